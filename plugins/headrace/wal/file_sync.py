"""How a file's bytes, or a directory's names, get onto the drive; everything that is synced is synced here.

On Linux fsync and fdatasync return when the drive has flushed its cache. On macOS fsync returns when the bytes have
reached the drive, which may still lose them with its power, and fdatasync does not exist: F_FULLFSYNC flushes there.
"""

from __future__ import annotations

import errno
import fcntl
import os

# What a file system answers that has no F_FULLFSYNC, a network's for one. Any other error is a failed sync.
_NOT_SUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL}


def sync_file(fd: int) -> None:
    """Make the file, or the directory, at ``fd`` durable with all that is known of it.

    Raises:
        OSError: it may not be durable, and a second try would not tell.
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
    """As `sync_file`, without what reading the file's bytes does not need (times); cheaper where there is such a call.

    Raises:
        OSError: as `sync_file`.
    """
    if _full_sync() is None and hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        sync_file(fd)


def _full_sync() -> int | None:
    """macOS's command to fcntl; None on other systems."""
    return getattr(fcntl, "F_FULLFSYNC", None)
