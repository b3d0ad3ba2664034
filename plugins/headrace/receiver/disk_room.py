"""Whether the log's disk has room again: asked without leaving a file behind."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.wal.errors import is_out_of_space

# A file that never has a name, so that a crash leaves nothing. Not on every system and file system.
_NAMELESS = getattr(os, "O_TMPFILE", None)


def folder_of(url: str) -> Path | None:
    """The folder at a storage's ``url``, or the nearest one above it that is there; None for an object store."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    folder = Path(unquote(parts.path))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def room_for(url: str, nbytes: int) -> bool:
    """Whether ``nbytes`` more can be stored at a storage's ``url``: really allocated and given back, since neither
    quotas nor reserved blocks show in the free space. True where only a write can tell, in an object store say.
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
    # File systems without a fixed number of files tell 0 of 0.
    return found.f_bavail * found.f_frsize >= nbytes and (found.f_favail > 0 or found.f_files == 0)
