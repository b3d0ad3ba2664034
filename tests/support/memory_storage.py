"""A storage in memory that supports appending, for tests of what is written and not of its durability."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import pyarrow as pa

from headrace.wal.errors import StorageError, StoredFileExistsError, StoredFileMissingError
from headrace.wal.log_storage import Data, RandomAccessFile, SegmentFile, checked_path, joined


class MemoryStorage:
    """Files as bytes in a dictionary, shared with the storages below it."""

    appends = True

    def __init__(self, files: dict[str, bytearray] | None = None, root: str = "") -> None:
        self.files: dict[str, bytearray] = {} if files is None else files
        self._root = root
        self.url = f"in-memory:{root}"

    def below(self, path: str) -> MemoryStorage:
        return MemoryStorage(self.files, joined(self._root, checked_path(path, empty=True)))

    def create_segment(self, path: str) -> SegmentFile:
        if self.exists(path):
            raise StoredFileExistsError(f"There is a file {path!r} already.")
        return _MemorySegmentFile(self.files.setdefault(self._full(path), bytearray()))

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        if exclusive and self.exists(path):
            raise StoredFileExistsError(f"There is a file {path!r} already.")
        self.files[self._full(path)] = bytearray(memoryview(data))

    def read(self, path: str) -> bytes:
        return bytes(self._file(path))

    def open(self, path: str) -> RandomAccessFile:
        return _MemoryFile(bytes(self._file(path)))

    def size(self, path: str) -> int:
        return len(self._file(path))

    def exists(self, path: str) -> bool:
        return self._full(path) in self.files

    def paths(self, prefix: str = "") -> list[str]:
        inside = joined(self._root, checked_path(prefix, empty=True))
        start = f"{inside}/" if inside else ""
        own = f"{self._root}/" if self._root else ""
        return sorted(path.removeprefix(own) for path in self.files if path.startswith(start))

    def delete(self, path: str) -> bool:
        return self.files.pop(self._full(path), None) is not None

    def remove_partial_writes(self, older_than_s: float) -> int:
        return 0

    def sync(self, path: str) -> None:
        self._file(path)

    def truncate(self, path: str, length: int) -> None:
        del self._file(path)[length:]

    def _full(self, path: str) -> str:
        return joined(self._root, checked_path(path))

    def _file(self, path: str) -> bytearray:
        try:
            return self.files[self._full(path)]
        except KeyError:
            raise StoredFileMissingError(f"There is no file {path!r}.") from None


class _MemorySegmentFile:
    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._is_open = True

    def append(self, parts: Sequence[Data], *, sync: bool = True) -> None:
        if not self._is_open:
            raise StorageError("The file is closed.")
        for part in parts:
            self._data += memoryview(part)

    def close(self) -> None:
        self._is_open = False


class _MemoryFile:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_at(self, offset: int, length: int) -> pa.Buffer:
        return pa.py_buffer(self._data[offset : offset + length])

    def close(self) -> None:
        pass

    def __enter__(self) -> _MemoryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
