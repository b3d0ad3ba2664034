"""A ledger that is rebuilt goes on where the lost one stood. What is found of a stream: tests/unit/batching."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event, select

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger import BatchState, DesiredState, EventKind, database
from headrace.ledger.batches.tables import BatchInputRow, BatchRow, FiledReplay, ReplayDefinitionRow
from headrace.ledger.errors import (
    AlreadyCompletedError,
    LeaseHeldError,
    LedgerConflictError,
    LedgerError,
)
from headrace.ledger.rebuild import FoundBatch, FoundStream
from headrace.ledger.receiving.tables import PositionRow, SegmentRow, StoredBlock, TopicRow
from headrace.ledger.states import PartitionState
from headrace.ledger.tables import StreamRevision, StreamRow, totals

NOW_MS = 1_700_000_000_000
T0, T1, T2, T3 = (NOW_MS + 1000 * number for number in range(4))
RECEIVER = ReceiverId("flights", "kafka", 0)
OLD, TP = TopicPartition("departures", "id-0", 0, 1), TopicPartition("departures", "id-1", 0, 2)
LAST_ATTEMPT = 5_000
RUN: dict[str, Any] = {"holder": "task", "way": "connect", "lease_ms": 5_000}


def block(number: int, batch_time_ms: int) -> StoredBlock:
    info = BlockInfo(
        receiver=RECEIVER,
        epoch=4,
        sequence=number,
        cut_time_ms=NOW_MS,
        handle=BlockHandle("a", number * 100, 100),
        ranges=(OffsetRange(TP, number * 10, number * 10 + 10, 10),),
        records=10,
        payload_bytes=100,
    )
    return StoredBlock(0, batch_time_ms, NOW_MS, info)


def batch(time_ms: int, state: BatchState = BatchState.ALLOCATED, **fields: Any) -> BatchRow:
    row: dict[str, Any] = dict.fromkeys(
        ("code_version", "absorbed_by_ms", "started_at_ms", "completed_at_ms", "checkpointed_at_ms", "checkpoint_uri")
    )
    row |= dict.fromkeys(("cleaned_at_ms", "cleanup", "error"))
    row |= {"stream": "flights", "batch_time_ms": time_ms, "interval_ms": 1000, "state": state, "revision": 1}
    row |= {"manifest_uri": f"m/{time_ms}", "manifest_sha256": "0", "blocks": 0, "records": 0, "payload_bytes": 0}
    row |= {"absorbed": (), "attempt": 2, "allocated_at_ms": NOW_MS}
    return BatchRow(**(row | fields))


def position(partition: TopicPartition, offset: int) -> PositionRow:
    return PositionRow("kafka", partition, offset, 0, None, None, T3, PartitionState.ACTIVE, None, NOW_MS)


def topic(topic_id: str, incarnation: int, *, current: bool) -> TopicRow:
    return TopicRow("flights", "kafka", "departures", topic_id, incarnation, 1, 1, True, current, NOW_MS, NOW_MS)


STREAM = StreamRow(
    "flights",
    '{"outputs": []}',
    3,
    1000,
    200,
    ("index", "files"),
    2,
    False,
    T0 - 1000,
    T2,
    DesiredState.RUNNING,
    7,
    1,
    2,
)
REVISION = StreamRevision('{"outputs": []}', 1000, 200, ("index", "files"), 2, False, "arrival", 0, 3, 2)
DONE = batch(T0, BatchState.COMPLETED, records=480, blocks=9, completed_at_ms=5, checkpointed_at_ms=6, steps=("index",))
REPLAY = FiledReplay("march", BatchState.COMPLETED, 3, 1, ("again",), None, 1, 2, None, {"again": {"n": 1}})


def found(**changes: Any) -> FoundStream:
    inputs = (BatchInputRow("flights", T0, "kafka", OLD, 0, 500, 480, 9),)
    fields: dict[str, Any] = {
        "stream": STREAM,
        "revisions": [REVISION],
        "receiver_epochs": {RECEIVER: 4},
        "last_attempt": LAST_ATTEMPT,
        "topics": [topic("id-0", 1, current=False), topic("id-1", 2, current=True)],
        "positions": [position(OLD, 500), position(TP, 40)],
        "segments": [SegmentRow(0, "flights", "a", RECEIVER, 4, NOW_MS, None, 400, None, None)],
        "blocks": [block(0, T1), block(1, T2), block(2, T2), block(3, T3)],
        "batches": [
            FoundBatch(DONE, inputs, {"index": {"indexed": 480}}, (REPLAY,)),
            FoundBatch(batch(T1, BatchState.ABSORBED, absorbed_by_ms=T2)),
            FoundBatch(batch(T2, absorbed=(T1,), blocks=3, records=30), outputs={"index": {"indexed": 30}}),
        ],
        "replay_definitions": [ReplayDefinitionRow("march", 1, '{"outputs": [{"id": "again"}]}', 4)],
        "runs": {"manual": T1},
    }
    return FoundStream(**(fields | changes))


@pytest.fixture
def restored(ledger: Any) -> Any:
    ledger.rebuild.restore("flights", found())
    return ledger


def test_everything_is_as_it_was_found(restored: Any) -> None:
    assert restored.streams.get("flights") == STREAM
    done, absorbed, open_ = restored.batches.page("flights", oldest_first=True)
    assert done == replace(DONE, attempt=LAST_ATTEMPT)
    assert (absorbed.state, absorbed.absorbed_by_ms) == (BatchState.ABSORBED, T2)
    assert (open_.state, open_.records, open_.blocks, open_.absorbed) == (BatchState.ALLOCATED, 30, 3, (T1,))
    assert [stored.info for stored in restored.allocations.blocks_of("flights", T2)] == [
        block(n, T2).info for n in range(3)
    ]
    assert [(row.batch_time_ms, row.blocks) for row in restored.blocks.unclaimed("flights")] == [(T3, 1)]
    assert len(restored.events.page("flights", kinds=[EventKind.LEDGER_REBUILT])) == 1
    assert restored.segments.stored_bytes("flights") == 400
    assert restored.topics.all("flights") == found().topics
    assert restored.positions.all("flights") == found().positions
    assert restored.runs.assign("flights", "manual") == T1


def test_rows_are_inserted_in_parts_so_each_statement_ends(ledger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_ROWS", 3)
    inserted: dict[str, list[int]] = defaultdict(list)

    def on_execute(_connection: Any, _cursor: Any, statement: str, rows: Any, _context: Any, many: bool) -> None:
        if statement.startswith("INSERT INTO "):
            inserted[statement.split()[2]].append(len(rows) if many else 1)

    inputs = tuple(BatchInputRow("flights", T0, name, OLD, 0, 500, 480, 9) for name in "abcdefg")
    event.listen(ledger.rebuild._database.engine, "before_cursor_execute", on_execute)
    ledger.rebuild.restore("flights", found(batches=[FoundBatch(DONE, inputs)]))
    assert (inserted["blocks"], inserted["batch_inputs"]) == ([3, 1], [3, 3, 1])
    assert ledger.batches.inputs("flights", T0) == list(inputs)


def test_work_goes_on_with_higher_epochs_from_the_same_positions(restored: Any, clock: Any) -> None:
    job = restored.jobs.acquire("flights", holder="driver", lease_ms=10_000)
    assert job.epoch == 8
    assert restored.topics.observe(job, "kafka", [("departures", "id-1", 1)])[0].incarnation == 2
    restored.positions.assign(job, "kafka", {TP: 0})
    lease = restored.receivers.register(restored.receivers.schedule(job, RECEIVER), host="here", lease_ms=10_000)
    assert lease.epoch == 5
    given = restored.receivers.heartbeat(lease, sealed_through_ms=0).assigned
    assert {tp: assigned.next_offset for tp, assigned in given.items()} == {TP: 40}
    info = BlockInfo(RECEIVER, 5, 0, NOW_MS, BlockHandle("b", 0, 1), (OffsetRange(TP, 40, 50, 10),), 10, 1)
    # Not before the partition's last block, nor within what is sealed.
    assert restored.blocks.add(lease, info).batch_time_ms == T3
    clock.advance(5000)
    allocated = restored.allocations.allocate("flights", T3, manifest_uri="m", manifest_sha256="3", blocks_expected=2)
    assert allocated.records == 20


def test_attempts_go_on_above_every_number_there_was(restored: Any) -> None:
    begun = restored.attempts.begin("flights", T2, **RUN)
    # What was recorded stays recorded.
    assert (begun.number, begun.outputs) == (LAST_ATTEMPT + 1, ("files",))
    assert restored.attempts.begin("flights", T0, **RUN, force=True).number == LAST_ATTEMPT + 1
    with pytest.raises(AlreadyCompletedError):
        restored.attempts.begin("flights", T2, **RUN, outputs=["index"])


def test_replays_come_back_with_what_they_wrote(restored: Any) -> None:
    (row,) = restored.replays.between("flights", "march", T0, T3)
    assert (row.state, row.revision, row.outputs, row.completed_at_ms) == (BatchState.COMPLETED, 1, ("again",), 2)
    assert [o.counts for o in restored.attempts.outputs("flights", T0, target="march")] == [{"n": 1}]
    definition = '{"outputs": [{"id": "again"}]}'
    again = restored.replays.begin("flights", T0, target="march", definition=definition, outputs=["again"], **RUN)
    assert again.number > LAST_ATTEMPT
    assert restored.replays.between("flights", "march", T0, T3)[0].revision == 1


def test_a_new_registration_gives_way_and_received_data_does_not(ledger: Any, world: Any) -> None:
    with pytest.raises(LeaseHeldError, match="driver"):
        ledger.rebuild.restore("flights", found())
    world.clock.advance(10_000)
    ledger.rebuild.restore("flights", found())
    assert ledger.jobs.current("flights") is None
    assert {row.partition: row.next_offset for row in ledger.positions.all("flights")} == {OLD: 500, TP: 40}
    with pytest.raises(LedgerError, match="not lost"):
        ledger.rebuild.restore("flights", found())


def test_a_restored_ledger_has_no_old_gaps_and_counts_none_twice(ledger: Any, world: Any) -> None:
    """Listeners hear of no gap from before."""
    ledger.listener_cursors.open(world.job, ["webhook"])
    ledger.positions.advance(world.receiver, world.partitions[0], 0, 5, gap="lost")
    world.clock.advance(10_000)
    ledger.rebuild.restore("flights", found(gaps=[]))
    job = ledger.jobs.acquire("flights", holder="driver", lease_ms=10_000)
    cursor = ledger.listener_cursors.open(job, ["webhook"])["webhook"]
    assert cursor.event_id == ledger.events.newest_id("flights")
    with ledger.rebuild._database.read() as connection:
        query = select(totals.c.name).where(totals.c.stream == "flights", totals.c.name == "gap_offsets")
        assert connection.execute(query).all() == []


def test_a_live_attempt_keeps_its_ledger_unless_forced(ledger: Any, world: Any) -> None:
    world.ledger.jobs.release(world.job, "stopped")
    world.clock.advance(1_000)
    world.allocate(T0)
    world.ledger.attempts.begin("flights", T0, **RUN)
    with pytest.raises(LeaseHeldError, match="is being run by task"):
        ledger.rebuild.restore("flights", found())
    ledger.rebuild.restore("flights", found(), force=True)
    assert ledger.batches.get("flights", T0).records == 480


def test_contradictions_change_nothing(ledger: Any) -> None:
    ledger.streams.register("flights", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
    with pytest.raises(LedgerConflictError):
        ledger.rebuild.restore("flights", found(blocks=[block(0, T1), block(0, T2)]))
    with pytest.raises(KeyError):
        ledger.rebuild.restore("flights", found(segments=[]))
    assert ledger.positions.all("flights") == []
