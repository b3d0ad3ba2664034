"""Runs that take longer than the batch interval."""

from __future__ import annotations

import pytest

from headrace.batch.allocation import allocate
from headrace.views.batches import slow_runs

from .conftest import START_MS, Receiving


def run_each(receiving: Receiving, *, seconds: float, batches: int = 6) -> None:
    """One run after another, each as long, as a scheduler with one active run makes them."""
    for _ in range(batches):
        receiving.store(1)
        receiving.clock.advance(int(seconds * 1000))
        ended = receiving.clock.now_ms() // 10_000 * 10_000
        allocate(receiving.context, ended, takes_over=True)


def test_runs_that_are_longer_than_the_interval_are_reported_with_remedies(receiving: Receiving) -> None:
    run_each(receiving, seconds=25)
    found = slow_runs(receiving.ledger, "shop", coalesces=True)
    assert found is not None
    assert (found.run_ms, found.interval_ms) == (25_000, 10_000)
    assert "runs take 25.0 s and the batch interval is 10 s" in str(found)
    assert "longer batch_interval" in str(found)
    assert "single_task=True" in str(found)


@pytest.mark.parametrize(("seconds", "batches"), [(25, 4), (10, 6)], ids=["too few batches", "in time"])
def test_runs_that_are_shorter_than_the_interval_are_not_reported(
    receiving: Receiving, seconds: float, batches: int
) -> None:
    run_each(receiving, seconds=seconds, batches=batches)
    assert slow_runs(receiving.ledger, "shop", coalesces=True) is None


def test_a_backlog_that_is_caught_up_is_none_of_them(receiving: Receiving) -> None:
    """Each batch is late, and each run shorter than the interval."""
    for _ in range(6):
        receiving.store(1)
        receiving.clock.advance(10_000)
    receiving.clock.advance(60_000)
    for number in range(6):
        receiving.clock.advance(5_000)
        at_ms = START_MS + 10_000 * (number + 1)
        allocate(receiving.context, at_ms)
    assert slow_runs(receiving.ledger, "shop", coalesces=False) is None
