"""Finds rows of one batch with the same document id: all but one of them would be lost.

Rows that a task holds at the same time are compared exactly, before they are sent. For the comparison over all rows
and tasks of a batch, each id is represented by a digest of 64 bits: each task returns its digests, and the code that
ends the write compares them. A million rows need 8 MB. Two different ids among a million have the same digest about
once in ten million such batches. The next attempt uses other digests, so it succeeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import rejected_before
from headrace.elasticsearch.counts import EXAMPLES
from headrace.elasticsearch.document_ids import MAX_ID_BYTES, Identities
from headrace.elasticsearch.documents import line_offsets
from headrace.elasticsearch.errors import DuplicateIdsError
from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions


class DuplicateIdCheck:
    """Checks the rows of one task. ``seed`` (below 2**64) is equal for all tasks of a write and new for each write."""

    def __init__(self, options: IndexingOptions, seed: int) -> None:
        self._options = options
        steps = np.arange(1, MAX_ID_BYTES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._weights = _mixed(np.uint64(seed) + steps)
        self._digests: list[np.ndarray[Any, Any]] = []

    def take(self, batch: pa.RecordBatch, identities: Identities) -> None:
        """Add rows that are about to be sent.

        With record ids, rows that a decoder or the transform rejected are included: their dead letters have the same
        ids.

        Raises:
            DuplicateIdsError: two of these rows have the same id (and version, where ids are versioned by the record).
        """
        _, ids, numbers = compared_rows(batch, identities, self._options)
        if len(pc.unique(ids)) < len(ids):
            self._refuse_equal(ids, numbers)
        digests = _digests(ids, self._weights)
        for column in numbers:
            digests = _mixed(digests ^ _mixed(column.to_numpy(zero_copy_only=False).view(np.uint64)))
        self._digests.append(digests)

    def digests(self) -> np.ndarray[Any, Any]:
        """The digests of all rows added (uint64 array)."""
        return np.concatenate(self._digests) if self._digests else np.empty(0, np.uint64)

    def _refuse_equal(self, ids: Any, numbers: list[Any]) -> None:
        names = ["id", *(f"n{place}" for place in range(len(numbers)))]
        found = pa.table([ids, *numbers], names=names).group_by(names).aggregate([([], "count_all")])
        double = found.filter(pc.greater(found.column("count_all"), 1))
        if double.num_rows:
            raise duplicate_ids_error(self._options.index, self._options.document_id, double.column("id").to_pylist())


def compared_rows(
    batch: pa.RecordBatch, identities: Identities, options: IndexingOptions
) -> tuple[Any, Any, list[Any]]:
    """The rows that must differ from each other: their numbers in ``batch``, their ids, and columns (int64) in which
    rows of the same id may differ."""
    left_out = set(identities.rejected)
    if options.document_id is not DocumentIdKind.RECORD:
        left_out |= rejected_before(batch).keys()
    rows = pa.array(np.delete(np.arange(batch.num_rows), sorted(left_out)))
    ids, numbers = identities.ids, _distinguishing(batch, identities, options)
    if left_out:
        ids, numbers = ids.take(rows), [column.take(rows) for column in numbers]
    return rows, ids, numbers


def _distinguishing(batch: pa.RecordBatch, identities: Identities, options: IndexingOptions) -> list[Any]:
    if options.document_id is DocumentIdKind.RECORD or identities.versions is None or options.versioned_by_batch:
        return []
    numbers = [identities.versions]
    if options.version_from is not None and all(name in batch.schema.names for name in columns.COORDINATES):
        # Two records may have the same version; two rows of one record may not have the same key.
        numbers += [batch.column(columns.PARTITION), batch.column(columns.OFFSET)]
    return [pc.fill_null(pc.cast(column, pa.int64()), -1) for column in numbers]


def repeated_digests(parts: Sequence[np.ndarray[Any, Any]]) -> int:
    """The number of rows whose digest another row before them has."""
    every = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.uint64)
    return int((every[1:] == every[:-1]).sum())


def duplicate_ids_error(index: str, kind: DocumentIdKind, examples: Sequence[str]) -> DuplicateIdsError:
    """The error that fails the batch. ``examples`` are ids that several rows share, as far as they are known."""
    shown = ", ".join(map(repr, examples[:EXAMPLES]))
    more = ", …" if len(examples) > EXAMPLES else ""
    return DuplicateIdsError(
        f"Several rows of the batch have the same document id in index {index!r}"
        f"{f': {shown}{more}' if examples else ''}. All but one of them would be lost.",
        remedy=_REMEDIES[kind],
    )


_REMEDIES = {
    DocumentIdKind.RECORD: "Where the transform makes several rows of one record, name the column that distinguishes "
    'them: document_ids=RecordIds(rows="column"), such as the position that posexplode gives. Otherwise let it make '
    "one row of each record.",
    DocumentIdKind.KEY: "A key has one document. Where the transform makes several rows of one record, give each row a "
    "key of its own, or use ColumnIds. Where records of one key are in several partitions, name a column that grows "
    "with every change of a key: KeyIds(version_from=…).",
    DocumentIdKind.COLUMNS: "Name columns that together are different in each row of a batch, or let the transform "
    "keep one row of each: dropDuplicates, or groupBy.",
}


def _digests(ids: Any, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A digest for each id: the sum of its bytes, weighted by position, modulo 2**64 (a universal hash)."""
    data, offsets = line_offsets(pc.cast(ids, pa.large_binary()))
    lengths = np.diff(offsets)
    first = int(offsets[0])
    places = np.arange(int(offsets[-1]) - first) - np.repeat(offsets[:-1] - first, lengths)
    terms = (data[first : int(offsets[-1])].astype(np.uint64) + np.uint64(1)) * weights[places]
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
    totals: np.ndarray[Any, Any] = sums[offsets[1:] - first] - sums[offsets[:-1] - first]
    return _mixed(totals)


def _mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mix the bits of each number (the finaliser of splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, Any] = numbers ^ (numbers >> np.uint64(31))
    return mixed
