"""Shows what a batch would write, writing nothing: reads its records as an attempt does, and applies the transform.

No attempt is begun, so the ledger does not change and no running attempt is fenced. Windows are read as an attempt
reads them. A transform that takes the state gets the table that the batch's own update has left; the update is not run.

`export_batch` writes a batch's records to one Parquet file, so that a transform can be debugged with them in a test.
The file has a row for each record, in the order of topic, incarnation, partition and offset: the columns that a
transform gets, with decoded ``key`` and ``value``; then ``raw_key`` and ``raw_value``, the bytes from Kafka; then
``undecodable_reason``, null if the record decodes. Records that do not decode have null as key and value.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import parquet

from headrace.batch.readers import BatchReaders, ask_reader
from headrace.clock import SystemClock, time_text
from headrace.elasticsearch.errors import FieldsUnknownError
from headrace.errors import HeadraceError, headline
from headrace.ledger.batches.tables import Attempt, BatchRow
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.batch_plan import (
    BatchNotReadableError,
    OutputPlan,
    load_manifests,
    origins_of,
    plan_outputs,
)
from headrace.spark.outputs.documents import (
    PreviewedDocument,
    columns_of_documents,
    lacks_incarnation,
    preview_documents,
)
from headrace.spark.records.batch_frames import BatchInputs, OutputFrames, read_inputs, read_records, sharing_frames
from headrace.spark.records.decoding import RAW_KEY, RAW_VALUE, REASON, Reader, RecordDecoding
from headrace.spark.records.transforms import STATE_FRAMES, BatchContext, apply_transform, load_transform, takes
from headrace.spark.sessions import collect
from headrace.stream import Input, Output, Stream
from headrace.stream.model import is_reference
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.kept_values import KeptUse
    from headrace.spark.outputs.documents import BatchIncarnations


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
    previews: dict[str, OutputPreview] = {}
    for read in read_outputs(context, batch_time_ms, [output.step for output in outputs], open_session):
        source = read.attempt.claim.source
        previews[read.plan.output.id] = _preview(read, limit=limit)
    return BatchPreview(
        context.name, batch_time_ms, batch.records, source, tuple(previews[output.id] for output in outputs)
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
    for _ in load_manifests([origin, *(windowed for plan in plans for windowed in plan.read)]):
        pass
    attempt = BatchAttempt(context, claim, open_session)
    inputs = BatchInputs(attempt, pins=False)
    for group in sharing_frames(context.stream, plans):
        with OutputFrames(attempt, inputs, group) as frames:
            for plan in group:
                yield ReadOutput(attempt, plan, inputs, frames)


def outputs_of(stream: Stream, output_id: str | None) -> Sequence[Output]:
    """All outputs, or the one with this id. Raises PreviewError if there is none."""
    outputs = [output for output in stream.outputs if output_id in (None, output.id)]
    if not outputs:
        known = ", ".join(output.id for output in stream.outputs)
        raise PreviewError(f"Stream {stream.name!r} has no output {output_id!r}. Its outputs are {known}.")
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
        indexing = attempt.stream.elasticsearch_output(output.id)
        if indexing is not None:
            documents = preview_documents(
                taken,
                indexing,
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


def transformed_columns(
    spark: SparkSession, stream: Stream, output_ids: Collection[str]
) -> dict[str, str | HeadraceError]:
    """The columns of the documents that transforms make for these Elasticsearch outputs, in Spark's DDL, by output.

    The transforms are called without records, so there need not have been a batch. Where that fails there is the error.
    Schemas of a registry are asked for, and not kept.
    """
    made: dict[str, str | HeadraceError] = {}
    for output in stream.elasticsearch_outputs:
        if output.id in output_ids:
            try:
                made[output.id] = columns_of_documents(_without_records(spark, stream, output), output)
            except HeadraceError as error:
                made[output.id] = error
    return made


def _without_records(spark: SparkSession, stream: Stream, output: Output) -> DataFrame:
    """The rows that the output's transform makes of no records."""
    transform, where = load_transform(stream, output), f"The columns of output {output.id!r}"
    if transform is not None and any(takes(transform, name) for name in STATE_FRAMES):
        raise FieldsUnknownError(
            f"{where} are made of the state, which only a batch has.",
            remedy="`headrace batches preview` shows the documents of a batch.",
        )
    inputs = tuple(_with_columns(stream, source) for source in stream.inputs)
    read = read_inputs(spark, stream.model_copy(update={"inputs": inputs}), [])
    interval_ms = stream.batch_interval_ms
    context = BatchContext.of(
        stream.name,
        SystemClock().now_ms() // interval_ms * interval_ms,
        interval_ms,
        1,
        parameters=stream.parameters,
        window_ms=None if output.window is None else output.window.length_ms,
    )
    decoded = {name: views.decoded for name, views in read.items()}
    known = [each.id for each in stream.outputs]
    try:
        return apply_transform(transform, decoded, [output.id], context, known=known)[output.id]
    except HeadraceError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise FieldsUnknownError(
            f"{where} are not known, since the transform {stream.transform_of(output)} raises "
            f"{type(error).__name__} when it is called without records: {headline(str(error))[0]}",
            remedy="A batch may have no records either: let the transform take none.",
        ) from error


def _with_columns(stream: Stream, source: Input) -> Input:
    """The input with decoders whose columns are known."""
    asked = {
        name: ask_reader(stream, source, name).decoder for name, decoder in source.decoders.items() if decoder.is_framed
    }
    return source.model_copy(update=asked)


_ORDER = ("topic", "incarnation", "partition", "offset")
# Spark's default, INT96, is deprecated and not read by all libraries.
_TIMESTAMP_TYPE = "spark.sql.parquet.outputTimestampType"
_SPARKS_DEFAULT = "INT96"


class ExportError(HeadraceError):
    """The file cannot be written."""


@dataclass(frozen=True, slots=True)
class ExportedBatch:
    """The file that was written, and its number of records."""

    stream: str
    batch_time_ms: int
    input_id: str
    path: str
    records: int
    undecodable: int
    bytes: int


def export_batch(
    context: StreamContext,
    batch_time_ms: int,
    path: Path,
    open_session: Callable[[], SparkSession],
    *,
    input_id: str | None = None,
    overwrite: bool = False,
) -> ExportedBatch:
    """Write the records of one input of a batch to ``path``. The file appears complete or not at all.

    Args:
        input_id: the input; needed if the stream has several.
        open_session: opens a classic Spark session on this machine; it is called once.

    Raises:
        PreviewError: the batch cannot be read, or the input is not given.
        ExportError: the file exists, and ``overwrite`` is false; it is a folder; its folder does not exist; or Spark
            did not write one file.
        ManifestError: the batch's manifest is missing or damaged.
    """
    path = path.absolute()
    readable_batch(context, batch_time_ms)
    source = _input(context.stream, input_id)
    if path.is_dir():
        raise ExportError(f"{path} is a folder.", remedy="Name a file in it.")
    if path.exists() and not overwrite:
        raise ExportError(f"The file {path} exists.", remedy="Give another name, or --overwrite.")
    if not path.parent.is_dir():
        raise ExportError(f"The folder {path.parent} does not exist.", remedy="Create it.")
    origin = origins_of(context, [batch_time_ms])[batch_time_ms]
    for _ in load_manifests([origin]):
        pass
    readers = BatchReaders.of(context, batch_time_ms)
    source = next(each for each in readers.stream.inputs if each.id == source.id)
    spark = open_session()
    read = partial(read_records, spark, source, [origin])
    rows = exported(spark, source, read, context.stream.folder_url, readers.uses(source))
    folder = Path(tempfile.mkdtemp(prefix=".headrace-export-", dir=path.parent))
    try:
        _write(rows, folder / "rows", spark)
        written = only_file(folder / "rows")
        reasons = parquet.read_table(written, columns=[REASON]).column(REASON)
        records, undecodable = len(reasons), len(reasons) - reasons.null_count
        written.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ExportedBatch(context.name, batch_time_ms, source.id, str(path), records, undecodable, path.stat().st_size)


def exported(
    spark: SparkSession, source: Input, read: Reader, folder_url: str, uses: Mapping[str, KeptUse]
) -> DataFrame:
    """An input's records as the file has them: decoded, with their bytes and the reason why they do not decode."""
    from pyspark.sql import functions as F  # noqa: N812

    decoding = RecordDecoding.of(source, spark, folder_url, uses=uses)
    if decoding is None:
        raw = read().withColumn(RAW_KEY, F.col("key")).withColumn(RAW_VALUE, F.col("value"))
        return raw.withColumn(REASON, F.lit(None).cast("string"))
    rows = read(decoding=replace(decoding, keep_bytes="all"))
    for name in ("key", "value"):
        rows = rows.withColumn(name, F.when(F.col(REASON).isNull(), F.col(name)))
    return rows


def only_file(folder: Path) -> Path:
    """The one Parquet file that Spark wrote into the folder. Raises ExportError if there is none, or several."""
    written = sorted(folder.glob("part-*.parquet"))
    if len(written) != 1:
        raise ExportError(f"Spark wrote {len(written)} Parquet files into {folder}, not one.")
    return written[0]


def _write(rows: DataFrame, folder: Path, spark: SparkSession) -> None:
    before = spark.conf.get(_TIMESTAMP_TYPE, _SPARKS_DEFAULT)
    spark.conf.set(_TIMESTAMP_TYPE, "TIMESTAMP_MICROS")
    try:
        # Not as_uri(): it percent-encodes, and Hadoop's Path does not decode.
        rows.coalesce(1).sortWithinPartitions(*_ORDER).write.parquet(f"file://{folder}", compression="zstd")
    finally:
        spark.conf.set(_TIMESTAMP_TYPE, before or _SPARKS_DEFAULT)


def _input(stream: Stream, input_id: str | None) -> Input:
    known = ", ".join(source.id for source in stream.inputs)
    if input_id is None:
        if len(stream.inputs) > 1:
            raise PreviewError(f"Stream {stream.name!r} has several inputs: {known}.", remedy="Name one with --input.")
        return stream.inputs[0]
    for source in stream.inputs:
        if source.id == input_id:
            return source
    raise PreviewError(f"Stream {stream.name!r} has no input {input_id!r}. Its inputs are {known}.")
