"""`open_storage`, and storage in a local folder.

Local storage syncs files, and directories when they change. Every sync in headrace goes through this file, and its
calls of the operating system are in one place, so that a test can make them fail (tests/support/faulty_files.py). On
Linux fsync and fdatasync return when the drive has flushed its cache. On macOS fsync returns when the bytes have
reached the drive, which may still lose them in a power failure; fdatasync does not exist. F_FULLFSYNC flushes there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from headrace.wal.errors import (
    PathEscapesRootError,
    RepairRefusedError,
    StorageError,
    StoredFileExistsError,
    StoredFileMissingError,
)
from headrace.wal.log_storage import Data, LogStorage, SegmentFile, checked_path, joined


def open_storage(url: str, *, write_timeout_s: float | None = None) -> LogStorage:
    """Open the storage at a plain path, a file:// URL, or a URL whose fsspec driver can create objects conditionally.

    A write to an object store that takes longer than ``write_timeout_s`` seconds fails; the object may appear later.
    None: the driver's own timeouts. A write to a folder cannot be interrupted.

    Raises UnknownStorageError for any other scheme, PathEscapesRootError for a URL with "..".
    """
    # Imported here, so that a DAG file that only names a storage loads no file system.
    from headrace.wal.object_storage import open_object_storage

    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StorageError(f"{url} names the host {parts.netloc!r}.", remedy="Write file:///path, three slashes.")
        return LocalStorage(unquote(parts.path))
    if "://" not in url:
        return LocalStorage(url)
    return open_object_storage(url, write_timeout_s)


# The errors of a file system without F_FULLFSYNC, such as a network file system. Any other error is a failed sync.
_NOT_SUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL}


def sync_file(fd: int) -> None:
    """Make the file or directory at ``fd`` durable, with its metadata.

    Raises:
        OSError: it may not be durable. A second try cannot find out: it may succeed without having written anything.
    """
    flush = _full_sync()
    if flush is not None:
        try:
            fcntl.fcntl(fd, flush)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    os.fsync(fd)


def sync_data(fd: int) -> None:
    """As `sync_file`, without metadata that reading the bytes does not need (times). Cheaper where fdatasync exists.

    Raises:
        OSError: as `sync_file`.
    """
    if _full_sync() is None and hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        sync_file(fd)


def _full_sync() -> int | None:
    """macOS's fcntl command F_FULLFSYNC; None on other systems."""
    return getattr(fcntl, "F_FULLFSYNC", None)


class FileCalls(Protocol):
    """The calls that read and write files, with the parameters of ``os``; each raises OSError."""

    def open(self, path: Path, flags: int, mode: int = 0o640) -> int: ...

    def close(self, fd: int) -> None: ...

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int: ...

    def pread(self, fd: int, length: int, offset: int) -> bytes: ...

    def size(self, fd: int) -> int: ...

    def exists(self, path: Path) -> bool: ...

    def ftruncate(self, fd: int, length: int) -> None: ...

    def fsync(self, fd: int) -> None: ...

    def fdatasync(self, fd: int) -> None: ...

    def mkdir(self, path: Path) -> None: ...

    def replace(self, source: Path, target: Path) -> None: ...

    def link(self, source: Path, target: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def walk(self, top: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]: ...


class SystemCalls:
    """The operating system's own calls."""

    def open(self, path: Path, flags: int, mode: int = 0o640) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int:
        return os.writev(fd, parts)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def exists(self, path: Path) -> bool:
        return path.exists()

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        sync_file(fd)

    def fdatasync(self, fd: int) -> None:
        sync_data(fd)

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def walk(self, top: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
        return os.walk(top, onerror=onerror)


logger = logging.getLogger(__name__)


_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""The names that `LocalStorage.write_atomically` gives to incomplete files."""


class LocalStorage:
    """Files below ``root``, which need not exist yet. A test replaces ``calls``, the operating system's calls."""

    appends = True

    def __init__(self, root: str | Path, *, calls: FileCalls | None = None) -> None:
        self._root = Path(os.path.realpath(root))
        self._calls = calls or SystemCalls()
        self._named: dict[Path, _Identity] = {}
        """The directories whose names are known to be durable, with those of all directories above them."""
        self.url = self._root.as_uri()

    def below(self, path: str) -> LocalStorage:
        storage = LocalStorage(self._resolve(path, empty=True), calls=self._calls)
        storage._named = self._named
        return storage

    def create_segment(self, path: str) -> SegmentFile:
        target = self._resolve(path)
        with _reported("create", path):
            self._make_directory(target.parent)
            return LocalSegmentFile(target, self._calls)

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        target = self._resolve(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        with _reported("write", path):
            self._make_directory(target.parent)
            try:
                self._write_new(temporary, data)
                if exclusive:
                    self._calls.link(temporary, target)
                else:
                    self._calls.replace(temporary, target)
            finally:
                # The first error is the one to report. A temporary file that stays is never listed.
                with contextlib.suppress(OSError):
                    self._calls.unlink(temporary)
            _sync_directory(self._calls, target.parent)

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            data: bytes = file.read_at(0, file.size).to_pybytes()
            return data

    def open(self, path: str) -> LocalFile:
        with _reported("open", path):
            return LocalFile(self._resolve(path), path, self._calls)

    def size(self, path: str) -> int:
        target = self._resolve(path)
        if not target.is_file():
            raise StoredFileMissingError(f"There is no file {path!r}.")
        with _reported("check", path):
            return target.stat().st_size

    def exists(self, path: str) -> bool:
        return self._resolve(path).is_file()

    def paths(self, prefix: str = "") -> list[str]:
        top = self._resolve(prefix, empty=True)
        listed = []
        for directory, folders, files in self._calls.walk(top, _raise_unless_missing):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            below = Path(directory).relative_to(top).as_posix()
            inside = joined(prefix, "" if below == "." else below)
            # Names with a leading dot are temporary files of a write in progress or of an interrupted one.
            listed += [joined(inside, name) for name in files if not name.startswith(".")]
        return sorted(listed)

    def delete(self, path: str) -> bool:
        target = self._resolve(path)
        with _reported("delete", path):
            try:
                self._calls.unlink(target)
            except FileNotFoundError:
                return False
            _sync_directory(self._calls, target.parent)
            return True

    def remove_partial_writes(self, older_than_s: float) -> int:
        before = time.time() - older_than_s
        removed = 0
        for directory, folders, files in self._calls.walk(self._root, _raise_unless_missing):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for name in filter(_TEMPORARY.fullmatch, files):
                file = Path(directory, name)
                # The directory is not synced: if a crash restores the file, the next call removes it.
                try:
                    if file.lstat().st_mtime < before:
                        self._calls.unlink(file)
                        removed += 1
                except FileNotFoundError:
                    pass  # Its writer has renamed or removed it.
                except OSError as error:
                    # Nothing reads this file, so it blocks nothing.
                    logger.warning("The incomplete file %s cannot be deleted: %s", file, error)
        return removed

    def sync(self, path: str) -> None:
        with _reported("sync", path), self._opened(self._resolve(path), os.O_RDONLY | os.O_CLOEXEC) as fd:
            self._calls.fsync(fd)
        _sync_directory(self._calls, self._resolve(path).parent)

    def truncate(self, path: str, length: int) -> None:
        with _reported("truncate", path), self._opened(self._resolve(path), os.O_RDWR | os.O_CLOEXEC) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RepairRefusedError(
                    f"Segment {path} is open in a writer.", remedy="Stop the receiver, or let it roll on, then repair."
                ) from error
            self._calls.ftruncate(fd, length)
            self._calls.fsync(fd)

    @contextlib.contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        fd = self._calls.open(path, flags)
        try:
            yield fd
        finally:
            self._calls.close(fd)

    def _write_new(self, path: Path, data: Data) -> None:
        with self._opened(path, _NEW_FILE) as fd:
            _write_all(self._calls, fd, [data])
            self._calls.fsync(fd)

    def _make_directory(self, path: Path) -> None:
        """Create the directory and its parents, and make each name durable in the directory above it. Existing ones are
        synced too: the process that created one may have been killed, or may have failed, before the sync."""
        identity = _identity(path)
        if identity is not None and self._named.get(path) == identity:
            return
        if path == path.parent or (identity is not None and identity.device != _device(path.parent)):
            return  # This is the top of a file system; headrace has created nothing above it.
        self._make_directory(path.parent)
        if identity is None:
            with contextlib.suppress(FileExistsError):
                self._calls.mkdir(path)
        try:
            _sync_directory(self._calls, path.parent)
        except PermissionError:
            # A process that created a directory of the log can read its parent, so this one existed before.
            if identity is None:
                raise
        made = identity or _identity(path)
        if made is not None:
            self._named[path] = made

    def _resolve(self, path: str, *, empty: bool = False) -> Path:
        checked_path(path, empty=empty)
        target = self._root / path
        # A symbolic link below the root may lead out of it.
        if not Path(os.path.realpath(target)).is_relative_to(self._root):
            raise PathEscapesRootError(f"{path!r} leads out of the storage's root {self._root}.")
        return target


class LocalSegmentFile:
    """A segment being written. Holds a lock on the file, so that a repair cannot cut what a live writer appends."""

    def __init__(self, path: Path, calls: FileCalls) -> None:
        self._path = path
        self._calls = calls
        self._fd = calls.open(path, _NEW_FILE)
        self._length = 0
        self._is_poisoned = False
        # Advisory and best effort: some network file systems have no locks, and the log is correct without them.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, parts: Sequence[Data], *, sync: bool = True) -> None:
        if self._is_poisoned or self._fd < 0:
            raise StorageError(f"{self._path.name} takes no more writes after a failed one or its close.")
        # Set until the outcome is known, so that an interrupt counts as a failure too.
        self._is_poisoned = True
        try:
            _write_all(self._calls, self._fd, parts)
            if self._length == 0:
                self._calls.fsync(self._fd)
                _sync_directory(self._calls, self._path.parent)
            elif sync:
                self._calls.fdatasync(self._fd)
            # A file whose directory was removed or unmounted still accepts writes and syncs, but no reader finds it.
            # Inodes are not compared: on some network file systems they change.
            if not self._calls.exists(self._path):
                raise FileNotFoundError(errno.ENOENT, "the file is no longer in its directory")
        except BaseException:
            self._give_back()
            raise
        self._length += sum(len(memoryview(part)) for part in parts)
        self._is_poisoned = False

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._calls.close(fd)

    def _give_back(self) -> None:
        """Free the space of a failed write: on a full disk each further try would take as much again. Readers do not
        rely on this, they ignore anything after the acknowledged bytes."""
        with contextlib.suppress(OSError):
            self._calls.ftruncate(self._fd, self._length)
            if self._length == 0:
                self._calls.unlink(self._path)


class LocalFile:
    """A file open for reading."""

    def __init__(self, path: Path, name: str, calls: FileCalls) -> None:
        self._name = name
        self._calls = calls
        self._fd = calls.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = calls.size(self._fd)

    def read_at(self, offset: int, length: int) -> pa.Buffer:
        # Check the bound first: a length read from a damaged file must not become an allocation.
        length = max(0, min(length, self.size - offset))
        chunks = []
        with _reported(f"read {length} bytes at {offset} of", self._name):
            while length:
                chunk = self._calls.pread(self._fd, length, offset)
                if not chunk:
                    break
                chunks.append(chunk)
                offset += len(chunk)
                length -= len(chunk)
        return pa.py_buffer(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Nothing was written, so an error here does not matter for what was read.
            with contextlib.suppress(OSError):
                self._calls.close(fd)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# POSIX lets one writev take at least 16 parts; Linux and macOS take 1,024.
_PARTS_AT_ONCE = 1_024


def _write_all(calls: FileCalls, fd: int, parts: Sequence[Data]) -> None:
    views = [memoryview(part) for part in parts if memoryview(part)]
    while views:
        written = calls.writev(fd, views[:_PARTS_AT_ONCE])
        if not written:
            raise OSError(errno.EIO, "the file takes no bytes")
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views and written:
            views[0] = views[0][written:]


class _Identity(NamedTuple):
    """Identifies a directory: one that was removed and created again is another one."""

    device: int
    inode: int


def _identity(path: Path) -> _Identity | None:
    """The identity of the directory at ``path``; None if there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _Identity(status.st_dev, status.st_ino) if stat.S_ISDIR(status.st_mode) else None


def _device(path: Path) -> int:
    return path.stat().st_dev


def _sync_directory(calls: FileCalls, path: Path) -> None:
    fd = calls.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    finally:
        calls.close(fd)


def _raise_unless_missing(error: OSError) -> None:
    if error.errno not in _NO_SUCH_FILE:
        raise StorageError(f"The storage cannot list {error.filename}: {error.strerror}.") from error


@contextlib.contextmanager
def _reported(action: str, path: str) -> Iterator[None]:
    """Turns the operating system's errors into the storage's."""
    try:
        yield
    except FileExistsError as error:
        raise StoredFileExistsError(f"There is a file {path!r} already.") from error
    except OSError as error:
        if error.errno in _NO_SUCH_FILE and action != "write":
            raise StoredFileMissingError(f"There is no file {path!r}.") from error
        raise StorageError(f"The storage cannot {action} {path!r}: {error.strerror or error}.") from error
