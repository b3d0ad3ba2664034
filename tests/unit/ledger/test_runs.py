"""Runs that have no data interval get their batch times from the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.ledger.errors import StreamNotFoundError

NOW_MS = 1_700_000_000_000
T1, T2, T3 = NOW_MS + 1000, NOW_MS + 2000, NOW_MS + 3000


@pytest.fixture
def filled(world: Any) -> Any:
    """Blocks in T1, T2 and T3, of which the last has not ended."""
    for number in range(3):
        world.add({0: (number * 10, number * 10 + 10)})
        world.clock.advance(1000 if number < 2 else 500)
    return world


def test_runs_take_the_unclaimed_times_oldest_first(filled: Any) -> None:
    assign = filled.ledger.runs.assign
    assert assign("flights", "a", coalesces=False) == T1
    assert assign("flights", "b", coalesces=False) == T2
    # Nothing that has ended is left: the latest interval, as of now.
    assert assign("flights", "c", coalesces=False) == T2
    filled.clock.advance(10_000)
    assert assign("flights", "d", coalesces=False) == T3
    assert assign("flights", "e", coalesces=False) == T2 + 10_000


def test_a_run_keeps_its_time(filled: Any) -> None:
    runs = filled.ledger.runs
    assert runs.newest("flights") == {}
    assert runs.assign("flights", "a", coalesces=False) == T1
    filled.allocate(T1)
    filled.complete(T1)
    filled.clock.advance(60_000)
    assert runs.assign("flights", "a", coalesces=True) == T1
    runs.assign("flights", "b", coalesces=False)
    assert runs.newest("flights") == {"a": T1, "b": T2}
    assert runs.newest("flights", limit=1) == {"b": T2}


def test_a_claimed_time_is_not_given_out(filled: Any) -> None:
    filled.allocate(T1)
    assert filled.ledger.runs.assign("flights", "a", coalesces=False) == T2


def test_where_batches_coalesce_a_run_takes_the_latest_time(filled: Any) -> None:
    runs = filled.ledger.runs
    assert runs.assign("flights", "a", coalesces=True) == T2
    # It takes T1 over; until it has, another one may be given that, and finds it absorbed.
    assert runs.assign("flights", "b", coalesces=True) == T1


def test_streams_have_runs_of_their_own(filled: Any) -> None:
    filled.ledger.streams.register("other", "{}", batch_interval_ms=10_000, block_interval_ms=200)
    filled.ledger.runs.assign("flights", "a", coalesces=False)
    assert filled.ledger.runs.assign("other", "a", coalesces=False) == NOW_MS
    with pytest.raises(StreamNotFoundError):
        filled.ledger.runs.assign("nobody's", "a", coalesces=False)
