"""The operating system calls of the local storage, in one place, so that a test can make them fail
(`headrace.testing.faulty_files`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from headrace.wal.file_sync import sync_data, sync_file


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
