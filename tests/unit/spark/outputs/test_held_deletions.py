"""Rows that delete are held back, and nothing else is."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headrace.spark.outputs.held_deletions import MAX_KEPT_BYTES, HeldDeletions, held_rows, only_deletions


def rows(*values: str | None, rejected: bool = False, document: str = "value") -> pa.RecordBatch:
    numbers = range(len(values))
    columns: dict[str, Any] = {"offset": pa.array(numbers, pa.int64()), document: pa.array(values, pa.string())}
    if rejected:
        columns["rejected_because"] = pa.array([None if number % 2 else "odd" for number in numbers], pa.string())
    return pa.record_batch(columns)


def offsets(batches: Any) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


@pytest.mark.parametrize("document", ["value", "document"])
def test_rows_without_a_document_are_held_back(document: str) -> None:
    held = HeldDeletions()
    batches = [rows("{}", None, "{}", document=document), rows("{}", document=document), rows(None, document=document)]
    assert offsets(held.rest_of(batches)) == [0, 2, 0]
    assert held.rows == 2
    stream = held.to_bytes()
    assert stream is not None
    assert offsets(held_rows(stream)) == offsets(only_deletions(batches)) == [1, 0]


def test_rejected_rows_are_dead_letters_and_not_held_back() -> None:
    held = HeldDeletions()
    batch = rows(None, None, "{}", rejected=True)
    assert offsets(held.rest_of([batch])) == [0, 2]
    assert (held.rows, offsets(only_deletions([batch]))) == (1, [1])


def test_nothing_is_returned_without_deletions_or_with_too_many() -> None:
    held = HeldDeletions()
    assert offsets(held.rest_of([rows("{}")])) == [0]
    assert (held.rows, held.to_bytes()) == (0, None)
    many = rows(*[None] * (MAX_KEPT_BYTES // 8))
    for _ in range(2):
        assert offsets(held.rest_of([many])) == []
    assert (held.rows, held.to_bytes()) == (2 * many.num_rows, None)
