"""Local copies: read if valid, never trusted over the log, and bounded."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.records import make_block

from headrace.blocks import BlockHandle, ReceiverId
from headrace.clock import ManualClock
from headrace.wal import local_copies
from headrace.wal.errors import SegmentMissingError
from headrace.wal.local_copies import BlockCopies, CopySettings
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_blocks
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter, WrittenFrame

RECEIVER = ReceiverId("flights", "kafka", 0)
MIB = 1 << 20


class Log:
    """A log in an object store, with copies. Each block has one record."""

    def __init__(self, folder: Path, max_bytes: int = MIB) -> None:
        self.storage: LogStorage = open_storage(f"memory://bucket/{secrets.token_hex(8)}")
        self.settings = CopySettings(max_bytes, str(folder))
        self.copies = self.open()
        self.writer = self.open_writer()
        self.frames: list[WrittenFrame] = []

    def open(self) -> BlockCopies:
        return BlockCopies(self.storage.url, self.settings)

    def open_writer(self) -> WriteAheadLogWriter:
        return WriteAheadLogWriter(self.storage, "", RECEIVER, 1, clock=ManualClock(1_700_000_000_000))

    def add(self, value: bytes) -> BlockHandle:
        batch, ranges = make_block([value], from_offset=len(self.frames))
        accepted = len(self.frames) - 1 if self.frames else None
        frame = self.writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=accepted)
        self.frames.append(frame)
        self.copies.write(frame.handle, frame.parts)
        return frame.handle

    def read(self, copies: BlockCopies | None = None) -> list[bytes]:
        handles = [frame.handle for frame in self.frames]
        return [block.batch.column("value")[0].as_py() for block in read_blocks(self.storage, handles, copies)]

    def delete_objects(self) -> None:
        for path in self.storage.paths():
            self.storage.delete(path)

    def path(self, handle: BlockHandle) -> Path:
        """The file of a block's copy."""
        return self.copies._path(handle)

    @property
    def files(self) -> list[Path]:
        return sorted(self.copies.folder.iterdir())


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path)
    yield made
    made.delete_objects()


def test_blocks_are_read_from_copies_and_the_log_is_not_asked(log: Log) -> None:
    log.add(b"a")
    log.add(b"b")
    log.delete_objects()
    copies = log.open()
    assert log.read(copies) == [b"a", b"b"]
    size = sum(frame.handle.length for frame in log.frames)
    assert (copies.counts.hits, copies.counts.bytes_read, copies.counts.misses) == (2, size, 0)
    assert (log.copies.counts.written, log.copies.counts.bytes_written) == (2, size)


def test_a_block_without_a_copy_is_read_from_the_log(log: Log) -> None:
    log.add(b"a")
    log.path(log.add(b"b")).unlink()
    log.add(b"c")
    copies = log.open()
    assert log.read(copies) == [b"a", b"b", b"c"]
    assert (copies.counts.hits, copies.counts.misses, copies.counts.invalid) == (2, 1, 0)
    log.delete_objects()
    with pytest.raises(SegmentMissingError):
        log.read(log.open())


def flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda data: data[: len(data) // 2],
        lambda data: data + b"\0",
        lambda data: bytes(len(data)),
        lambda data: b"",
        lambda data: data[:4] + b"\x02" + data[5:],
    ],
    ids=["a flipped bit", "torn", "longer", "zeros", "empty", "another version"],
)
def test_a_damaged_copy_is_counted_deleted_and_read_from_the_log(
    log: Log, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = log.path(log.add(b"a"))
    log.add(b"b")
    path.write_bytes(damage(path.read_bytes()))
    copies = log.open()
    assert log.read(copies) == [b"a", b"b"]
    assert (copies.counts.hits, copies.counts.invalid) == (1, 1)
    assert not path.exists()
    assert str(path) in caplog.text


def test_a_copy_of_another_block_is_not_taken_for_this_one(log: Log) -> None:
    """Both frames are valid and equally long; each contains a hash of its segment's path."""
    _, first, second = log.add(b"a"), log.add(b"b"), log.add(b"c")
    assert first.length == second.length
    log.path(first).write_bytes(log.path(second).read_bytes())
    copies = log.open()
    assert log.read(copies) == [b"a", b"b", b"c"]
    assert copies.counts.invalid == 1


def test_a_stream_created_again_does_not_read_the_firsts_copies(log: Log) -> None:
    """The same URL, receiver, epoch, number and clock: only the random part of the segment's name differs."""
    old = log.add(b"old")
    log.delete_objects()
    log.frames.clear()
    log.writer = log.open_writer()
    batch, ranges = make_block([b"new"])
    log.frames.append(log.writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None))
    new = log.frames[0].handle
    assert (new.offset, new.length) == (old.offset, old.length)
    assert new.segment.rpartition("-")[0] == old.segment.rpartition("-")[0]
    copies = log.open()
    assert log.read(copies) == [b"new"]
    assert (copies.counts.hits, copies.counts.misses) == (0, 1)


def test_a_link_in_place_of_a_copy_is_not_followed(log: Log, tmp_path: Path) -> None:
    path = log.path(log.add(b"a"))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    copies = log.open()
    assert log.read(copies) == [b"a"]
    assert (copies.counts.hits, copies.counts.invalid) == (0, 1)


def test_the_oldest_copies_are_deleted_when_the_bound_is_reached(tmp_path: Path) -> None:
    log = Log(tmp_path, max_bytes=5 * 4096)
    for number in range(8):
        log.add(b"%d" % number)
        assert len(log.files) <= 5, "a copy of less than 4 KiB takes 4 KiB"
    assert log.files == sorted(log.path(frame.handle) for frame in log.frames[-5:])
    copies = log.open()
    assert log.read(copies) == [b"%d" % number for number in range(8)]
    assert (copies.counts.hits, copies.counts.misses) == (5, 3)


def test_the_number_of_copies_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copies, "MAX_COPIES", 3)
    log = Log(tmp_path)
    for _ in range(5):
        log.add(b"x")
    assert len(log.files) == 3


def test_a_killed_writers_files_count_and_are_deleted_first(tmp_path: Path) -> None:
    """They count for the bound."""
    log = Log(tmp_path, max_bytes=4 * 4096)
    log.add(b"first")
    killed = """
import os, signal, sys
from headrace.blocks import BlockHandle
from headrace.wal.local_copies import BlockCopies, CopySettings
copies = BlockCopies(sys.argv[1], CopySettings(int(sys.argv[2]), sys.argv[3]))
copies.write(BlockHandle("a", 0, 4), [b"copy"])
partial = copies._path(BlockHandle("b", 0, 4)).with_suffix(".tmp")
partial.write_bytes(b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", killed, log.storage.url, str(4 * 4096), str(tmp_path)], check=False)
    assert len(log.files) == 3
    for path in log.files:
        age = 0 if path == log.path(log.frames[0].handle) else 3600
        os.utime(path, (time.time() - age, time.time() - age))
    log.add(b"second")
    assert len(log.files) == 4
    log.add(b"third")
    log.add(b"fourth")
    assert log.files == sorted(log.path(frame.handle) for frame in log.frames)


def test_a_block_larger_than_the_bound_is_not_copied(tmp_path: Path) -> None:
    log = Log(tmp_path, max_bytes=4096)
    log.add(b"a")
    log.add(secrets.token_bytes(10_000))
    assert len(log.files) == 1
    assert log.copies.counts.failures == 1


def test_a_full_disk_is_counted_logged_once_and_fails_nothing(
    log: Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def write(self, data: memoryview) -> int:
            self._file.write(data[:10])
            raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        real = os.fdopen
        patch.setattr("headrace.wal.local_copies.os.fdopen", lambda *given: FullDisk(real(*given)))
        log.add(b"a")
        log.add(b"b")
    assert log.files == [], "a part of a copy is not left on a full disk"
    assert log.copies.counts.failures == 2
    assert caplog.text.count("no space left on device") == 1
    log.add(b"c")
    assert log.read(log.open()) == [b"a", b"b", b"c"]
    assert log.copies.counts.written == 1


def test_a_folder_that_others_can_write_is_refused(log: Log) -> None:
    """The folder itself is private."""
    log.add(b"a")
    for folder in (log.copies.folder, log.copies.folder.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert log.files[0].stat().st_mode & 0o777 == 0o600
    log.copies.folder.parent.chmod(0o770)
    log.add(b"b")
    copies = log.open()
    assert log.read(copies) == [b"a", b"b"]
    assert (log.copies.counts.failures, copies.counts.hits, copies.counts.misses) == (1, 0, 2)


def test_a_link_in_place_of_the_folder_is_refused(log: Log, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    log.copies.folder.parent.symlink_to(tmp_path / "other")
    log.add(b"a")
    assert log.copies.counts.failures == 1
    assert list((tmp_path / "other").rglob("*.frame")) == []


def test_another_users_folder_is_refused(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.add(b"a")
    own = os.geteuid()
    copies = log.open()
    monkeypatch.setattr("headrace.wal.local_copies.os.geteuid", lambda: own + 1)
    assert log.read(copies) == [b"a"]
    assert copies.counts.hits == 0


def test_a_folder_that_a_cleaner_deleted_is_created_again(log: Log) -> None:
    """The cleaner is one of temporary files."""
    log.add(b"a")
    for path in log.files:
        path.unlink()
    log.copies.folder.rmdir()
    log.copies.folder.parent.rmdir()
    copies = log.open()
    assert log.read(copies) == [b"a"]
    assert copies.counts.misses == 1
    log.add(b"b")
    assert len(log.files) == 1


def test_two_logs_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = Log(tmp_path), Log(tmp_path)
    first.add(b"a")
    second.add(b"b")
    assert first.copies.folder != second.copies.folder
    assert len(first.files) == len(second.files) == 1


def test_copies_are_in_the_temporary_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert BlockCopies("s3://bucket/x/log", CopySettings(MIB)).folder.is_relative_to(tmp_path)


def test_copies_are_kept_in_the_order_of_age_and_not_of_names(tmp_path: Path) -> None:
    log = Log(tmp_path, max_bytes=3 * 4096)
    handles = [log.add(b"%d" % number) for number in range(3)]
    now = time.time_ns()
    for age, handle in enumerate([handles[1], handles[2], handles[0]]):
        os.utime(log.path(handle), ns=(now + age, now + age))
    log.add(b"new")
    assert not log.path(handles[1]).exists()
    assert log.path(handles[0]).exists()
