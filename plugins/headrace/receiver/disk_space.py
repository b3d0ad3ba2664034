"""The free space on the log's disk: whether a block fits, and whether receiving must pause to leave room for others.

Batches need room for manifests, checkpoints, and the ledger itself if it is on the same disk. Without any room, not
even the pause could be reported. So receiving pauses before the disk is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.clock import Clock
from headrace.wal.errors import is_out_of_space

# The smaller of these is kept free. Elasticsearch also stops writing at 95 % ("flood stage").
RESERVE_BYTES = 256 << 20
RESERVE_SHARE = 0.05
# Receiving resumes at this many times the reserve, so that it does not pause and resume with every block.
RESUME_AT = 1.5
# This share of the reserve is kept even if batches wait for records that only receiving can bring.
HARD_SHARE = 0.25
_LOOK_SECONDS = 1.0
_MIB = 1024 * 1024
# Opens a file without a name, so a crash leaves nothing. Not available on every system and file system.
_NAMELESS = getattr(os, "O_TMPFILE", None)

Space = tuple[int, int]
"""Bytes free for this user, and total bytes."""


class DiskReserve:
    """Checks about once a second. Used by one thread. ``found`` is the space at the last check, None if unknown."""

    def __init__(self, space: Callable[[], Space | None], clock: Clock) -> None:
        self._space = space
        self._clock = clock
        self._next_look = 0.0
        self._reason: str | None = None
        self.found: Space | None = None

    def look(self, only_receiving_helps: Callable[[], bool] = lambda: False) -> str | None:
        """Return why receiving has to pause; None while there is enough room.

        ``only_receiving_helps`` is called when there is little room: if it returns True, receiving continues into the
        reserve, down to ``HARD_SHARE`` of it.
        """
        now = self._clock.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self.found = self._space()
            self._reason = self._judge(self.found, only_receiving_helps)
        return self._reason

    def _judge(self, space: Space | None, only_receiving_helps: Callable[[], bool]) -> str | None:
        if space is None:
            return None
        free, total = space
        reserve = min(RESERVE_BYTES, total * RESERVE_SHARE)
        resume = reserve * RESUME_AT
        if free >= (resume if self._reason is not None else reserve):
            return None
        # Nothing is freed below the hard reserve, so it needs no second bound to resume at.
        if free >= reserve * HARD_SHARE and only_receiving_helps():
            return None
        return (
            f"the log's disk is nearly full: {free / _MIB:.1f} MiB are free, and {reserve / _MIB:.1f} MiB are reserved "
            f"for batches and the ledger; receiving continues with {resume / _MIB:.1f} MiB free"
        )


def space_of(url: str) -> Space | None:
    """Return the space of the disk that holds a storage's ``url``; None for an object store, or if unknown."""
    folder = folder_of(url)
    if folder is None:
        return None
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


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
