"""Every call to the operating system fails once, in every way, and the power goes: what was acknowledged is there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.faulty_files import FaultyFiles
from tests.support.records import make_block
from tests.support.segments import writer_options

from headrace.blocks import BlockInfo, ReceiverId
from headrace.clock import ManualClock
from headrace.wal.errors import StorageError, WalError, WriteFailedError, is_out_of_space
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log
from headrace.wal.storage import LocalStorage
from headrace.wal.writer import WriteAheadLogWriter

RECEIVER = ReceiverId("flights", "kafka", 0)


class Log:
    """A log on faulty files, and the blocks that its writers acknowledged: the ledger, where nothing is refused."""

    def __init__(self, folder: Path) -> None:
        self.files = FaultyFiles()
        self.folder = folder
        self.storage = LocalStorage(folder, calls=self.files)
        self.clock = ManualClock(1_700_000_000_000)
        self.acknowledged: list[tuple[BlockInfo, Any]] = []
        self.at = 0
        self.epoch = 0

    def open_writer(self, **options: Any) -> WriteAheadLogWriter:
        self.epoch += 1
        self.clock.advance(1)
        return WriteAheadLogWriter(
            self.storage,
            "",
            RECEIVER,
            self.epoch,
            clock=self.clock,
            accepted=self.accepted_in,
            **writer_options(**options),
        )

    def accepted_in(self, segment: str) -> list[BlockInfo]:
        return [block for block, _ in self.acknowledged if block.handle.segment == segment]

    def write(self, writer: WriteAheadLogWriter, size: int = 100) -> None:
        batch, ranges = make_block([Random(self.at).randbytes(size)] * 3, from_offset=self.at)
        last = [block.sequence for block, _ in self.acknowledged if block.epoch == self.epoch]
        frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=last[-1] if last else None)
        block = BlockInfo(RECEIVER, self.epoch, frame.sequence, 0, frame.handle, ranges, 3, frame.payload_bytes)
        self.acknowledged.append((block, batch))
        self.at += 3

    def check(self) -> None:
        """All that was acknowledged can be read, by handle and in order, with and without the ledger."""
        self.files.heal()
        for block, batch in self.acknowledged:
            assert read_block(self.storage, block.handle)[1].equals(batch)
        expected = {block.handle.segment for block, _ in self.acknowledged}
        for ledger in ({"accepted": self.accepted_in, "expected": expected}, {}):
            scan = scan_log(self.storage, **ledger)  # type: ignore[arg-type]
            seen = [frame.handle for frame in scan]
            assert [handle for handle in seen if handle in {block.handle for block, _ in self.acknowledged}] == [
                block.handle for block, _ in self.acknowledged
            ]
            assert scan.damage == []


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


WRITE_FAULTS: list[tuple[str, int, dict[str, Any]]] = [
    ("writev", errno.ENOSPC, {}),
    ("writev", errno.ENOSPC, {"written": 300}),
    ("writev", errno.EIO, {"written": 50}),
    ("writev", errno.EDQUOT, {}),
    ("fdatasync", errno.EIO, {}),
    ("fdatasync", errno.ENOSPC, {}),
]


@pytest.mark.parametrize(("call", "error", "how"), WRITE_FAULTS)
def test_a_failed_write_or_sync_poisons_only_its_segment(log: Log, call: str, error: int, how: dict[str, Any]) -> None:
    """The next segment goes on."""
    writer = log.open_writer()
    log.write(writer)
    poisoned = log.acknowledged[0][0].handle.segment
    length = log.storage.size(poisoned)
    log.files.fail(call, error, **how)
    with pytest.raises(WriteFailedError) as failure:
        log.write(writer)
    assert failure.value.segment == poisoned
    assert is_out_of_space(failure.value) == (error in (errno.ENOSPC, errno.EDQUOT))
    # What it took on the disk is free again.
    assert log.storage.size(poisoned) == length
    log.files.calls.clear()
    log.write(writer)
    assert log.acknowledged[1][0].handle.segment != poisoned
    name = poisoned.rsplit("/", 1)[1]
    assert not [each for each in log.files.calls if each[1] == name], "a poisoned file was touched again"
    log.check()


@pytest.mark.parametrize("call", ["open", "writev", "fsync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_a_segment_that_cannot_be_begun_leaves_nothing(log: Log, call: str, error: int) -> None:
    writer = log.open_writer(segment_bytes=1)
    log.write(writer)
    log.files.fail(call, error, path="*-000001-*.wal", written=40)
    with pytest.raises(WriteFailedError):
        log.write(writer)
    assert len(log.storage.paths()) == 1
    log.write(writer)
    log.check()


def test_a_full_disk_takes_blocks_again_when_there_is_room(log: Log) -> None:
    writer = log.open_writer()
    log.write(writer, 2000)
    log.files.room = 5000
    used = sum(path.stat().st_size for path in log.folder.rglob("*") if path.is_file())
    for _ in range(20):
        with pytest.raises(WriteFailedError) as failure:
            log.write(writer, 20_000)
        assert is_out_of_space(failure.value)
    # Twenty tries left no more than the end of the segment before them.
    left = sum(path.stat().st_size for path in log.folder.rglob("*") if path.is_file())
    assert left <= used
    log.files.room = 100_000
    log.write(writer, 20_000)
    log.check()


def test_a_short_write_is_continued(log: Log) -> None:
    writer = log.open_writer()
    log.files.fail("writev", None, written=7, times=5)
    log.write(writer)
    log.check()


def test_an_error_on_close_is_too_late_to_matter(log: Log) -> None:
    writer = log.open_writer(segment_bytes=1)
    log.files.fail("close", errno.EIO, path="*.wal")
    log.write(writer)
    log.write(writer)
    writer.close()
    log.check()


def test_a_disk_that_turns_read_only_is_reported_and_reads_go_on(log: Log) -> None:
    writer = log.open_writer()
    log.write(writer)
    log.files.read_only = True
    for _ in range(2):
        with pytest.raises(WriteFailedError, match="Read-only file system"):
            log.write(writer)
    assert read_block(log.storage, log.acknowledged[0][0].handle)[1].equals(log.acknowledged[0][1])
    # A successor can read what there is, though it can mend nothing.
    successor = log.open_writer()
    with pytest.raises(WriteFailedError, match="Read-only file system"):
        log.write(successor)
    log.files.read_only = False
    log.write(successor)
    log.check()


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_directory_that_vanishes_fails_only_the_next_write(log: Log, how: str) -> None:
    """An open file takes writes and syncs without an error long after nobody can find it."""
    writer = log.open_writer()
    log.write(writer)
    if how == "removed":
        shutil.rmtree(log.folder)
    else:
        log.folder.rename(log.folder.with_name("elsewhere"))
    with pytest.raises(WriteFailedError, match="no longer in its directory"):
        log.write(writer)
    lost = log.acknowledged.pop()[0]
    log.write(writer)
    with pytest.raises(WalError, match="missing"):
        read_block(log.storage, lost.handle)
    log.check()


def test_a_torn_tail_that_cannot_be_cut_is_left_and_passed_over(log: Log) -> None:
    writer = log.open_writer()
    log.write(writer)
    segment = log.acknowledged[0][0].handle.segment
    with (log.folder / segment).open("ab") as file:
        file.write(b"torn")
    length = log.storage.size(segment)
    writer.roll_if_due(None)
    log.files.read_only = True
    successor = log.open_writer()
    (tail,) = successor.recovery.torn_tails
    assert (tail.length, tail.kept) == (4, None)
    log.files.heal()
    log.write(successor)
    assert log.storage.size(segment) == length
    log.check()


def script(log: Log) -> None:
    """A life of a log: what can fail in it is every call that it makes."""
    crashed = log.open_writer(segment_bytes=3000)
    for _ in range(3):
        try_to(lambda: log.write(crashed))
    left = crashed._segment
    if left is not None:
        with (log.folder / left.path).open("ab") as file:
            file.write(b"torn")
    holder: list[WriteAheadLogWriter] = []
    try_to(lambda: holder.append(log.open_writer()))
    for successor in holder:
        for _ in range(2):
            try_to(partial(log.write, successor))
        try_to(partial(successor.close, None))


def try_to(step: Callable[[], object]) -> None:
    try:
        step()
    except WalError as error:
        assert str(error)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_whichever_call_fails_nothing_acknowledged_is_lost(tmp_path: Path, error: int) -> None:
    counted = Log(tmp_path / "counted")
    script(counted)
    calls = len(counted.files.calls)
    assert calls > 60
    for number in range(calls):
        log = Log(tmp_path / str(number))
        log.files.fail("*", error, after=number, written=Random(number).choice((0, 30)))
        script(log)
        log.files.heal()
        log.write(log.open_writer())
        log.check()


@pytest.mark.parametrize("exclusive", [False, True])
def test_an_atomic_write_that_fails_leaves_the_old_or_new_file(tmp_path: Path, exclusive: bool) -> None:
    # A few more for each folder above the test's.
    """It does so wherever the write fails."""
    for number in range(80):
        files = FaultyFiles()
        storage = LocalStorage(tmp_path / str(number), calls=files)
        old = None
        if not exclusive:
            storage.write_atomically("a/b", b"old")
            old = b"old"
        files.fail("*", errno.EIO, after=number, written=2)
        files.calls.clear()
        try:
            storage.write_atomically("a/b", b"new", exclusive=exclusive)
        except StorageError:
            files.heal()
            assert (storage.read("a/b") if storage.exists("a/b") else None) in (old, b"new")
        else:
            files.heal()
            assert storage.read("a/b") == b"new"
        assert storage.paths() in ([], ["a/b"])
    assert len(files.calls) < 80, "not every call has failed"


@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    """After each cut the next writer takes over what chance has left of the last one's unsynced bytes."""
    random = Random(seed)
    log = Log(tmp_path / "log")
    for _ in range(5):
        writer = log.open_writer(segment_bytes=random.choice((1, 5000, 1 << 20)))
        for _ in range(random.randint(0, 5)):
            if random.random() < 0.3:
                call = random.choice(("writev", "fsync", "fdatasync", "close", "ftruncate", "unlink", "open", "mkdir"))
                path = random.choice(("*", log.folder.name, log.folder.parent.name))
                log.files.fail(
                    call, random.choice((errno.EIO, errno.ENOSPC)), path=path, written=random.randint(0, 900)
                )
            try_to(partial(log.write, writer, random.choice((10, 700))))
        if random.random() < 0.2:
            writer.close(None)
        log.files.heal()
        log.files.cut_power(random)
    log.write(log.open_writer())
    log.check()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("what", ["segment", "file"])
@pytest.mark.parametrize("folder", ["log", "storage"])
@pytest.mark.parametrize("how", ["sync fails", "killed", "killed, then another process"])
def test_a_folder_outlives_a_power_cut_whoever_made_it_unsynced(
    tmp_path: Path, seed: int, what: str, folder: str, how: str
) -> None:
    files = FaultyFiles()
    root = tmp_path / "storage"
    storage = LocalStorage(root, calls=files)
    if how == "sync fails":
        # The folder whose entries name the one that is made.
        above = {"log": root.name, "storage": tmp_path.name}[folder]
        files.fail("fsync", errno.EIO, path=above)
        with pytest.raises(StorageError):
            storage.write_atomically("log/kafka-0/other", b"")
        assert (root / "log").exists() == (folder == "log")
    else:
        # Killed between making it and syncing the one it is in.
        files.mkdir(root)
        if folder == "log":
            files.fsync(files.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
            files.mkdir(root / "log")
    if how == "killed, then another process":
        storage = LocalStorage(root / "log", calls=files).below("kafka-0")
    else:
        storage = storage.below("log").below("kafka-0")
    if what == "segment":
        segment = storage.create_segment("a")
        segment.append([b"acknowledged"])
        segment.close()
    else:
        storage.write_atomically("a", b"acknowledged")
    files.close_all()
    files.cut_power(Random(seed))
    assert (root / "log" / "kafka-0" / "a").read_bytes() == b"acknowledged"


def test_folders_are_synced_once_for_however_many_segments(tmp_path: Path) -> None:
    files = FaultyFiles()
    storage = LocalStorage(tmp_path, calls=files)
    for number in range(3):
        files.calls.clear()
        storage.below("log").create_segment(f"kafka-0/{number}").close()
        assert ("fsync" in {call for call, _ in files.calls}) == (number == 0)
    # One that was removed and made again is another.
    shutil.rmtree(tmp_path / "log")
    files.calls.clear()
    storage.create_segment("log/kafka-0/4").close()
    assert [name for call, name in files.calls if call == "fsync"] == [tmp_path.name, "log"]


@pytest.mark.parametrize("seed", range(20))
def test_an_atomic_write_outlives_a_power_cut(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    files = FaultyFiles()
    storage = LocalStorage(tmp_path / "manifests", calls=files)
    storage.write_atomically("a/b", b"first" * 300)
    files.cut_power(random)
    assert storage.read("a/b") == b"first" * 300
    storage.write_atomically("a/b", b"second" * 300)
    files.fail(random.choice(("fsync", "replace", "writev")), errno.EIO)
    with pytest.raises(StorageError):
        storage.write_atomically("a/b", b"third" * 300)
    files.cut_power(random)
    # Whether the third came through is not known, but it is one of the two, and whole.
    assert storage.read("a/b") in (b"second" * 300, b"third" * 300)


def test_a_second_sync_after_a_failed_one_saves_nothing(tmp_path: Path) -> None:
    """What the faulty files do, as kernels do: rule 11 is about this."""
    files = FaultyFiles()
    path = tmp_path / "a"
    storage = LocalStorage(tmp_path, calls=files)
    file = storage.create_segment("a")
    file.append([b"0123456789"])
    fd = next(fd for fd, (of, _) in files._open.items() if of == path)
    files.writev(fd, [memoryview(b"lost")])
    files.fail("fdatasync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        files.fdatasync(fd)
    files.fdatasync(fd)
    assert storage.read("a") == b"0123456789lost"
    files.cut_power(Random(0))
    assert storage.read("a").rstrip(b"\0") == b"0123456789"
    file.close()
