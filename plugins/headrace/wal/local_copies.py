"""Copies of recent blocks on the host's own disk, for a log in an object store.

The receiver writes a copy after the log has the block and the ledger has accepted it. A batch's task that runs on the
same host reads the copy instead of the log. The log stays the truth:

- A copy is the block's frame, byte for byte. It is decoded and checked as if it came from the log
  (`headrace.wal.reader`). One that fails a check is counted and deleted, and the block is read from the log.
- A copy is found by a block's handle, which comes from the ledger. Segments of an object store have a random part in
  their names (`headrace.wal.frame.SegmentName`), so no later log has the same handle. The frame repeats a hash of the
  segment's path.
- A copy is not synced. A file that was cut short by a crash does not pass the checks.

All processes of one user on a host share the folder of a log:

    <folder>/headrace-copies-<user id>/<hash of the log's URL>/<hash of the segment's path>-<offset>.frame
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from headrace.blocks import BlockHandle

if TYPE_CHECKING:
    from headrace.stream.settings import Storage
    from headrace.wal.log_storage import Data

logger = logging.getLogger(__name__)

# Each write lists the folder: about 10 ms for this many files. Small blocks reach it before the bound in bytes.
MAX_COPIES = 4096
# What a small file takes on most file systems.
_DISK_BLOCK_BYTES = 4096
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class CopyCounts:
    """What one process has done with copies. ``bytes_…`` are the lengths of frames."""

    written: int = 0
    bytes_written: int = 0
    failures: int = 0
    """Copies that could not be written, for example because the disk was full."""
    hits: int = 0
    bytes_read: int = 0
    misses: int = 0
    invalid: int = 0
    """Copies that failed a check. Their blocks were read from the log."""


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Where copies are, and how many bytes they may take on a host. ``folder``: None for the temporary folder.

    Spark's tasks get this in place of the definition's `LocalCopies`, so that they need not import the definition.
    """

    max_bytes: int
    folder: str | None = None

    @classmethod
    def of(cls, storage: Storage) -> Self | None:
        """The settings of a stream's storage; None if it has no copies."""
        copies = storage.local_copies
        return None if copies is None else cls(copies.max_bytes, copies.folder)


class BlockCopies:
    """The copies of one log's blocks on this host. No method raises OSError: without copies the log is read.

    Several processes may use the same folder. Each instance is used by one thread.
    """

    def __init__(self, log_url: str, settings: CopySettings) -> None:
        """``log_url`` is the URL of the log's root."""
        base = Path(settings.folder or tempfile.gettempdir())
        log = hashlib.blake2b(log_url.rstrip("/").encode(), digest_size=16).hexdigest()
        self.folder = base / f"headrace-copies-{os.geteuid()}" / log
        self.counts = CopyCounts()
        self._max_bytes = settings.max_bytes
        self._has_warned = False

    def write(self, handle: BlockHandle, parts: Sequence[Data]) -> None:
        """Keep a copy of a block that the log has and the ledger has accepted. ``parts`` are its frame's bytes.

        The oldest copies are deleted to make room. A failure is counted, and the first one is logged.
        """
        try:
            self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent, self.folder):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(0o700)
            self._check_folders()
            self._make_room(handle.length)
            self._write(self._path(handle), parts)
        except OSError as error:
            self.counts.failures += 1
            self._warn("A block could not be copied to %s, and batches read it from the log: %s", self.folder, error)
        else:
            self.counts.written += 1
            self.counts.bytes_written += handle.length

    def read(self, handle: BlockHandle) -> pa.Buffer | None:
        """The bytes of a block's copy, not yet checked; None if there is none."""
        try:
            self._check_folders()
            with os.fdopen(os.open(self._path(handle), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read() if size == handle.length else None
        except FileNotFoundError:
            self.counts.misses += 1
            return None
        except PermissionError as error:
            self.counts.misses += 1
            self._warn("The copies in %s are not used: %s", self.folder, error)
            return None
        except OSError as error:
            self.reject(handle, error)
            return None
        if data is None:
            self.reject(handle, f"it has {size} bytes, the block's frame has {handle.length}")
            return None
        return pa.py_buffer(data)

    def used(self, handle: BlockHandle) -> None:
        """Count a copy that passed all checks."""
        self.counts.hits += 1
        self.counts.bytes_read += handle.length

    def reject(self, handle: BlockHandle, reason: object) -> None:
        """Count and delete a copy that failed a check."""
        self.counts.invalid += 1
        path = self._path(handle)
        logger.warning("The copy %s is not valid and is deleted; the block is read from the log: %s", path, reason)
        with contextlib.suppress(OSError):
            path.unlink()

    def _path(self, handle: BlockHandle) -> Path:
        segment = hashlib.blake2b(handle.segment.encode(), digest_size=16).hexdigest()
        return self.folder / f"{segment}-{handle.offset}.frame"

    def _check_folders(self) -> None:
        """Raise PermissionError if another user could have written the copies, FileNotFoundError if there are none."""
        for folder in (self.folder.parent, self.folder):
            status = os.lstat(folder)
            is_private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
            if not is_private or status.st_uid != os.geteuid():
                raise PermissionError(f"{folder} is not a folder that only this user can access (mode 0700)")

    def _make_room(self, length: int) -> None:
        """Delete the oldest files until a copy of ``length`` bytes fits. Also those that killed processes left."""
        needed = _on_disk(length)
        if needed > self._max_bytes:
            raise OSError(f"a frame of {length} bytes is larger than max_bytes of the local copies, {self._max_bytes}")
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                # Another process may have deleted it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime_ns, _on_disk(status.st_size), entry.path))
        total, number = sum(size for _, size, _ in files), len(files)
        for _, size, path in sorted(files):
            if total + needed <= self._max_bytes and number < MAX_COPIES:
                return
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
            total, number = total - size, number - 1

    def _write(self, path: Path, parts: Sequence[Data]) -> None:
        partial = path.with_suffix(".tmp")
        try:
            with os.fdopen(os.open(partial, _NEW, 0o600), "wb") as file:
                for part in parts:
                    file.write(memoryview(part))
            # After the last byte, so that a reader does not find a part of it.
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    def _warn(self, message: str, *arguments: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(message, *arguments)


def _on_disk(size: int) -> int:
    return -(-size // _DISK_BLOCK_BYTES) * _DISK_BLOCK_BYTES
