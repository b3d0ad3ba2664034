"""Creates folders durably and exchanges them atomically, on a local or shared file system."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from headrace.wal.file_sync import sync_file

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically. Returns False if the file system does not support this."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one))


def make_directory(path: Path) -> None:
    """Create the directory and its parents, with each name durable in its parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in the directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(fd)
    finally:
        os.close(fd)
