"""A fault-injecting file system: real files, with calls that fail on demand and simulated power cuts.

files = FaultyFiles()
storage = LocalStorage(folder, calls=files)
files.fail("fdatasync", errno.EIO)          # the next call
files.fail("writev", errno.ENOSPC, written=100, times=3)
files.room = 1_000_000                      # the disk is full after so many more bytes
files.read_only = True
files.cut_power(Random(7))                  # bytes that are not durable are kept, lost or zeroed, at random
files.left_out = "LocalSegmentFile.append: fdatasync"   # this sync of headrace.wal.storage does nothing
"""

from __future__ import annotations

import ast
import errno
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from headrace.wal import storage
from headrace.wal.storage import SystemCalls

_SECTOR = 512


@dataclass(slots=True)
class _Fault:
    call: str
    error: int | None
    path: str
    written: int
    after: int
    times: int


class _Inode:
    """A file's content, and the part of it that would survive a power cut."""

    def __init__(self, content: bytes = b"", *, durable: bool = False) -> None:
        self.content = bytearray(content)
        self.durable = content if durable else b""
        self._doomed: list[tuple[int, int]] = []

    def sync(self) -> None:
        """Make the content durable, except what a failed sync has dropped: the kernel marks those pages clean."""
        kept = bytearray(self.content)
        for start, end in self._doomed:
            old = self.durable[start:end]
            kept[start:end] = (old + bytes(end - start - len(old)))[: max(0, len(kept) - start)]
        self.durable = bytes(kept)

    def fail_sync(self) -> None:
        self._doomed.append((len(self.durable), len(self.content)))

    def after_power_cut(self, random: Random) -> bytes:
        """The durable bytes, and after them a random number of bytes whose sectors are randomly written or zero."""
        if len(self.content) < len(self.durable):
            # It was cut, and that was not synced.
            return random.choice((bytes(self.content), self.durable))
        length = random.randint(len(self.durable), len(self.content))
        left = bytearray(self.durable)
        while len(left) < length:
            sector = bytes(self.content[len(left) : min(length, len(left) + _SECTOR)])
            left += sector if random.random() < 0.5 else bytes(len(sector))
        return bytes(left)


class FaultyFiles(SystemCalls):
    """The calls of one storage and of those below it. ``calls`` lists the calls in order: (call, file's name)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.room: int | None = None
        """How many more bytes fit on the disk; None: no bound."""
        self.read_only = False
        self.left_out: str | None = None
        """A sync that does nothing, as `sync_site` names it: a test shows that it fails without it."""
        self._faults: list[_Fault] = []
        self._bad_sectors: list[tuple[str, int, int]] = []
        self._open: dict[int, tuple[Path, _Inode | None]] = {}
        # The current directory entries, and those that would survive a power cut; None is a directory.
        self._live: dict[Path, _Inode | None] = {}
        self._durable: dict[Path, _Inode | None] = {}

    def fail(
        self, call: str, error: int | None, *, path: str = "*", written: int = 0, after: int = 0, times: int = 1
    ) -> None:
        """Make the next ``times`` calls on files whose name matches ``path`` fail, after ``after`` have succeeded.

        ``call`` is the call's name; "*" matches any call. ``error`` is an errno. A write first writes ``written``
        bytes; with None as ``error`` it is a short write without an error.
        """
        self._faults.append(_Fault(call, error, path, written, after, times))

    def spoil(self, path: str, start: int, stop: int) -> None:
        """Make the bytes [start, stop) of files whose name matches ``path`` unreadable: reading them fails with EIO."""
        self._bad_sectors.append((path, start, stop))

    def heal(self) -> None:
        """Remove all faults, and the bound on the disk's room."""
        self._faults.clear()
        self._bad_sectors.clear()
        self.room = None
        self.read_only = False

    def cut_power(self, random: Random) -> None:
        """Put the files into a state that a power cut could leave, at random, and go on from it. Files that were open
        must not be written to any more."""
        contents = {
            id(inode): inode.after_power_cut(random)
            for inode in (*self._live.values(), *self._durable.values())
            if inode is not None
        }
        left: dict[Path, _Inode | None] = {}
        gone: set[Path] = set()
        for path in sorted(self._live.keys() | self._durable.keys()):
            sides = [side for side in (self._live, self._durable) if path.parent not in gone]
            chosen = random.choice(sides) if sides else {}
            if path not in chosen:
                gone.add(path)
                _remove(path)
                continue
            inode = chosen[path]
            left[path] = None if inode is None else _Inode(contents[id(inode)], durable=True)
            if inode is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(contents[id(inode)])
        self._live, self._durable = left, dict(left)

    def close_all(self) -> None:
        """Close the files that are still open, as the end of their process does."""
        for fd in list(self._open):
            self._open.pop(fd)
            super().close(fd)

    # -- the calls -------------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o640) -> int:
        self._meet("open", path, writes=bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)))
        fd = super().open(path, flags, mode)
        inode: _Inode | None = None
        if flags & os.O_CREAT:
            inode = self._live[path] = _Inode()
        elif not flags & os.O_DIRECTORY:
            self._adopt(path)
            inode = self._live[path]
        self._open[fd] = (path, inode)
        return fd

    def close(self, fd: int) -> None:
        path, _ = self._open.pop(fd)
        super().close(fd)
        self._meet("close", path)

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int:
        path, inode = self._open[fd]
        data = b"".join(parts)
        fault = self._next_fault("writev", path)
        through = len(data) if fault is None else min(len(data), fault.written)
        error = None if fault is None else fault.error
        if self.room is not None and through > self.room:
            # As on a real disk: what fits is written, and the next call fails.
            through, error = self.room, errno.ENOSPC if self.room == 0 else None
        if self.read_only:
            through, error = 0, errno.EROFS
        written = os.write(fd, data[:through]) if through else 0
        if inode is not None:
            inode.content += data[:written]
        if self.room is not None:
            self.room -= written
        if error is not None:
            raise OSError(error, os.strerror(error))
        return written

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        path, _ = self._open[fd]
        self._meet("pread", path)
        for name, start, stop in self._bad_sectors:
            if fnmatch(path.name, name) and offset < stop and start < offset + length:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().pread(fd, length, offset)

    def ftruncate(self, fd: int, length: int) -> None:
        path, inode = self._open[fd]
        self._meet("ftruncate", path, writes=True)
        super().ftruncate(fd, length)
        if inode is not None:
            if self.room is not None:
                self.room += max(0, len(inode.content) - length)
            del inode.content[length:]

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd)

    def fdatasync(self, fd: int) -> None:
        self._sync("fdatasync", fd)

    def mkdir(self, path: Path) -> None:
        self._meet("mkdir", path, writes=True)
        super().mkdir(path)
        self._live[path] = None

    def replace(self, source: Path, target: Path) -> None:
        self._meet("replace", target, writes=True)
        self._adopt(target)
        super().replace(source, target)
        self._live[target] = self._live.pop(source)

    def link(self, source: Path, target: Path) -> None:
        self._meet("link", target, writes=True)
        super().link(source, target)
        self._live[target] = self._live[source]

    def unlink(self, path: Path) -> None:
        self._meet("unlink", path, writes=True)
        self._adopt(path)
        super().unlink(path)
        inode = self._live.pop(path, None)
        if self.room is not None and inode is not None and inode not in self._live.values():
            self.room += len(inode.content)

    def _adopt(self, path: Path) -> None:
        """Track a file that existed before its first call here; all of it counts as durable."""
        if path not in self._live and path.is_file():
            self._live[path] = self._durable[path] = _Inode(path.read_bytes(), durable=True)

    # -- faults ----------------------------------------------------------------------------------------------------

    def _sync(self, call: str, fd: int) -> None:
        path, inode = self._open[fd]
        try:
            self._meet(call, path)
        except OSError:
            if inode is not None:
                inode.fail_sync()
            raise
        if self.left_out is not None and sync_site() == self.left_out:
            return
        # Nothing is really synced: power cuts are simulated, and tests make thousands of these calls.
        if inode is not None:
            inode.sync()
            return
        for entry in [each for each in self._live.keys() | self._durable.keys() if each.parent == path]:
            if entry in self._live:
                self._durable[entry] = self._live[entry]
            else:
                del self._durable[entry]

    def _meet(self, call: str, path: Path, *, writes: bool = False) -> None:
        fault = self._next_fault(call, path)
        if fault is not None and fault.error is not None:
            raise OSError(fault.error, os.strerror(fault.error), str(path))
        if writes and self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def _next_fault(self, call: str, path: Path) -> _Fault | None:
        self.calls.append((call, path.name))
        for fault in self._faults:
            if fnmatch(call, fault.call) and fnmatch(path.name, fault.path):
                if fault.after:
                    fault.after -= 1
                    return None
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                return fault
        return None


def sync_site() -> str:
    """Name the place in headrace.wal.storage that asks for the sync that is running: "LocalStorage.delete: directory",
    with "directory", "fsync" or "fdatasync" as what is synced."""
    frame, what = sys._getframe(1), ""
    while frame.f_code.co_filename != storage.__file__:
        what = frame.f_code.co_name
        assert frame.f_back is not None
        frame = frame.f_back
    if frame.f_code.co_name == "_sync_directory":
        assert frame.f_back is not None
        frame, what = frame.f_back, "directory"
    return f"{frame.f_code.co_qualname}: {what}"


_SYNCS = ("fsync", "fdatasync", "_sync_directory")
# These are the operating system's calls, and the one that syncs any directory.
_NO_SITES = ("FileCalls", "SystemCalls", "sync_file", "sync_data", "_sync_directory")


def sync_sites() -> Iterator[str]:
    """Yield the syncs in the source of headrace.wal.storage, as `sync_site` names them."""
    for top in ast.parse(Path(storage.__file__).read_bytes()).body:
        if not isinstance(top, ast.ClassDef | ast.FunctionDef) or top.name in _NO_SITES:
            continue
        for function in top.body if isinstance(top, ast.ClassDef) else [top]:
            for call in ast.walk(function):
                called = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
                if called in _SYNCS:
                    name = f"{top.name}.{function.name}" if function is not top else top.name  # type: ignore[attr-defined]
                    yield f"{name}: {called if called != '_sync_directory' else 'directory'}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
