"""Runs that have no data interval get their batch times from the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.ledger.batches.run_batch_times import BatchBounds
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
    assert assign("flights", "a") == T1
    assert assign("flights", "b") == T2
    # Nothing that has ended is left: the latest interval, as of now.
    assert assign("flights", "c") == T2
    filled.clock.advance(10_000)
    assert assign("flights", "d") == T3
    assert assign("flights", "e") == T2 + 10_000


def test_a_run_keeps_its_time(filled: Any) -> None:
    runs = filled.ledger.runs
    assert runs.find("flights", "a") is None
    assert runs.assign("flights", "a") == T1
    filled.allocate(T1)
    filled.complete(T1)
    filled.clock.advance(60_000)
    assert runs.assign("flights", "a") == T1
    assert runs.assign("flights", "b") == T2
    assert (runs.find("flights", "a"), runs.find("flights", "b")) == (T1, T2)


def test_a_claimed_time_is_not_given_out(filled: Any) -> None:
    filled.allocate(T1)
    assert filled.ledger.runs.assign("flights", "a") == T2


WIDE = BatchBounds(records=1_000, payload_bytes=1_000_000)


def test_a_run_that_takes_over_is_about_the_latest_ended_time(filled: Any) -> None:
    """Its own date lags behind: Airflow fixed it when the run before was made."""
    take = filled.ledger.runs.take
    assert take("flights", "late", bounds=WIDE, date_ms=T1) == T2
    # The times are still unclaimed. Whoever allocates first has them, the other finds that.
    assert take("flights", "other", bounds=WIDE, date_ms=T2) == T2
    filled.clock.advance(10_000)
    assert take("flights", "late", bounds=WIDE, date_ms=T1) == T2
    assert filled.ledger.runs.find("flights", "late") == T2
    assert filled.ledger.runs.find("flights", "nobody") is None


def test_a_run_whose_time_was_taken_waits_for_a_later_one(filled: Any) -> None:
    runs = filled.ledger.runs
    assert runs.take("flights", "late", bounds=WIDE, date_ms=T1) == T2
    filled.allocate(T2, absorb=[T1], blocks_expected=2)
    assert runs.take("flights", "next", bounds=WIDE, date_ms=T2) is None
    # It was given nothing, so when it is cleared it is asked for what there is by then: the batch of its date.
    assert runs.take("flights", "next", bounds=WIDE, date_ms=T2, keeps_date=True) == T2
    filled.clock.advance(1000)
    assert runs.take("flights", "one more", bounds=WIDE, date_ms=T2) == T3


def test_an_interval_without_records_is_a_batch_too(filled: Any) -> None:
    filled.clock.advance(9_000)
    until_ms = T3 + 8_000
    assert filled.ledger.runs.take("flights", "a", bounds=WIDE, date_ms=until_ms) == until_ms


def test_a_run_of_a_clock_that_is_ahead_is_about_its_own_time(filled: Any) -> None:
    """Airflow's clock may be ahead of the ledger's; the run then waits for the end of its interval."""
    assert filled.ledger.runs.take("flights", "ahead", bounds=WIDE, date_ms=T3) == T3
    assert filled.ledger.runs.take("flights", "far ahead", bounds=WIDE, date_ms=T3 + 10_000) == T2


@pytest.mark.parametrize(
    "bounds",
    [
        BatchBounds(records=15, payload_bytes=1_000_000),
        BatchBounds(records=1_000, payload_bytes=1),
        BatchBounds(records=1_000, payload_bytes=1_000_000, times=1),
    ],
)
def test_a_batch_takes_no_more_than_it_may_and_one_time_at_least(filled: Any, bounds: BatchBounds) -> None:
    assert filled.ledger.runs.take("flights", "a", bounds=bounds, date_ms=T2) == T1
    filled.allocate(T1)
    assert filled.ledger.runs.take("flights", "b", bounds=bounds, date_ms=T2) == T2


def test_a_batch_ends_before_one_that_is_there(filled: Any) -> None:
    """Somebody ran T2 by its date: a batch of T1 and T3 would reach over its offsets."""
    filled.allocate(T2)
    filled.clock.advance(1000)
    assert filled.ledger.runs.take("flights", "a", bounds=WIDE, date_ms=T3) == T1
    filled.allocate(T1)
    assert filled.ledger.runs.take("flights", "b", bounds=WIDE, date_ms=T3) == T3


def test_a_run_without_date_gets_the_latest_interval(filled: Any) -> None:
    """It gets that where nothing waits."""
    filled.allocate(T2, absorb=[T1], blocks_expected=2)
    assert filled.ledger.runs.take("flights", "manual", bounds=WIDE) == T2


def test_streams_have_runs_of_their_own(filled: Any) -> None:
    filled.ledger.streams.register("other", "{}", batch_interval_ms=10_000, block_interval_ms=200)
    filled.ledger.runs.assign("flights", "a")
    assert filled.ledger.runs.assign("other", "a") == NOW_MS
    with pytest.raises(StreamNotFoundError):
        filled.ledger.runs.assign("nobody's", "a")


def test_one_run_repeats_a_batch_until_unasked_for_ten_minutes(filled: Any) -> None:
    runs, clock = filled.ledger.runs, filled.clock
    runs.assign("flights", "own")
    assert runs.repeat("flights", "a", T1) == "a"
    assert runs.find("flights", "a") == T1
    # It asks again in its next task, and when it was cleared.
    assert runs.repeat("flights", "a", T1) == "a"
    for _ in range(3):
        clock.advance(400_000)
        assert runs.repeat("flights", "own", T1) == "a"
    assert runs.repeat("flights", "b", T2) == "b", "another batch"
    clock.advance(600_000)
    # A run that has another batch time, or that had this one as its first, may repeat it too.
    assert runs.repeat("flights", "b", T1) == "b"
    assert runs.repeat("flights", "a", T1) == "b"
    assert (runs.find("flights", "b"), runs.find("flights", "own")) == (T1, T1)


def test_a_batch_that_takes_longer_is_not_repeated_by_others(filled: Any) -> None:
    runs, attempts = filled.ledger.runs, filled.ledger.attempts
    filled.allocate(T1)
    assert runs.repeat("flights", "a", T1) == "a"
    begun: dict[str, Any] = {"holder": "task", "way": "connect", "lease_ms": 5_000, "attributes": {"run_id": "a"}}
    attempt = attempts.begin("flights", T1, **begun)
    for _ in range(30):
        filled.clock.advance(60_000)
        attempts.renew(attempt)
    assert runs.repeat("flights", "b", T1) == "a"
    filled.clock.advance(1_200_000)
    attempts.fail(attempt, "no")
    filled.clock.advance(500_000)
    assert runs.repeat("flights", "b", T1) == "a"
    filled.clock.advance(700_000)
    # An attempt of another run does not count.
    attempts.begin("flights", T1, **begun | {"attributes": {"run_id": "other"}})
    assert runs.repeat("flights", "b", T1) == "b"
