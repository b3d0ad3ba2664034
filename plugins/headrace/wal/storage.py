"""What the log, the manifests and the checkpoints need of a store, and how a URL becomes one.

Paths given to a storage are relative to its root, with "/" between their parts; none may leave the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, TypeAlias
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from headrace.wal.errors import PathEscapesRootError, StorageError

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

    def append(self, parts: Sequence[Data]) -> None:
        """Write the parts, one after the other; durable when it returns.

        Any exception means that nothing is known of these bytes, and the file must not be written to again: after a
        failed fsync the kernel has dropped the dirty pages and a second fsync would report success.
        """
        ...

    def close(self) -> None:
        """Close the file; nothing is written by it."""
        ...


class LogStorage(Protocol):
    """A tree of files. Every write is durable when it returns; every failure is a StorageError or an OSError."""

    url: str
    """Opens the same storage elsewhere (``open_storage``); holds no secret."""
    appends: bool
    """Whether ``create_segment`` works; where it does not, a segment is one object, written at once."""

    def below(self, path: str) -> LogStorage:
        """The same store with ``path`` as its root."""
        ...

    def create_segment(self, path: str) -> SegmentFile:
        """A new file to append to; StoredFileExistsError if there is one already."""
        ...

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        """The whole file or nothing of it, replacing an older one unless ``exclusive`` (StoredFileExistsError)."""
        ...

    def read(self, path: str) -> bytes:
        """The whole file; StoredFileMissingError if there is none."""
        ...

    def open(self, path: str) -> RandomAccessFile:
        """The file for reading in places; StoredFileMissingError if there is none."""
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
        """Remove the file; whether there was one."""
        ...

    def remove_partial_writes(self, older_than_s: float) -> int:
        """Delete the files of atomic writes whose process was killed: those that have not changed for ``older_than_s``.

        ``list`` does not show these files. Returns how many were deleted. A writer that lives and is as slow as that
        gets a StorageError, and nothing of its file appears.
        """
        ...

    def sync(self, path: str) -> None:
        """Make durable what a writer that is gone may have left unsynced; StoredFileMissingError if there is none."""
        ...

    def truncate(self, path: str, length: int) -> None:
        """Cut the file to ``length`` bytes. RepairRefusedError while its writer has it open (local files)."""
        ...


def open_storage(url: str) -> LogStorage:
    """The storage at a plain path, a file:// URL, or a URL whose fsspec driver can create objects conditionally.

    Raises UnknownStorageError for any other scheme, PathEscapesRootError for one with "..".
    """
    # Imported here: a DAG file that only names a storage loads no file system.
    from headrace.wal.local_storage import LocalStorage
    from headrace.wal.object_storage import open_object_storage

    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StorageError(f"{url} names the host {parts.netloc!r}.", remedy="Write file:///path, three slashes.")
        return LocalStorage(unquote(parts.path))
    if "://" not in url:
        return LocalStorage(url)
    return open_object_storage(url)


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
