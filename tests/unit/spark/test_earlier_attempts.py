"""Which outputs may hold documents of the batch already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.spark.earlier_attempts import written_before

FOREIGN = "headrace.indexing.errors.ForeignDocumentsError: Index 'i' holds other documents"


def found(*rows: dict[str, Any], steps: tuple[str, ...] | None = None, target: str = "") -> frozenset[str]:
    attempts = [
        SimpleNamespace(**{"number": number, "target": "", "outputs": ("a", "b"), "error": None, **row})
        for number, row in enumerate(rows, 1)
    ]
    ledger: Any = SimpleNamespace(batches=SimpleNamespace(attempts=lambda stream, time_ms: attempts))
    batch: Any = SimpleNamespace(steps=steps)
    attempt: Any = SimpleNamespace(stream="s", batch_time_ms=10, number=9, target=target, outputs=("a", "c"))
    return written_before(ledger, batch, attempt)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], set()),
        ([{}], {"a"}),
        ([{"outputs": ("b",)}], set()),
        ([{"outputs": ("c",), "error": "the executor was killed"}], {"c"}),
        ([{"error": FOREIGN}], set()),
        ([{"error": FOREIGN}, {"outputs": ("c",)}], {"c"}),
        ([{"target": "v2"}], set()),
        ([{"number": 9}], set()),
    ],
)
def test_an_earlier_attempt_at_the_output_may_have_written(rows: list[dict[str, Any]], expected: set[str]) -> None:
    assert found(*rows) == expected


def test_a_batch_that_completed_has_written_also_where_a_recovered_ledger_has_no_attempts() -> None:
    assert found(steps=("a",)) == {"a"}
    assert found(steps=("a",), target="v2") == set()


def test_of_a_replay_only_its_own_attempts_count() -> None:
    assert found({}, target="v2") == set()
    assert found({"target": "v2"}, target="v2") == {"a"}
