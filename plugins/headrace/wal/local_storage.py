"""The storage of one machine: files that are synced, and directories that are synced when they change."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from headrace.wal.errors import (
    PathEscapesRootError,
    RepairRefusedError,
    StorageError,
    StoredFileExistsError,
    StoredFileMissingError,
)
from headrace.wal.storage import Data, SegmentFile, checked_path, joined

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


class LocalStorage:
    """Files below ``root``, which need not exist yet."""

    appends = True

    def __init__(self, root: str | Path) -> None:
        self._root = Path(os.path.realpath(root))
        self.url = self._root.as_uri()

    def below(self, path: str) -> LocalStorage:
        return LocalStorage(self._resolve(path, empty=True))

    def create_segment(self, path: str) -> SegmentFile:
        target = self._resolve(path)
        with _told("create", path):
            _make_directory(target.parent)
            return LocalSegmentFile(target)

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        target = self._resolve(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        with _told("write", path):
            _make_directory(target.parent)
            try:
                _write_new(temporary, data)
                if exclusive:
                    target.hardlink_to(temporary)
                else:
                    temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(target.parent)

    def read(self, path: str) -> bytes:
        with _told("read", path):
            return self._resolve(path).read_bytes()

    def open(self, path: str) -> LocalFile:
        with _told("open", path):
            return LocalFile(self._resolve(path), path)

    def size(self, path: str) -> int:
        target = self._resolve(path)
        if not target.is_file():
            raise StoredFileMissingError(f"There is no file {path!r}.")
        with _told("look at", path):
            return target.stat().st_size

    def exists(self, path: str) -> bool:
        return self._resolve(path).is_file()

    def list(self, prefix: str = "") -> list[str]:
        top = self._resolve(prefix, empty=True)
        found = []
        for directory, folders, files in os.walk(top, onerror=_raise_unless_missing):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            below = Path(directory).relative_to(top).as_posix()
            inside = joined(prefix, "" if below == "." else below)
            # Names with a leading dot are temporary files of a write that is under way or was cut off.
            found += [joined(inside, name) for name in files if not name.startswith(".")]
        return sorted(found)

    def delete(self, path: str) -> bool:
        target = self._resolve(path)
        with _told("delete", path):
            try:
                target.unlink()
            except FileNotFoundError:
                return False
            _sync_directory(target.parent)
            return True

    def truncate(self, path: str, length: int) -> None:
        with _told("truncate", path), open(self._resolve(path), "r+b") as file:  # noqa: PTH123 - a file, not a storage
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RepairRefusedError(
                    f"Segment {path} is open in a writer.", remedy="Stop the receiver, or let it roll on, then repair."
                ) from error
            file.truncate(length)
            os.fsync(file.fileno())

    def _resolve(self, path: str, *, empty: bool = False) -> Path:
        checked_path(path, empty=empty)
        target = self._root / path
        # A symbolic link below the root may lead out of it.
        if not Path(os.path.realpath(target)).is_relative_to(self._root):
            raise PathEscapesRootError(f"{path!r} leads out of the storage's root {self._root}.")
        return target


class LocalSegmentFile:
    """A segment being written. Holds a lock on it, so that a repair cannot cut what a live writer appends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, _NEW_FILE, 0o640)
        self._is_new = True
        self._is_poisoned = False
        # Advisory and best effort: some network file systems have no locks, and the log is correct without.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, parts: Sequence[Data]) -> None:
        if self._is_poisoned or self._fd < 0:
            raise StorageError(f"{self._path.name} takes no more writes after a failed one or its close.")
        # Set while the outcome is open, so that an interrupt counts as a failure too.
        self._is_poisoned = True
        _write_all(self._fd, parts)
        if self._is_new:
            os.fsync(self._fd)
            _sync_directory(self._path.parent)
            self._is_new = False
        else:
            os.fdatasync(self._fd)
        self._is_poisoned = False

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class LocalFile:
    """A file open for reading."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read_at(self, offset: int, length: int) -> pa.Buffer:
        # The bound comes first: a length out of a damaged file must not become an allocation.
        length = max(0, min(length, self.size - offset))
        chunks = []
        with _told(f"read {length} bytes at {offset} of", self._name):
            while length:
                chunk = os.pread(self._fd, length, offset)
                if not chunk:
                    break
                chunks.append(chunk)
                offset += len(chunk)
                length -= len(chunk)
        return pa.py_buffer(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_all(fd: int, parts: Sequence[Data]) -> None:
    views = [memoryview(part) for part in parts if memoryview(part)]
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views and written:
            views[0] = views[0][written:]


def _write_new(path: Path, data: Data) -> None:
    fd = os.open(path, _NEW_FILE, 0o640)
    try:
        _write_all(fd, [data])
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_directory(path: Path) -> None:
    """The directory and its parents, each one's name durable in the one above it."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise_unless_missing(error: OSError) -> None:
    if error.errno not in _NO_SUCH_FILE:
        raise StorageError(f"The storage cannot list {error.filename}: {error.strerror}.") from error


@contextlib.contextmanager
def _told(action: str, path: str) -> Iterator[None]:
    """Turns the operating system's errors into the storage's."""
    try:
        yield
    except FileExistsError as error:
        raise StoredFileExistsError(f"There is a file {path!r} already.") from error
    except OSError as error:
        if error.errno in _NO_SUCH_FILE and action != "write":
            raise StoredFileMissingError(f"There is no file {path!r}.") from error
        raise StorageError(f"The storage cannot {action} {path!r}: {error.strerror or error}.") from error
