"""Traces one record: where it was, which batch took it, each attempt at the batch, and its outcome in each output.

In an Elasticsearch output the outcome is its document, its dead letter, or neither. The id of the document is known if
it is made of the record's coordinates or of its key. If it is made of columns, or of columns beside the coordinates,
only the transform knows it; then the dead letters alone are asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from headrace.batch.places import written_places
from headrace.clock import time_text
from headrace.elasticsearch import columns
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.dead_letter_index import LetterFilter
from headrace.elasticsearch.document_ids import record_id
from headrace.elasticsearch.errors import UnsuitableRowsError
from headrace.elasticsearch.options import IndexingOptions, TombstonePolicy
from headrace.elasticsearch.record_indices import row_names
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.transport import Cluster
from headrace.errors import HeadraceError
from headrace.ledger.batches.batch_states import is_recorded
from headrace.ledger.batches.tables import AttemptRow, BatchOutputRow, BatchRow
from headrace.ledger.receiving.tables import PositionRow
from headrace.ledger.states import AttemptState
from headrace.stream import STATE_STEP, ElasticsearchOutput, Output, Stream
from headrace.stream.outputs import ColumnIds, KeyIds
from headrace.stream_context import StreamContext
from headrace.views.dead_letters import kept_letters
from headrace.views.trace_location import Coordinates, Location, coordinates_of, find_position, locate
from headrace.views.trace_records import RecordReader
from headrace.views.traced import (
    Outcome,
    OutputTrace,
    Record,
    RecordPosition,
    RecordState,
    RecordTrace,
    TracedAttempt,
    TracedBatch,
    TracedDocument,
    TracedLetter,
    UnknownRecordError,
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


# What the newest result of an output has.
_RECORDED = ("attempt", "code_version", "recorded_at_ms", "error", "counts")


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the batch or of its replay ``target``. ``row`` is its newest result, ``stream`` the definition with
    which it ran, or will run."""

    name: str
    target: str
    stream: Stream
    row: BatchOutputRow | None
    revision: int | None


def trace_outputs(
    context: StreamContext,
    position: RecordPosition,
    batch: BatchRow,
    attempts: Sequence[AttemptRow],
    record: Record | None,
    *,
    document_id: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[OutputTrace, ...]:
    """Trace the record in all outputs of its batch: the batch's own first, then those of its replays."""
    return tuple(
        _trace(step, batch, position, record, document_id=document_id, environ=environ)
        for step in _steps(context, batch, attempts)
    )


def _steps(context: StreamContext, batch: BatchRow, attempts: Sequence[AttemptRow]) -> Iterator[_Step]:
    by_number = {attempt.number: attempt for attempt in attempts}
    for target in ("", *dict.fromkeys(attempt.target for attempt in attempts if attempt.target)):
        rows = context.ledger.attempts.outputs(context.name, batch.batch_time_ms, target=target)
        of_name = {row.output_id: row for row in rows}
        begun = [attempt for attempt in attempts if attempt.target == target]
        expected = [name for attempt in begun for name in attempt.outputs]
        if not target:
            expected = [*context.stream.steps, *expected]
        for name in dict.fromkeys([*expected, *of_name]):
            row = of_name.get(name)
            attempt = by_number.get(row.attempt) if row is not None else next(iter(reversed(begun)), None)
            stream = _definition(context, attempt)
            revision = None if attempt is None else attempt.revision
            yield _Step(name, target, stream, row, revision)


def _definition(context: StreamContext, attempt: AttemptRow | None) -> Stream:
    """The definition with which the attempt ran; the stream's present one if that is not known."""
    if attempt is None:
        return context.stream
    with contextlib.suppress(HeadraceError):
        if attempt.definition is not None:
            return Stream.from_json(attempt.definition)
        if attempt.revision is not None:
            return Stream.from_json(context.ledger.streams.at_revision(context.name, attempt.revision).definition)
    return context.stream


def _trace(
    step: _Step,
    batch: BatchRow,
    position: RecordPosition,
    record: Record | None,
    *,
    document_id: str | None,
    environ: Mapping[str, str] | None,
) -> OutputTrace:
    output = {output.step: output for output in step.stream.outputs}.get(step.name)
    kind = step.name if step.name == STATE_STEP else "unknown" if output is None else output.kind
    row = step.row
    known = OutputTrace(
        output_id=step.name if output is None else output.id,
        kind=kind,
        target=step.target,
        outcome=Outcome.UNKNOWN,
        text="",
        revision=step.revision,
        **{name: None if row is None else getattr(row, name) for name in _RECORDED},
        document=None,
        letters=(),
    )
    if (reason := batch.abandoned_steps.get(step.name)) and not step.target and not is_recorded(row):
        return _outcome(known, Outcome.NOT_WRITTEN, f"The output was given up for this batch: {reason}")
    if output is None and step.name != STATE_STEP:
        return _outcome(known, Outcome.UNKNOWN, "The stream's definition does not have this output any more.")
    if row is not None and is_recorded(row) and "skipped" in row.counts:
        text = f"The output had nothing to write at this batch time: {row.counts['skipped']}."
        return _outcome(known, Outcome.WRITTEN, text)
    indexing = None if output is None else step.stream.elasticsearch_output(output.id)
    if indexing is not None:
        question = DocumentQuestion(
            stream=step.stream,
            output=indexing,
            position=position,
            record=record,
            places=tuple(written_places(indexing, {} if row is None else row.counts)),
            written=is_recorded(row),
            waits=_waits(batch, row),
            document_id=document_id,
            environ=environ,
        )
        return elasticsearch_outcome(known, question)
    if not is_recorded(row):
        return _outcome(known, Outcome.NOT_WRITTEN, _waits(batch, row))
    return _outcome(known, Outcome.WRITTEN, _written(output, batch))


def _outcome(known: OutputTrace, outcome: Outcome, text: str, **looked_up: Any) -> OutputTrace:
    return known.model_copy(update={"outcome": outcome, "text": text, **looked_up})


def _waits(batch: BatchRow, row: BatchOutputRow | None) -> str:
    """Why the output has not written the batch."""
    if row is not None and row.error:
        return f"The output has not written the batch; attempt {row.attempt} failed: {row.error}"
    if row is not None and row.state is AttemptState.FENCED:
        return f"The output has not written the batch: attempt {row.attempt} was replaced by a later one."
    return f"The output has not written the batch, which is {batch.state.value}."


def _written(output: Output | None, batch: BatchRow) -> str:
    if output is None:
        return "The state was updated with the batch's records."
    time_ms = batch.batch_time_ms
    place = output.whereabouts(time_ms)
    return (
        f"The batch is written. {place} Whether a row of this record is among them is not recorded: headrace batches "
        f"preview {batch.stream} {time_text(time_ms)} --output {output.id} shows the rows."
    )


@dataclass(frozen=True, slots=True)
class DocumentQuestion:
    """A record whose outcome in an output is asked for.

    ``stream`` and ``output`` are the definition that wrote the batch. ``places`` are those that the ledger has of the
    batch, with the concrete indices if they are known. ``waits`` says why the output has not written the batch, if it
    has not. ``document_id`` is an id that a person gave. ``environ`` is where the output's connection is looked up.
    """

    stream: Stream
    output: ElasticsearchOutput
    position: RecordPosition
    record: Record | None
    places: tuple[Mapping[str, Any], ...]
    written: bool
    waits: str
    document_id: str | None = None
    environ: Mapping[str, str] | None = None

    @property
    def transform(self) -> str | None:
        """The reference of the output's transform, if it has one."""
        return self.stream.transform_of(self.output)

    @property
    def index_name(self) -> str | None:
        """The name of the record's index, made as a batch makes it; None if that is not possible: the transform gives a
        part of it, or the record could not be read. None too of an output with one index."""
        output, record = self.output, self.record
        if output.names.is_plain or record is None or self.transform is not None:
            return None
        options = IndexingOptions.of(output, Target.of(output, self.stream.name), batch_time_ms=0)
        # A record without a value may be ignored, and its key have a document nevertheless.
        options = replace(options, tombstones=TombstonePolicy.DEAD_LETTER)
        try:
            found = row_names(record_batch(self.position, record), options)
        except UnsuitableRowsError:
            return None
        return found.names[found.codes[0]] if found.codes[0] >= 0 else None

    @property
    def indices(self) -> list[str]:
        """The concrete indices where its document may be, as far as the ledger has them."""
        name = self.index_name
        found = [str(place["index"] or place["name"]) for place in self.places if name in (None, place["name"])]
        return found or ([] if name is None else [name])


def elasticsearch_outcome(known: OutputTrace, asked: DocumentQuestion) -> OutputTrace:
    """Complete what is known of an output by what Elasticsearch has. Without an answer the outcome is unknown."""
    id_, no_id = _document_id(asked)
    try:
        with DocumentLookup.open(asked.output, asked.stream.name, asked.environ) as lookup:
            letters = lookup.letters(asked.position, asked.indices)
            document = None if id_ is None else lookup.found(asked.indices, id_)
            document = None if document is None else _compared(document, asked)
    except HeadraceError as error:
        return _outcome(known, Outcome.UNKNOWN, f"The search server could not be asked: {error}")
    if document is None and not no_id and not asked.indices:
        no_id = "the index of its document is not known: the transform gives a part of its name"
    outcome, text = judge(asked, document, letters, no_id)
    return _outcome(known, outcome, text, document=document, letters=letters)


def record_batch(position: RecordPosition, record: Record) -> pa.RecordBatch:
    """The record as one row, with the columns of which the name of its index can be made."""
    partition = position.partition
    headers = [{"key": header.key, "value": header.value} for header in record.headers]
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.record_batch(
        {
            columns.TOPIC: pa.array([partition.topic]),
            columns.PARTITION: pa.array([partition.partition], pa.int32()),
            columns.OFFSET: pa.array([position.offset], pa.int64()),
            columns.KEY: pa.array([record.key], pa.binary()),
            columns.TIMESTAMP: pa.array([record.timestamp_ms], pa.timestamp("ms", "UTC")),
            columns.HEADERS: pa.array([headers], kind),
        }
    )


def _document_id(asked: DocumentQuestion) -> tuple[str | None, str]:
    """The id of the record's document; or None, and why it is not known."""
    ids, position = asked.output.document_ids, asked.position
    if isinstance(ids, ColumnIds):
        return None, f"the id of its document is made of {', '.join(ids.columns)}, which the transform gives"
    if isinstance(ids, KeyIds):
        if _ids_are_keys(asked.stream):
            return _key_id(asked.record)
        return asked.document_id, "the id of its document is made of the decoded key: give the id"
    partition = position.partition
    id_ = record_id(partition, position.offset)
    if not ids.rows:
        return id_, ""
    if asked.document_id is not None and asked.document_id.startswith(f"{id_}~"):
        return asked.document_id, ""
    return None, f"the ids of its documents are {id_}~ and the values of {', '.join(ids.rows)}: give a whole id"


def _ids_are_keys(stream: Stream) -> bool:
    """Whether a document's id by key is the bytes of the key. What else a decoder makes of a key, only Spark knows."""
    return all(source.key_decoder.column in ("BINARY", "STRING") for source in stream.inputs)


def _key_id(record: Record | None) -> tuple[str | None, str]:
    if record is None:
        return None, "the id of its document is its key, and the record could not be read"
    try:
        return (record.key or b"").decode() or None, "the record has no key, of which ids are made"
    except UnicodeDecodeError:
        return None, "its key is not UTF-8, so it cannot be the id of a document"


def _compared(document: TracedDocument, asked: DocumentQuestion) -> TracedDocument:
    """The document, compared with the record's value if that is what the output writes."""
    if asked.transform is not None or asked.record is None or not document.found:
        return document
    return document.model_copy(update={"same": is_value(document.source, asked.record.value)})


def judge(
    asked: DocumentQuestion, document: TracedDocument | None, letters: tuple[TracedLetter, ...], no_id: str
) -> tuple[Outcome, str]:
    """The outcome, and a sentence on it. ``document`` None: it was not looked up, for the reason ``no_id``."""
    open_letters = [letter for letter in letters if letter.replayed_at_ms is None]
    refused = f" It was refused in {len(letters)} batch(es) or replays." if letters and not open_letters else ""
    if document is not None and document.found and not (open_letters and isinstance(asked.output.document_ids, KeyIds)):
        outcome, text = _with_document(asked, document)
        if outcome is not None:
            return outcome, text + (" There is a dead letter of it too." if open_letters else refused)
    else:
        text = ""
    if open_letters:
        letter = open_letters[0]
        return Outcome.DEAD_LETTER, (
            f"It is dead letter {letter.id} in {letter.index}: {letter.reason_type}: {letter.reason}"
        )
    if not asked.written:
        return Outcome.NOT_WRITTEN, asked.waits
    if letters:
        return Outcome.WRITTEN, "It was refused, and its dead letter has been replayed since."
    if document is None:
        return Outcome.WRITTEN, f"The batch is written, and there is no dead letter of the record. {_capital(no_id)}."
    return Outcome.NEITHER, text or _neither(asked)


def _with_document(asked: DocumentQuestion, document: TracedDocument) -> tuple[Outcome | None, str]:
    """The outcome if there is a document with the record's id; None: it is not the record's, and the text says why."""
    ids, offset = asked.output.document_ids, asked.position.offset
    named = f"Document {document.id} in {document.index}, version {document.version}"
    if not isinstance(ids, KeyIds):
        return Outcome.DOCUMENT, f"{named}{_comparison(document, asked)}."
    if ids.version_from is not None:
        return Outcome.UNKNOWN, (
            f"{named}, has the record's key as its id. Its version is the column {ids.version_from!r}, so whether it "
            "is this record's is not known."
        )
    version = document.version if document.version is not None else offset
    if version == offset:
        return Outcome.DOCUMENT, f"{named}, which is the record's offset{_comparison(document, asked)}."
    if version > offset:
        return Outcome.NEWER_DOCUMENT, f"{named}: a record with this key and offset {version} has replaced it."
    return None, f"No document and no dead letter of the record: {named}, is of an earlier record with this key."


def _comparison(document: TracedDocument, asked: DocumentQuestion) -> str:
    if document.same is None:
        return "" if asked.transform is None else f", which {asked.transform} made of it"
    return ", equal to the record's value" if document.same else ", with other contents than the record's value"


def _neither(asked: DocumentQuestion) -> str:
    text = "No document and no dead letter, and the output has written the batch"
    ids, record = asked.output.document_ids, asked.record
    if record is not None and record.value is None and asked.output.tombstone_action != "dead_letter":
        action = "deletes the document of its key" if asked.output.tombstone_action == "delete" else "is ignored"
        return f"{text}: the record has no value, which {action}."
    if asked.transform is None:
        return f"{text}: the document, or the dead letter, was deleted since, or the index was made anew."
    if isinstance(ids, KeyIds):
        return (
            f"{text}: {asked.transform} dropped the record or changed its key, or the document was deleted since, for "
            "example by a later record without a value."
        )
    return f"{text}: {asked.transform} dropped the record, or the document was deleted since."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


MAX_RETRY_SECONDS = 5.0
"""How long an unavailable Elasticsearch is waited for, for each output: a person waits for the answer."""
_REQUEST_SECONDS = 10.0
_MAX_LETTERS = 20
# A key is in one partition at a time; this many records are read to find which one.
_MAX_CANDIDATES = 100


class DocumentLookup:
    """Looks up the documents and dead letters of one output. ``output`` is the definition that wrote them.

    Every method raises ElasticsearchRefusedError or ElasticsearchUnavailableError, and `letters` the errors of the
    letters' topic.
    """

    def __init__(
        self,
        administration: Administration,
        output: ElasticsearchOutput,
        stream_name: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._administration = administration
        self._output = output
        self._stream_name = stream_name
        self._environ = environ

    @classmethod
    @contextmanager
    def open(
        cls, output: ElasticsearchOutput, stream_name: str, environ: Mapping[str, str] | None = None
    ) -> Iterator[DocumentLookup]:
        """Open a client for the output's cluster. Raises the errors of its connection."""
        timeout = min(output.request_timeout_seconds, _REQUEST_SECONDS)
        with Administration.of(
            Cluster.of(output, environ), timeout_seconds=timeout, max_retry_seconds=MAX_RETRY_SECONDS
        ) as administration:
            yield cls(administration, output, stream_name, environ)

    def document(self, index: str, id_: str) -> TracedDocument:
        """The document with this id; not ``found`` if there is none, or no index."""
        path = f"/{quote(index, safe='')}/_doc/{quote(id_, safe='')}"
        answer = self._administration.ask(f"Asking for document {id_!r}", index, "GET", path, missing_is_none=True)
        if answer is None:
            return TracedDocument(index=index, id=id_, found=False, version=None, same=None, source=None)
        return TracedDocument(
            index=answer["_index"],
            id=id_,
            found=True,
            version=answer.get("_version"),
            same=None,
            source=answer.get("_source"),
        )

    def found(self, indices: Sequence[str], id_: str) -> TracedDocument | None:
        """The document with this id, from the first of these indices that has it; None if there are no indices."""
        documents = (self.document(index, id_) for index in indices)
        last = None
        for last in documents:
            if last.found:
                return last
        return last

    def letters(self, position: RecordPosition, indices: Sequence[str]) -> tuple[TracedLetter, ...]:
        """The dead letters of the record for these indices or the output's, the newest batch first."""
        options = IndexingOptions.of(self._output, Target.of(self._output, self._stream_name), batch_time_ms=0)
        options = replace(options, max_retry_seconds=MAX_RETRY_SECONDS)
        partition = position.partition
        wanted = LetterFilter(
            topic=partition.topic,
            partition=partition.partition,
            from_offset=position.offset,
            until_offset=position.offset,
            replayed=True,
        )
        with kept_letters(self._administration, options, self._environ) as kept:
            letters = list(kept.find(wanted, _MAX_LETTERS, contents=False))
        return tuple(
            TracedLetter(
                index=self._output.letters_place,
                id=letter.id,
                reason_type=letter.reason.type,
                reason=letter.reason.text,
                batch_time_ms=letter.fields.get("batch_time"),
                attempt=letter.fields.get("attempt"),
                replayed_at_ms=letter.fields.get("replayed_at"),
            )
            for letter in letters
            if (letter.fields.get("incarnation") or 1) == partition.incarnation
            and (
                letter.fields.get("index") in (None, *indices, self._output.index_text)
                or letter.fields.get("index_names") == self._output.index_text
            )
        )


def is_value(document: Any, value: bytes | None) -> bool | None:
    """Whether a document's contents are this value; None if the value is no JSON or the index stores no contents."""
    if document is None or value is None:
        return None
    try:
        return bool(json.loads(value) == document)
    except ValueError:
        return None


def record_of_document(
    context: StreamContext, document_id: str, environ: Mapping[str, str] | None = None
) -> Coordinates:
    """Find the record of a document whose id is the record's key, by the document's version, which is its offset.

    What a decoder made of a key is not compared: then the record is known if only one has this offset.

    Raises:
        UnknownRecordError: there is no such document, or its version is not an offset.
        ElasticsearchUnavailableError, ElasticsearchRefusedError: the index cannot be asked.
    """
    outputs = [output for output in context.stream.elasticsearch_outputs if isinstance(output.document_ids, KeyIds)]
    tried = []
    for output in outputs:
        if not output.names.is_plain:
            tried.append(f"output {output.id} has an index for each record, {output.index_text}")
            continue
        if isinstance(output.document_ids, KeyIds) and output.document_ids.version_from is not None:
            tried.append(f"the versions in {output.index_text} are those of {output.document_ids.version_from!r}")
            continue
        with DocumentLookup.open(output, context.name, environ) as lookup:
            document = lookup.document(output.index_text, document_id)
        if document.version is None:
            tried.append(f"{output.index_text} has no document {document_id!r}")
            continue
        held = list(_of_document(context, document_id, document.version, environ))
        if len(held) == 1:
            return held[0]
        named = f"the document in {output.index_text} has version {document.version}"
        if not held:
            tried.append(f"{named}, and no record with this offset and key can be read")
            continue
        records = ", ".join(f"{place.topic} {place.partition} {place.offset}" for place in held)
        tried.append(f"{named}, and its key is a decoded one: it may be of each record with this offset ({records})")
    reasons = "; ".join(tried) or "no output has ids by key"
    raise UnknownRecordError(
        f"Document {document_id!r} of stream {context.name!r} does not lead to a record: {reasons}.",
        remedy="Give the record's topic, partition and offset, or search for its key with --key.",
    )


def _of_document(
    context: StreamContext, id_: str, offset: int, environ: Mapping[str, str] | None
) -> Iterator[Coordinates]:
    """The record at this offset whose key is the id. With decoded keys, all records at the offset that have a key, or
    that may have one, as they were not read."""
    reader, ids_are_keys = RecordReader(context, environ), _ids_are_keys(context.stream)
    rows = [row for row in context.ledger.positions.all(context.name) if offset < row.next_offset]
    for row in rows[:_MAX_CANDIDATES]:
        position = RecordPosition(row.input_id, row.partition, offset)
        try:
            record = reader.read(position, locate(context, position, row).block)
        except HeadraceError:
            if not ids_are_keys:
                yield _coordinates(row, offset)
            continue
        if record is not None and (record.key == id_.encode() if ids_are_keys else record.key):
            yield _coordinates(row, offset)
            if ids_are_keys:
                return
    if not ids_are_keys:
        yield from (_coordinates(row, offset) for row in rows[_MAX_CANDIDATES:])


def _coordinates(row: PositionRow, offset: int) -> Coordinates:
    partition = row.partition
    return Coordinates(partition.topic, partition.partition, offset, partition.incarnation)
