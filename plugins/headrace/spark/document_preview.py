"""Shows the documents that an Elasticsearch output would index of rows, without sending them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.verdicts import Reason
from headrace.spark.documents import prepare_documents

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from headrace.spark.documents import BatchIncarnations
    from headrace.stream import ElasticsearchOutput


@dataclass(frozen=True, slots=True)
class PreviewedDocument:
    """What a row would become.

    ``id`` and ``version`` are those that would be sent; ``document`` is the JSON text, None if the document with this
    id would be deleted. ``rejected``: the row would be a dead letter for this reason, and has no id. Elasticsearch may
    still refuse a document, for example for its mapping. ``record`` is the row's topic, partition and offset, if it has
    them.
    """

    id: str | None
    version: int | None
    document: str | None
    rejected: Reason | None
    record: tuple[str, int, int] | None


def preview_documents(
    frame: DataFrame,
    output: ElasticsearchOutput,
    *,
    stream_name: str,
    batch_time_ms: int,
    incarnations: BatchIncarnations | None = None,
) -> list[PreviewedDocument]:
    """The documents of the frame's rows, in the order of the rows, by the code that a batch uses.

    All rows are collected in this process. Ignored tombstones give none.

    Raises:
        UnsuitableRowsError: the rows do not have the columns that the output's ids need, or it is not clear what the
            document is.
    """
    options = IndexingOptions.of(output, stream_name=stream_name, batch_time_ms=batch_time_ms)
    prepared = prepare_documents(frame, output, incarnations=incarnations)
    columns.check_columns(prepared.columns, options)
    rows = prepared.toArrow().combine_chunks()
    return [document for batch in rows.to_batches() for document in _documents(batch, options)]


def _documents(batch: pa.RecordBatch, options: IndexingOptions) -> Iterator[PreviewedDocument]:
    preparation = prepare_rows(batch, options)
    prepared = preparation.prepared
    lines = {} if prepared is None else {prepared.row(line): line for line in range(len(prepared))}
    for row in range(batch.num_rows):
        record = _record(batch, row)
        if row in preparation.rejected:
            yield PreviewedDocument(None, None, None, preparation.rejected[row], record)
        elif prepared is not None and row in lines:
            line = lines[row]
            document = prepared.document(line)
            text = None if document is None else document.decode()
            yield PreviewedDocument(prepared.id(line), prepared.version(line), text, None, record)


def _record(batch: pa.RecordBatch, row: int) -> tuple[str, int, int] | None:
    if any(name not in batch.schema.names for name in columns.COORDINATES):
        return None
    topic, partition, offset = (batch.column(name)[row].as_py() for name in columns.COORDINATES)
    return None if topic is None or partition is None or offset is None else (topic, partition, offset)
