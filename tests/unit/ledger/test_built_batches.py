"""Batches from before the stream's zero time, of offset ranges that were found in Kafka by timestamps."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.blocks import TopicPartition
from headrace.clock import time_text
from headrace.ledger import AttemptState, BatchState
from headrace.ledger.batches.tables import BatchInputRow
from headrace.ledger.errors import AllocationConflictError, AlreadyCompletedError, AttemptFencedError, BatchTimeError

NOW_MS = 1_700_000_000_000
# The stream's zero time is NOW_MS.
BEFORE, ZERO, AFTER = NOW_MS - 1000, NOW_MS, NOW_MS + 1000
RUN = {"holder": "task", "way": "connect", "lease_ms": 5_000}
OTHER = TopicPartition("arrivals", "id-9", 0)


@pytest.fixture
def world(build: Any) -> Any:
    """A stream that begins to receive partition 0 at offset 100."""
    world = build(partitions=1)
    with world.ledger.streams._database.write() as connection:
        connection.exec_driver_sql("UPDATE positions SET starting_offset = 100, next_offset = 100")
    return world


def ranges(world: Any, *offsets: tuple[int, int], at: int = BEFORE, tp: TopicPartition | None = None) -> list[Any]:
    return [BatchInputRow("flights", at, "kafka", tp or world.partitions[0], a, b, 0, 0) for a, b in offsets]


def test_a_built_batch_has_ranges_and_no_blocks(world: Any) -> None:
    inputs = [*ranges(world, (40, 100)), *ranges(world, (7, 7), tp=OTHER)]
    batch = world.allocate(BEFORE, inputs=inputs)
    assert (batch.built, batch.blocks, batch.records, batch.state) == (True, 0, 60, BatchState.ALLOCATED)
    (taken,) = world.ledger.batches.inputs("flights", BEFORE)
    assert (taken.from_offset, taken.until_offset, taken.records) == (40, 100, 60)
    assert world.ledger.batches.origins("flights", [BEFORE, ZERO])[BEFORE].source == "kafka"
    attempt = world.ledger.attempts.begin("flights", BEFORE, **RUN)
    assert attempt.source == "kafka"
    assert world.complete(BEFORE).state is BatchState.COMPLETED


def test_an_empty_one_is_built_too(world: Any) -> None:
    batch = world.allocate(BEFORE, inputs=[])
    assert (batch.built, batch.records) == (True, 0)


def test_only_times_up_to_the_zero_time_are_built(world: Any) -> None:
    world.clock.advance(2000)
    assert world.allocate(ZERO, inputs=ranges(world, (0, 10), at=ZERO)).records == 10
    with pytest.raises(BatchTimeError, match="zero time"):
        world.allocate(AFTER, inputs=ranges(world, (10, 20), at=AFTER))


def test_no_offset_of_another_batch_is_taken(world: Any) -> None:
    with pytest.raises(AllocationConflictError, match="where the stream began to receive"):
        world.allocate(BEFORE, inputs=ranges(world, (90, 101)))
    world.allocate(BEFORE, inputs=ranges(world, (40, 60)))
    for overlap in ((30, 41), (59, 70), (40, 60), (45, 50), (0, 100)):
        with pytest.raises(AllocationConflictError, match=f"of batch {time_text(BEFORE)}"):
            world.allocate(ZERO, inputs=ranges(world, overlap, at=ZERO))
    # Refused, nothing is there.
    assert world.ledger.batches.find("flights", ZERO) is None
    assert world.allocate(ZERO, inputs=ranges(world, (60, 100), at=ZERO)).records == 40


def test_a_time_with_blocks_is_not_built(world: Any) -> None:
    world.add({0: (100, 110)}, event_time_ms=BEFORE - 1)
    with pytest.raises(AllocationConflictError, match="has blocks in the log"):
        world.allocate(BEFORE, inputs=ranges(world, (0, 10)), blocks_expected=1)


def test_an_empty_batch_is_replaced_and_run_again(world: Any) -> None:
    world.allocate(BEFORE)
    world.complete(BEFORE)
    inputs = ranges(world, (0, 10))
    # Only if asked.
    assert not world.allocate(BEFORE, inputs=inputs).built
    assert not world.allocate(BEFORE, replace_empty=True).built
    batch = world.allocate(BEFORE, inputs=inputs, replace_empty=True, manifest_uri="m/built")
    assert (batch.built, batch.records, batch.manifest_uri) == (True, 10, "m/built")
    assert (batch.state, batch.completed_at_ms, batch.checkpointed_at_ms) == (BatchState.ALLOCATED, None, None)
    attempt = world.ledger.attempts.begin("flights", BEFORE, **RUN)
    assert (attempt.number, attempt.source, attempt.outputs) == (2, "kafka", ("index",))
    # What has ranges stays as it is.
    assert world.allocate(BEFORE, inputs=ranges(world, (20, 30)), replace_empty=True).records == 10
    world.complete(BEFORE)
    with pytest.raises(AlreadyCompletedError):
        world.ledger.attempts.begin("flights", BEFORE, **RUN)


def test_who_runs_the_empty_one_is_fenced(world: Any) -> None:
    world.allocate(BEFORE)
    running = world.ledger.attempts.begin("flights", BEFORE, **RUN)
    copy = {"target": "v2", "definition": '{"outputs": [{"id": "index"}]}', "outputs": ["index"]}
    replaying = world.ledger.replays.begin("flights", BEFORE, **copy, **RUN)
    world.allocate(BEFORE, inputs=ranges(world, (0, 10)), replace_empty=True)
    for attempt in (running, replaying):
        with pytest.raises(AttemptFencedError):
            world.ledger.attempts.record_output(attempt, "index", {})
    assert {row.state for row in world.ledger.attempts.of_batch("flights", BEFORE)} == {AttemptState.FENCED}
    assert world.ledger.replays.between("flights", "v2", 0, AFTER) == []


def test_an_absorbed_or_abandoned_time_stays(world: Any) -> None:
    world.allocate(ZERO, absorb=[BEFORE], blocks_expected=0)
    inputs = ranges(world, (0, 10))
    assert world.allocate(BEFORE, inputs=inputs, replace_empty=True).state is BatchState.ABSORBED
    earlier = BEFORE - 1000
    world.allocate(earlier)
    world.ledger.batches.abandon("flights", earlier, "no")
    inputs = ranges(world, (0, 10), at=earlier)
    assert world.allocate(earlier, inputs=inputs, replace_empty=True).state is BatchState.ABANDONED
