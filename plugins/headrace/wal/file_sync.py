"""Makes a file's bytes, or a directory's names, durable; every sync in headrace goes through this file.

On Linux fsync and fdatasync return when the drive has flushed its cache. On macOS fsync returns when the bytes have
reached the drive, which may still lose them in a power failure; fdatasync does not exist. F_FULLFSYNC flushes there.
"""

from __future__ import annotations

import errno
import fcntl
import os

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
