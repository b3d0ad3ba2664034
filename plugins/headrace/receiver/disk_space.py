"""Checks whether the log's disk has room, without leaving a file behind."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.wal.errors import is_out_of_space

# Opens a file without a name, so a crash leaves nothing. Not available on every system and file system.
_NAMELESS = getattr(os, "O_TMPFILE", None)


def folder_of(url: str) -> Path | None:
    """Return the folder at a storage's ``url``, or its nearest existing ancestor; None for an object store."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    folder = Path(unquote(parts.path))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def room_for(url: str, nbytes: int) -> bool:
    """Return whether ``nbytes`` more can be stored at a storage's ``url``.

    The bytes are allocated and freed again, since the free space shows neither quotas nor reserved blocks. Returns
    True if only a write can show it, as in an object store.
    """
    folder = folder_of(url)
    if folder is None:
        return True
    try:
        if _NAMELESS is None:
            return _is_free(folder, nbytes)
        descriptor = os.open(folder, _NAMELESS | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return not is_out_of_space(error) and _is_free(folder, nbytes)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        return not is_out_of_space(error)
    finally:
        os.close(descriptor)
    return True


def _is_free(folder: Path, nbytes: int) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return True
    # File systems without a fixed number of files report 0 of 0.
    return found.f_bavail * found.f_frsize >= nbytes and (found.f_favail > 0 or found.f_files == 0)
