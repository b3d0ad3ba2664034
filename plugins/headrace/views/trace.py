"""Traces one record: where it was, which batch took it, each attempt at the batch, and its outcome in each output."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import HeadraceError
from headrace.ledger.batch_tables import AttemptRow, BatchRow
from headrace.stream_context import StreamContext
from headrace.views.trace_location import Coordinates, Location, coordinates_of, find_position, locate
from headrace.views.trace_outputs import record_of_document, trace_outputs
from headrace.views.trace_records import RecordReader
from headrace.views.traced import (
    OutputTrace,
    Record,
    RecordPosition,
    RecordState,
    RecordTrace,
    TracedAttempt,
    TracedBatch,
)


def trace_document(
    context: StreamContext, document_id: str, *, environ: Mapping[str, str] | None = None
) -> RecordTrace:
    """Trace the record of a document.

    Ids of the default form contain the record's coordinates. With ids by key, the document's version is the record's
    offset, so the index is asked.

    Raises:
        UnknownRecordError: the id does not lead to a record.
        ElasticsearchUnavailableError, ElasticsearchRefusedError: the index cannot be asked.
    """
    asked = coordinates_of(context, document_id) or record_of_document(context, document_id, environ)
    return trace_record(context, asked, document_id=document_id, environ=environ)


def trace_record(
    context: StreamContext,
    asked: Coordinates,
    *,
    input_id: str | None = None,
    document_id: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> RecordTrace:
    """Trace the record with these coordinates.

    Reads the ledger, the batch's manifest, one block of the log or one record of Kafka, and asks Elasticsearch for one
    document and the record's dead letters in each output. If Kafka or Elasticsearch does not answer, the trace says so
    in that place.

    Args:
        input_id: the input, if several have a topic of this name.
        document_id: the document's whole id, if several rows of the record are documents.
        environ: where the connections of inputs and outputs are looked up; by default this process's environment.

    Raises:
        UnknownRecordError: the stream has not seen the topic or the partition.
        LedgerUnavailableError: the ledger does not answer.
    """
    place = find_position(context, asked, input_id=input_id)
    position = place.position
    location = locate(context, position, place.row)
    record, problem = _read(context, position, location, environ)
    state, text = location.state, location.text
    if location.problem is not None:
        text += f" Its block is not known: {location.problem}"
    if state is RecordState.IN_BATCH and record is None and problem is None:
        state = RecordState.NO_RECORD
        text += " There is no record at the offset: Kafka has a transaction marker, or an aborted or compacted record."
    if asked.incarnation is None and place.is_of_earlier_incarnation:
        text += (
            f" The offset is that of incarnation {position.partition.incarnation} of the topic, which was created "
            "again since: its present incarnation has not reached the offset."
        )
    attempts = () if location.batch is None else _attempts(context, location.batch)
    outputs: tuple[OutputTrace, ...] = ()
    if location.batch is not None and state is RecordState.IN_BATCH:
        outputs = trace_outputs(
            context, position, location.batch, attempts, record, document_id=document_id, environ=environ
        )
    return RecordTrace(
        stream=context.name,
        position=position,
        state=state,
        text=text,
        record=record,
        record_problem=problem,
        block=location.block,
        batch=None if location.batch is None else _batch(context, location.batch),
        attempts=tuple(map(TracedAttempt.model_validate, attempts)),
        outputs=outputs,
        elsewhere=place.elsewhere,
    )


def _read(
    context: StreamContext, position: RecordPosition, location: Location, environ: Mapping[str, str] | None
) -> tuple[Record | None, str | None]:
    """The record, or None and why it could not be read.

    None and None: there is no record at the offset. Of a batch's offset, this is said only if its block was read.
    """
    if location.state in (RecordState.NO_RECORD, RecordState.GAP):
        return None, None
    try:
        record = RecordReader(context, environ).read(position, location.block)
    except HeadraceError as error:
        return None, str(error)
    block = location.block
    if record is None and location.state is RecordState.IN_BATCH and (block is None or not block.in_log):
        return None, _no_longer_in_kafka(location)
    return record, None


def _no_longer_in_kafka(location: Location) -> str:
    """Kafka returns nothing for a transaction marker, and also for a record that it compacted after the batch."""
    if location.block is not None:
        log = "the log no longer has its block"
    elif location.problem is not None:
        log = "its block in the log is not known"
    else:
        log = "the log never had it: the batch was built from Kafka"
    return f"Kafka has no record at the offset any more (compacted since, or a transaction marker), and {log}."


def _attempts(context: StreamContext, batch: BatchRow) -> tuple[AttemptRow, ...]:
    return tuple(context.ledger.attempts.of_batch(context.name, batch.batch_time_ms))


def _batch(context: StreamContext, batch: BatchRow) -> TracedBatch:
    origin = context.ledger.batches.origins(context.name, [batch.batch_time_ms]).get(batch.batch_time_ms)
    return TracedBatch(
        batch_time_ms=batch.batch_time_ms,
        state=batch.state.value,
        records=batch.records,
        built=batch.built,
        revision=batch.revision,
        allocated_at_ms=batch.allocated_at_ms,
        completed_at_ms=batch.completed_at_ms,
        error=batch.error,
        manifest_uri=batch.manifest_uri,
        source=None if origin is None else origin.source,
    )
