"""Topics and their incarnations, who owns a partition, positions that move without a block."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, insert, select, text

from headrace.blocks import TopicPartition
from headrace.ledger import EventKind, PartitionState
from headrace.ledger.errors import (
    LeaseHeldError,
    LeaseLostError,
    LedgerConflictError,
    LedgerError,
    PartitionNotAssignedError,
    PositionConflictError,
    PositionNotFoundError,
)
from headrace.ledger.receiving.tables import EpochEnd, positions

NOW_MS = 1_700_000_000_000


def kinds(world: Any, *wanted: EventKind) -> list[tuple[str, Any]]:
    return [(event.kind, event.payload) for event in world.ledger.events.page("flights", kinds=wanted)]


def orders(world: Any, lease: Any) -> tuple[set[int], set[int]]:
    heard = world.ledger.receivers.heartbeat(lease, sealed_through_ms=0)
    return {tp.partition for tp in heard.assigned}, {tp.partition for tp in heard.revoked}


def test_a_topic_seen_again_is_the_same(world: Any) -> None:
    (row,) = world.ledger.topics.observe(world.job, "kafka", [("departures", "id-1", 3)])
    assert (row.incarnation, row.current, row.partitions) == (1, True, 3)
    assert len(kinds(world, EventKind.TOPIC_SEEN)) == 1


def test_growth_is_an_event_and_partitions_never_shrink(world: Any) -> None:
    topics = world.ledger.topics
    assert topics.observe(world.job, "kafka", [("departures", "id-1", 5)])[0].partitions == 5
    assert topics.observe(world.job, "kafka", [("departures", "id-1", 4)])[0].partitions == 5
    (event,) = kinds(world, EventKind.PARTITIONS_GREW)
    assert (event[1]["from"], event[1]["to"]) == (3, 5)


def test_a_topics_first_size_is_kept(world: Any) -> None:
    topics = world.ledger.topics
    topics.observe(world.job, "kafka", [("departures", "id-1", 5)])
    (row,) = topics.all("flights", "kafka")
    assert (row.first_partitions, row.partitions) == (3, 5)


def test_an_input_starts_with_the_topics_of_its_first_look(world: Any) -> None:
    topics = world.ledger.topics
    both = topics.observe(world.job, "other", [("arrivals", "id-8", 1), ("weather", "id-9", 2)])
    assert [(row.topic, row.at_start) for row in both] == [("arrivals", True), ("weather", True)]
    later = topics.observe(world.job, "other", [("arrivals", "id-8", 1), ("delays", "id-10", 1)])
    assert [(row.topic, row.at_start) for row in later] == [("arrivals", True), ("delays", False)]
    (empty_at_first,) = topics.observe(world.job, "third", [("gates", "id-11", 1)], appeared=True)
    assert not empty_at_first.at_start
    assert [row.topic for row in topics.all("flights", "other")] == ["arrivals", "delays", "weather"]


def test_a_recreated_topic_is_another_incarnation(world: Any) -> None:
    (row,) = world.ledger.topics.observe(world.job, "kafka", [("departures", "id-2", 3)])
    assert row.incarnation == 2
    assert [(r.incarnation, r.current) for r in world.ledger.topics.all("flights")] == [(1, False), (2, True)]
    assert len(kinds(world, EventKind.TOPIC_RECREATED)) == 1
    # Old metadata does not make a third one.
    assert world.ledger.topics.observe(world.job, "kafka", [("departures", "id-1", 3)])[0].incarnation == 1


def test_the_same_name_in_two_inputs_counts_as_one_series(world: Any) -> None:
    topics = world.ledger.topics
    assert topics.observe(world.job, "other", [("departures", "id-7", 1)])[0].incarnation == 2
    assert topics.observe(world.job, "third", [("departures", "id-1", 1)])[0].incarnation == 1
    assert kinds(world, EventKind.TOPIC_RECREATED) == []


def test_a_stale_job_observes_nothing_new(world: Any) -> None:
    world.ledger.jobs.release(world.job)
    with pytest.raises(LeaseLostError):
        world.ledger.topics.observe(world.job, "kafka", [("departures", "id-2", 3)])


def test_ensuring_leaves_existing_positions(world: Any) -> None:
    world.add({0: (0, 10)})
    more = TopicPartition("departures", "id-1", 3)
    world.ledger.positions.ensure_all(world.job, "kafka", {world.partitions[0]: 99, more: 40})
    world.ledger.positions.ensure_all(world.job, "kafka", {more: 50})
    rows = {row.partition.partition: row for row in world.ledger.positions.all("flights", "kafka")}
    assert (rows[0].next_offset, rows[0].starting_offset) == (10, 0)
    assert (rows[3].next_offset, rows[3].receiver_index, rows[3].state) == (40, None, PartitionState.ACTIVE)


def test_a_position_needs_its_topic(world: Any) -> None:
    with pytest.raises(LedgerConflictError):
        world.ledger.positions.ensure_all(world.job, "kafka", {TopicPartition("unseen", "id-3", 0): 0})


def test_a_partition_changes_hands_once_its_owner_releases_it(world: Any) -> None:
    positions, moved = world.ledger.positions, world.partitions[1]
    other = world.lease(1)
    positions.assign(world.job, "kafka", {moved: 1})
    assert orders(world, world.receiver) == ({0, 2}, {1})
    assert orders(world, other) == (set(), set())
    # What it has read already may still be stored.
    world.add({1: (0, 4)})
    positions.release(world.receiver, moved)
    assert orders(world, world.receiver) == ({0, 2}, set())
    assert orders(world, other) == ({1}, set())
    with pytest.raises(PartitionNotAssignedError):
        world.add({1: (4, 8)}, sequence=1)
    world.add({1: (4, 8)}, lease=other)
    released = kinds(world, EventKind.PARTITION_RELEASED)
    assert [(payload["partition"], payload["receiver"], payload["next_offset"]) for _, payload in released] == [
        (1, 0, 4)
    ]


def test_an_assignment_can_be_taken_back_before_the_release(world: Any) -> None:
    world.lease(1)
    for index in (1, 0):
        world.ledger.positions.assign(world.job, "kafka", {world.partitions[1]: index})
    assert orders(world, world.receiver) == ({0, 1, 2}, set())


def test_a_requested_release_leaves_the_partition_free(world: Any) -> None:
    positions = world.ledger.positions
    positions.request_release(world.job, "kafka", world.partitions[:2])
    assert orders(world, world.receiver) == ({2}, {0, 1})
    positions.release(world.receiver, world.partitions[:2])
    positions.release(world.receiver, world.partitions[:2])
    assert [row.receiver_index for row in positions.all("flights")] == [None, None, 0]


def test_a_living_receiver_is_not_robbed(world: Any) -> None:
    with pytest.raises(LeaseHeldError, match="is alive"):
        world.ledger.positions.force_release(world.job, "kafka", [world.partitions[0]])


def test_a_dead_receiver_loses_its_partitions_for_good(world: Any) -> None:
    other = world.lease(1)
    world.clock.advance(10_000)
    world.ledger.receivers.heartbeat(other, sealed_through_ms=0)
    positions = world.ledger.positions
    positions.assign(world.job, "kafka", {world.partitions[0]: 1})
    positions.force_release(world.job, "kafka", world.partitions)
    assert [row.receiver_index for row in positions.all("flights")] == [1, None, None]
    with pytest.raises(PartitionNotAssignedError):
        world.add({0: (0, 10)})
    # It may live on, with nothing to read.
    assert orders(world, world.receiver) == (set(), set())


def test_an_unknown_partition_is_not_assigned(world: Any) -> None:
    with pytest.raises(PositionNotFoundError, match="departures-9"):
        world.ledger.positions.assign(world.job, "kafka", {TopicPartition("departures", "id-1", 9): 0})


def test_a_stale_job_assigns_nothing(world: Any) -> None:
    world.ledger.jobs.release(world.job)
    with pytest.raises(LeaseLostError):
        world.ledger.positions.assign(world.job, "kafka", {world.partitions[0]: 1})


def test_a_position_advances_without_a_block(world: Any) -> None:
    world.add({0: (0, 10)})
    positions = world.ledger.positions
    positions.advance(world.receiver, world.partitions[0], 10, 22)
    assert world.position() == 22
    assert world.ledger.gaps.page("flights") == []
    world.add({0: (22, 30)})
    with pytest.raises(PositionConflictError) as refused:
        positions.advance(world.receiver, world.partitions[0], 22, 40)
    assert (refused.value.expected, refused.value.kind) == (30, "overlap")
    with pytest.raises(LedgerError):
        positions.advance(world.receiver, world.partitions[0], 30, 29)


def test_a_jump_is_a_gap(world: Any) -> None:
    world.ledger.positions.advance(world.receiver, world.partitions[0], 0, 100, gap="lost to retention")
    (gap,) = world.ledger.gaps.page("flights")
    assert (gap.partition, gap.from_offset, gap.until_offset) == (world.partitions[0], 0, 100)
    assert (gap.reason, gap.batch_time_ms, gap.at_ms) == ("lost to retention", None, NOW_MS)
    (event,) = kinds(world, EventKind.GAP)
    assert event[1]["until_offset"] == 100


def test_a_position_knows_the_leader_epoch_of_its_last_record(world: Any) -> None:
    first, second = world.partitions[:2]
    world.add({0: (0, 10), 1: (0, 3)}, epoch_ends={first: EpochEnd(4, 9)})
    # A broker that does not tell, and a position that moves without a record, leave what was true.
    world.add({0: (10, 12), 1: (3, 4)}, epoch_ends={second: EpochEnd(0, 4)})
    world.ledger.positions.advance(world.receiver, first, 12, 14)

    def known() -> list[EpochEnd | None]:
        assigned = world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=0).assigned
        rows = {row.partition: row for row in world.ledger.positions.all("flights")}
        ends = [assigned[each].epoch_end for each in (first, second)]
        for each, end in zip((first, second), ends, strict=True):
            reported = (None, None) if end is None else (end.leader_epoch, end.end_offset)
            assert (rows[each].leader_epoch, rows[each].epoch_end_offset) == reported
        return ends

    assert known() == [EpochEnd(4, 9), EpochEnd(0, 4)]
    world.ledger.positions.advance(world.receiver, first, 14, 20, gap="lost to retention")
    assert known() == [None, EpochEnd(0, 4)]
    world.ledger.positions.forget_epoch_end(world.receiver, second)
    assert known() == [None, None]
    with pytest.raises(PartitionNotAssignedError):
        world.ledger.positions.forget_epoch_end(world.lease(1), second)


def test_only_the_owner_advances(world: Any) -> None:
    with pytest.raises(PartitionNotAssignedError):
        world.ledger.positions.advance(world.lease(1), world.partitions[0], 0, 1)


def test_a_failed_partition_is_reported_and_resumed(world: Any) -> None:
    positions, receivers = world.ledger.positions, world.ledger.receivers
    positions.fail(world.receiver, world.partitions[0], "offsets lost")
    given = receivers.heartbeat(world.receiver, sealed_through_ms=0).assigned[world.partitions[0]]
    assert (given.state, given.error) == (PartitionState.FAILED, "offsets lost")
    positions.set_state(world.job, "kafka", [world.partitions[0]], "active")
    assert positions.all("flights")[0].error is None
    assert len(kinds(world, EventKind.PARTITION_FAILED)) == 1


def test_a_partition_that_ends_is_reported_with_unread_records(world: Any) -> None:
    """The partition ends with its topic."""
    first, second = world.partitions[:2]
    reported = {"lag": {first.topic: {str(first.partition): [1_000, 2.5]}}}
    world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=0, stats=reported)
    world.ledger.positions.set_state(world.job, "kafka", [first, second], "ended", "the topic was deleted")
    events = [payload for _, payload in kinds(world, EventKind.PARTITION_ENDED)]
    assert [(event["partition"], event["unread"]) for event in events] == [
        (first.partition, 1_000),
        (second.partition, None),
    ]
    assert events[0]["next_offset"] == world.ledger.positions.all("flights")[0].next_offset
    assert events[0]["error"] == "the topic was deleted"


def test_positions_whose_topic_is_over_can_be_left_out(world: Any) -> None:
    positions = world.ledger.positions
    positions.set_state(world.job, "kafka", [world.partitions[0]], "ended", "the topic was deleted")
    positions.set_state(world.job, "kafka", [world.partitions[1]], "failed", "offsets lost")
    assert [row.partition for row in positions.all("flights", live=True)] == list(world.partitions[1:])
    assert [row.partition for row in positions.all("flights", "kafka", live=True)] == list(world.partitions[1:])
    assert len(positions.all("flights")) == len(world.partitions)


def test_live_positions_are_found_by_index_despite_ended_ones(world: Any) -> None:
    """The tracker reads them twice a second."""
    statements: list[str] = []
    engine = world.ledger.streams._database.engine
    with engine.begin() as connection:
        one = dict(connection.execute(select(positions)).mappings().first())
        ended = [one | {"partition": number, "state": "ended"} for number in range(10, 2_010)]
        connection.execute(insert(positions), ended)
        # Postgres chooses an index by what it last counted: with few rows, or a count of before, any of them.
        connection.execute(text("ANALYZE positions"))

    def explain(_c: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "positions" in statement and not statement.startswith("EXPLAIN"):
            own = cursor.connection.cursor()
            is_sqlite = engine.dialect.name == "sqlite"
            if not is_sqlite:
                own.execute("SET LOCAL enable_seqscan = off")
            own.execute(f"EXPLAIN {'QUERY PLAN ' if is_sqlite else ''}{statement}", parameters)
            statements.extend(str(row) for row in own.fetchall())

    event.listen(engine, "before_cursor_execute", explain)
    try:
        world.ledger.positions.all("flights", "kafka", live=True)
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    assert any("ix_positions_live" in line for line in statements), statements
