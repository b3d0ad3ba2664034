"""Adding blocks: positions, batch times, fencing, duplicates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.ledger import EventKind
from headrace.ledger.errors import (
    BlockConflictError,
    LeaseLostError,
    LedgerConflictError,
    PartitionNotAssignedError,
    PositionConflictError,
    PositionNotFoundError,
    StreamNotFoundError,
)
from headrace.ledger.receiving.tables import WaitingTimes

NOW_MS = 1_700_000_000_000


def test_a_block_gets_the_first_interval_end_after_its_cut(world: Any) -> None:
    """The block moves the positions of its partitions, too."""
    added = world.add({0: (0, 10), 1: (0, 5)})
    assert (added.batch_time_ms, added.duplicate) == (NOW_MS + 1000, False)
    assert [world.position(partition) for partition in range(3)] == [10, 5, 0]
    (stored,) = world.ledger.allocations.blocks_of("flights", NOW_MS + 1000)
    assert stored.block_id == added.block_id
    assert stored.info == world.block({0: (0, 10), 1: (0, 5)}, sequence=0)
    (event,) = world.ledger.events.page("flights", kinds=[EventKind.BLOCK_ADDED])
    assert event.payload == {
        "receiver": "flights/kafka/0", "batch_time_ms": NOW_MS + 1000, "records": 15, "payload_bytes": 150
    }  # fmt: skip


@pytest.mark.parametrize(("ahead", "expected"), [(0, 1000), (1, 1000), (999, 1000), (1000, 2000)])
def test_the_interval_end_is_strictly_after_the_cut(world: Any, ahead: int, expected: int) -> None:
    world.clock.advance(ahead)
    assert world.add({0: (0, 1)}).batch_time_ms == NOW_MS + expected


def test_a_cut_in_the_future_is_not_believed(world: Any) -> None:
    assert world.add({0: (0, 1)}, cut_time_ms=NOW_MS + 3_600_000).batch_time_ms == NOW_MS + 1000


def test_a_late_block_goes_to_the_next_open_time(world: Any) -> None:
    world.clock.advance(2500)
    world.ledger.allocations.seal("flights", NOW_MS + 2000)
    assert world.add({0: (0, 1)}, cut_time_ms=NOW_MS + 100).batch_time_ms == NOW_MS + 3000


def test_a_late_block_before_any_seal_keeps_its_own_time(world: Any) -> None:
    world.clock.advance(2500)
    assert world.add({0: (0, 1)}, cut_time_ms=NOW_MS + 100).batch_time_ms == NOW_MS + 1000


def test_a_partition_never_goes_back_to_an_earlier_batch(world: Any) -> None:
    world.clock.advance(1500)
    world.add({0: (0, 1)})
    # Another block, cut earlier, of the same partition; and one of a partition without blocks.
    assert world.add({0: (1, 2), 1: (0, 1)}, cut_time_ms=NOW_MS).batch_time_ms == NOW_MS + 2000
    assert world.add({2: (0, 1)}, cut_time_ms=NOW_MS).batch_time_ms == NOW_MS + 1000


@pytest.mark.parametrize(("start", "kind", "amount"), [(8, "overlap", 2), (13, "hole", 3)])
def test_overlaps_and_holes_are_refused_and_change_nothing(world: Any, start: int, kind: str, amount: int) -> None:
    world.add({0: (0, 10)})
    with pytest.raises(PositionConflictError) as refused:
        world.add({1: (0, 5), 0: (start, 20)})
    error = refused.value
    assert (error.topic, error.partition.partition, error.expected, error.got) == ("departures", 0, 10, start)
    assert error.kind == kind
    assert f"{kind} of {amount} offsets" in str(error)
    assert world.position(1) == 0
    assert len(world.ledger.allocations.blocks_of("flights", NOW_MS + 1000)) == 1
    # The sequence was not accepted, so it is not used up.
    assert not world.add({0: (10, 20)}, sequence=1).duplicate


def test_the_same_block_again_is_answered_as_the_first_time(world: Any) -> None:
    block = world.block({0: (0, 10)})
    first = world.ledger.blocks.add(world.receiver, block)
    world.add({0: (10, 20)})
    again = world.ledger.blocks.add(world.receiver, block)
    assert again == replace(first, duplicate=True)
    assert world.position() == 20
    assert len(world.ledger.allocations.blocks_of("flights", first.batch_time_ms)) == 2


def test_another_block_under_the_same_sequence_is_refused(world: Any) -> None:
    world.add({0: (0, 10)})
    with pytest.raises(BlockConflictError):
        world.add({0: (10, 20)}, sequence=0, handle=BlockHandle("0-1-a", 700, 100))


def test_a_sequence_may_be_left_out_but_not_come_late(world: Any) -> None:
    world.add({0: (0, 10)}, sequence=4)
    with pytest.raises(BlockConflictError):
        world.add({0: (10, 20)}, sequence=3)


def test_one_place_in_the_log_holds_one_block(world: Any) -> None:
    world.add({0: (0, 10)})
    with pytest.raises(LedgerConflictError):
        world.add({0: (10, 20)}, handle=BlockHandle("0-1-a", 0, 100))
    assert world.position() == 10


def test_a_partition_twice_in_a_block_is_refused(world: Any) -> None:
    twice = OffsetRange(world.partitions[0], 0, 5, 5)
    with pytest.raises(BlockConflictError):
        world.add({0: (0, 5)}, ranges=(twice, twice))


def test_an_empty_range_is_no_range(world: Any) -> None:
    world.add(
        {0: (0, 10)}, ranges=(OffsetRange(world.partitions[0], 0, 10, 10), OffsetRange(world.partitions[1], 0, 0, 0))
    )
    assert world.allocate(NOW_MS + 1000).blocks == 1
    assert [row.partition.partition for row in world.ledger.batches.inputs("flights", NOW_MS + 1000)] == [0]


def test_a_foreign_partition_is_refused(world: Any) -> None:
    other = world.lease(1)
    with pytest.raises(PartitionNotAssignedError) as refused:
        world.add({0: (0, 10)}, lease=other)
    assert refused.value.owner == 0


def test_an_unknown_partition_is_refused(world: Any) -> None:
    unknown = OffsetRange(TopicPartition("departures", "id-9", 0, 2), 0, 1, 1)
    with pytest.raises(PositionNotFoundError):
        world.add({}, ranges=(unknown,))


def test_an_earlier_instance_is_fenced(world: Any) -> None:
    world.add({0: (0, 10)})
    newer = world.lease(0)
    assert (newer.epoch, newer.last_accepted_sequence) == (2, -1)
    with pytest.raises(LeaseLostError):
        world.add({0: (10, 20)})
    assert not world.add({0: (10, 20)}, lease=newer).duplicate


def test_the_receivers_of_an_earlier_job_are_fenced(world: Any) -> None:
    world.clock.advance(10_001)
    world.ledger.jobs.acquire("flights", holder="other driver", lease_ms=10_000)
    with pytest.raises(LeaseLostError):
        world.add({0: (0, 10)})
    assert world.position() == 0


def test_the_receivers_of_an_ended_job_are_fenced(world: Any) -> None:
    world.ledger.jobs.release(world.job, "stopped")
    with pytest.raises(LeaseLostError):
        world.add({0: (0, 10)})


def test_a_released_receiver_adds_no_more(world: Any) -> None:
    world.ledger.receivers.release(world.receiver, "stopped")
    with pytest.raises(LeaseLostError):
        world.add({0: (0, 10)})


def test_a_lease_that_ran_out_holds_until_someone_takes_over(world: Any) -> None:
    world.clock.advance(60_000)
    assert not world.add({0: (0, 10)}).duplicate


def test_a_block_of_another_epoch_is_refused(world: Any) -> None:
    with pytest.raises(LeaseLostError):
        world.add({0: (0, 10)}, epoch=7)


def test_unclaimed_times_count_what_no_batch_took(world: Any) -> None:
    world.add({0: (0, 10)})
    world.add({0: (10, 20)})
    world.clock.advance(1000)
    world.add({0: (20, 25)})
    first, second = world.ledger.blocks.unclaimed("flights")
    assert (first.batch_time_ms, first.blocks, first.records, first.payload_bytes) == (NOW_MS + 1000, 2, 20, 200)
    assert (second.batch_time_ms, second.blocks, second.records) == (NOW_MS + 2000, 1, 5)
    assert world.ledger.batches.next_unclaimed("flights") == NOW_MS + 1000
    world.allocate(NOW_MS + 1000)
    assert world.ledger.batches.next_unclaimed("flights") == NOW_MS + 2000
    world.allocate(NOW_MS + 2000)
    assert world.ledger.batches.next_unclaimed("flights") is None


def test_a_time_with_blocks_of_many_receivers_is_unclaimed_once(world: Any) -> None:
    other = world.lease(1)
    world.ledger.positions.request_release(world.job, "kafka", [world.partitions[2]])
    world.ledger.positions.release(world.receiver, world.partitions[2])
    world.ledger.positions.assign(world.job, "kafka", {world.partitions[2]: 1})
    for start in (0, 10):
        world.add({0: (start, start + 10)})
        world.add({2: (start, start + 10)}, lease=other)
        world.clock.advance(1000)
    ledger, times = world.ledger, [NOW_MS + 1000, NOW_MS + 2000]
    rows = ledger.blocks.unclaimed("flights")
    assert [(row.batch_time_ms, row.blocks, row.records, row.payload_bytes) for row in rows] == [
        (time_ms, 2, 20, 200) for time_ms in times
    ]
    assert len(ledger.blocks.unclaimed("flights", 1)) == 1
    assert ledger.blocks.waiting("flights", times[1]) == WaitingTimes(*times, 2, 40)
    assert ledger.batches.absorbable("flights", NOW_MS + 3000) == times
    assert [earlier.batch_time_ms for earlier in ledger.batches.earlier_unfinished("flights", NOW_MS + 3000)] == times
    assert len(ledger.snapshots.take("flights").unclaimed) == 2
    assert world.allocate(times[0]).records == 20
    assert [row.batch_time_ms for row in ledger.blocks.unclaimed("flights")] == times[1:]


def test_all_that_waits_is_counted_however_many_times_it_is(world: Any) -> None:
    assert world.ledger.blocks.waiting("flights", NOW_MS) is None
    for offset in range(1_002):
        world.add({0: (offset, offset + 1)})
        world.clock.advance(1000)
    assert world.ledger.blocks.waiting("flights", NOW_MS + 1_001_000) == WaitingTimes(
        NOW_MS + 1000, NOW_MS + 1_001_000, 1_001, 1_001
    )
    assert world.ledger.blocks.waiting("flights", NOW_MS) is None


def test_an_unknown_stream_is_named(ledger: Any) -> None:
    with pytest.raises(StreamNotFoundError, match="'nowhere'"):
        ledger.allocations.seal("nowhere", 1000)


def together(world: Any, *offsets: dict[int, tuple[int, int]], **overrides: Any) -> list[Any]:
    """The blocks of one write."""
    handle = overrides.pop("segment", "1-1-a")
    blocks = [world.block(each, **overrides) for each in offsets]
    return [replace(b, handle=BlockHandle(handle, b.sequence * 100, 100)) for b in blocks]


def test_blocks_of_one_write_are_added_one_after_the_other(world: Any) -> None:
    blocks = together(world, {0: (0, 10)}, {0: (10, 12), 1: (0, 5)}, {1: (5, 6)})
    added = world.ledger.blocks.add_all(world.receiver, blocks)
    assert [world.position(partition) for partition in range(3)] == [12, 6, 0]
    stored = world.ledger.allocations.blocks_of("flights", NOW_MS + 1000)
    assert [block.info for block in stored] == blocks
    assert [block.block_id for block in stored] == [each.block_id for each in added]
    events = world.ledger.events.page("flights", kinds=[EventKind.BLOCK_ADDED])
    assert [event.payload["records"] for event in events] == [10, 7, 1]
    (waiting,) = world.ledger.blocks.unclaimed("flights")
    assert (waiting.blocks, waiting.records, waiting.payload_bytes) == (3, 18, 180)
    (row,) = world.ledger.receivers.all("flights")
    assert (row.last_accepted_sequence, row.received_blocks, row.received_bytes) == (blocks[-1].sequence, 3, 180)


def test_each_block_of_a_write_gets_its_own_batch_time(world: Any) -> None:
    world.clock.advance(2_500)
    cuts = (NOW_MS + 100, NOW_MS + 1_200, NOW_MS + 900)
    blocks = [
        replace(block, cut_time_ms=cut)
        for block, cut in zip(together(world, {0: (0, 1)}, {0: (1, 2)}, {0: (2, 3), 1: (0, 1)}), cuts, strict=True)
    ]
    added = world.ledger.blocks.add_all(world.receiver, blocks)
    # The last one was cut earlier than the one before it in its partition.
    assert [each.batch_time_ms - NOW_MS for each in added] == [1_000, 2_000, 2_000]
    assert [time.blocks for time in world.ledger.blocks.unclaimed("flights")] == [1, 2]


@pytest.mark.parametrize("start", [9, 11], ids=["overlap", "hole"])
def test_a_write_is_refused_whole(world: Any, start: int) -> None:
    with pytest.raises(PositionConflictError) as refused:
        world.ledger.blocks.add_all(world.receiver, together(world, {1: (0, 5)}, {0: (0, 10)}, {0: (start, 20)}))
    assert (refused.value.expected, refused.value.got) == (10, start)
    assert [world.position(partition) for partition in range(3)] == [0, 0, 0]
    assert world.ledger.blocks.unclaimed("flights") == []


def test_a_write_whose_answer_was_lost_is_added_once(world: Any) -> None:
    blocks = together(world, {0: (0, 10)}, {0: (10, 12)})
    first = world.ledger.blocks.add_all(world.receiver, blocks)
    again = world.ledger.blocks.add_all(world.receiver, blocks)
    assert [replace(each, duplicate=False) for each in again] == first
    assert all(each.duplicate for each in again)
    assert world.position() == 12
    longer = [*blocks, *together(world, {0: (12, 13)})]
    with pytest.raises(BlockConflictError):
        world.ledger.blocks.add_all(world.receiver, longer)


def test_blocks_of_two_writes_are_not_added_together(world: Any) -> None:
    blocks = [*together(world, {0: (0, 1)}), *together(world, {0: (1, 2)}, segment="1-1-b")]
    with pytest.raises(BlockConflictError, match="does not follow"):
        world.ledger.blocks.add_all(world.receiver, blocks)
    with pytest.raises(BlockConflictError, match="does not follow"):
        world.ledger.blocks.add_all(world.receiver, together(world, {0: (0, 1)}, {0: (1, 2)})[::-1])
