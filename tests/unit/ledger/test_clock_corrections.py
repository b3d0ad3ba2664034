"""A ledger's clock that was ahead and is right again holds up nothing that is not allocated, and no dead process."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.ledger.batches.run_batch_times import CLOCKS_DIFFER_MS, BatchBounds
from headrace.ledger.errors import BatchStateError, LeaseHeldError
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


def test_the_next_batch_takes_back_what_waits_in_times_to_come(stalled: Any) -> None:
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


def test_an_allocated_batch_keeps_its_blocks_and_its_place(world: Any) -> None:
    """What follows it stays behind it."""
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


def test_a_job_that_died_under_a_clock_ahead_is_replaced(world: Any) -> None:
    """It is replaced after its lease."""
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


def test_a_shared_job_that_died_under_a_clock_ahead_is_replaced(world: Any) -> None:
    """It is replaced after its lease."""
    acquire = world.ledger.shared_jobs.acquire
    world.clock.advance(AHEAD_MS)
    acquire("shared", holder="first", lease_ms=10_000)
    world.clock.set_back(AHEAD_MS)
    with pytest.raises(LeaseHeldError):
        acquire("shared", holder="next", lease_ms=10_000)
    world.clock.advance(10_000)
    assert acquire("shared", holder="next", lease_ms=10_000).holder == "next"


def test_partitions_are_not_drained_by_a_clock_that_was_ahead(build: Any) -> None:
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


YEAR_MS = 365 * 86_400_000


@pytest.fixture
def standing(world: Any) -> Any:
    """A batch at T1; then by a clock a year ahead two batches that are allocated, and a block that waits."""
    world.add({0: (0, 10)})
    world.clock.advance(INTERVAL_MS)
    world.allocate(T1)
    world.complete(T1)
    world.clock.advance(YEAR_MS)
    world.add({0: (10, 20)})
    world.clock.advance(INTERVAL_MS)
    world.allocate(T2 + YEAR_MS)
    world.complete(T2 + YEAR_MS)
    world.add({0: (20, 30), 1: (0, 5)})
    world.clock.advance(INTERVAL_MS)
    world.allocate(T2 + INTERVAL_MS + YEAR_MS)
    world.add({0: (30, 40)})
    world.clock.set_back(YEAR_MS)
    assert world.add({2: (0, 1)}).batch_time_ms > YEAR_MS + NOW_MS, "it stands for a year"
    return world


def test_a_stream_that_stands_for_a_year_is_opened_again(standing: Any) -> None:
    ahead = (T2 + YEAR_MS, T2 + INTERVAL_MS + YEAR_MS)
    now_ms = standing.clock.now_ms()
    open_ms = now_ms // INTERVAL_MS * INTERVAL_MS + INTERVAL_MS
    planned = standing.ledger.clock_corrections.reopen(STREAM, dry_run=True)
    assert (planned.batches, planned.batch_time_ms, planned.sealed_until_ms) == (ahead, open_ms, ahead[-1])
    assert standing.ledger.streams.get(STREAM).sealed_until_ms == ahead[-1], "nothing has changed"
    done = standing.ledger.clock_corrections.reopen(STREAM)
    assert (done.batches, done.taken.blocks, done.taken.records) == (ahead, 2, 11)
    assert standing.add({0: (40, 50)}).batch_time_ms == open_ms
    # What is allocated stays, to the last block.
    assert _ranges(standing, ahead[0]) == {0: (10, 20, 10)}
    assert [len(standing.ledger.allocations.blocks_of(STREAM, time_ms)) for time_ms in ahead] == [1, 1]
    standing.clock.advance(INTERVAL_MS)
    standing.allocate(open_ms)
    assert _ranges(standing, open_ms) == {0: (30, 50, 20), 2: (0, 1, 1)}
    assert standing.ledger.clock_corrections.reopen(STREAM) is None
    assert standing.ledger.clock_corrections.apply(STREAM) is None
    (event,) = standing.ledger.events.page(STREAM, kinds=[EventKind.BLOCKS_TAKEN_BACK])
    assert event.payload == {
        "batch_time_ms": open_ms, "until_ms": ahead[-1], "blocks": 2, "records": 11, "batches": list(ahead)
    }  # fmt: skip


def test_a_year_later_no_block_joins_a_batch_of_that_time(standing: Any) -> None:
    standing.ledger.clock_corrections.reopen(STREAM)
    standing.clock.advance(T1 + YEAR_MS - standing.clock.now_ms() - INTERVAL_MS)
    times = []
    for number in range(5):
        times.append(standing.add({0: (40 + number, 41 + number)}).batch_time_ms - YEAR_MS)
        standing.clock.advance(INTERVAL_MS)
    after_ms = T2 + 2 * INTERVAL_MS
    assert times == [T1, after_ms, after_ms, after_ms, after_ms + INTERVAL_MS]
    assert len(standing.ledger.allocations.blocks_of(STREAM, T2 + YEAR_MS)) == 1


def test_a_clock_ahead_again_moves_no_block_out_of_its_batch(standing: Any) -> None:
    standing.ledger.clock_corrections.reopen(STREAM)
    standing.clock.advance(AHEAD_MS)
    standing.add({0: (40, 50)})
    standing.clock.set_back(AHEAD_MS)
    assert standing.ledger.clock_corrections.apply(STREAM).records == 10
    assert len(standing.ledger.allocations.blocks_of(STREAM, T2 + YEAR_MS)) == 1
    assert len(standing.ledger.allocations.blocks_of(STREAM, T2 + INTERVAL_MS + YEAR_MS)) == 1


def test_an_ordered_stream_finishes_a_clock_aheads_batches_first(build: Any) -> None:
    world = build(ordered=True)
    world.clock.advance(YEAR_MS)
    world.add({0: (0, 10)})
    world.clock.advance(INTERVAL_MS)
    world.allocate(T1 + YEAR_MS)
    world.clock.set_back(YEAR_MS)
    with pytest.raises(BatchStateError, match=r"runs its batches in order.*stream's repair"):
        world.ledger.clock_corrections.reopen(STREAM)
    attempt = world.ledger.attempts.begin(STREAM, T1 + YEAR_MS, holder="repair", way="connect", lease_ms=5_000)
    world.ledger.attempts.record_output(attempt, "index", {})
    world.ledger.attempts.complete(attempt)
    assert world.ledger.clock_corrections.reopen(STREAM).batches == (T1 + YEAR_MS,)


def test_a_stream_with_state_is_not_opened_again(build: Any) -> None:
    world = build(outputs=["state", "index"])
    world.clock.advance(YEAR_MS)
    world.allocate(T1 + YEAR_MS - INTERVAL_MS)
    world.clock.set_back(YEAR_MS)
    with pytest.raises(BatchStateError, match="has state"):
        world.ledger.clock_corrections.reopen(STREAM)


def test_a_definition_of_a_clock_ahead_is_replaced_by_the_next(world: Any) -> None:
    def declare(definition: str, at_ms: int) -> int:
        fields = {"batch_interval_ms": INTERVAL_MS, "block_interval_ms": 200}
        world.ledger.streams.register(STREAM, definition, declared_at_ms=at_ms, **fields)
        return world.ledger.streams.get(STREAM).revision

    newer = '{"outputs": [{"id": "index"}], "parameters": {"a": 1}}'
    newest = '{"outputs": [{"id": "index"}], "parameters": {"a": 2}}'
    revision = declare(newer, NOW_MS + YEAR_MS)
    assert declare(newest, NOW_MS) == revision + 1


def test_runs_that_repeat_a_batch_do_not_wait_for_a_clock_ahead(world: Any) -> None:
    world.allocate(NOW_MS)
    world.clock.advance(YEAR_MS)
    assert world.ledger.runs.repeat(STREAM, "ahead", NOW_MS) == "ahead"
    world.clock.set_back(YEAR_MS)
    assert world.ledger.runs.repeat(STREAM, "now", NOW_MS) == "now"
