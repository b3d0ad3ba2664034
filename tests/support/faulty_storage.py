"""A storage whose writes fail on demand, and that can damage its files."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.wal.log_storage import Data, LogStorage, RandomAccessFile, SegmentFile

EVERYTHING = 1 << 62


@dataclass(frozen=True, slots=True)
class WriteFault:
    """One write to fail: ``written`` of its bytes reach the file first (``EVERYTHING``: only the sync fails)."""

    written: int = 0
    error: BaseException = field(default_factory=lambda: OSError(errno.EIO, "Input/output error"))


class FaultyStorage:
    """A storage whose next writes fail by ``write_faults``; reads see what the writes left.

    >>> storage.write_faults.append(WriteFault(written=100))   # the next write stops after 100 bytes
    """

    def __init__(self, storage: LogStorage, write_faults: deque[WriteFault | None] | None = None) -> None:
        self._storage = storage
        self.url = storage.url
        self.appends = storage.appends
        self.write_faults: deque[WriteFault | None] = deque() if write_faults is None else write_faults
        """One entry for each of the next writes; None lets it succeed. When the entries are used up, all writes
        succeed."""

    def below(self, path: str) -> FaultyStorage:
        return FaultyStorage(self._storage.below(path), self.write_faults)

    def create_segment(self, path: str) -> SegmentFile:
        return _FaultySegmentFile(self._storage.create_segment(path), self.write_faults)

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        fault = self.write_faults.popleft() if self.write_faults else None
        if fault is None:
            self._storage.write_atomically(path, data, exclusive=exclusive)
            return
        # Atomic: all of it or nothing is written, and the writer gets an error either way.
        if fault.written >= len(memoryview(data)):
            self._storage.write_atomically(path, data, exclusive=exclusive)
        raise fault.error

    def read(self, path: str) -> bytes:
        return self._storage.read(path)

    def open(self, path: str) -> RandomAccessFile:
        return self._storage.open(path)

    def size(self, path: str) -> int:
        return self._storage.size(path)

    def exists(self, path: str) -> bool:
        return self._storage.exists(path)

    def paths(self, prefix: str = "") -> list[str]:
        return self._storage.paths(prefix)

    def delete(self, path: str) -> bool:
        return self._storage.delete(path)

    def remove_partial_writes(self, older_than_s: float) -> int:
        return self._storage.remove_partial_writes(older_than_s)

    def sync(self, path: str) -> None:
        self._storage.sync(path)

    def truncate(self, path: str, length: int) -> None:
        self._storage.truncate(path, length)

    def flip_bit(self, path: str, bit: int) -> None:
        """Flip the file's ``bit``, counted from 0, eight per byte."""
        data = bytearray(self.read(path))
        data[bit // 8] ^= 1 << bit % 8
        self._storage.write_atomically(path, bytes(data))

    def overwrite(self, path: str, offset: int, data: bytes) -> None:
        """Write ``data`` at ``offset``, without making the file longer."""
        whole = bytearray(self.read(path))
        data = data[: len(whole) - offset]
        whole[offset : offset + len(data)] = data
        self._storage.write_atomically(path, bytes(whole))

    def zero(self, path: str, offset: int, length: int) -> None:
        """Write ``length`` zeros at ``offset``, as a lost page leaves them."""
        self.overwrite(path, offset, bytes(length))

    def cut(self, path: str, length: int) -> None:
        """Cut the file to its first ``length`` bytes."""
        self._storage.write_atomically(path, self.read(path)[:length])


class _FaultySegmentFile:
    def __init__(self, file: SegmentFile, write_faults: deque[WriteFault | None]) -> None:
        self._file = file
        self._write_faults = write_faults
        self._has_failed = False

    def append(self, parts: Sequence[Data], *, sync: bool = True) -> None:
        if self._has_failed:
            raise AssertionError("a poisoned segment was written to")
        fault = self._write_faults.popleft() if self._write_faults else None
        if fault is None:
            self._file.append(parts, sync=sync)
            return
        self._has_failed = True
        written = b"".join(memoryview(part) for part in parts)[: fault.written]
        if written:
            self._file.append([written])
        raise fault.error

    def close(self) -> None:
        self._file.close()
