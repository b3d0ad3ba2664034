"""A ledger that is rebuilt goes on where the lost one stood."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger import BatchState, EventKind
from headrace.ledger.errors import (
    AllocationConflictError,
    AlreadyCompletedError,
    BatchTimeError,
    LedgerConflictError,
    LedgerError,
)
from headrace.ledger.found import FoundBatch, FoundBlock, FoundSegment, FoundStream
from headrace.ledger.rows import BatchInputRow

NOW_MS = 1_700_000_000_000
T0, T1, T2, T3 = (NOW_MS + 1000 * number for number in range(4))
RECEIVER = ReceiverId("flights", "kafka", 0)
OLD, TP = TopicPartition("departures", "id-0", 0, 1), TopicPartition("departures", "id-1", 0, 2)


def block(number: int, batch_time_ms: int) -> FoundBlock:
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
    return FoundBlock(info, batch_time_ms)


def found(**changes: Any) -> FoundStream:
    fields: dict[str, Any] = {
        "job_epoch": 7,
        "receiver_epochs": {RECEIVER: 4},
        "positions": {("kafka", OLD): 500, ("kafka", TP): 40},
        "segments": [FoundSegment("a", RECEIVER, 4)],
        "blocks": [block(0, T1), block(1, T2), block(2, T2), block(3, T3)],
        "batches": [
            FoundBatch(
                T0, "m/0", "0", inputs=(BatchInputRow("flights", T0, "kafka", OLD, 0, 500, 480, 9),), checkpoint_uri="c"
            ),
            FoundBatch(T2, "m/2", "2", absorbed=(T1,)),
        ],
    }
    return FoundStream(**(fields | changes))


@pytest.fixture
def restored(ledger: Any) -> Any:
    ledger.streams.register("flights", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
    ledger.rebuild.restore("flights", found())
    return ledger


def test_batches_come_back_with_their_blocks_and_inputs(restored: Any) -> None:
    done, absorbed, open_ = restored.batches.list("flights", oldest_first=True)
    assert (done.state, done.records, done.blocks, done.checkpoint_uri) == (BatchState.COMPLETED, 480, 9, "c")
    assert (absorbed.state, absorbed.absorbed_by_ms) == (BatchState.ABSORBED, T2)
    assert (open_.state, open_.records, open_.blocks, open_.absorbed) == (BatchState.ALLOCATED, 30, 3, (T1,))
    assert [stored.info for stored in restored.batches.blocks_of("flights", T2)] == [
        block(n, T2).info for n in range(3)
    ]
    (taken,) = restored.batches.inputs("flights", T2)
    assert (taken.from_offset, taken.until_offset, taken.blocks) == (0, 30, 3)
    assert [(row.batch_time_ms, row.blocks) for row in restored.blocks.unclaimed("flights")] == [(T3, 1)]
    assert len(restored.events.list("flights", kinds=[EventKind.LEDGER_REBUILT])) == 1


def test_work_goes_on_with_higher_epochs_from_the_same_positions(restored: Any, clock: Any) -> None:
    job = restored.jobs.acquire("flights", holder="driver", lease_ms=10_000)
    assert job.epoch == 8
    assert restored.topics.observe(job, "kafka", "departures", "id-1", 1).incarnation == 2
    restored.positions.assign(job, "kafka", {TP: 0})
    lease = restored.receivers.register(job, RECEIVER, host="here", lease_ms=10_000)
    assert lease.epoch == 5
    given = restored.receivers.heartbeat(lease, sealed_through_ms=0).assigned
    assert {tp: assigned.next_offset for tp, assigned in given.items()} == {TP: 40}
    info = BlockInfo(RECEIVER, 5, 0, NOW_MS, BlockHandle("b", 0, 1), (OffsetRange(TP, 40, 50, 10),), 10, 1)
    # Not before the partition's last block, nor within what is sealed.
    assert restored.blocks.add(lease, info).batch_time_ms == T3
    clock.advance(5000)
    batch = restored.batches.allocate("flights", T3, manifest_uri="m", manifest_sha256="3", blocks_expected=2)
    assert batch.records == 20


def test_only_an_empty_stream_is_filled(restored: Any) -> None:
    with pytest.raises(LedgerError, match="not empty"):
        restored.rebuild.restore("flights", found())


def test_contradictions_change_nothing(ledger: Any) -> None:
    ledger.streams.register("flights", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
    with pytest.raises(LedgerConflictError):
        ledger.rebuild.restore("flights", found(blocks=[block(0, T1), block(0, T2)]))
    with pytest.raises(LedgerError, match="segments that were not"):
        ledger.rebuild.restore("flights", found(segments=[]))
    assert ledger.positions.list("flights") == []


def test_what_is_by_timestamp_and_by_output_comes_back(ledger: Any, clock: Any) -> None:
    clock.advance(3500)
    ledger.streams.register(
        "flights",
        "{}",
        batch_interval_ms=1000,
        block_interval_ms=200,
        outputs=("index", "files"),
        max_concurrent_batches=2,
        batch_by="timestamp",
    )
    timed = [replace(each, info=replace(each.info, event_time_ms=T0 + 5)) for each in found().blocks]
    batches = [
        FoundBatch(
            T0,
            "m/0",
            "0",
            inputs=(BatchInputRow("flights", T0, "kafka", OLD, 0, 500, 500, 0),),
            checkpoint_uri="c",
            code_version="v1",
            outputs={"index": {"indexed": 480}, "files": {}},
            built=True,
        ),
        FoundBatch(T1, "m/1", "1", outputs={"index": {"indexed": 10}}),
        FoundBatch(T2, "m/2", "2", late_records=7, checkpoint_uri="c"),
    ]
    ledger.rebuild.restore(
        "flights", found(blocks=timed, batches=batches, watermarks={("kafka", OLD): T0 - 5}, runs={"manual": T1})
    )
    done, half, late = ledger.batches.list("flights", oldest_first=True)
    assert (done.built, done.blocks, done.code_version, done.steps) == (True, 0, "v1", ("index", "files"))
    assert (half.late_records, late.late_records) == (0, 7)
    assert {row.output_id: row.counts for row in ledger.batches.outputs("flights", T0)} == {
        "index": {"indexed": 480},
        "files": {},
    }
    run = {"holder": "task", "way": "connect", "lease_ms": 5_000}
    assert ledger.batches.begin_attempt("flights", T0, **run, force=True).source == "kafka"
    assert ledger.batches.begin_attempt("flights", T1, **run).outputs == ("files",)
    for outputs in (None, ["index"]):
        with pytest.raises(AlreadyCompletedError):
            ledger.batches.begin_attempt("flights", T2, **run, outputs=outputs)
    assert ledger.runs.assign("flights", "manual", coalesces=False) == T1
    (block_of_t1,) = ledger.blocks.of_batch("flights", T1)
    assert block_of_t1.info.event_time_ms == T0 + 5
    assert {row.partition: row.watermark_ms for row in ledger.positions.list("flights")} == {OLD: T0 - 5, TP: T0 + 5}
    # What nobody claimed is counted when it is.
    batch = ledger.batches.allocate("flights", T3, manifest_uri="m", manifest_sha256="3", blocks_expected=1)
    assert batch.late_records == 10


def test_what_was_received_is_not_built_from_kafka(ledger: Any, clock: Any) -> None:
    clock.advance(100_000)
    late_ms = NOW_MS + 100_000
    ledger.streams.register("flights", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
    assert ledger.streams.get("flights").zero_time_ms == late_ms
    ledger.rebuild.restore("flights", found())
    assert ledger.streams.get("flights").zero_time_ms == T0 - 1000
    assert {row.partition: row.starting_offset for row in ledger.positions.list("flights")} == {OLD: 0, TP: 0}

    def build(batch_time_ms: int) -> Any:
        inputs = [BatchInputRow("flights", batch_time_ms, "kafka", OLD, 480, 490, 10, 0)]
        return ledger.batches.allocate(
            "flights", batch_time_ms, manifest_uri="m", manifest_sha256="0", inputs=inputs, replace_empty=True
        )

    with pytest.raises(BatchTimeError, match="zero time"):
        build(late_ms)
    with pytest.raises(AllocationConflictError, match="where the stream began"):
        build(T0 - 5000)


def test_where_the_stream_began_comes_back(ledger: Any) -> None:
    ledger.streams.register("flights", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
    starting = {("kafka", OLD): 0, ("kafka", TP): 7}
    ledger.rebuild.restore("flights", found(starting_offsets=starting, zero_time_ms=T0 - 3000))
    assert ledger.streams.get("flights").zero_time_ms == T0 - 3000
    assert {row.partition: row.starting_offset for row in ledger.positions.list("flights")} == {OLD: 0, TP: 7}


def test_a_block_of_two_partitions_is_one_block(ledger: Any) -> None:
    ledger.streams.register("flights", '{"outputs": []}', batch_interval_ms=1000, block_interval_ms=200)
    first = block(0, T1)
    both = replace(first, info=replace(first.info, ranges=(*first.info.ranges, OffsetRange(OLD, 490, 500, 10))))
    rows = tuple(
        BatchInputRow("flights", T1, "kafka", r.partition, r.from_offset, r.until_offset, 10, 1)
        for r in both.info.ranges
    )
    gone = {
        time_ms: tuple(
            replace(row, batch_time_ms=time_ms, until_offset=row.until_offset + more, blocks=2) for row in rows
        )
        for time_ms, more in ((T2, 10), (T3, 20))
    }
    batches = [
        FoundBatch(T1, "m/1", "1", inputs=rows, checkpoint_uri="c"),
        FoundBatch(T2, "m/2", "2", inputs=gone[T2], checkpoint_uri="c"),
        FoundBatch(T3, "m/3", "3", inputs=gone[T3], checkpoint_uri="c", blocks=2),
    ]
    blocks = [both, block(1, T2)]
    ledger.rebuild.restore("flights", found(blocks=blocks, batches=batches))
    assert ledger.batches.get("flights", T1).blocks == 1
    assert ledger.batches.get("flights", T3).blocks == 2
    sources = {time: origin.source for time, origin in ledger.batches.origins("flights", [T1, T2, T3]).items()}
    assert sources == {T1: "log", T2: "kafka", T3: "kafka"}
