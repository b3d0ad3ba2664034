"""Shows what a batch would write, writing nothing: reads its records as an attempt does, and applies the transform.

No attempt is begun, so the ledger does not change and no running attempt is fenced. Windows are read as an attempt
reads them. A transform that takes the state gets the table that the batch's own update has left; the update is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.ledger.batch_tables import Attempt, BatchRow
from headrace.spark.batch_attempt import BatchAttempt
from headrace.spark.batch_frames import BatchInputs, OutputFrames, sharing_frames
from headrace.spark.batch_plan import BatchNotReadableError, OutputPlan, load_manifests, origins_of, plan_outputs
from headrace.spark.decoding import REASON
from headrace.spark.document_preview import PreviewedDocument, preview_documents
from headrace.spark.documents import lacks_incarnation
from headrace.spark.sessions import collect
from headrace.stream import ElasticsearchOutput, Output, Stream
from headrace.stream.model import is_reference
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.spark.documents import BatchIncarnations


@dataclass(frozen=True, slots=True)
class ReadOutput:
    """What an output would write of a batch."""

    attempt: BatchAttempt
    plan: OutputPlan
    inputs: BatchInputs
    frames: OutputFrames

    @property
    def skipped(self) -> str | None:
        """Why the output has nothing to do at this batch time; None if it has."""
        if self.plan.skipped is None and not self.plan.needs_spark:
            return "the batch has no records"
        return self.plan.skipped

    def frame(self) -> DataFrame:
        """The output's rows."""
        return self.frames.of(self.plan.output)

    def incarnations(self, frame: DataFrame) -> BatchIncarnations | None:
        """The batch's incarnations, if the rows lack them."""
        return self.inputs.incarnations(self.plan.origins) if lacks_incarnation(frame.schema) else None


class PreviewError(BatchNotReadableError):
    """The preview was asked for something that the stream or the batch does not have."""


@dataclass(frozen=True, slots=True)
class UndecodableRecord:
    """A record that does not decode, so no transform gets it. Elasticsearch outputs keep it as a dead letter."""

    topic: str
    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class OutputPreview:
    """What one output would write.

    ``rows`` are the first rows of the output, by column; ``more``: there are others. ``documents`` is what an
    Elasticsearch output would send of them; None for other outputs. ``skipped``: the output has nothing to do at this
    batch time. ``undecodable`` is the number of records that do not decode, ``undecodable_records`` the first of them.
    """

    output_id: str
    kind: str
    transform: str | None
    schema: str
    rows: tuple[dict[str, Any], ...]
    more: bool
    documents: tuple[PreviewedDocument, ...] | None
    undecodable: int = 0
    undecodable_records: tuple[UndecodableRecord, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class BatchPreview:
    """What a batch would write with the stream's present definition. ``source`` is "log" or "kafka"."""

    stream: str
    batch_time_ms: int
    records: int
    source: str
    outputs: tuple[OutputPreview, ...]


def with_transform(stream: Stream, reference: str | None, output_id: str | None) -> Stream:
    """The stream, with ``reference`` as the transform of this output, or of all outputs.

    Raises:
        PreviewError: the reference is not "module:function".
    """
    if reference is None:
        return stream
    if not is_reference(reference):
        raise PreviewError(f"{reference!r} is no transform.", remedy="Write module:function.")
    outputs = tuple(
        output.model_copy(update={"transform": reference}) if output_id in (None, output.id) else output
        for output in stream.outputs
    )
    return stream.model_copy(update={"outputs": outputs})


def readable_batch(context: StreamContext, batch_time_ms: int) -> BatchRow:
    """The batch, if its records can be read.

    Raises:
        PreviewError: it is not allocated, was removed, absorbed by another batch, or abandoned.
    """
    batch = context.ledger.batches.find(context.name, batch_time_ms)
    name = f"Batch {time_text(batch_time_ms)} of stream {context.name!r}"
    if batch is None:
        if context.ledger.streams.get(context.name).has_removed(batch_time_ms):
            raise PreviewError(f"{name} was removed: the stream keeps its batches for limits.history.")
        raise PreviewError(
            f"{name} is not allocated.", remedy=f"headrace batches list {context.name} lists the batches."
        )
    if batch.absorbed_by_ms is not None:
        taker = time_text(batch.absorbed_by_ms)
        raise PreviewError(f"{name} has no records: batch {taker} took them over.", remedy=f"Ask for batch {taker}.")
    if batch_time_ms not in context.ledger.batches.origins(context.name, [batch_time_ms]):
        raise PreviewError(f"{name} is {batch.state.value}, so its records are not read.")
    return batch


def preview_batch(
    context: StreamContext,
    batch_time_ms: int,
    open_session: Callable[[], SparkSession],
    *,
    output_id: str | None = None,
    limit: int = 20,
) -> BatchPreview:
    """Preview a batch's outputs, or one of them.

    Args:
        context: the stream, with the transforms to apply (`with_transform`).
        open_session: opens a classic Spark session; it is called once.
        limit: the number of rows of each output, and of undecodable records.

    Raises:
        PreviewError: the batch cannot be read, or the stream has no such output.
        ManifestError: a manifest is missing or damaged.
        StateMissingError: the transform takes the state, and the batch's update of it has not run or is pruned.
        TransformError: the transform cannot be called, or does not return what the output needs.
    """
    batch = readable_batch(context, batch_time_ms)
    outputs = outputs_of(context.stream, output_id)
    source = ""
    found: dict[str, OutputPreview] = {}
    for read in read_outputs(context, batch_time_ms, [output.step for output in outputs], open_session):
        source = read.attempt.claim.source
        found[read.plan.output.id] = _preview(read, limit=limit)
    return BatchPreview(
        context.name, batch_time_ms, batch.records, source, tuple(found[output.id] for output in outputs)
    )


def read_outputs(
    context: StreamContext, batch_time_ms: int, outputs: Sequence[str], open_session: Callable[[], SparkSession]
) -> Iterator[ReadOutput]:
    """Yield what these outputs of a readable batch would write; the frames are open until the next one is taken.

    Raises the errors of `preview_batch`.
    """
    origin = origins_of(context, [batch_time_ms])[batch_time_ms]
    attempts = context.ledger.attempts.of_batch(context.name, batch_time_ms)
    claim = Attempt(
        stream=context.name,
        batch_time_ms=batch_time_ms,
        number=max((attempt.number for attempt in attempts), default=0) + 1,
        holder="preview",
        way="preview",
        outputs=tuple(outputs),
        lease_ms=0,
        lease_until_ms=0,
        source=origin.source,
    )
    plans = plan_outputs(context, batch_time_ms, claim.outputs)
    for _ in load_manifests([origin, *(each for plan in plans for each in plan.read)]):
        pass
    attempt = BatchAttempt(context, claim, open_session)
    inputs = BatchInputs(attempt)
    for group in sharing_frames(context.stream, plans):
        with OutputFrames(attempt, inputs, group) as frames:
            for plan in group:
                yield ReadOutput(attempt, plan, inputs, frames)


def outputs_of(stream: Stream, output_id: str | None) -> Sequence[Output]:
    """All outputs, or the one with this id. Raises PreviewError if there is none."""
    outputs = [output for output in stream.outputs if output_id in (None, output.id)]
    if not outputs:
        known = ", ".join(output.id for output in stream.outputs)
        raise PreviewError(f"Stream {stream.name!r} has no output {output_id!r}, but {known}.")
    return outputs


def _preview(read: ReadOutput, *, limit: int) -> OutputPreview:
    attempt, plan, inputs = read.attempt, read.plan, read.inputs
    output = plan.output
    transform, skipped = attempt.stream.transform_of(output), read.skipped
    if skipped is not None:
        return OutputPreview(output.id, output.kind, transform, "", (), more=False, documents=None, skipped=skipped)
    number, undecodable = inputs.undecodable(plan.fresh)
    examples = [
        UndecodableRecord(row["topic"], row["partition"], row["offset"], row[REASON])
        for rows in undecodable.values()
        for row in rows.select("topic", "partition", "offset", REASON).take(limit)
    ]
    frame = read.frame()
    taken = frame.limit(limit + 1).persist()
    try:
        rows = collect(taken)
        documents = None
        if isinstance(output, ElasticsearchOutput):
            documents = preview_documents(
                taken,
                output,
                stream_name=attempt.stream.name,
                batch_time_ms=attempt.batch_time_ms,
                incarnations=read.incarnations(frame),
            )[:limit]
    finally:
        taken.unpersist()
    return OutputPreview(
        output_id=output.id,
        kind=output.kind,
        transform=transform,
        schema=frame.schema.simpleString(),
        rows=tuple(row.asDict(recursive=True) for row in rows[:limit]),
        more=len(rows) > limit,
        documents=None if documents is None else tuple(documents),
        undecodable=number,
        undecodable_records=tuple(examples[:limit]),
    )
