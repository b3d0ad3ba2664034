"""Compares the documents that two versions of a stream's code make of past batches, writing nothing to an index.

Each batch is read as by a preview, once with the definition's transforms and once with the other one. The documents of
both go into files, so their number is bounded by the disk and not by memory. At the end the last document of each id
is compared: what an index would hold if all of the batches were written into an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.clock import time_text
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.states import BatchState
from headrace.spark.outputs.documents import prepare_documents
from headrace.spark.preview import PreviewError, ReadOutput, outputs_of, read_outputs, with_transform
from headrace.stream import ElasticsearchOutput
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from headrace.elasticsearch.bulk_bodies import PreparedRows

_DOCUMENT = (
    "index STRING, id STRING, version BIGINT, document STRING, rejected BOOLEAN, collision STRING, "
    "batch_time_ms BIGINT, row BIGINT"
)
"""``id`` is null of a row that is not sent. ``collision``: what no two rows of a batch may have in common."""
_DIFFERENCE = "index STRING, id STRING, before STRING, after STRING, fields ARRAY<STRING>"
WHOLE = "(the document)"
"""In place of the names of changed fields, if a document is no valid JSON, so that Elasticsearch would refuse it."""
_UNREAD = (BatchState.ABSORBED, BatchState.ABANDONED)


@dataclass(frozen=True, slots=True)
class ChangedDocument:
    """A document that the two versions do not have in common, as JSON text. ``before`` is None of a new one, ``after``
    of one that is gone; ``fields`` are the top-level fields that differ. A document in another index is another one."""

    index: str
    id: str
    before: str | None
    after: str | None
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CollidingId:
    """A document id that several rows of one batch have."""

    id: str
    batch_time_ms: int
    rows: int


@dataclass(frozen=True, slots=True)
class Collisions:
    """How many ids several rows of one batch have, in one version. A run of such a batch fails."""

    number: int
    examples: tuple[CollidingId, ...]


@dataclass(frozen=True, slots=True)
class UnreadBatches:
    """Batches of the range that were not read, from one batch time to another, both included."""

    from_ms: int
    to_ms: int
    reason: str

    def __str__(self) -> str:
        times = sorted({self.from_ms, self.to_ms})
        return f"{' to '.join(map(time_text, times))}: {self.reason}"


@dataclass(frozen=True, slots=True)
class OutputDiff:
    """How many documents of an output are only in the new version, in both, or only in the old one.

    ``changed_fields`` counts the changed documents by top-level field. ``rejected_before`` and ``rejected_after`` are
    the rows that would be dead letters; records that do not decode are not among them, for no transform gets them.
    """

    output_id: str
    transform_before: str | None
    transform_after: str | None
    new: int
    changed: int
    gone: int
    same: int
    rejected_before: int
    rejected_after: int
    collisions_before: Collisions
    collisions_after: Collisions
    changed_fields: dict[str, int]
    examples: tuple[ChangedDocument, ...]


@dataclass(frozen=True, slots=True)
class ReplayDiff:
    """The comparison of the batches between two batch times, both included."""

    stream: str
    from_ms: int
    to_ms: int
    batches: int
    records: int
    not_read: tuple[UnreadBatches, ...]
    outputs: tuple[OutputDiff, ...]


def diff_replay(
    context: StreamContext,
    spark: SparkSession,
    folder: Path,
    *,
    transform: str,
    from_ms: int,
    to_ms: int,
    output_id: str | None = None,
    limit: int = 10,
    progress: Callable[[str], None] = lambda _: None,
) -> ReplayDiff:
    """Compare the stream's transforms with ``transform`` ("module:function") over these batches.

    Args:
        folder: an empty folder for the documents; the caller deletes it.
        output_id: only this Elasticsearch output; by default all of them.
        limit: the number of examples of new, of changed and of gone documents.
        progress: gets a line of text for each batch.

    Raises:
        PreviewError: there is no such batch, output or transform; also what `preview_batch` raises.
    """
    changed = StreamContext(with_transform(context.stream, transform, output_id), context.ledger)
    outputs = [
        output for output in context.stream.elasticsearch_outputs if output in outputs_of(context.stream, output_id)
    ]
    if not outputs:
        raise PreviewError("There is no Elasticsearch output to compare the documents of.")
    rows = _batches(context, from_ms, to_ms)
    read = [row for row in rows if row.state not in _UNREAD]
    unread = _unread(context, rows, {row.batch_time_ms for row in read}, from_ms, to_ms)
    if not read:
        raise PreviewError(
            f"Stream {context.name!r} has no batch from {time_text(from_ms)} to {time_text(to_ms)} whose records can "
            f"be read.{''.join(f' {batches}.' for batches in unread)}",
            remedy=f"headrace batches list {context.name} lists the batches.",
        )
    names = [output.id for output in outputs]
    rejected = {(side, name): 0 for side in ("before", "after") for name in names}
    for number, row in enumerate(read, start=1):
        progress(f"batch {time_text(row.batch_time_ms)} ({number} of {len(read)}): {row.records:,} records")
        for side, version in (("before", context), ("after", changed)):
            for prepared in read_outputs(
                version, row.batch_time_ms, [output.step for output in outputs], lambda: spark
            ):
                if prepared.skipped is None:
                    rejected[side, prepared.plan.output.id] += _keep(prepared, folder / side / prepared.plan.output.id)
    progress("comparing the documents")
    return ReplayDiff(
        stream=context.name,
        from_ms=from_ms,
        to_ms=to_ms,
        batches=len(read),
        records=sum(row.records for row in read),
        not_read=unread,
        outputs=tuple(
            _compare(
                spark,
                folder,
                output,
                transforms=(context.stream.transform_of(output), changed.stream.transform_of(changed_output)),
                rejected=(rejected["before", output.id], rejected["after", output.id]),
                limit=limit,
            )
            for output, changed_output in ((output, changed.stream.output(output.id)) for output in outputs)
        ),
    )


def _batches(context: StreamContext, from_ms: int, to_ms: int) -> list[BatchRow]:
    """The batches of the range, oldest first."""
    batches: list[BatchRow] = []
    before_ms = to_ms + 1
    while page := context.ledger.batches.page(context.name, before_ms=before_ms):
        batches += [row for row in page if row.batch_time_ms >= from_ms]
        before_ms = page[-1].batch_time_ms
        if before_ms <= from_ms:
            break
    return batches[::-1]


def _unread(
    context: StreamContext, rows: Sequence[BatchRow], read: Container[int], from_ms: int, to_ms: int
) -> tuple[UnreadBatches, ...]:
    unread: list[UnreadBatches] = []
    stream = context.ledger.streams.get(context.name)
    first_ms, last_ms = max(from_ms, stream.removed_from_ms), min(to_ms, stream.removed_until_ms)
    if first_ms <= last_ms:
        unread.append(UnreadBatches(first_ms, last_ms, "removed, since the stream keeps batches for limits.history"))
    for absorber_ms, group in groupby(rows, key=lambda row: row.absorbed_by_ms):
        times = [(row.batch_time_ms, row.state) for row in group]
        if absorber_ms is None:
            unread += [UnreadBatches(at, at, "abandoned") for at, state in times if state is BatchState.ABANDONED]
        elif absorber_ms not in read:
            where = "after the range" if absorber_ms > to_ms else "not read"
            reason = f"its records are in batch {time_text(absorber_ms)}, which is {where}"
            unread.append(UnreadBatches(times[0][0], times[-1][0], reason))
    return tuple(unread)


def _keep(read: ReadOutput, folder: Path) -> int:
    """Add the output's documents of a batch to the folder. Returns how many rows would be dead letters."""
    output, attempt = cast("ElasticsearchOutput", read.plan.output), read.attempt
    target = Target.of(output, attempt.stream.name)
    options = IndexingOptions.of(output, target, batch_time_ms=attempt.batch_time_ms)
    frame = read.frame()
    prepared = prepare_documents(frame, output, incarnations=read.incarnations(frame))
    options.check_columns(prepared.columns)
    documents = prepared.mapInArrow(partial(_documents, options, attempt.batch_time_ms), _DOCUMENT)
    path = str(folder / str(attempt.batch_time_ms))
    documents.write.parquet(path)
    return attempt.spark.read.schema(_DOCUMENT).parquet(path).where("rejected").count()


def _documents(
    options: IndexingOptions, batch_time_ms: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """A row for each row of the batch, in its order."""
    import pyarrow as pa

    from headrace.elasticsearch.bulk_bodies import prepare_rows
    from headrace.elasticsearch.document_ids import identify
    from headrace.elasticsearch.indexer import compared_rows

    number = 0
    for batch in batches:
        identities = identify(batch, options)
        preparation = prepare_rows(batch, options, identities=identities)
        sent = {} if preparation.prepared is None else dict(_sent(preparation.prepared))
        compared, ids, numbers = compared_rows(batch, identities, options)
        parts = zip(ids.to_pylist(), *(column.to_pylist() for column in numbers), strict=True)
        collisions = dict(zip(compared.to_pylist(), map(json.dumps, parts), strict=True))
        rows = range(batch.num_rows)
        columns_of_sent = [[sent[row][place] if row in sent else None for row in rows] for place in range(4)]
        yield pa.record_batch(
            {
                "index": pa.array(columns_of_sent[0], pa.string()),
                "id": pa.array(columns_of_sent[1], pa.string()),
                "version": pa.array(columns_of_sent[2], pa.int64()),
                "document": pa.array(columns_of_sent[3], pa.string()),
                "rejected": pa.array([row in preparation.rejected for row in rows], pa.bool_()),
                "collision": pa.array([collisions.get(row) for row in rows], pa.string()),
                "batch_time_ms": pa.array([batch_time_ms] * len(rows), pa.int64()),
                "row": pa.array([number + row for row in rows], pa.int64()),
            }
        )
        number += len(rows)


def _sent(prepared: PreparedRows) -> Iterator[tuple[int, tuple[str, str, int | None, str | None]]]:
    """The number of each row that is sent, with its index, id, version and document. No document: its id is deleted."""
    for line in range(len(prepared)):
        document = prepared.document(line)
        text = None if document is None else document.decode(errors="replace")
        yield prepared.row(line), (prepared.target(line).name, prepared.id(line), prepared.version(line), text)


def _compare(
    spark: SparkSession,
    folder: Path,
    output: ElasticsearchOutput,
    *,
    transforms: tuple[str | None, str | None],
    rejected: tuple[int, int],
    limit: int,
) -> OutputDiff:
    from pyspark.sql import functions as F  # noqa: N812

    rows = {side: _rows(spark, folder / side / output.id) for side in ("before", "after")}
    collisions = {side: _collisions(rows[side], limit) for side in rows}
    before, after = (_held(rows[side], output).withColumnRenamed("document", side) for side in rows)
    joined = before.join(after, ["index", "id"], "full").persist()
    try:
        in_both = joined.where("before IS NOT NULL AND after IS NOT NULL").count()
        different = joined.where("NOT (before <=> after)").mapInArrow(_differences, _DIFFERENCE).persist()
        try:
            kind = F.expr("CASE WHEN before IS NULL THEN 'new' WHEN after IS NULL THEN 'gone' ELSE 'changed' END")
            different = different.withColumn("kind", kind)
            counts = {row["kind"]: row["count"] for row in different.groupBy("kind").count().collect()}
            fields = different.where("kind = 'changed'").select(F.explode("fields").alias("field"))
            by_field = fields.groupBy("field").count().orderBy(F.desc("count"), "field").collect()
            examples = [
                ChangedDocument(row["index"], row["id"], row["before"], row["after"], tuple(row["fields"]))
                for kind in ("new", "changed", "gone")
                for row in different.where(F.col("kind") == kind).orderBy("id", "index").limit(limit).collect()
            ]
        finally:
            different.unpersist()
    finally:
        joined.unpersist()
    return OutputDiff(
        output_id=output.id,
        transform_before=transforms[0],
        transform_after=transforms[1],
        new=counts.get("new", 0),
        changed=counts.get("changed", 0),
        gone=counts.get("gone", 0),
        same=in_both - counts.get("changed", 0),
        rejected_before=rejected[0],
        rejected_after=rejected[1],
        collisions_before=collisions["before"],
        collisions_after=collisions["after"],
        changed_fields={row["field"]: row["count"] for row in by_field},
        examples=tuple(examples),
    )


def _rows(spark: SparkSession, folder: Path) -> DataFrame:
    paths = sorted(str(path) for path in folder.iterdir()) if folder.is_dir() else []
    return spark.read.schema(_DOCUMENT).parquet(*paths) if paths else spark.createDataFrame([], _DOCUMENT)


def _collisions(rows: DataFrame, limit: int) -> Collisions:
    """The ids for which a real batch raises DuplicateIdsError, in whichever of its tasks their rows are."""
    kept = rows.where("collision IS NOT NULL").groupBy("batch_time_ms", "collision").count().where("count > 1")
    kept = kept.persist()
    try:
        number = kept.count()
        shown = kept.orderBy("batch_time_ms", "collision").limit(limit).collect() if number else []
    finally:
        kept.unpersist()
    examples = [CollidingId(json.loads(row["collision"])[0], row["batch_time_ms"], row["count"]) for row in shown]
    return Collisions(number, tuple(examples))


def _held(rows: DataFrame, output: ElasticsearchOutput) -> DataFrame:
    """The index, the id and the document of what is there after these writes."""
    from pyspark.sql import functions as F  # noqa: N812

    # The highest version. Of the same version the first is kept if documents are created, else the last.
    sign = -1 if output.write_action == "create" else 1
    order = F.struct(F.coalesce("version", F.lit(0)), sign * F.col("batch_time_ms"), sign * F.col("row"))
    newest = F.max_by(F.struct("document"), order).alias("held")
    held = rows.where("id IS NOT NULL").groupBy("index", "id").agg(newest).select("index", "id", "held.document")
    return held.where("document IS NOT NULL")


def _differences(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The fields that differ; documents that differ only in the order of their fields are left out."""
    import pyarrow as pa

    for batch in batches:
        differences: list[tuple[str, str, str | None, str | None, Sequence[str]]] = []
        for row in batch.to_pylist():
            before, after = row["before"], row["after"]
            fields = [] if before is None or after is None else _changed_fields(_parsed(before), _parsed(after))
            if fields or before is None or after is None:
                differences.append((row["index"], row["id"], before, after, fields))
        columns = zip(*differences, strict=True) if differences else ((), (), (), (), ())
        indices, ids, befores, afters, fields_of = columns
        yield pa.record_batch(
            {
                "index": pa.array(indices, pa.string()),
                "id": pa.array(ids, pa.string()),
                "before": pa.array(befores, pa.string()),
                "after": pa.array(afters, pa.string()),
                "fields": pa.array(fields_of, pa.list_(pa.string())),
            }
        )


def _changed_fields(before: Any, after: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        return [name for name in before | after if _text(before, name) != _text(after, name)]
    return [] if before == after else [WHOLE]


def _text(document: dict[str, Any], name: str) -> str | None:
    """A field's JSON: for Python true, 1 and 1.0 are equal, but not for Elasticsearch."""
    return json.dumps(document[name], sort_keys=True) if name in document else None


def _parsed(document: str) -> Any:
    try:
        return json.loads(document)
    except ValueError:
        return document
