"""Which outputs may hold documents of the batch already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.spark.earlier_attempts import WRITTEN, tried_before, written_before


def make_ledger(*rows: dict[str, Any], rebuilt_at_ms: int | None = None) -> Any:
    attempts = [
        SimpleNamespace(**{"number": number, "target": "", "outputs": ("a", "b"), "attributes": {}, **row})
        for number, row in enumerate(rows, 1)
    ]
    events = [] if rebuilt_at_ms is None else [SimpleNamespace(at_ms=rebuilt_at_ms)]
    return SimpleNamespace(
        batches=SimpleNamespace(attempts=lambda stream, time_ms: attempts),
        events=SimpleNamespace(latest=lambda stream, kinds, limit: events),
    )


def make_attempt(target: str = "") -> Any:
    return SimpleNamespace(stream="s", batch_time_ms=10, number=9, target=target, outputs=("a", "c"))


def found(
    *rows: dict[str, Any],
    rebuilt_at_ms: int | None = None,
    target: str = "",
    window: str | None = None,
    built: bool = False,
) -> frozenset[str]:
    outputs = [SimpleNamespace(id=name, window="5 min" if name == window else None) for name in ("a", "b", "c")]
    stream: Any = SimpleNamespace(outputs=outputs)
    batch: Any = SimpleNamespace(allocated_at_ms=100, built=built)
    ledger = make_ledger(*rows, rebuilt_at_ms=rebuilt_at_ms)
    return written_before(ledger, stream, batch, make_attempt(target))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], set()),
        ([{}], {"a"}),
        ([{"outputs": ("b",)}], set()),
        ([{"outputs": ("c",)}], {"c"}),
        ([{"outputs": ("a", "c"), "attributes": {WRITTEN: ["a"]}}], {"a"}),
        ([{"attributes": {WRITTEN: []}}], set()),
        ([{"attributes": {WRITTEN: []}}, {"outputs": ("c",)}], {"c"}),
        ([{"target": "v2"}], set()),
        ([{"number": 9}], set()),
    ],
)
def test_an_earlier_attempt_at_the_output_may_have_written(rows: list[dict[str, Any]], expected: set[str]) -> None:
    assert found(*rows) == expected


def test_a_rebuilt_ledger_has_no_attempts_of_the_batches_from_before() -> None:
    assert found(rebuilt_at_ms=100) == {"a", "c"}
    assert found(rebuilt_at_ms=99) == set()
    assert found(rebuilt_at_ms=100, target="v2") == set()


def test_a_batch_built_from_kafka_may_have_late_records_that_a_later_batch_wrote() -> None:
    assert found(built=True) == {"a", "c"}


def test_a_window_writes_records_again_that_earlier_batches_wrote() -> None:
    assert found(window="c") == {"c"}


def test_of_a_replay_only_its_own_attempts_count() -> None:
    assert found({}, target="v2") == set()
    assert found({"target": "v2"}, target="v2") == {"a"}


def test_dead_letters_may_be_left_by_every_earlier_attempt_at_the_output() -> None:
    failed = {"attributes": {WRITTEN: []}}
    assert tried_before(make_ledger(), make_attempt()) == set()
    assert tried_before(make_ledger(failed), make_attempt()) == {"a"}
    assert tried_before(make_ledger(failed, {"target": "v2", "outputs": ("c",)}), make_attempt()) == {"a"}
    assert tried_before(make_ledger(*[{"outputs": ("b",)}] * 8, failed), make_attempt()) == set()
