"""What damage takes of the log is read again or a gap after a rebuild, and told: nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.faulty_files import FaultyFiles

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import checkpoint_now
from headrace.batch.cleanup import clean_up
from headrace.batch.rebuilt_positions import UNEXPLAINED
from headrace.batch.recover import Recovered, recover
from headrace.clock import time_text
from headrace.fsck.coverage import check_coverage
from headrace.fsck.findings import Problem
from headrace.fsck.stream_check import check_stream
from headrace.ledger import BatchState, EventKind, Ledger
from headrace.wal.errors import DamagedFrameError, StorageError
from headrace.wal.recovery import scan_log
from headrace.wal.scan import RecoveryMode
from headrace.wal.storage import LocalStorage

from .conftest import PARTITION, Receiving

Rebuild = Callable[..., tuple[Ledger, Recovered]]


@pytest.fixture
def rebuild(receiving: Receiving, tmp_path: Path) -> Rebuild:
    """Rebuilds the ledger into another, in which no offsets are without a block, batch or gap."""

    def rebuild(
        mode: RecoveryMode = RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS, *, has_hole: bool = False
    ) -> tuple[Ledger, Recovered]:
        ledger = Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=receiving.clock)
        folder = receiving.storage.below("shop")
        report = recover("shop", ledger, folder, definition=receiving.stream, mode=mode, force=True)
        assert bool(check_coverage(ledger.snapshots.take("shop"))[1]) is has_hole
        return ledger, report

    return rebuild


def checkpoint(receiving: Receiving) -> None:
    receiving.clock.advance(1)
    checkpoint_now(receiving.context, receiving.clock.now_ms())


def forget_checkpoints(receiving: Receiving) -> None:
    folder = receiving.storage.below("shop")
    for path in folder.paths("checkpoints"):
        folder.delete(path)


def break_block(receiving: Receiving, number: int) -> None:
    """A bit of its records."""
    log = receiving.storage.below("shop/log")
    handle = list(scan_log(log))[number].handle
    data = bytearray(log.read(handle.segment))
    data[handle.offset + handle.length - 3] ^= 1
    log.write_atomically(handle.segment, bytes(data))


def gaps(ledger: Ledger) -> list[tuple[int, int]]:
    """Each has its event too."""
    lost = [(gap.from_offset, gap.until_offset) for gap in ledger.gaps.page("shop")]
    events = ledger.events.latest("shop", kinds=[EventKind.GAP])
    assert [(event.payload["from_offset"], event.payload["until_offset"]) for event in events] == lost
    return lost


def position(ledger: Ledger) -> int:
    (row,) = ledger.positions.all("shop")
    assert row.partition == PARTITION
    return row.next_offset


def reported(report: Recovered, *words: str) -> bool:
    return any(all(word in notice for word in words) for notice in report.notices)


@pytest.mark.parametrize("when", ["none", "before", "after"])
def test_a_damaged_block_in_the_middle_is_a_gap(receiving: Receiving, rebuild: Rebuild, when: str) -> None:
    if when == "before":
        checkpoint(receiving)
    for records in (1, 2, 3, 1):
        receiving.store(records)
    if when == "after":
        checkpoint(receiving)
    break_block(receiving, 1)
    with pytest.raises(DamagedFrameError):
        rebuild()
    ledger, report = rebuild(RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
    assert (gaps(ledger), report.counts["gaps_found"]) == ([(1, 3)], 1)
    assert "is damaged at offset" in ledger.gaps.page("shop")[0].reason
    assert reported(report, "[1, 3) of clicks/clicks-0 is a gap")
    assert position(ledger) == 7
    problems = {finding.problem for finding in check_stream(ledger, "shop", kafka=False).findings}
    assert problems == {Problem.LOG_DAMAGED}


def test_a_bad_sector_is_passed_over_as_damage_is(receiving: Receiving, tmp_path: Path) -> None:
    receiving.store(2)
    receiving.new_segment()
    receiving.store(3)
    receiving.store(1)
    checkpoint(receiving)
    files = FaultyFiles()
    folder = LocalStorage(tmp_path / "storage", calls=files).below("shop")
    # All of a segment this small is on one sector, its header too.
    files.spoil(receiving.segments()[0].rpartition("/")[2], 0, 1)
    with Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=receiving.clock) as ledger:
        with pytest.raises(StorageError, match="Input/output error"):
            recover("shop", ledger, folder, definition=receiving.stream)
        skip = RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS
        recover("shop", ledger, folder, definition=receiving.stream, mode=skip, force=True)
        assert (gaps(ledger), position(ledger)) == ([(0, 2)], 6)


@pytest.mark.parametrize(
    "mode", [RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS, RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS]
)
def test_a_damaged_last_block_is_read_again(receiving: Receiving, rebuild: Rebuild, mode: RecoveryMode) -> None:
    for records in (1, 2, 3):
        receiving.store(records)
    checkpoint(receiving)
    break_block(receiving, 2)
    ledger, report = rebuild(mode)
    assert (position(ledger), gaps(ledger)) == (3, [])
    assert reported(report, "[3, 6) of clicks/clicks-0 is read from Kafka again", "tail")


def test_what_is_behind_damage_is_read_again_if_reading_stops(receiving: Receiving, rebuild: Rebuild) -> None:
    for records in (1, 2, 3):
        receiving.store(records)
    checkpoint(receiving)
    break_block(receiving, 1)
    ledger, report = rebuild(RecoveryMode.POINT_IN_TIME_RECOVERY)
    assert (position(ledger), gaps(ledger)) == (1, [])
    assert reported(report, "[1, 6) of clicks/clicks-0 is read from Kafka again", "is damaged at offset")


def delete_first_segment(receiving: Receiving) -> str:
    first = receiving.segments()[0]
    receiving.storage.delete(first)
    return first


@pytest.mark.parametrize("passed_over", [False, True])
def test_a_deleted_first_segment_is_a_gap(receiving: Receiving, rebuild: Rebuild, passed_over: bool) -> None:
    receiving.store(4)
    receiving.new_segment()
    receiving.store(2)
    checkpoint(receiving)
    if passed_over:
        checkpoint(receiving)
        folder = receiving.storage.below("shop")
        folder.write_atomically(folder.paths("checkpoints")[-1], b"{}")
    name = delete_first_segment(receiving).removeprefix("shop/log/")
    ledger, report = rebuild()
    assert gaps(ledger) == [(0, 4)]
    assert position(ledger) == 6
    assert reported(report, f"Segment {name} is missing from the log")
    assert reported(report, "[0, 4) of clicks/clicks-0 is a gap", f"segment {name} is missing")


def test_a_deleted_first_segment_takes_the_beginning_with_it(receiving: Receiving, rebuild: Rebuild) -> None:
    """No checkpoint says where the stream began."""
    receiving.store(4)
    receiving.new_segment()
    receiving.store(2)
    receiving.store(1)
    name = delete_first_segment(receiving).removeprefix("shop/log/")
    forget_checkpoints(receiving)
    ledger, report = rebuild()
    assert (position(ledger), gaps(ledger)) == (7, [])
    assert reported(report, f"Segment {name} is missing from the log")
    assert reported(report, "Where clicks/clicks-0 began is not known", "offsets before 4 may be lost")
    (event,) = ledger.events.page("shop", kinds=[EventKind.LEDGER_REBUILT])
    assert event.payload["lost"] == [f"segment {name} is missing"]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_segment_that_cleanup_deleted_is_not_missed(
    receiving: Receiving, rebuild: Rebuild, has_checkpoint: bool
) -> None:
    time_ms = receiving.store(4).batch_time_ms
    receiving.new_segment()
    receiving.clock.advance(30_000)
    allocate(receiving.context, time_ms)
    receiving.complete(time_ms)
    checkpoint(receiving)
    receiving.store(2)
    receiving.store(1)
    assert clean_up(receiving.context).segments == 1
    if not has_checkpoint:
        forget_checkpoints(receiving)
    ledger, report = rebuild()
    assert (position(ledger), gaps(ledger)) == (7, [])
    assert not reported(report, "missing")


@pytest.mark.parametrize("is_allocated", [True, False])
def test_a_batch_whose_log_was_deleted_by_hand_reads_kafka(
    receiving: Receiving, rebuild: Rebuild, is_allocated: bool
) -> None:
    """Allocated before the checkpoint or after it."""
    time_ms = receiving.store(4).batch_time_ms
    receiving.new_segment()
    receiving.clock.advance(30_000)
    if not is_allocated:
        checkpoint(receiving)
    allocate(receiving.context, time_ms)
    receiving.store(2)
    if is_allocated:
        checkpoint(receiving)
    delete_first_segment(receiving)
    ledger, report = rebuild()
    assert ledger.batches.get("shop", time_ms).state is BatchState.ALLOCATED
    assert ledger.batches.origins("shop", [time_ms])[time_ms].source == "kafka"
    assert reported(report, f"Batch {time_text(time_ms)} is not over, and its log is gone")
    assert gaps(ledger) == []


@pytest.mark.parametrize("is_known", [True, False])
def test_a_jump_is_a_gap_unless_the_checkpoint_knows_it(receiving: Receiving, rebuild: Rebuild, is_known: bool) -> None:
    """What is known is a jump over control records; of any other nobody can tell whether it was."""
    receiving.store(4)
    receiving.ledger.positions.advance(receiving.lease, PARTITION, 4, 6)
    receiving.position = 6
    if is_known:
        checkpoint(receiving)
    receiving.store(2)
    receiving.store(1)
    ledger, report = rebuild(has_hole=is_known)
    assert gaps(ledger) == ([] if is_known else [(4, 6)])
    assert reported(report, "[4, 6)", UNEXPLAINED) is not is_known
    assert position(ledger) == 9


def test_unproven_blocks_after_damage_are_read_again_with_it(receiving: Receiving, rebuild: Rebuild) -> None:
    """Nothing proves that the ledger had accepted the blocks behind the damaged one."""
    for records in (1, 2, 3):
        receiving.store(records)
    break_block(receiving, 1)
    ledger, _ = rebuild(RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
    assert (position(ledger), gaps(ledger)) == (1, [])
