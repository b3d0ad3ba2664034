"""Compares the documents that two versions of a stream's code make of past batches, writing nothing to an index.

Each batch is read as by a preview, once with the definition's transforms and once with the other one. The documents of
both go into files, so their number is bounded by the disk and not by memory. At the end the last document of each id
is compared: what an index would hold if all of the batches were written into an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.clock import time_text
from headrace.elasticsearch import columns
from headrace.elasticsearch.options import IndexingOptions, WriteMethod
from headrace.ledger.models import BatchRow
from headrace.ledger.states import BatchState
from headrace.spark.batch_preview import PreviewError, ReadOutput, outputs_of, read_outputs, with_transform
from headrace.spark.documents import prepare_documents
from headrace.stream import ElasticsearchOutput
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from headrace.elasticsearch.bulk_bodies import PreparedRows

    _Row = tuple[str | None, int | None, str | None]

_DOCUMENT = "id STRING, version BIGINT, document STRING, batch_time_ms BIGINT, row BIGINT"
_DIFFERENCE = "id STRING, before STRING, after STRING, fields ARRAY<STRING>"
WHOLE = "(the document)"
"""In place of the names of changed fields, if a document is no valid JSON, so that Elasticsearch would refuse it."""
_UNREAD = (BatchState.ABSORBED, BatchState.ABANDONED)


@dataclass(frozen=True, slots=True)
class ChangedDocument:
    """A document that the two versions do not have in common, as JSON text. ``before`` is None of a new one, ``after``
    of one that is gone; ``fields`` are the top-level fields that differ."""

    id: str
    before: str | None
    after: str | None
    fields: tuple[str, ...]


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
    changed_fields: dict[str, int]
    examples: tuple[ChangedDocument, ...]


@dataclass(frozen=True, slots=True)
class ReplayDiff:
    """The comparison of the batches between two batch times, both included. ``not_read`` are abandoned ones."""

    stream: str
    from_ms: int
    to_ms: int
    batches: int
    records: int
    not_read: tuple[int, ...]
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
        PreviewError: there is no such batch, output or transform; also what `batch_preview.preview_batch` raises.
    """
    changed = StreamContext(with_transform(context.stream, transform, output_id), context.ledger)
    outputs = [each for each in outputs_of(context.stream, output_id) if isinstance(each, ElasticsearchOutput)]
    if not outputs:
        raise PreviewError("There is no Elasticsearch output to compare the documents of.")
    rows = _batches(context, from_ms, to_ms)
    read = [row for row in rows if row.state not in _UNREAD]
    if not read:
        raise PreviewError(
            f"Stream {context.name!r} has no batch from {time_text(from_ms)} to {time_text(to_ms)} whose records can "
            "be read.",
            remedy=f"headrace batches list {context.name} lists the batches.",
        )
    names = [output.id for output in outputs]
    rejected = {(side, name): 0 for side in ("before", "after") for name in names}
    for number, row in enumerate(read, start=1):
        progress(f"batch {time_text(row.batch_time_ms)} ({number} of {len(read)}): {row.records:,} records")
        for side, version in (("before", context), ("after", changed)):
            for each in read_outputs(version, row.batch_time_ms, names, lambda: spark):
                if each.skipped is None:
                    rejected[side, each.plan.output.id] += _keep(each, folder / side / each.plan.output.id)
    progress("comparing the documents")
    return ReplayDiff(
        stream=context.name,
        from_ms=from_ms,
        to_ms=to_ms,
        batches=len(read),
        records=sum(row.records for row in read),
        not_read=tuple(row.batch_time_ms for row in rows if row.state is BatchState.ABANDONED),
        outputs=tuple(
            _compare(
                spark,
                folder,
                output,
                transforms=(context.stream.transform_of(output), changed.stream.transform_of(changed_output)),
                rejected=(rejected["before", output.id], rejected["after", output.id]),
                limit=limit,
            )
            for output, changed_output in ((each, changed.stream.output(each.id)) for each in outputs)
        ),
    )


def _batches(context: StreamContext, from_ms: int, to_ms: int) -> list[BatchRow]:
    """The batches of the range, oldest first."""
    found: list[BatchRow] = []
    before_ms = to_ms + 1
    while page := context.ledger.batches.page(context.name, before_ms=before_ms):
        found += [row for row in page if row.batch_time_ms >= from_ms]
        before_ms = page[-1].batch_time_ms
        if before_ms <= from_ms:
            break
    return found[::-1]


def _keep(read: ReadOutput, folder: Path) -> int:
    """Add the output's documents of a batch to the folder. Returns how many rows would be dead letters."""
    from pyspark.sql import functions as F  # noqa: N812

    output, attempt = cast("ElasticsearchOutput", read.plan.output), read.attempt
    options = IndexingOptions.of(output, stream_name=attempt.stream.name, batch_time_ms=attempt.batch_time_ms)
    frame = read.frame()
    prepared = prepare_documents(frame, output, incarnations=read.incarnations(frame))
    columns.check_columns(prepared.columns, options)
    documents = prepared.mapInArrow(partial(_documents, options, attempt.batch_time_ms), _DOCUMENT)
    path = str(folder / str(attempt.batch_time_ms))
    documents.write.parquet(path)
    return attempt.spark.read.schema(_DOCUMENT).parquet(path).where(F.col("id").isNull()).count()


def _documents(
    options: IndexingOptions, batch_time_ms: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The documents that would be sent; a row without an id for each dead letter."""
    import pyarrow as pa

    from headrace.elasticsearch.bulk_bodies import prepare_rows

    number = 0
    for batch in batches:
        preparation = prepare_rows(batch, options)
        rows: list[_Row] = [(None, None, None)] * len(preparation.rejected)
        if preparation.prepared is not None:
            rows += _sent(preparation.prepared)
        ids, versions, texts = zip(*rows, strict=True) if rows else ((), (), ())
        yield pa.record_batch(
            {
                "id": pa.array(ids, pa.string()),
                "version": pa.array(versions, pa.int64()),
                "document": pa.array(texts, pa.string()),
                "batch_time_ms": pa.array([batch_time_ms] * len(rows), pa.int64()),
                "row": pa.array(range(number, number + len(rows)), pa.int64()),
            }
        )
        number += len(rows)


def _sent(prepared: PreparedRows) -> Iterator[_Row]:
    for line in range(len(prepared)):
        document = prepared.document(line)
        yield prepared.id(line), prepared.version(line), None if document is None else document.decode(errors="replace")


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

    before, after = (
        _held(spark, folder / side / output.id, output).withColumnRenamed("document", side)
        for side in ("before", "after")
    )
    joined = before.join(after, "id", "full").persist()
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
                ChangedDocument(row["id"], row["before"], row["after"], tuple(row["fields"]))
                for each in ("new", "changed", "gone")
                for row in different.where(F.col("kind") == each).orderBy("id").limit(limit).collect()
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
        changed_fields={row["field"]: row["count"] for row in by_field},
        examples=tuple(examples),
    )


def _held(spark: SparkSession, folder: Path, output: ElasticsearchOutput) -> DataFrame:
    """The id and the document of what an index holds after these writes."""
    from pyspark.sql import functions as F  # noqa: N812

    paths = sorted(str(path) for path in folder.iterdir()) if folder.is_dir() else []
    rows = spark.read.schema(_DOCUMENT).parquet(*paths) if paths else spark.createDataFrame([], _DOCUMENT)
    # The highest version. Of the same version the first is kept if documents are created, else the last.
    method = IndexingOptions.of(output, stream_name="", batch_time_ms=0).method
    sign = -1 if method is WriteMethod.CREATE else 1
    order = F.struct(F.coalesce("version", F.lit(0)), sign * F.col("batch_time_ms"), sign * F.col("row"))
    newest = F.max_by(F.struct("document"), order).alias("held")
    held = rows.where("id IS NOT NULL").groupBy("id").agg(newest).select("id", "held.document")
    return held.where("document IS NOT NULL")


def _differences(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The fields that differ; documents that differ only in the order of their fields are left out."""
    import pyarrow as pa

    for batch in batches:
        found: list[tuple[str, str | None, str | None, Sequence[str]]] = []
        for row in batch.to_pylist():
            before, after = row["before"], row["after"]
            fields = [] if before is None or after is None else _changed_fields(_parsed(before), _parsed(after))
            if fields or before is None or after is None:
                found.append((row["id"], before, after, fields))
        ids, befores, afters, fields_of = zip(*found, strict=True) if found else ((), (), (), ())
        yield pa.record_batch(
            {
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
