"""The log as a whole, in each way that it is written: appended to, closed after each write, compressed, in objects."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from tests.support.memory_storage import MemoryStorage
from tests.support.records import make_block
from tests.support.segments import writer_options
from tests.unit.wal.torn_tails import repair

from headrace.blocks import BlockHandle, BlockInfo, ReceiverId
from headrace.clock import ManualClock
from headrace.wal import frame
from headrace.wal.errors import DamagedFrameError, SegmentMissingError, WriteFailedError
from headrace.wal.frame import FrameHeader, SegmentEnd, SegmentHeader, SegmentName, encode
from headrace.wal.log_storage import LogStorage, RandomAccessFile
from headrace.wal.reader import read_block, read_blocks
from headrace.wal.recovery import scan_log
from headrace.wal.scan import scan_segment
from headrace.wal.storage import LocalSegmentFile, open_storage
from headrace.wal.writer import WriteAheadLogWriter

RECEIVER = ReceiverId("flights", "kafka", 0)


class Log:
    """A storage, and how it is written."""

    def __init__(self, storage: LogStorage, **options: Any) -> None:
        self.storage = storage
        self.clock = ManualClock(1_700_000_000_000)
        self._options = options

    def open_writer(self, epoch: int = 1, **options: Any) -> WriteAheadLogWriter:
        self.clock.advance(1)
        chosen = writer_options(**{**self._options, **options})
        return WriteAheadLogWriter(self.storage, "", RECEIVER, epoch, clock=self.clock, **chosen)


@pytest.fixture(params=["appended", "closed after each write", "lz4", "objects"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    if request.param == "objects":
        url = f"memory://bucket/{secrets.token_hex(8)}"
        yield Log(open_storage(url))
        memory = fsspec.filesystem("memory")
        if memory.exists(url.removeprefix("memory:/")):
            memory.rm(url.removeprefix("memory:/"), recursive=True)
        return
    options: dict[str, dict[str, Any]] = {
        "appended": {},
        "closed after each write": {"close_after_write": True},
        "lz4": {"codec": "lz4"},
    }
    yield Log(open_storage(str(tmp_path / "log")), **options[request.param])


def write(writer: WriteAheadLogWriter, count: int, start: int = 0) -> list[tuple[BlockHandle, pa.RecordBatch]]:
    written = []
    for at in range(start, start + count):
        batch, ranges = make_block([Random(at).randbytes(1000)], from_offset=at)
        frame = writer.write(batch, ranges, cut_time_ms=at, last_accepted_sequence=None)
        written.append((frame.handle, batch))
    return written


def test_all_segments_are_read_in_the_order_of_writing(log: Log) -> None:
    written = write(log.open_writer(1, segment_bytes=8000), 10)
    written += write(log.open_writer(2, segment_bytes=8000), 10, start=10)
    assert len(log.storage.paths()) > 4
    frames = list(scan_log(log.storage))
    assert [f.handle for f in frames] == [handle for handle, _ in written]
    assert [f.batch() for f in frames] == [batch for _, batch in written]


def test_a_log_goes_on_after_it_was_read(log: Log) -> None:
    """Earlier data is read with the later, whoever wrote it and however often it is read in between."""
    written: list[tuple[BlockHandle, pa.RecordBatch]] = []
    for epoch in range(1, 4):
        writer = log.open_writer(epoch)
        for _ in range(2):
            written += write(writer, 2, start=len(written))
            assert [f.handle for f in scan_log(log.storage)] == [handle for handle, _ in written]
        writer.close()


def test_nothing_is_made_before_the_first_write(log: Log) -> None:
    writer = log.open_writer()
    assert list(scan_log(log.storage)) == []
    writer.roll_if_due(None)
    writer.close()
    assert log.storage.paths() == []
    if log.storage.url.startswith("file:"):
        assert not Path(log.storage.url.removeprefix("file://")).exists()


def test_a_block_can_be_read_by_others_as_soon_as_it_is_written(log: Log) -> None:
    writer = log.open_writer()
    for at in range(3):
        ((handle, batch),) = write(writer, 1, start=at)
        assert read_block(open_storage(log.storage.url), handle)[1].equals(batch)


def test_blocks_are_read_in_any_order(log: Log) -> None:
    written = write(log.open_writer(segment_bytes=8000), 20)
    shuffled = list(written)
    Random(3).shuffle(shuffled)
    for handle, batch in shuffled:
        assert read_block(log.storage, handle)[1].equals(batch)
    asked = [handle for handle, _ in shuffled[:7]]
    assert [block.handle for block in read_blocks(log.storage, asked)] == sorted(asked)


def test_a_segment_is_closed_after_each_write_on_demand(log: Log) -> None:
    """It is closed so, too, where nothing can be appended."""
    written = write(log.open_writer(), 3)
    closes = not log.storage.appends or log._options.get("close_after_write")
    assert len({handle.segment for handle, _ in written}) == (3 if closes else 1)
    scan = scan_log(log.storage)
    assert len(list(scan)) == 3
    # A segment that its writer has open may grow; a closed one has an end.
    assert len(scan.open) == (0 if closes else 1)


def test_files_are_appended_to_and_objects_written_whole(tmp_path: Path) -> None:
    """That is the default."""
    for url, segments in ((str(tmp_path / "log"), 1), (f"memory://bucket/{secrets.token_hex(8)}", 3)):
        storage = open_storage(url)
        write(WriteAheadLogWriter(storage, "", RECEIVER, 1), 3)
        assert len(storage.paths()) == segments


def test_an_older_segment_may_be_deleted_beside_the_log(log: Log) -> None:
    """The log is written and read meanwhile."""
    writer = log.open_writer(segment_bytes=1)
    written = write(writer, 5)
    for handle, _ in written[:3]:
        assert log.storage.delete(handle.segment)
    written += write(writer, 1, start=5)
    assert [f.handle for f in scan_log(log.storage)] == [handle for handle, _ in written[3:]]
    with pytest.raises(SegmentMissingError):
        read_block(log.storage, written[0][0])


def test_verdicts_of_what_is_left_hold_after_cleanup(log: Log) -> None:
    writer = log.open_writer(segment_bytes=1)
    for at in range(4):
        batch, ranges = make_block([b"x"], from_offset=at)
        last = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=at - 1 if at else None).handle
    for path in log.storage.paths()[:2]:
        log.storage.delete(path)
    assert last.segment in log.storage.paths()
    assert [s.accepted for s in scan_log(log.storage).settled()] == [True, None]


def test_a_file_taken_by_cleanup_in_the_reading_is_no_damage(log: Log) -> None:
    written = write(log.open_writer(segment_bytes=1), 4)
    scan = iter(scan_log(log.storage))
    first = next(scan)
    for handle, _ in written[:3]:
        log.storage.delete(handle.segment)
    assert [first.handle, *(f.handle for f in scan)] == [written[0][0], written[3][0]]
    # Not the oldest: that was not cleanup.
    written += write(log.open_writer(2, segment_bytes=1), 3, start=4)
    scan = iter(scan_log(log.storage))
    next(scan)
    log.storage.delete(written[5][0].segment)
    with pytest.raises(SegmentMissingError):
        list(scan)


def test_a_file_taken_by_cleanup_once_listed_is_no_damage(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write(log.open_writer(segment_bytes=1), 3)
    plain = type(log.storage).paths

    def list_and_clean(self: LogStorage, prefix: str = "") -> list[str]:
        listed = plain(self, prefix)
        self.delete(listed[0])
        return listed

    monkeypatch.setattr(type(log.storage), "paths", list_and_clean)
    scan = scan_log(log.storage)
    assert [f.handle for f in scan] == [handle for handle, _ in written[1:]]
    assert scan.damage == []


def test_a_scan_opens_one_segment_at_a_time_and_none_unasked(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    write(log.open_writer(segment_bytes=1), 5)
    opened: list[str] = []
    plain = type(log.storage).open

    def count(self: LogStorage, path: str) -> RandomAccessFile:
        opened.append(path)
        return plain(self, path)

    monkeypatch.setattr(type(log.storage), "open", count)
    scan = iter(scan_log(log.storage))
    assert opened == []
    next(scan)
    # The headers of all, since later ones tell of earlier ones, and then the first segment.
    paths = log.storage.paths()
    assert opened == [*paths, paths[0]]
    next(scan)
    assert opened[len(paths) :] == paths[:2]


def test_a_log_of_two_receivers_is_read_by_receiver(log: Log) -> None:
    writers = [
        WriteAheadLogWriter(log.storage, "", ReceiverId("flights", "kafka", index), 1, clock=log.clock)
        for index in (0, 1)
    ]
    for at in range(3):
        for writer in writers:
            write(writer, 1, start=at)
    assert [f.header.receiver.index for f in scan_log(log.storage)] == [0, 0, 0, 1, 1, 1]
    only = scan_log(log.storage, receiver=ReceiverId("flights", "kafka", 1))
    assert [f.header.receiver.index for f in only] == [1, 1, 1]


def test_a_failed_write_fails_its_own_receiver_and_no_other(log: Log) -> None:
    """The receivers of a host share no sync and no queue."""
    one, other = (
        WriteAheadLogWriter(log.storage, "", ReceiverId("flights", "kafka", index), 1, clock=log.clock)
        for index in (0, 1)
    )
    written = write(one, 1) + write(other, 1)
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((type(log.storage), "write_atomically"), (LocalSegmentFile, "append")):
            patch.setattr(kind, name, losing_its_answer(getattr(kind, name)))
        with pytest.raises(WriteFailedError, match="the store is down"):
            write(one, 1, start=1)
    written += write(other, 1, start=1) + write(one, 1, start=1)
    assert sorted(f.handle for f in scan_log(log.storage)) == sorted(handle for handle, _ in written)


def test_files_of_others_in_the_logs_folder_are_passed_by(log: Log) -> None:
    written = write(log.open_writer(), 2)
    for path in ("kafka-0/notes.txt", "kafka-0/.hidden", "README", "torn/kafka-0/a.torn", "kafka-0/1-2-3.wal"):
        log.storage.write_atomically(path, b"of somebody else")
    assert [f.handle for f in scan_log(log.storage)] == [handle for handle, _ in written]
    written += write(log.open_writer(2), 1, start=2)
    assert [f.handle for f in scan_log(log.storage)] == [handle for handle, _ in written]


def test_what_a_failed_write_left_is_skipped_and_the_rest_read(log: Log) -> None:
    """All of it is there, as when only the answer was lost."""
    writer = log.open_writer()
    written = write(writer, 1)
    before = sum(map(log.storage.size, log.storage.paths()))
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((type(log.storage), "write_atomically"), (LocalSegmentFile, "append")):
            patch.setattr(kind, name, losing_its_answer(getattr(kind, name)))
        with pytest.raises(WriteFailedError, match="the store is down"):
            write(writer, 1, start=1)
    assert sum(map(log.storage.size, log.storage.paths())) > before + 1000
    written += write(writer, 1, start=1)
    scan = scan_log(log.storage)
    frames = list(scan)
    assert [f.handle for f in frames] == [handle for handle, _ in written]
    # The second sequence was spent on what failed.
    assert [f.header.sequence for f in frames] == [0, 2]
    (tail,) = scan.torn_tails
    assert tail.length > 1000


def losing_its_answer(plain: Callable[..., None]) -> Callable[..., None]:
    def fail(*arguments: Any, **options: Any) -> None:
        plain(*arguments, **options)
        raise OSError("the store is down")

    return fail


def test_an_empty_file_of_an_early_crash_is_passed_by(log: Log) -> None:
    """The crash came before the first byte."""
    written = write(log.open_writer(1), 2)
    empty = SegmentName("kafka", 0, 2, 0, 1_700_000_000_005).path
    log.storage.write_atomically(empty, b"")
    successor = log.open_writer(3)
    # Who has written the one before it, and crashed, has left that one for this writer to vouch for.
    assert [segment.segment for segment in successor.recovery.segments] == [written[-1][0].segment, empty]
    written += write(successor, 2, start=2)
    for _ in range(2):
        scan = scan_log(log.storage)
        assert [f.handle for f in scan] == [handle for handle, _ in written]
        assert (scan.damage, scan.missing) == ([], [])
        log.storage.delete(empty)


def test_writes_that_come_with_the_close_are_whole_or_refused(log: Log) -> None:
    writer = log.open_writer()
    started = threading.Barrier(5)
    durable: list[BlockHandle] = []
    refused: list[Exception] = []

    def run(number: int) -> None:
        batch, ranges = make_block([b"x" * 500], from_offset=number)
        started.wait()
        for _ in range(20):
            try:
                durable.append(writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle)
            except ValueError as error:
                refused.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    while not durable:
        pass
    writer.close()
    for thread in threads:
        thread.join()
    assert len(durable) + len(refused) == 80
    assert sorted(durable) == sorted(f.handle for f in scan_log(log.storage))
    assert scan_log(log.storage).open == []
    with pytest.raises(ValueError, match="closed"):
        write(writer, 1)


def test_a_segment_written_by_hand_is_read() -> None:
    """The format as it is documented, without the writer."""
    path = SegmentName("kafka", 0, 1, 0, 1_700_000_000_000).path
    batches = [make_block([b"%d" % at], from_offset=at) for at in range(3)]
    headers: list[tuple[SegmentHeader | FrameHeader | SegmentEnd, pa.Buffer | None]] = [
        (SegmentHeader(RECEIVER, 1, 0, 1_700_000_000_000, 0, None, {}, ()), None)
    ]
    for at, (batch, ranges) in enumerate(batches):
        headers.append((FrameHeader(RECEIVER, 1, at, at - 1 if at else None, 0, ranges, 1, 0), encode(batch)))
    headers.append((SegmentEnd(RECEIVER, 1, 3, 3, 2, 1_700_000_000_001), None))
    data = b""
    handles = []
    for header, payload in headers:
        head, body = frame.build(header, payload, segment=frame.segment_id(path), offset=len(data))
        written = head + (b"" if body is None else body.to_pybytes())
        handles.append(BlockHandle(path, len(data), len(written)))
        data += written
    storage = MemoryStorage()
    storage.write_atomically(path, data)
    scan = scan_segment(storage, path, newest=False)
    assert [f.batch() for f in scan] == [batch for batch, _ in batches]
    assert (scan.opening, scan.ending) == (headers[0][0], headers[-1][0])
    for handle, (batch, _) in reversed(list(zip(handles[1:-1], batches, strict=True))):
        assert read_block(storage, handle)[1] == batch


def test_a_lost_segment_between_others_says_what_was_in_it(log: Log) -> None:
    """From the positions in the headers around it; exactly, and a lost newest one too, where the ledger is asked."""
    positions: dict[Any, int] = {}
    writer = log.open_writer(segment_bytes=1, positions=lambda: positions)
    blocks = []
    for at in range(4):
        batch, ranges = make_block([b"x"] * 10, from_offset=10 * at)
        done = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
        positions[ranges[0].partition] = 10 * at + 10
        blocks.append(BlockInfo(RECEIVER, 1, done.sequence, 0, done.handle, ranges, 10, 0))
    log.storage.delete(blocks[1].handle.segment)
    with pytest.raises(SegmentMissingError, match=r"inferred from the frames around it\): flights-0\[10, 20\)") as lost:
        list(scan_log(log.storage))
    assert (lost.value.ranges, lost.value.exact) == (blocks[1].ranges, False)
    log.storage.delete(blocks[3].handle.segment)
    scan = scan_log(
        log.storage,
        deleted=lambda path: path == blocks[1].handle.segment,
        accepted=lambda path: [block for block in blocks if block.handle.segment == path],
        expected=[block.handle.segment for block in blocks],
    )
    with pytest.raises(SegmentMissingError, match="the ledger names it") as lost:
        list(scan)
    assert (lost.value.ranges, lost.value.exact) == (blocks[3].ranges, True)


def test_a_repair_of_a_folder_that_is_gone_fails(log: Log) -> None:
    ((handle, _),) = write(log.open_writer(), 1)
    log.storage.delete(handle.segment)
    with pytest.raises(SegmentMissingError, match=handle.segment):
        repair(log.storage, handle.segment)


def test_a_handle_of_what_is_not_written_yet_is_an_error(log: Log) -> None:
    ((handle, _),) = write(log.open_writer(), 1)
    ahead = BlockHandle(handle.segment, log.storage.size(handle.segment), handle.length)
    with pytest.raises(DamagedFrameError, match=r"0 of them|no frame"):
        read_block(log.storage, ahead)
