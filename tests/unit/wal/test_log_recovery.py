"""What a writer finds of those before it."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.faulty_files import FaultyFiles
from tests.support.faulty_storage import FaultyStorage, WriteFault
from tests.support.records import make_block

from headrace.blocks import BlockInfo, ReceiverId
from headrace.clock import ManualClock
from headrace.wal.errors import DamagedFrameError, StorageError, WriteFailedError
from headrace.wal.recovery import COPIES_KEPT, scan_log
from headrace.wal.scan import READ_TRIES, RecoveryMode
from headrace.wal.storage import LocalStorage, open_storage
from headrace.wal.writer import NewBlock, WriteAheadLogWriter, WrittenFrame

OpenWriter = Callable[..., WriteAheadLogWriter]


def write(writer: WriteAheadLogWriter, at: int = 0) -> WrittenFrame:
    batch, ranges = make_block([b"value"], from_offset=at)
    return writer.write(batch, ranges, cut_time_ms=at, last_accepted_sequence=None)


class CleanedMeanwhile(FaultyStorage):
    """Between the listing and the reading cleanup takes a file."""

    victim = ""

    def below(self, path: str) -> CleanedMeanwhile:
        return self

    def paths(self, prefix: str = "") -> list[str]:
        listed = super().paths(prefix)
        self.delete(self.victim)
        return listed


@pytest.mark.parametrize("victim", [0, 1])
def test_cleanup_may_take_a_segment_while_it_is_looked_for(
    storage: FaultyStorage, open_writer: OpenWriter, receiver: ReceiverId, clock: ManualClock, victim: int
) -> None:
    segments = [write(open_writer(epoch)).handle.segment for epoch in (1, 2)]
    racing = CleanedMeanwhile(storage)
    racing.victim = segments[victim]
    successor = WriteAheadLogWriter(racing, "", receiver, 3, clock=clock)
    left = [previous.segment for previous in successor.recovery.segments]
    assert left == ([segments[1]] if victim == 0 else [segments[0]])
    write(successor, 1)


def test_what_a_crash_left_is_reported_with_its_place(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    crashed = open_writer(1)
    segment = write(crashed).handle.segment
    whole = storage.size(segment)
    storage.write_faults.append(WriteFault(77))
    with pytest.raises(WriteFailedError):
        write(crashed, 1)
    (tail,) = open_writer(2).recovery.torn_tails
    assert (tail.segment, tail.offset, tail.length) == (segment, whole, 77)


def test_damage_is_reported(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    crashed = open_writer(1)
    first, _ = write(crashed, 0), write(crashed, 1)
    storage.flip_bit(first.handle.segment, 8 * (first.handle.offset + first.handle.length - 1))
    (damage,) = open_writer(2).recovery.damage
    assert (damage.segment, damage.offset) == (first.handle.segment, first.handle.offset)


def test_a_torn_tail_is_cut_off_and_its_bytes_are_kept(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    segment, torn = crash(storage, open_writer)
    length = storage.size(segment) - len(torn)
    (tail,) = open_writer(2).recovery.torn_tails
    assert tail.kept is not None
    assert tail.kept in str(tail)
    assert storage.read(tail.kept) == torn
    assert storage.size(segment) == length
    # Who comes next finds a clean log.
    assert open_writer(3).recovery.torn_tails == ()


def test_a_tail_that_a_writer_still_has_open_is_left(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    """A zombie may be in the middle of a write; what it writes does not count, and the file is its own."""
    zombie = open_writer(1)
    segment = write(zombie).handle.segment
    with (Path(storage.url.removeprefix("file://")) / segment).open("ab") as file:
        file.write(b"half a frame")
    length = storage.size(segment)
    successor = open_writer(2)
    (tail,) = successor.recovery.torn_tails
    assert (tail.length, tail.kept) == (12, None)
    assert storage.size(segment) == length
    write(successor, 1)
    scan = scan_log(storage)
    assert [f.header.epoch for f in scan] == [1, 2]
    assert [(found.segment, found.offset) for found in scan.torn_tails] == [(segment, length - 12)]


def test_bytes_on_which_the_ledger_relies_are_damage_and_stay(
    storage: FaultyStorage, open_writer: OpenWriter, receiver: ReceiverId
) -> None:
    writer = open_writer(1)
    batch, ranges = make_block([b"value"])
    frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    accepted = [BlockInfo(receiver, 1, frame.sequence, 0, frame.handle, ranges, 1, frame.payload_bytes)]
    storage.cut(frame.handle.segment, frame.handle.offset + 60)
    before = storage.read(frame.handle.segment)
    successor = open_writer(2, accepted=lambda path: accepted if path == frame.handle.segment else [])
    (damage,) = successor.recovery.damage
    assert (damage.offset, damage.ranges) == (frame.handle.offset, ranges)
    assert successor.recovery.torn_tails == ()
    assert storage.read(frame.handle.segment) == before
    # And the log goes on saying so, to those without a ledger too.
    write(successor, 1)
    with pytest.raises(DamagedFrameError):
        list(scan_log(storage))


def test_no_more_than_ten_copies_are_kept_of_a_receiver(storage: FaultyStorage, open_writer: OpenWriter) -> None:
    kept = []
    for life in range(COPIES_KEPT + 3):
        crash(storage, open_writer, 2 * life + 1)
        kept += [tail.kept for tail in open_writer(2 * life + 2).recovery.torn_tails]
    assert len(kept) == COPIES_KEPT + 3
    assert storage.paths("torn") == kept[3:]


def test_what_was_inherited_is_synced_before_it_is_vouched_for(tmp_path: Path, receiver: ReceiverId) -> None:
    """A writer that was killed between write and sync left its bytes in memory, where the next one reads them."""
    files = FaultyFiles()
    storage = LocalStorage(tmp_path / "log", calls=files)
    batch, ranges = make_block([b"value"])
    # The process dies between the write and the sync.
    files.fail("fsync", errno.EIO, path="*.wal")
    files.fail("ftruncate", errno.EIO)
    files.fail("unlink", errno.EIO)
    with pytest.raises(WriteFailedError):
        WriteAheadLogWriter(storage, "", receiver, 1).write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    files.heal()
    (segment,) = storage.paths()
    files.calls.clear()
    (inherited,) = WriteAheadLogWriter(storage, "", receiver, 2).recovery.segments
    assert inherited.length == storage.size(segment)
    name = segment.rsplit("/", 1)[1]
    assert ("fsync", name) in files.calls


def crash(storage: FaultyStorage, open_writer: OpenWriter, epoch: int = 1) -> tuple[str, bytes]:
    """A segment with a torn tail, and the bytes of the tail."""
    crashed = open_writer(epoch)
    segment = write(crashed).handle.segment
    whole = storage.size(segment)
    storage.write_faults.append(WriteFault(77))
    with pytest.raises(WriteFailedError):
        write(crashed, 1)
    return segment, storage.read(segment)[whole:]


@pytest.mark.parametrize("times", [READ_TRIES, READ_TRIES - 1])
def test_what_the_disk_does_not_read_again_and_again_is_damage(
    tmp_path: Path, receiver: ReceiverId, clock: ManualClock, times: int
) -> None:
    """A bad sector must not keep receivers away for good, and an error that passes is none."""
    files = FaultyFiles()
    storage = LocalStorage(tmp_path, calls=files)
    writer = WriteAheadLogWriter(storage, "", receiver, 1, clock=clock)
    batch, ranges = make_block([b"value"])
    frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    segment, length = frame.handle.segment, storage.size(frame.handle.segment)
    before = storage.read(segment)
    accepted = [BlockInfo(receiver, 1, frame.sequence, 0, frame.handle, ranges, 1, frame.payload_bytes)]
    files.fail("pread", errno.EIO, path=Path(segment).name, times=times)
    successor = WriteAheadLogWriter(storage, "", receiver, 2, clock=clock, accepted=lambda _: accepted)
    recovery = successor.recovery
    assert [(each.segment, each.length) for each in recovery.segments] == [(segment, length)]
    assert [damaged.ranges for damaged in recovery.damage] == ([ranges] if times == READ_TRIES else [])
    assert recovery.torn_tails == ()
    assert write(successor, 1).handle.segment != segment
    assert storage.read(segment) == before


def test_a_storage_error_that_is_no_bad_sector_stops_the_writer(
    tmp_path: Path, receiver: ReceiverId, clock: ManualClock
) -> None:
    files = FaultyFiles()
    storage = LocalStorage(tmp_path, calls=files)
    write(WriteAheadLogWriter(storage, "", receiver, 1, clock=clock))
    files.fail("pread", errno.EACCES, path="*", times=100)
    with pytest.raises(StorageError, match="cannot read"):
        WriteAheadLogWriter(storage, "", receiver, 2, clock=clock)


def write_three(writer: WriteAheadLogWriter, at: int, accepted: int | None = None) -> list[BlockInfo]:
    """Three blocks of one write, as the ledger would know them."""
    made = [make_block([b"%d" % number * 900], from_offset=number) for number in range(at, at + 3)]
    blocks = [NewBlock(batch, ranges, 0) for batch, ranges in made]
    frames = writer.write_all(blocks, last_accepted_sequence=accepted)
    return [
        BlockInfo(writer._receiver, writer._epoch, frame.sequence, 0, frame.handle, block.ranges, 1, 900)
        for block, frame in zip(blocks, frames, strict=True)
    ]


def spoil(path: Path, info: BlockInfo) -> None:
    """Zero a part of the block, as where a crash lost its page."""
    with path.open("r+b") as file:
        file.seek(info.handle.offset + 10)
        file.write(bytes(100))


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("is_first", [True, False], ids=["the segment's first write", "a later write"])
def test_any_block_of_the_last_write_may_be_torn(
    tmp_path: Path, receiver: ReceiverId, lost: int, is_first: bool
) -> None:
    storage = LocalStorage(tmp_path)
    writer = WriteAheadLogWriter(storage, "", receiver, 1)
    before = [] if is_first else write_three(writer, 0)
    written = write_three(writer, 3, None if is_first else 2)
    spoil(tmp_path / written[0].handle.segment, written[lost])
    writer._segment.release()  # type: ignore[union-attr]
    successor = WriteAheadLogWriter(storage, "", receiver, 2, accepted=lambda _: before)
    assert successor.recovery.damage == ()
    (tail,) = successor.recovery.torn_tails
    assert (tail.offset, tail.kept is not None) == (written[lost].handle.offset, True)
    assert tail.ranges == tuple(r for info in written[lost + 1 :] for r in info.ranges) or lost == 2
    write(successor, 9)
    settled = [(frame.frame.header.sequence, frame.accepted) for frame in scan_log(storage).settled()]
    # Those before the torn one stay, and are undecided; the first write is decided by the second one.
    kept = [(info.sequence, None if lost else True) for info in written[:lost]]
    assert settled == [*((info.sequence, True if lost else None) for info in before), *kept, (0, None)]


@pytest.mark.parametrize("accepted", [True, False])
def test_a_block_of_an_earlier_write_is_not_torn(tmp_path: Path, receiver: ReceiverId, accepted: bool) -> None:
    """A later write shows that it was whole once, whether the ledger has it or not."""
    storage = LocalStorage(tmp_path)
    writer = WriteAheadLogWriter(storage, "", receiver, 1)
    write(writer)
    first = write_three(writer, 1, 0)
    write_three(writer, 4, 3 if accepted else 0)
    writer._segment.release()  # type: ignore[union-attr]
    spoil(tmp_path / first[0].handle.segment, first[1])
    successor = WriteAheadLogWriter(storage, "", receiver, 2, accepted=lambda _: first if accepted else [])
    assert successor.recovery.torn_tails == ()
    (damage,) = successor.recovery.damage
    assert damage.offset == first[1].handle.offset


def test_without_a_ledger_a_block_before_a_whole_one_is_damaged(tmp_path: Path, receiver: ReceiverId) -> None:
    """The one behind it may have been accepted, so that a person decides."""
    storage = LocalStorage(tmp_path)
    writer = WriteAheadLogWriter(storage, "", receiver, 1)
    write(writer)
    written = write_three(writer, 1, 0)
    writer._segment.release()  # type: ignore[union-attr]
    spoil(tmp_path / written[0].handle.segment, written[1])
    with pytest.raises(DamagedFrameError):
        list(scan_log(storage))
    scan = scan_log(storage, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
    assert [(frame.frame.header.sequence, frame.accepted) for frame in scan.settled()] == [
        (0, True),
        (1, None),
        (3, None),
    ]


def test_the_blocks_of_a_write_are_decided_by_the_next_write(open_writer: OpenWriter, storage: FaultyStorage) -> None:
    writer = open_writer(1)
    write_three(writer, 0)
    write_three(writer, 3, 2)
    write_three(writer, 6, 2)
    writer.close(8)
    open_writer(2)
    assert [frame.accepted for frame in scan_log(storage).settled()] == [True] * 3 + [False] * 3 + [True] * 3


def test_old_frames_with_one_last_accepted_are_each_a_write(open_writer: OpenWriter, storage: FaultyStorage) -> None:
    """As where the ledger refused them one after the other."""
    writer = open_writer(1)
    for at in range(3):
        write(writer, at)
    assert [frame.accepted for frame in scan_log(storage).settled()] == [False, False, None]


def test_a_write_that_fails_has_no_block(tmp_path: Path, receiver: ReceiverId) -> None:
    files = FaultyFiles()
    storage = LocalStorage(tmp_path, calls=files)
    writer = WriteAheadLogWriter(storage, "", receiver, 1)
    write_three(writer, 0)
    files.fail("fdatasync", errno.EIO)
    with pytest.raises(WriteFailedError):
        write_three(writer, 3, 2)
    again = write_three(writer, 3, 2)
    assert [info.sequence for info in again] == [6, 7, 8]
    writer.close(8)
    settled = [(frame.frame.header.sequence, frame.accepted) for frame in scan_log(storage).settled()]
    assert settled == [(0, True), (1, True), (2, True), (6, True), (7, True), (8, True)]
    files.close_all()


def test_a_write_of_several_blocks_is_one_append_and_one_sync(tmp_path: Path, receiver: ReceiverId) -> None:
    files = FaultyFiles()
    writer = WriteAheadLogWriter(LocalStorage(tmp_path, calls=files), "", receiver, 1)
    write(writer)
    files.calls.clear()
    write_three(writer, 1, 0)
    assert [call for call, _ in files.calls if call in ("writev", "fsync", "fdatasync")] == ["writev", "fdatasync"]
    files.close_all()


def test_a_write_of_several_blocks_is_one_object(receiver: ReceiverId) -> None:
    storage = open_storage(f"memory://bucket/{secrets.token_hex(8)}")
    writer = WriteAheadLogWriter(storage, "", receiver, 1)
    written = write_three(writer, 0)
    write_three(writer, 3, 2)
    assert len(storage.paths()) == 2
    assert {info.handle.segment for info in written} == {sorted(storage.paths())[0]}
    scan = scan_log(storage)
    assert [frame.accepted for frame in scan.settled()] == [True] * 3 + [None] * 3
    assert scan.damage == []
