"""Cleanup by reference, and events."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from headrace.blocks import BlockHandle
from headrace.ledger import EventKind
from headrace.ledger.errors import BatchStateError, BlockConflictError, SegmentRemovedError
from headrace.ledger.receiving.blocks import segment_for
from headrace.ledger.receiving.receivers import require_receiver
from headrace.ledger.receiving.tables import ReceiverLease, receivers

NOW_MS = 1_700_000_000_000
T1, T2 = NOW_MS + 1000, NOW_MS + 2000
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}


def open_segment(world: Any, lease: ReceiverLease, path: str) -> None:
    """Open a segment as the first block in it would, without a block."""
    with world.ledger.segments._database.write_stream("flights") as (connection, locked):
        receiver = require_receiver(connection, locked, lease)
        segment_id = segment_for(connection, locked, lease, receiver, path)
        connection.execute(
            update(receivers).where(receivers.c.receiver_index == lease.receiver_id.index).values(segment_id=segment_id)
        )


@pytest.fixture
def logged(world: Any) -> Any:
    """T1's blocks in segments a and b, T2's in b; segment c is being written."""
    for number, segment in enumerate("aabb"):
        world.add({0: (number * 10, number * 10 + 10)}, handle=BlockHandle(segment, number * 100, 100))
        if number == 2:
            world.clock.advance(1000)
    open_segment(world, world.receiver, "c")
    world.clock.advance(1500)
    for time_ms in (T1, T2):
        world.allocate(time_ms)
    return world


def removable(world: Any, before_ms: int = NOW_MS * 2) -> list[str]:
    return [segment.path for segment in world.ledger.cleanup.removable_segments("flights", before_ms)]


def test_a_new_segment_closes_the_one_before(logged: Any) -> None:
    segments = logged.ledger.segments.page("flights")
    assert [(segment.path, segment.closed_at_ms is None) for segment in segments] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]
    logged.ledger.segments.closed(logged.receiver, "c", 4096)
    assert logged.ledger.segments.get("flights", "c").bytes == 4096
    assert logged.ledger.segments.get("flights", "d") is None


def test_a_segment_goes_when_every_batch_in_it_is_done_with(logged: Any) -> None:
    assert removable(logged) == []
    batch = logged.complete(T1, checkpoint=False)
    assert removable(logged) == []
    logged.ledger.batches.mark_checkpointed("flights", [batch.filed("r/1", 1)])
    assert removable(logged) == ["a"]
    assert removable(logged, before_ms=T1) == []
    logged.complete(T2)
    assert removable(logged) == ["a", "b"]
    assert removable(logged, before_ms=T2) == ["a"]


@pytest.mark.parametrize("end", ["took over", "failed", "receiver ended", "receiver registered again"])
def test_a_segment_whose_writer_is_gone_goes_too(logged: Any, end: str) -> None:
    logged.add({0: (40, 50)}, handle=BlockHandle("c", 0, 100))
    last_ms = T2 + 1000
    jobs, receivers = logged.ledger.jobs, logged.ledger.receivers
    if end == "took over":
        logged.clock.advance(3_600_000)
        jobs.acquire("flights", holder="the next job", lease_ms=60_000)
    elif end == "failed":
        jobs.release(logged.job, "failed", error="killed")
    elif end == "receiver ended":
        receivers.release(logged.receiver, "failed", error="killed")
    else:
        receivers.register(
            receivers.schedule(logged.job, logged.receiver.receiver_id), host="elsewhere", lease_ms=5_000
        )
    logged.clock.advance(2_000)
    logged.allocate(last_ms)
    for time_ms in (T1, T2):
        logged.complete(time_ms)
    assert removable(logged) == ["a", "b"]
    logged.complete(last_ms)
    assert removable(logged) == ["a", "b", "c"]


def test_a_batch_that_runs_again_keeps_its_segments(logged: Any) -> None:
    logged.complete(T1)
    logged.ledger.attempts.begin("flights", T1, **RUN, force=True)
    assert removable(logged) == []


def test_an_abandoned_batch_lets_its_segments_go(logged: Any) -> None:
    batches = logged.ledger.batches
    batch = batches.abandon("flights", T1, "poison")
    # Without its result a rebuilt ledger would run it again.
    assert removable(logged) == []
    batches.mark_checkpointed("flights", [batch.filed("r", 1)])
    assert removable(logged) == ["a"]


def test_an_absorbed_time_goes_with_the_batch_that_took_it(world: Any) -> None:
    world.add({0: (0, 10)}, handle=BlockHandle("a", 0, 100))
    world.clock.advance(1000)
    world.add({0: (10, 20)}, handle=BlockHandle("b", 0, 100))
    world.clock.advance(1500)
    world.allocate(T2, absorb=[T1], blocks_expected=2)
    assert removable(world) == []
    world.complete(T2)
    assert removable(world) == ["a"]
    world.ledger.segments.closed(world.receiver, "b")
    cleanup = world.ledger.cleanup
    assert cleanup.cleanable_batches("flights", NOW_MS * 2) == []
    for path in ("a", "b"):
        cleanup.claim_removal("flights", [path], NOW_MS * 2)
        assert [batch.batch_time_ms for batch in cleanup.cleanable_batches("flights", NOW_MS * 2)] == []
        cleanup.fold_blocks("flights", path)
    assert [batch.batch_time_ms for batch in cleanup.cleanable_batches("flights", NOW_MS * 2)] == [T2]
    world.ledger.batches.mark_cleaned("flights", T2)
    assert world.ledger.batches.get("flights", T1).cleaned_at_ms is not None
    assert cleanup.cleanable_batches("flights", NOW_MS * 2) == []


def test_a_segment_of_unaccepted_frames_goes_once_closed(world: Any) -> None:
    open_segment(world, world.receiver, "a")
    assert removable(world) == []
    world.lease(0)
    assert removable(world) == ["a"]


def test_a_batch_that_failed_when_run_again_holds_no_window(logged: Any) -> None:
    cleanup, attempts = logged.ledger.cleanup, logged.ledger.attempts
    logged.complete(T1)
    logged.complete(T2)
    logged.clock.advance(100_000)
    assert cleanup.needed_from("flights") == T2 + 1000
    attempt = attempts.begin("flights", T1, **RUN, force=True)
    assert cleanup.needed_from("flights") == T1
    attempts.fail(attempt, "its ranges are gone")
    assert cleanup.needed_from("flights") == T2 + 1000
    # One that never completed does, and so does one that nobody claimed.
    logged.allocate(T2 + 2000)
    attempt = attempts.begin("flights", T2 + 2000, **RUN)
    attempts.fail(attempt, "Elasticsearch was away")
    assert cleanup.needed_from("flights") == T2 + 2000


def test_a_batch_reread_from_kafka_does_not_keep_later_segments(logged: Any) -> None:
    logged.complete(T1)
    logged.complete(T2)
    logged.clock.advance(100_000)
    logged.ledger.cleanup.claim_removal("flights", ["a"], NOW_MS * 2)
    attempt = logged.ledger.attempts.begin("flights", T1, **RUN, force=True)
    assert attempt.source == "kafka"
    assert logged.ledger.cleanup.needed_from("flights") == T2 + 1000
    assert logged.ledger.cleanup.needed_from("flights", in_log=False) == T1, "its window's batches stay in the ledger"


def test_what_began_since_keeps_what_its_window_reaches_back_to(logged: Any) -> None:
    cleanup, attempts = logged.ledger.cleanup, logged.ledger.attempts
    logged.complete(T1)
    logged.complete(T2)
    before_ms = cleanup.needed_from("flights") - 1000
    assert removable(logged, before_ms) == ["a"]
    attempt = attempts.begin("flights", T2, **RUN, force=True)
    assert cleanup.claim_removal("flights", ["a"], before_ms, window_reach_ms=1000) == []
    attempts.fail(attempt, "lost")
    claimed = cleanup.claim_removal("flights", ["a"], before_ms, window_reach_ms=1000)
    assert [segment.path for segment in claimed] == ["a"]


def test_folding_keeps_what_the_batch_took(logged: Any) -> None:
    logged.complete(T1)
    cleanup, batches = logged.ledger.cleanup, logged.ledger.batches
    assert [segment.path for segment in cleanup.claim_removal("flights", ["a", "b"], NOW_MS * 2)] == ["a"]
    # Cut short here, the removal is found again.
    assert removable(logged) == ["a"]
    assert cleanup.fold_blocks("flights", "a") == 2
    assert cleanup.fold_blocks("flights", "a") == 0
    assert removable(logged) == []
    assert [segment.path for segment in logged.ledger.segments.page("flights")] == ["b", "c"]
    assert logged.ledger.segments.get("flights", "a").removed_at_ms is not None
    assert len(logged.ledger.events.page("flights", kinds=[EventKind.BLOCK_ADDED])) == 2
    assert len(logged.ledger.allocations.blocks_of("flights", T1)) == 1
    (taken,) = batches.inputs("flights", T1)
    assert (taken.from_offset, taken.until_offset, taken.blocks) == (0, 30, 3)
    assert batches.get("flights", T1).blocks == 3


def test_a_batch_without_its_log_is_run_again_from_kafka(logged: Any) -> None:
    logged.complete(T1)
    batches = logged.ledger.batches
    assert {origin.source for origin in batches.origins("flights", [T1]).values()} == {"log"}
    logged.ledger.cleanup.claim_removal("flights", ["a"], NOW_MS * 2)
    assert {origin.source for origin in batches.origins("flights", [T1]).values()} == {"kafka"}
    attempt = logged.ledger.attempts.begin("flights", T1, **RUN, force=True)
    assert (attempt.source, logged.ledger.attempts.of_batch("flights", T1)[-1].claim()) == ("kafka", attempt)


def test_what_runs_again_cannot_be_claimed(logged: Any) -> None:
    logged.complete(T1)
    assert removable(logged) == ["a"]
    logged.ledger.attempts.begin("flights", T1, **RUN, force=True)
    assert logged.ledger.cleanup.claim_removal("flights", ["a"], NOW_MS * 2) == []


def test_no_block_is_added_to_a_segment_that_goes(world: Any) -> None:
    world.add({0: (0, 10)}, handle=BlockHandle("a", 0, 100))
    world.clock.advance(2500)
    world.allocate(T1)
    world.complete(T1)
    world.ledger.segments.closed(world.receiver, "a")
    world.ledger.cleanup.claim_removal("flights", ["a"], NOW_MS * 2)
    with pytest.raises(SegmentRemovedError):
        world.add({0: (10, 20)}, handle=BlockHandle("a", 100, 100), sequence=1)
    world.ledger.cleanup.fold_blocks("flights", "a")
    with pytest.raises(SegmentRemovedError):
        world.add({0: (10, 20)}, handle=BlockHandle("a", 100, 100), sequence=1)
    world.add({0: (10, 20)}, handle=BlockHandle("b", 0, 100), sequence=1)


def test_a_block_of_an_earlier_segment_does_not_reopen_it(world: Any) -> None:
    open_segment(world, world.receiver, "a")
    open_segment(world, world.receiver, "b")
    world.add({0: (0, 10)}, handle=BlockHandle("a", 0, 100))
    world.add({0: (10, 20)}, handle=BlockHandle("b", 0, 100))
    assert [segment.closed_at_ms is None for segment in world.ledger.segments.page("flights")] == [False, True]


def test_a_segment_has_one_writer(world: Any) -> None:
    world.add({0: (0, 10)}, handle=BlockHandle("a", 0, 100))
    with pytest.raises(BlockConflictError, match="written by flights/kafka/0 in epoch 1"):
        open_segment(world, world.lease(1), "a")


def test_folding_needs_a_claim(logged: Any) -> None:
    with pytest.raises(BatchStateError, match="never claimed"):
        logged.ledger.cleanup.fold_blocks("flights", "a")


def test_a_batch_is_cleaned_when_nothing_of_it_is_left(logged: Any) -> None:
    cleanup, batches = logged.ledger.cleanup, logged.ledger.batches
    logged.complete(T1)
    logged.complete(T2)
    with pytest.raises(BatchStateError, match="still in the log"):
        batches.mark_cleaned("flights", T1)
    cleanup.claim_removal("flights", ["a", "b"], NOW_MS * 2)
    cleanup.fold_blocks("flights", "a")
    assert cleanup.cleanable_batches("flights", NOW_MS * 2) == []
    cleanup.fold_blocks("flights", "b")
    assert [batch.batch_time_ms for batch in cleanup.cleanable_batches("flights", T2)] == [T1]
    cleaned = batches.mark_cleaned("flights", T1, {"segments": 2})
    assert (cleaned.cleanup, cleaned.cleaned_at_ms) == ({"segments": 2}, logged.clock.now_ms())
    assert batches.mark_cleaned("flights", T1) == cleaned
    assert [batch.batch_time_ms for batch in cleanup.cleanable_batches("flights", NOW_MS * 2)] == [T2]


def test_a_batch_in_use_is_not_cleaned(logged: Any) -> None:
    with pytest.raises(BatchStateError, match="can be marked cleaned"):
        logged.ledger.batches.mark_cleaned("flights", T1)


def test_events_are_read_in_order_and_followed(world: Any) -> None:
    events = world.ledger.events
    start = events.latest("flights", limit=1)[0].event_id
    events.append("flights", EventKind.COMMIT_FAILED, {"error": "x"})
    events.append("flights", EventKind.OUTPUT_COMPLETED, batch_time_ms=T1)
    events.append("flights", EventKind.COMMIT_FAILED, {"error": "y"})
    assert [event.kind for event in events.page("flights", start)] == [
        "commit_failed",
        "output_completed",
        "commit_failed",
    ]
    both = events.page("flights", start, [EventKind.COMMIT_FAILED, EventKind.OUTPUT_COMPLETED], limit=2)
    assert [event.kind for event in both] == ["commit_failed", "output_completed"]
    assert [event.payload["error"] for event in events.latest("flights", [EventKind.COMMIT_FAILED])] == ["y", "x"]
    assert [event.kind for event in events.of_batch("flights", T1)] == ["output_completed"]


def test_old_events_are_pruned(world: Any) -> None:
    events = world.ledger.events
    before = len(events.page("flights"))
    world.clock.advance(1000)
    events.append("flights", EventKind.COMMIT_FAILED)
    assert events.prune("flights", NOW_MS + 1000, limit=2) == 2
    assert events.prune("flights", NOW_MS + 1000) == before - 2
    assert [event.kind for event in events.page("flights")] == ["commit_failed"]


def test_the_logs_bytes_are_those_of_its_files(world: Any) -> None:
    segments = world.ledger.segments
    assert segments.stored_bytes("flights") == 0
    world.add({0: (0, 10)})
    world.add({0: (10, 20)})
    # An open one to the end of its last block; a closed one as its writer says, where it does.
    assert segments.stored_bytes("flights") == 200
    segments.closed(world.receiver, "0-1-a", 250)
    assert segments.stored_bytes("flights") == 250
    world.add({0: (20, 30)}, handle=BlockHandle("0-1-b", 30, 100))
    open_segment(world, world.receiver, "0-1-c")
    assert segments.stored_bytes("flights") == 250 + 130
    assert segments.stored_bytes("others") == 0
    for time_ms in sorted({row.batch_time_ms for row in world.ledger.blocks.unclaimed("flights")}):
        world.clock.advance(2_000)
        world.allocate(time_ms)
        world.complete(time_ms)
    before_ms = world.clock.now_ms()
    assert world.ledger.cleanup.claim_removal("flights", ["0-1-a"], before_ms)
    world.ledger.cleanup.fold_blocks("flights", "0-1-a")
    assert segments.stored_bytes("flights") == 130
