"""Streams whose batches are by Kafka's timestamps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.ledger.errors import StreamNotFoundError

NOW_MS = 1_700_000_000_000
T0, T1, T2, T3 = (NOW_MS + 1000 * number for number in range(4))
HOUR_MS = 3_600_000


@pytest.fixture
def world(build: Callable[..., Any]) -> Any:
    return build(batch_by="timestamp", allowed_lateness_ms=500)


def test_a_block_joins_the_batch_of_its_timestamps(world: Any) -> None:
    row = world.ledger.streams.get("flights")
    assert (row.batch_by, row.allowed_lateness_ms) == ("timestamp", 500)
    world.clock.advance(HOUR_MS)
    # Everything of ours was down for an hour; also what was sent before the stream existed has its time.
    added = [
        world.add({0: (number * 10, number * 10 + 10)}, event_time_ms=time_ms)
        for number, time_ms in enumerate((NOW_MS - 5_000, T0, T0 + 999, T1))
    ]
    assert [block.batch_time_ms for block in added] == [NOW_MS - 4_000, T1, T1, T2]
    assert not any(block.late for block in added)
    assert [time.batch_time_ms for time in world.ledger.blocks.unclaimed("flights")] == [NOW_MS - 4_000, T1, T2]
    (stored, _) = world.ledger.allocations.blocks_of("flights", T1)
    assert stored.info.event_time_ms == T0
    # A batch before the stream's zero time is one like the others.
    assert world.allocate(NOW_MS - 4_000).records == 10


def test_what_comes_after_its_batch_was_sealed_counts_as_late(world: Any) -> None:
    world.clock.advance(2500)
    world.add({0: (0, 10)}, event_time_ms=T0)
    world.allocate(T1)
    late = world.add({1: (0, 7)}, event_time_ms=T0 + 10)
    assert (late.batch_time_ms, late.late) == (T2, True)
    # The partition goes on from there, so that its ranges stay contiguous; these are in time.
    in_time = world.add({1: (7, 10)}, event_time_ms=T1)
    assert (in_time.batch_time_ms, in_time.late) == (T2, False)
    again = world.ledger.blocks.add(world.receiver, world.block({1: (0, 7)}, sequence=1, event_time_ms=T0 + 10))
    assert (again.duplicate, again.late) == (True, True)
    batch = world.allocate(T2)
    assert (batch.records, batch.late_records) == (10, 7)
    assert world.ledger.batches.get("flights", T1).late_records == 0


def test_a_partition_that_was_late_is_late_until_its_time_comes(world: Any) -> None:
    world.clock.advance(5500)
    world.ledger.allocations.seal("flights", T3)
    assert world.add({0: (0, 10)}, event_time_ms=T0).batch_time_ms == T3 + 1000
    assert world.add({0: (10, 20)}, event_time_ms=T2).late
    assert not world.add({0: (20, 30)}, event_time_ms=T3).late


def test_a_timestamp_ahead_of_the_clock_is_not_believed(world: Any) -> None:
    ahead = world.add({0: (0, 10)}, event_time_ms=NOW_MS + HOUR_MS)
    assert (ahead.batch_time_ms, ahead.late) == (T1, False)
    assert positions(world)[0] == (NOW_MS, 0)
    # Kafka says -1 where there is none.
    assert world.add({1: (0, 10)}, event_time_ms=-1).batch_time_ms == 1000


def positions(world: Any) -> dict[int, tuple[int, int]]:
    rows = world.ledger.positions.all("flights")
    return {row.partition.partition: (row.watermark_ms, row.drained_ms) for row in rows}


def heartbeat(world: Any, **drained: int) -> Any:
    given = {world.partitions[int(name[1:])]: time_ms for name, time_ms in drained.items()}
    return world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=0, drained=given)


def test_watermarks_only_rise_and_receivers_start_from_them(world: Any) -> None:
    world.clock.advance(2500)
    world.add({0: (0, 10), 1: (0, 10)}, event_time_ms=T1)
    world.add({0: (10, 20)}, event_time_ms=T0)
    assert positions(world) == {0: (T1, 0), 1: (T1, 0), 2: (0, 0)}
    assigned = heartbeat(world).assigned
    assert [assigned[tp].watermark_ms for tp in world.partitions] == [T1, T1, 0]


def test_a_partition_is_drained_by_its_owner_not_in_the_future(world: Any) -> None:
    world.clock.advance(2000)
    heartbeat(world, p0=T1, p1=T3)
    heartbeat(world, p0=T0)
    assert positions(world) == {0: (0, T1), 1: (0, T2), 2: (0, 0)}
    world.lease(1)
    world.ledger.positions.assign(world.job, "kafka", {world.partitions[2]: 1})
    world.ledger.positions.release(world.receiver, [world.partitions[2]])
    heartbeat(world, p2=T1)
    assert positions(world)[2] == (0, 0)


def test_a_batch_is_held_up_by_partitions_that_have_not_passed(world: Any) -> None:
    def unpassed(at: int) -> list[int]:
        return [row.partition.partition for row in world.ledger.positions.unpassed("flights", at)]

    world.clock.advance(2500)
    assert unpassed(T1) == [0, 1, 2]
    # A record of the next interval passes it; one of its own may be followed by others.
    world.add({0: (0, 10)}, event_time_ms=T1)
    world.add({1: (0, 10)}, event_time_ms=T1 - 1)
    assert unpassed(T1) == [1, 2]
    # An idle one is waited for as long as records may be late.
    heartbeat(world, p1=T1 + 499, p2=T1 + 500)
    assert unpassed(T1) == [1]
    heartbeat(world, p1=T1 + 500)
    assert unpassed(T1) == []
    assert unpassed(T2) == [0, 1, 2]
    world.ledger.positions.set_state(world.job, "kafka", world.partitions, "ended")
    assert unpassed(T2) == []
    with pytest.raises(StreamNotFoundError):
        world.ledger.positions.unpassed("nobody's", T1)


def test_a_changed_way_is_a_new_revision(world: Any) -> None:
    streams = world.ledger.streams
    definition = streams.get("flights").definition
    changed = streams.register("flights", definition, batch_interval_ms=1000, block_interval_ms=200)
    assert (changed.revision, changed.batch_by, changed.allowed_lateness_ms) == (2, "arrival", 0)
