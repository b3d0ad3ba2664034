"""What log, manifests and checkpoints ask of a storage: `LogStorage`, a tree of files whose writes are durable.

Paths given to a storage are relative to its root, with "/" between their parts; none may leave the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import pyarrow as pa

from headrace.wal.errors import (
    PathEscapesRootError,
)

Data: TypeAlias = bytes | pa.Buffer


class RandomAccessFile(Protocol):
    """A file open for reading. ``size`` is its length in bytes when it was opened."""

    size: int

    def read_at(self, offset: int, length: int) -> pa.Buffer:
        """Up to ``length`` bytes from ``offset``; fewer only where the file ends."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SegmentFile(Protocol):
    """A new file open for appending, by one writer."""

    def append(self, parts: Sequence[Data], *, sync: bool = True) -> None:
        """Write the parts, one after the other; they are durable when this returns. Without ``sync`` only the file's
        first bytes are, and the others when a later call syncs.

        After any exception these bytes may or may not be on disk, and the file must not be written to again: after a
        failed fsync the kernel has dropped the dirty pages and a second fsync would report success.
        """
        ...

    def close(self) -> None:
        """Close the file without writing anything."""
        ...


class LogStorage(Protocol):
    """A tree of files. Every write is durable when it returns; every failure is a StorageError or an OSError."""

    url: str
    """Opens the same storage in another process (``open_storage``); holds no secret."""
    appends: bool
    """Whether ``create_segment`` works. If not, a segment is one object, written as a whole."""

    def below(self, path: str) -> LogStorage:
        """The same store with ``path`` as its root."""
        ...

    def create_segment(self, path: str) -> SegmentFile:
        """Create a file to append to; StoredFileExistsError if it exists already."""
        ...

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        """Write the whole file or nothing. Replaces an existing file; with ``exclusive``, raises StoredFileExistsError
        instead."""
        ...

    def read(self, path: str) -> bytes:
        """The whole file; StoredFileMissingError if there is none."""
        ...

    def open(self, path: str) -> RandomAccessFile:
        """Open the file for reading at any offset; StoredFileMissingError if there is none."""
        ...

    def size(self, path: str) -> int:
        """The file's length in bytes; StoredFileMissingError if there is none."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is such a file (directories do not count)."""
        ...

    def paths(self, prefix: str = "") -> list[str]:
        """The paths of all files below the directory ``prefix``, sorted; none if there is no such directory."""
        ...

    def delete(self, path: str) -> bool:
        """Delete the file. Returns whether there was one."""
        ...

    def remove_partial_writes(self, older_than_s: float) -> int:
        """Delete the temporary files of atomic writes that have not changed for ``older_than_s`` seconds.

        They are left by processes that were killed; ``paths`` does not list them. Returns how many were deleted. A
        live writer that is slower than this gets a StorageError, and its file does not appear.
        """
        ...

    def sync(self, path: str) -> None:
        """Make a file durable whose writer may have ended without a sync; StoredFileMissingError if there is none."""
        ...

    def truncate(self, path: str, length: int) -> None:
        """Cut the file to ``length`` bytes. RepairRefusedError while its writer has it open (local files)."""
        ...


def checked_path(path: str, *, empty: bool = False) -> str:
    """``path`` if it stays below the root; ``empty`` allows the root itself."""
    if path == "" and empty:
        return path
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise PathEscapesRootError(
            f"{path!r} is no path below a storage's root.",
            remedy='Paths are relative, with "/" between their parts and none of them "", "." or "..".',
        )
    return path


def joined(root: str, path: str) -> str:
    return f"{root}/{path}" if root and path else root or path
