"""A disk that is really full, really read-only, really gone: a tmpfs of two megabytes, mounted for each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DISK_BYTES = 2 << 20


def run_mounted(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of Python whose first argument is a mounted tmpfs, in a mount namespace of its own: nothing of it
    is seen outside, or left behind. Under root as it is; else as the root of a user namespace."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {folder} && exec {sys.executable} - {folder}"
    flags = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    return subprocess.run(
        ["unshare", *flags, "sh", "-c", mount],
        input=PRELUDE + script,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


PRELUDE = """
import errno, gc, os, subprocess, sys
from pathlib import Path
from random import Random
from headrace.blocks import ReceiverId
from tests.support.records import make_block
from headrace.wal.errors import StorageError, WriteFailedError, is_out_of_space
from headrace.wal.storage import LocalStorage
from headrace.wal.recovery import scan_log
from headrace.wal.reader import read_block
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

disk = Path(sys.argv[1])
storage = LocalStorage(disk / "log")
acknowledged = []

def open_writer(epoch):
    return WriteAheadLogWriter(storage, "", ReceiverId("flights", "kafka", 0), epoch, segments=SegmentSettings(700_000))

def write(writer, size=100_000):
    at = len(acknowledged)
    batch, ranges = make_block([Random(at).randbytes(size)], from_offset=at)
    acknowledged.append((writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle, batch))

def write_until_full(writer):
    for _ in range(100):
        try:
            write(writer)
        except WriteFailedError as error:
            return error
    raise AssertionError("the disk took more than it has")

def check():
    for handle, batch in acknowledged:
        assert read_block(storage, handle)[1].equals(batch)
    assert [frame.handle for frame in scan_log(storage)] == [handle for handle, _ in acknowledged]
"""


@pytest.fixture(scope="module", autouse=True)
def mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where the kernel lets nobody mount: neither root, nor a user namespace."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) to mount a small disk with")
    tried = run_mounted("assert disk.is_mount()", tmp_path_factory.mktemp("try") / "disk")
    if tried.returncode:
        pytest.skip(f"no small disk can be mounted here, as root or in a user namespace: {tried.stderr.strip()[-300:]}")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "disk"
    assert not (tmp_path / "disk").is_mount()


def check_script(script: str, folder: Path) -> None:
    done = run_mounted(script, folder)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_refuses_blocks_until_there_is_room_again(folder: Path) -> None:
    """No block that was acknowledged is lost."""
    check_script(
        """
writer = open_writer(1)
error = write_until_full(writer)
assert is_out_of_space(error), error
free = os.statvfs(disk).f_bavail
for _ in range(10):
    assert is_out_of_space(write_until_full(writer))
# What the refused writes took is given back: each try fails for lack of room, not the one before it.
assert os.statvfs(disk).f_bavail >= free - 1, (free, os.statvfs(disk).f_bavail)
check()
# Cleanup takes the oldest segment.
oldest = storage.paths()[0]
assert storage.delete(oldest)
acknowledged[:] = [each for each in acknowledged if each[0].segment != oldest]
count = len(acknowledged)
write(writer)
assert len(acknowledged) == count + 1
writer.close()
check()
""",
        folder,
    )


def test_a_successor_starts_on_a_full_disk(folder: Path) -> None:
    check_script(
        """
writer = open_writer(1)
write(writer)
segment = acknowledged[0][0].segment
with (disk / "log" / segment).open("ab") as file:
    file.write(b"torn")
(disk / "filler").write_bytes(b"")
with (disk / "filler").open("ab", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
del writer
gc.collect()
successor = open_writer(2)
(tail,) = successor.recovery.torn_tails
assert tail.length == 4
assert is_out_of_space(write_until_full(successor))
(disk / "filler").unlink()
write(successor)
check()
""",
        folder,
    )


def test_an_atomic_write_on_a_full_disk_leaves_the_old_file(folder: Path) -> None:
    check_script(
        """
storage.write_atomically("manifest", b"old")
try:
    storage.write_atomically("manifest", bytes(5_000_000))
except StorageError as error:
    assert is_out_of_space(error), error
else:
    raise AssertionError("the disk took more than it has")
assert storage.read("manifest") == b"old"
assert [path.name for path in (disk / "log").iterdir()] == ["manifest"]
storage.write_atomically("manifest", b"new")
assert storage.read("manifest") == b"new"
""",
        folder,
    )


def test_a_disk_that_is_remounted_read_only_is_reported_and_read(folder: Path) -> None:
    check_script(
        """
writer = open_writer(1)
write(writer)
writer.close()
writer = open_writer(2)
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
try:
    write(writer)
except WriteFailedError as error:
    assert "Read-only file system" in str(error), error
else:
    raise AssertionError("a read-only disk took a block")
check()
subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
write(writer)
check()
""",
        folder,
    )


def test_a_disk_that_is_unmounted_below_the_writer_is_noticed(folder: Path) -> None:
    check_script(
        """
writer = open_writer(1)
write(writer)
subprocess.run(["umount", "-l", str(disk)], check=True)
try:
    write(writer)
except WriteFailedError as error:
    assert "no longer in its directory" in str(error), error
else:
    raise AssertionError("a block went where nobody finds it")
""",
        folder,
    )
