"""A ledger's clock that was ahead and is right again holds up nothing that is not allocated, and no dead process."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.ledger.batches import CLOCKS_DIFFER_MS, BatchBounds
from headrace.ledger.errors import LeaseHeldError
from headrace.ledger.states import EventKind

from .conftest import INTERVAL_MS, NOW_MS, STREAM

T1, T2 = NOW_MS + INTERVAL_MS, NOW_MS + 2 * INTERVAL_MS
AHEAD_MS = 600_000
WIDE = BatchBounds(records=1_000, payload_bytes=1_000_000)


@pytest.fixture
def stalled(world: Any) -> Any:
    """A block of T1; then one while the clock is ahead, and later ones of the same partition when it is right again."""
    world.add({0: (0, 10)})
    world.clock.advance(AHEAD_MS)
    assert world.add({0: (10, 20), 1: (0, 5)}).batch_time_ms == T1 + AHEAD_MS
    world.clock.set_back(AHEAD_MS)
    assert world.add({0: (20, 30)}).batch_time_ms == T1 + AHEAD_MS, "its partition does not go back by itself"
    assert world.add({2: (0, 1)}).batch_time_ms == T1
    return world


def _ranges(world: Any, batch_time_ms: int) -> dict[int, tuple[int, int, int]]:
    inputs = world.ledger.batches.inputs(STREAM, batch_time_ms)
    return {row.partition.partition: (row.from_offset, row.until_offset, row.records) for row in inputs}


def test_the_next_batch_takes_back_what_waits_in_times_that_are_still_to_come(stalled: Any) -> None:
    stalled.clock.advance(INTERVAL_MS)
    stalled.allocate(T1)
    assert _ranges(stalled, T1) == {0: (0, 10, 10), 2: (0, 1, 1)}
    (waiting,) = stalled.ledger.blocks.unclaimed(STREAM)
    assert (waiting.batch_time_ms, waiting.blocks, waiting.records, waiting.payload_bytes) == (T2, 2, 25, 250)
    assert stalled.add({0: (30, 31)}).batch_time_ms == T2
    (event,) = stalled.ledger.events.page(STREAM, kinds=[EventKind.BLOCKS_TAKEN_BACK])
    assert event.payload == {"batch_time_ms": T2, "until_ms": T1 + AHEAD_MS, "blocks": 2, "records": 25}
    stalled.clock.advance(INTERVAL_MS)
    stalled.allocate(T2)
    assert _ranges(stalled, T2) == {0: (10, 31, 21), 1: (0, 5, 5)}
    assert stalled.ledger.blocks.unclaimed(STREAM) == []


def test_they_join_blocks_that_are_in_the_open_time_already(stalled: Any) -> None:
    taken = stalled.ledger.clock_corrections.apply(STREAM)
    assert (taken.batch_time_ms, taken.blocks, taken.records) == (T1, 2, 25)
    stalled.clock.advance(INTERVAL_MS)
    stalled.allocate(T1)
    assert _ranges(stalled, T1) == {0: (0, 30, 30), 1: (0, 5, 5), 2: (0, 1, 1)}
    assert stalled.ledger.clock_corrections.apply(STREAM) is None


def test_a_run_that_takes_over_pending_times_finds_them(stalled: Any) -> None:
    stalled.clock.advance(INTERVAL_MS)
    assert stalled.ledger.runs.take(STREAM, "a", bounds=WIDE) == T1
    stalled.clock.advance(INTERVAL_MS)
    assert stalled.ledger.runs.take(STREAM, "b", bounds=WIDE) == T2
    assert [time.batch_time_ms for time in stalled.ledger.blocks.unclaimed(STREAM)] == [T1, T2]


def test_a_segment_that_was_closed_meanwhile_is_cleaned_in_time(stalled: Any) -> None:
    stalled.lease(0)
    stalled.ledger.clock_corrections.apply(STREAM)
    snapshot = stalled.ledger.snapshots.take(STREAM)
    assert [segment.last_batch_time_ms for segment in snapshot.segments] == [T1]
    assert {row.last_batch_time_ms for row in snapshot.positions} == {T1}


def test_an_allocated_batch_keeps_its_blocks_and_what_follows_it_stays_behind_it(world: Any) -> None:
    world.add({0: (0, 10)})
    world.clock.advance(AHEAD_MS)
    world.add({0: (10, 20)})
    world.clock.advance(INTERVAL_MS)
    world.allocate(T1 + AHEAD_MS)
    world.add({0: (20, 30)})
    world.clock.set_back(AHEAD_MS)
    assert world.ledger.clock_corrections.apply(STREAM) is None
    assert _ranges(world, T1 + AHEAD_MS) == {0: (10, 20, 10)}
    assert world.add({0: (30, 40)}).batch_time_ms == T2 + AHEAD_MS
    assert world.add({1: (0, 1)}).batch_time_ms == T2 + AHEAD_MS, "no block can join an earlier time"


def test_a_time_that_was_sealed_ahead_for_no_batch_is_open_again(world: Any) -> None:
    world.clock.advance(AHEAD_MS + INTERVAL_MS)
    world.ledger.allocations.seal(STREAM, T1 + AHEAD_MS)
    world.clock.set_back(AHEAD_MS)
    assert world.add({0: (0, 10)}).batch_time_ms == T2 + AHEAD_MS
    world.ledger.allocations.seal(STREAM, T1)
    assert world.add({1: (0, 10)}).batch_time_ms == T2
    assert [time.batch_time_ms for time in world.ledger.blocks.unclaimed(STREAM)] == [T2]


def test_a_run_allocates_nothing_ahead_of_its_own_host(world: Any) -> None:
    """Only the database's clock is ahead: what a batch would seal there, nothing could take back."""
    world.add({0: (0, 10)})
    world.clock.advance(AHEAD_MS + INTERVAL_MS)
    host_ms = T1 + 10
    assert world.ledger.runs.take(STREAM, "a", bounds=WIDE, host_ms=host_ms) == T1
    assert world.ledger.runs.assign(STREAM, "b", host_ms=host_ms) == T1
    late = world.ledger.runs.take(STREAM, "c", bounds=WIDE, host_ms=world.clock.now_ms() - CLOCKS_DIFFER_MS + 1)
    assert late == T1 + AHEAD_MS, "the ledger's clock counts while they nearly agree"


def test_a_job_that_died_while_the_clock_was_ahead_is_replaced_after_its_lease(world: Any) -> None:
    acquire = world.ledger.jobs.acquire
    world.clock.advance(AHEAD_MS)
    world.ledger.jobs.renew(world.job)
    world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=world.clock.now_ms())
    world.allocate(T1 + AHEAD_MS - INTERVAL_MS)
    world.ledger.attempts.begin(STREAM, T1 + AHEAD_MS - INTERVAL_MS, holder="t", way="connect", lease_ms=5_000)
    world.clock.set_back(AHEAD_MS)
    with pytest.raises(LeaseHeldError) as refused:
        acquire(STREAM, holder="next", lease_ms=10_000)
    assert refused.value.until_ms == NOW_MS + 10_000
    assert world.ledger.receivers.all(STREAM)[0].lease_until_ms == NOW_MS + 10_000
    (attempt,) = world.ledger.attempts.of_batch(STREAM, T1 + AHEAD_MS - INTERVAL_MS)
    assert attempt.lease_until_ms == NOW_MS + 5_000
    world.clock.advance(10_000)
    assert acquire(STREAM, holder="next", lease_ms=10_000).epoch == world.job.epoch + 1


def test_a_shared_job_that_died_while_the_clock_was_ahead_is_replaced_after_its_lease(world: Any) -> None:
    acquire = world.ledger.shared_jobs.acquire
    world.clock.advance(AHEAD_MS)
    acquire("shared", holder="first", lease_ms=10_000)
    world.clock.set_back(AHEAD_MS)
    with pytest.raises(LeaseHeldError):
        acquire("shared", holder="next", lease_ms=10_000)
    world.clock.advance(10_000)
    assert acquire("shared", holder="next", lease_ms=10_000).holder == "next"


def test_partitions_are_not_taken_for_drained_by_a_clock_that_was_ahead(build: Any) -> None:
    world = build(batch_by="timestamp", allowed_lateness_ms=0)
    ahead_ms = NOW_MS + AHEAD_MS
    world.clock.advance(AHEAD_MS)
    world.ledger.receivers.heartbeat(
        world.receiver, sealed_through_ms=ahead_ms, drained=dict.fromkeys(world.partitions, ahead_ms)
    )
    world.add({0: (0, 10)}, event_time_ms=ahead_ms)
    world.clock.set_back(AHEAD_MS)
    assert world.ledger.positions.unpassed(STREAM, T1) == []
    world.ledger.clock_corrections.apply(STREAM)
    assert len(world.ledger.positions.unpassed(STREAM, T1)) == 3
