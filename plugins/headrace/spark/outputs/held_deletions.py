"""The rows that delete documents, which wait until all tasks have indexed theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.elasticsearch import columns

MAX_KEPT_BYTES = 1024 * 1024
"""The most bytes of rows (about 10,000 records) that a task keeps for the process that sends them."""


class HeldDeletions:
    """The rows of one task that delete documents, held back so that they are sent after all tasks have ended.

    A batch's tasks run at the same time, and Elasticsearch forgets a deleted document's version after
    ``index.gc_deletes`` (a minute by default). An older value of the key, sent after that by a slower or a repeated
    task, would bring the document back. When deletions are sent last, no older value of the batch follows them. A newer
    value of the key is in the index by then, and its version refuses the deletion.

    If the rows are too many, they are only counted, and must be read again.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._kept: list[pa.RecordBatch] | None = []
        self._bytes = 0

    def rest_of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that do not delete, and hold back the others."""
        for batch in batches:
            mask = _deleting(batch)
            if mask is None:
                yield batch
                continue
            self._hold(batch.filter(mask))
            yield batch.filter(pc.invert(mask))

    def to_bytes(self) -> bytes | None:
        """The rows as an Arrow stream; None if there are none, or too many."""
        if not self._kept:
            return None
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, self._kept[0].schema) as writer:
            for batch in self._kept:
                writer.write_batch(batch)
        data: bytes = stream.getvalue().to_pybytes()
        return data

    def _hold(self, rows: pa.RecordBatch) -> None:
        self.rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._bytes > MAX_KEPT_BYTES:
            self._kept = None
        if self._kept is not None:
            self._kept.append(rows)


def held_rows(stream: bytes) -> list[pa.RecordBatch]:
    """The rows of ``HeldDeletions.to_bytes``."""
    with pa.ipc.open_stream(stream) as reader:
        return list(reader)


def only_deletions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows that delete."""
    for batch in batches:
        mask = _deleting(batch)
        if mask is not None:
            yield batch.filter(mask)


def _deleting(batch: pa.RecordBatch) -> Any | None:
    """The mask of the rows without a document that are not dead letters already; None if there are none."""
    documents = batch.column(columns.document_column(batch.schema.names))
    if not documents.null_count:
        return None
    mask = pc.is_null(documents)
    if columns.REJECTED_BECAUSE in batch.schema.names:
        mask = pc.and_(mask, pc.is_null(batch.column(columns.REJECTED_BECAUSE)))
    return mask if pc.any(mask).as_py() else None
