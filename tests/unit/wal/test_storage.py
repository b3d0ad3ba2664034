"""Storages keep what they are given, all of it or nothing, below their root."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from fsspec.asyn import AsyncFileSystem
from tests.support.faulty_files import FaultyFiles
from tests.support.faulty_storage import EVERYTHING, FaultyStorage, WriteFault
from tests.support.records import make_block

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.wal import object_storage
from headrace.wal.errors import (
    PathEscapesRootError,
    StorageError,
    StoredFileExistsError,
    StoredFileMissingError,
    UnknownStorageError,
    WriteFailedError,
    is_out_of_space,
)
from headrace.wal.log_storage import LogStorage
from headrace.wal.object_storage import FsspecClient, ObjectStorage
from headrace.wal.reader import read_blocks
from headrace.wal.recovery import scan_log
from headrace.wal.scan import scan_segment
from headrace.wal.storage import LocalStorage, open_storage
from headrace.wal.writer import WriteAheadLogWriter


@pytest.fixture(params=["path", "file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogStorage]:
    """A plain path, its URL, and an fsspec file system."""
    unique = secrets.token_hex(8)  # fsspec's memory is shared by the whole process.
    url = {
        "path": str(tmp_path / "a b" / unique),
        "file": (tmp_path / "a b" / unique).as_uri(),
        "memory": f"memory://bucket/{unique}",
    }[request.param]
    yield open_storage(url)
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/bucket/{unique}"):
            memory.rm(f"/bucket/{unique}", recursive=True)


def test_a_file_is_what_was_last_written(storage: LogStorage) -> None:
    storage.write_atomically("a/b/one.json", b"first")
    storage.write_atomically("a/b/one.json", pa.py_buffer(b"second"))
    assert storage.read("a/b/one.json") == b"second"
    assert storage.size("a/b/one.json") == 6
    assert storage.exists("a/b/one.json")
    assert not storage.exists("a/b")
    assert not storage.exists("a/b/two.json")


def test_an_empty_file_is_a_file(storage: LogStorage) -> None:
    storage.write_atomically("empty", b"")
    assert storage.read("empty") == b""
    assert storage.exists("empty")


def test_exclusive_writes_refuse_a_second(storage: LogStorage) -> None:
    storage.write_atomically("a/manifest", b"first", exclusive=True)
    with pytest.raises(StoredFileExistsError, match="a/manifest"):
        storage.write_atomically("a/manifest", b"second", exclusive=True)
    assert storage.read("a/manifest") == b"first"
    assert storage.paths() == ["a/manifest"]


def test_lists_are_sorted_and_of_a_directory(storage: LogStorage) -> None:
    for path in ("b", "a/2", "a/10", "a/c/1", "ab/1"):
        storage.write_atomically(path, b"x")
    assert storage.paths() == ["a/10", "a/2", "a/c/1", "ab/1", "b"]
    assert storage.paths("a") == ["a/10", "a/2", "a/c/1"]
    assert storage.paths("nothing") == []
    assert storage.below("a").paths() == ["10", "2", "c/1"]


def test_a_storage_below_is_the_same_store(storage: LogStorage) -> None:
    below = storage.below("x/y")
    below.write_atomically("z", b"1")
    assert storage.read("x/y/z") == b"1"
    again = open_storage(below.url)
    assert again.read("z") == b"1"


def test_what_is_missing_is_named(storage: LogStorage) -> None:
    for act in (storage.read, storage.size, storage.open):
        with pytest.raises(StoredFileMissingError, match="no/such"):
            act("no/such")


def test_two_cleanups_that_delete_one_object_at_once_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"memory://bucket/{secrets.token_hex(8)}")
    storage.write_atomically("a/b", b"one")
    looked = FsspecClient.size

    def look_and_be_late(client: FsspecClient, path: str) -> int | None:
        size = looked(client, path)
        client.delete(path)
        return size

    monkeypatch.setattr(FsspecClient, "size", look_and_be_late)
    assert not storage.delete("a/b")


def test_delete_says_whether_there_was_one(storage: LogStorage) -> None:
    storage.write_atomically("a/b", b"1")
    assert storage.delete("a/b")
    assert not storage.delete("a/b")
    assert not storage.exists("a/b")
    storage.write_atomically("a/b", b"2", exclusive=True)


def test_a_killed_atomic_writes_file_is_removed_when_it_is_old(tmp_path: Path) -> None:
    files = FaultyFiles()
    storage = LocalStorage(tmp_path, calls=files)
    for call in ("replace", "unlink"):
        files.fail(call, errno.EIO)
    with pytest.raises(StorageError):
        storage.write_atomically("a/b", b"1")
    assert list((tmp_path / "a").iterdir()), "the write left nothing"
    assert storage.remove_partial_writes(older_than_s=3600) == 0
    assert storage.remove_partial_writes(older_than_s=-1) == 1
    assert list((tmp_path / "a").iterdir()) == []


def test_a_partial_write_that_cannot_be_removed_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    storage = LocalStorage(tmp_path, calls=files)
    left = tmp_path / ".b.0123456789abcdef.tmp"
    left.touch()
    files.fail("unlink", errno.EACCES)
    assert storage.remove_partial_writes(older_than_s=-1) == 0
    assert str(left) in caplog.text
    assert storage.remove_partial_writes(older_than_s=-1) == 1


def test_a_storage_without_partial_writes_keeps_its_files(storage: LogStorage) -> None:
    assert storage.remove_partial_writes(older_than_s=-1) == 0
    storage.write_atomically("a/b", b"1")
    assert storage.remove_partial_writes(older_than_s=-1) == 0
    assert storage.paths() == ["a/b"]


def test_truncate_keeps_the_beginning(storage: LogStorage) -> None:
    storage.write_atomically("a", b"0123456789")
    storage.truncate("a", 4)
    assert storage.read("a") == b"0123"


def test_reads_end_where_the_file_does(storage: LogStorage) -> None:
    storage.write_atomically("a", b"0123456789")
    with storage.open("a") as file:
        assert file.size == 10
        assert file.read_at(2, 3).to_pybytes() == b"234"
        assert file.read_at(8, 1 << 50).to_pybytes() == b"89"
        assert file.read_at(10, 1).to_pybytes() == b""
        assert file.read_at(1 << 40, 1 << 40).to_pybytes() == b""


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\0b", "a\\..\\b", ".."]
)
def test_no_path_leaves_the_root(storage: LogStorage, path: str) -> None:
    acts: list[Callable[[], object]] = [
        lambda: storage.read(path),
        lambda: storage.open(path),
        lambda: storage.size(path),
        lambda: storage.exists(path),
        lambda: storage.delete(path),
        lambda: storage.truncate(path, 0),
        lambda: storage.write_atomically(path, b"x"),
    ]
    if path:
        acts += [lambda: storage.paths(path), lambda: storage.below(path)]
    for act in acts:
        with pytest.raises(PathEscapesRootError):
            act()


def test_the_log_works_on_it(storage: LogStorage, receiver: ReceiverId) -> None:
    writer = WriteAheadLogWriter(storage, "flights/log", receiver, 1)
    blocks = [make_block([b"v%d" % i], from_offset=i) for i in range(3)]
    written = [writer.write(b, r, cut_time_ms=0, last_accepted_sequence=None) for b, r in blocks]
    writer.close(2)
    log = storage.below("flights/log")
    got = list(read_blocks(log, [frame.handle for frame in written]))
    assert [block.batch for block in got] == [batch for batch, _ in blocks]
    assert [f.header.sequence for f in scan_log(log)] == [0, 1, 2]
    assert len(log.paths()) == (1 if storage.appends else 3)
    assert all(frame.handle.segment in log.paths() for frame in written)


def test_symbolic_links_do_not_lead_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(PathEscapesRootError):
        LocalStorage(root).read("link/secret")
    with pytest.raises(PathEscapesRootError):
        LocalStorage(root).write_atomically("link/new", b"x")


def test_a_root_behind_a_symbolic_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LocalStorage(tmp_path / "link").write_atomically("a", b"x")
    assert LocalStorage(tmp_path / "real").read("a") == b"x"


@pytest.mark.parametrize("failing", ["fsync", "writev"])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    storage = LocalStorage(tmp_path)
    storage.write_atomically("a", b"old")

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(StorageError, match="No space left"):
            storage.write_atomically("a", b"new")
    assert storage.read("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.write
    monkeypatch.setattr(os, "writev", lambda fd, views: plain(fd, views[0][:3]))
    storage = LocalStorage(tmp_path)
    storage.write_atomically("a", b"0123456789")
    file = storage.create_segment("b")
    file.append([b"0123", b"", pa.py_buffer(b"456789")])
    assert storage.read("a") == storage.read("b") == b"0123456789"
    file.close()


def test_temporary_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".a.0123.tmp").write_bytes(b"cut off by a crash")
    assert LocalStorage(tmp_path).paths() == []


def test_a_segment_is_created_once(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create_segment("a").close()
    with pytest.raises(StoredFileExistsError):
        storage.create_segment("a")


def test_unknown_schemes_say_what_to_install() -> None:
    with pytest.raises(UnknownStorageError, match="nosuch://"):
        open_storage("nosuch://bucket/path")


def test_another_host_in_a_file_url_is_refused() -> None:
    with pytest.raises(StorageError, match="three slashes"):
        open_storage("file://data/log")


@pytest.mark.parametrize("written", [0, EVERYTHING])
def test_an_object_whose_creation_failed_does_not_count(receiver: ReceiverId, written: int) -> None:
    """The store may have it all the same: the answer was lost, not the object."""
    storage = FaultyStorage(open_storage(f"memory://bucket/{secrets.token_hex(8)}"))
    writer = WriteAheadLogWriter(storage, "", receiver, 1)
    batch, ranges = make_block([b"x"])
    writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    storage.write_faults.append(WriteFault(written))
    batch, ranges = make_block([b"y"], from_offset=1)
    with pytest.raises(WriteFailedError):
        writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=0)
    writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=0)
    scan = scan_log(storage)
    assert [(s.frame.header.sequence, s.accepted) for s in scan.settled()] == [(0, True), (2, None)]
    assert [tail.ranges for tail in scan.torn_tails] == ([ranges] if written else [])


def test_objects_are_conditionally_created(receiver: ReceiverId, monkeypatch: pytest.MonkeyPatch) -> None:
    # The random part of their names would keep the two writers apart.
    monkeypatch.setattr("headrace.wal.writer.secrets.token_hex", lambda size: "0" * 2 * size)
    storage = open_storage(f"memory://bucket/{secrets.token_hex(8)}")
    clock = ManualClock(1_700_000_000_000)
    writer, rival = (WriteAheadLogWriter(storage, "", receiver, 1, clock=clock) for _ in range(2))
    batch, ranges = make_block([b"x"])
    handle = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle
    other, other_ranges = make_block([b"y"])
    with pytest.raises(WriteFailedError, match="already"):
        rival.write(other, other_ranges, cut_time_ms=0, last_accepted_sequence=None)
    assert len(list(scan_segment(storage, handle.segment, newest=True))) == 1


class HangingStore(AsyncFileSystem):  # type: ignore[misc]
    """A driver with asyncio whose server does not answer writes. ``stored``: the names of objects that it got."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[str] = []

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        self.stored.append(path)
        await asyncio.sleep(60)

    async def _find(self, path: str, **_: object) -> list[str]:
        return []


class SilentStore(HangingStore):
    """Its server does not answer reads either."""

    async def _find(self, path: str, **_: object) -> list[str]:
        await asyncio.sleep(60)
        return []

    async def _info(self, path: str, **_: object) -> dict[str, object]:
        if path.endswith("known"):
            return {"name": path, "size": 10, "type": "file"}
        await asyncio.sleep(60)
        return {}

    async def _cat_file(self, path: str, **_: object) -> bytes:
        await asyncio.sleep(60)
        return b""

    async def _rm_file(self, path: str, **_: object) -> None:
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    "call",
    [
        lambda storage: storage.paths(),
        lambda storage: storage.exists("a"),
        lambda storage: storage.open("known").read_at(0, 5),
        lambda storage: storage.delete("known"),
    ],
    ids=["list", "check", "read", "delete"],
)
def test_a_call_of_an_object_store_has_an_end(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[LogStorage], object]
) -> None:
    monkeypatch.setattr(object_storage, "CALL_SECONDS", 0.2)
    monkeypatch.setattr(object_storage, "LISTING_SECONDS", 0.2)
    storage = ObjectStorage(FsspecClient(SilentStore()), "bucket", "s3://bucket")
    began = time.monotonic()
    with pytest.raises(StorageError, match="no answer in"):
        call(storage)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_write_to_an_object_store_fails_at_its_timeout(exclusive: bool) -> None:
    """The write hangs."""
    storage = ObjectStorage(FsspecClient(HangingStore(), write_timeout_s=0.2), "bucket", "s3://bucket")
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"no answer in 0\.\d s; the object may be stored") as raised:
        storage.write_atomically("a", b"1", exclusive=exclusive)
    assert time.monotonic() - began < 5
    assert not is_out_of_space(raised.value)


def test_a_block_whose_write_hangs_is_written_to_another_segment(receiver: ReceiverId) -> None:
    store = HangingStore()
    storage = ObjectStorage(FsspecClient(store, write_timeout_s=0.1), "bucket", "s3://bucket")
    writer = WriteAheadLogWriter(storage, "", receiver, 1, clock=ManualClock(1_700_000_000_000))
    batch, ranges = make_block([b"x"])
    for sequence in range(2):
        with pytest.raises(WriteFailedError, match=f"Block {sequence} was not written"):
            writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
    assert len(set(store.stored)) == 2


def test_an_object_of_equal_bytes_is_the_one_without_an_answer() -> None:
    """The answer to its write was lost."""
    storage = open_storage(f"memory://bucket/{secrets.token_hex(8)}")
    storage.write_atomically("a", b"1", exclusive=True)
    storage.write_atomically("a", b"1", exclusive=True)
    with pytest.raises(StoredFileExistsError):
        storage.write_atomically("a", b"2", exclusive=True)


def test_a_driver_without_conditional_creation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    plain = type(memory).pipe_file
    monkeypatch.setattr(type(memory), "pipe_file", lambda self, path, value, **_: plain(self, path, value))
    with pytest.raises(UnknownStorageError, match=r"MemoryFileSystem, .* cannot create an object only where"):
        open_storage("memory://bucket/path")


@pytest.mark.parametrize("scheme", ["hdfs", "http", "ftp", "mock"])
def test_schemes_that_cannot_be_promised_are_refused(scheme: str) -> None:
    with pytest.raises(UnknownStorageError, match=f"{scheme}://"):
        open_storage(f"{scheme}://host/path")


def test_an_unreadable_disk_is_named_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.write_atomically("a", b"0123456789")

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with storage.open("a") as file, monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(StorageError, match="read 4 bytes at 3 of 'a': Input/output error"):
            file.read_at(3, 4)
