"""Writing: handles, rolling, what segments say of each other, and what a failed write leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.faulty_storage import EVERYTHING, FaultyStorage, WriteFault
from tests.support.records import make_block

from headrace.blocks import OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.wal.errors import FrameTooLongError, PayloadError, StaleWriterError, StorageError, WriteFailedError
from headrace.wal.frame import PreviousSegment, PreviousState, SegmentHeader
from headrace.wal.log_storage import RandomAccessFile
from headrace.wal.reader import read_block, read_blocks
from headrace.wal.recovery import scan_log
from headrace.wal.scan import scan_segment
from headrace.wal.writer import WriteAheadLogWriter, WrittenFrame

OpenWriter = Callable[..., WriteAheadLogWriter]


def write(writer: WriteAheadLogWriter, at: int = 0, size: int = 10, accepted: int | None = None) -> WrittenFrame:
    batch, ranges = make_block([os.urandom(size)], from_offset=at)
    return writer.write(batch, ranges, cut_time_ms=at, last_accepted_sequence=accepted)


def fail_sync(_fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def offsets(storage: FaultyStorage) -> list[int]:
    return [scanned.header.ranges[0].from_offset for scanned in scan_log(storage)]


def test_blocks_are_read_back_by_their_handles(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    blocks = [make_block([b"v%d" % i, None], from_offset=2 * i) for i in range(5)]
    written = [writer.write(b, r, cut_time_ms=7, last_accepted_sequence=i or None) for i, (b, r) in enumerate(blocks)]
    for i, (frame, (batch, ranges)) in enumerate(zip(written, blocks, strict=True)):
        header, got = read_block(storage, frame.handle)
        assert got.equals(batch)
        assert (header.sequence, header.ranges, header.cut_time_ms, header.records) == (i, ranges, 7, 2)
        assert header.last_accepted_sequence == (i or None)
        assert frame.sequence == i
    assert [frame.opened is not None for frame in written] == [True, False, False, False, False]


def test_a_block_by_timestamp_says_so_in_the_log(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    batch, ranges = make_block([b"v"])
    frame = open_writer().write(batch, ranges, cut_time_ms=7, last_accepted_sequence=None, event_time_ms=5)
    assert read_block(storage, frame.handle)[0].event_time_ms == 5


def test_grouped_reads_open_each_segment_once(
    storage: FaultyStorage, open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(segment_bytes=12_000)
    handles = [write(writer, i, 1000).handle for i in range(10)]
    segments = {handle.segment for handle in handles}
    assert 1 < len(segments) < len(handles)
    opened: list[str] = []
    plain_open = storage.open

    def count(path: str) -> RandomAccessFile:
        opened.append(path)
        return plain_open(path)

    monkeypatch.setattr(storage, "open", count)
    wanted = [*handles[1::2], *handles[::2]]
    got = list(read_blocks(storage, wanted))
    assert sorted(opened) == sorted(segments)
    assert [block.handle for block in got] == sorted(handles)
    assert [block.batch["offset"][0].as_py() for block in got] == list(range(10))


def test_segments_roll_by_size(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(segment_bytes=15_000)
    written = [write(writer, i, 3000) for i in range(6)]
    assert [frame.opened is not None for frame in written] == [True, False, True, False, True, False]
    assert written[2].closed == (written[0].handle.segment,)
    assert all(storage.size(path) < 15_500 for path in storage.paths())


def test_a_block_larger_than_a_segment_gets_one_of_its_own(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(segment_bytes=1000)
    for i in range(3):
        write(writer, i, 5000)
    assert len(storage.paths()) == 3
    assert offsets(storage) == [0, 1, 2]


def test_segments_roll_by_time(open_writer: OpenWriter, clock: ManualClock) -> None:
    writer = open_writer(segment_seconds=60)
    first = write(writer)
    clock.advance(59_999)
    assert write(writer, 1).opened is None
    clock.advance(1)
    third = write(writer, 2)
    assert third.opened == third.handle.segment != first.handle.segment
    assert third.closed == (first.handle.segment,)


def test_an_idle_writer_closes_its_segment_in_time(
    storage: FaultyStorage, open_writer: OpenWriter, clock: ManualClock
) -> None:
    writer = open_writer(segment_seconds=60)
    segment = write(writer).handle.segment
    assert writer.roll_if_due(0) == ()
    clock.advance(60_000)
    assert writer.roll_if_due(0) == (segment,)
    assert list(scan_segment(storage, segment, newest=False))
    assert write(writer, 1).opened is not None


def test_a_segment_opens_with_its_writers_positions(
    storage: FaultyStorage, open_writer: OpenWriter, receiver: ReceiverId, clock: ManualClock
) -> None:
    positions = {TopicPartition("flights", "id", 0): 5}
    writer = open_writer(positions=lambda: positions, segment_bytes=1)
    first = write(writer).handle.segment
    positions[TopicPartition("flights", "id", 1)] = 9
    second = write(writer, accepted=0).handle.segment
    openings = []
    for segment in (first, second):
        scan = scan_segment(storage, segment, newest=True)
        list(scan)
        assert scan.opening is not None
        openings.append(scan.opening)
    before = PreviousSegment(first, storage.size(first), PreviousState.CLOSED)
    opened_ms = clock.now_ms()
    assert openings == [
        SegmentHeader(receiver, 1, 0, opened_ms, 0, None, {TopicPartition("flights", "id", 0): 5}, ()),
        SegmentHeader(receiver, 1, 1, opened_ms, 1, 0, positions, (before,)),
    ]


@pytest.mark.parametrize("written", [0, 1, 50, 400, EVERYTHING])
def test_a_failed_write_poisons_the_segment(storage: FaultyStorage, open_writer: OpenWriter, written: int) -> None:
    writer = open_writer()
    first = write(writer, 0)
    length = storage.size(first.handle.segment)
    storage.write_faults.append(WriteFault(written))
    with pytest.raises(WriteFailedError, match="Input/output error") as failure:
        write(writer, 1)
    assert (failure.value.segment, failure.value.sequence) == (first.handle.segment, 1)
    again = write(writer, 1)
    assert again.sequence == 2
    assert again.handle.segment != first.handle.segment
    assert again.closed == (first.handle.segment,)
    # Though all of the failed frame may be on disk, it is not read: it was never acknowledged.
    scan = scan_log(storage)
    assert [(f.header.sequence, f.header.ranges[0].from_offset) for f in scan] == [(0, 0), (2, 1)]
    assert [(tail.segment, tail.offset) for tail in scan.torn_tails] == (
        [(first.handle.segment, length)] if written else []
    )


def test_a_failed_first_write_leaves_nothing_that_counts(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    storage.write_faults.extend([WriteFault(30), WriteFault(EVERYTHING), WriteFault(0)])
    for sequence in range(3):
        with pytest.raises(WriteFailedError) as failure:
            write(writer)
        assert failure.value.sequence == sequence
    good = write(writer)
    assert len(good.closed) == 3
    scan = scan_log(storage)
    assert [f.header.sequence for f in scan] == [3]
    assert len(scan.torn_tails) == 2
    assert scan.torn_tails[1].ranges is not None


def test_a_segment_whose_end_cannot_be_written_keeps_its_blocks(
    storage: FaultyStorage, open_writer: OpenWriter
) -> None:
    writer = open_writer(segment_bytes=1)
    write(writer, 0)
    storage.write_faults.append(WriteFault(20))
    write(writer, 1)
    scan = scan_log(storage)
    assert [f.header.sequence for f in scan] == [0, 1]
    assert len(scan.torn_tails) == 1


def test_an_interrupt_poisons_too(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer()
    first = write(writer)
    storage.write_faults.append(WriteFault(10, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write(writer, 1)
    assert write(writer, 1).handle.segment != first.handle.segment
    assert offsets(storage) == [0, 1]


def test_a_block_that_cannot_be_written_leaves_all_as_it_was(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer()
    first = write(writer)
    batch, ranges = make_block([b"x"])
    with pytest.raises(PayloadError):
        writer.write(batch.drop_columns(["key"]), ranges, cut_time_ms=0, last_accepted_sequence=None)
    with pytest.raises(ValueError, match="ranges of 0 records, a block of 1"):
        writer.write(batch, (), cut_time_ms=0, last_accepted_sequence=None)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.wal.frame.MAX_PAYLOAD_BYTES", 10)
        with pytest.raises(FrameTooLongError):
            writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    second = write(writer, 1)
    assert (second.sequence, second.handle.segment) == (1, first.handle.segment)


def test_a_closed_writer_writes_no_more(open_writer: OpenWriter) -> None:
    writer = open_writer()
    segment = write(writer).handle.segment
    assert writer.close(0) == (segment,)
    assert writer.close() == ()
    with pytest.raises(ValueError, match="closed"):
        write(writer)


def test_a_later_epoch_takes_over_what_a_crash_left(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    crashed = open_writer(1)
    segment = write(crashed, 0).handle.segment
    length = storage.size(segment)
    storage.write_faults.append(WriteFault(77))
    with pytest.raises(WriteFailedError):
        write(crashed, 1)
    successor = open_writer(2)
    assert [tail.length for tail in successor.recovery.torn_tails] == [77]
    write(successor, 1)
    scan = scan_log(storage)
    assert [(f.header.epoch, f.header.sequence) for f in scan] == [(1, 0), (2, 0)]
    assert scan.torn_tails == []
    assert storage.size(segment) == length


def test_a_replaced_writer_is_not_believed(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    zombie = open_writer(1)
    first = write(zombie, 0)
    successor = open_writer(2)
    write(successor, 1)
    write(zombie, 1)
    zombie.close()
    for stale in (1, 2):
        with pytest.raises(StaleWriterError, match="epoch 2"):
            open_writer(stale)
    scan = scan_log(storage)
    assert [(f.header.epoch, f.header.ranges[0].from_offset) for f in scan] == [(1, 0), (2, 1)]
    assert [tail.segment for tail in scan.torn_tails] == [first.handle.segment]


def test_segments_that_a_replaced_writer_opens_do_not_count(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    zombie = open_writer(1, segment_bytes=1)
    write(zombie, 0)
    write(open_writer(2), 1)
    late = write(zombie, 1)
    scan = scan_log(storage)
    assert [f.header.epoch for f in scan] == [1, 2]
    assert scan.superseded == [late.handle.segment]


def test_the_verdict_of_the_ledger_is_in_the_frames_that_follow(
    storage: FaultyStorage, open_writer: OpenWriter
) -> None:
    writer = open_writer(1)
    write(writer, 0, accepted=None)
    write(writer, 1, accepted=0)
    write(writer, 1, accepted=0)  # Block 1 was refused.
    write(open_writer(2), 2, accepted=None)
    verdicts = [(s.frame.header.epoch, s.frame.header.sequence, s.accepted) for s in scan_log(storage).settled()]
    assert verdicts == [(1, 0, True), (1, 1, False), (1, 2, None), (2, 0, None)]


def test_a_graceful_end_leaves_nothing_undecided(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    writer = open_writer(1, segment_bytes=1)
    write(writer, 0)
    write(writer, 1, accepted=0)
    writer.close(1)
    assert [s.accepted for s in scan_log(storage).settled()] == [True, True]


def test_closing_without_the_verdict_leaves_the_block_undecided(
    storage: FaultyStorage, open_writer: OpenWriter
) -> None:
    """The block is the last one."""
    writer = open_writer(1)
    write(writer, 0)
    write(writer, 1, accepted=0)
    writer.close()
    assert [s.accepted for s in scan_log(storage).settled()] == [True, None]


def test_a_failing_fdatasync_is_never_repeated_on_its_file(
    storage: FaultyStorage, open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real file: after a failed fsync the kernel calls the pages clean, and the next fsync would succeed."""
    writer = open_writer()
    first = write(writer)
    synced = []

    def fail(fd: int) -> None:
        synced.append(fd)
        fail_sync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(WriteFailedError):
            write(writer, 1)
    assert len(synced) == 1
    assert write(writer, 1).handle.segment != first.handle.segment
    assert offsets(storage) == [0, 1]


def test_the_directory_is_synced_when_a_segment_is_created(
    open_writer: OpenWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    plain_fsync = os.fsync

    def record(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        plain_fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    writer = open_writer()
    handle = write(writer).handle
    directory, file = handle.segment.split("/")
    assert [path.rsplit("/", 1)[1] for path in synced][-2:] == [file, directory]
    # The directories above were new as well.
    assert any(path.endswith("/log") for path in synced)
    synced.clear()
    write(writer, 1)
    assert synced == []


def test_a_poisoned_file_refuses_further_writes(storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    file = storage.create_segment("a.wal")
    file.append([b"good"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail_sync)
        with pytest.raises(OSError, match="Input/output error"):
            file.append([b"bad"])
    with pytest.raises(StorageError, match="takes no more writes"):
        file.append([b"again"])
    file.close()


def test_ranges_with_holes_are_kept(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    batch, _ = make_block([b"x"], from_offset=9)
    ranges = (OffsetRange(TopicPartition("flights", "id", 0), 9, 22, 1),)
    frame = open_writer().write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    assert read_block(storage, frame.handle)[0].ranges == ranges
