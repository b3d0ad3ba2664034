"""Stops receiving before the log's disk is full, while there is room still for what lets batches complete and cleanup
make room: manifests, checkpoints, and the ledger itself where it is on the same disk. With none left, nobody could even
be told that receiving pauses."""

from __future__ import annotations

import os
from collections.abc import Callable

from headrace.clock import Clock
from headrace.receiver.disk_room import folder_of

# The smaller of these is kept free. Elasticsearch, too, writes no more at 95 % ("flood stage").
RESERVE_BYTES = 256 << 20
RESERVE_SHARE = 0.05
# Receiving goes on with so many times the reserve, so that it does not pause and go on with every block.
RESUME_AT = 1.5
# Of the reserve this much is kept also where batches wait for records, so that only receiving lets them make room.
HARD_SHARE = 0.25
_LOOK_SECONDS = 1.0
_MIB = 1024 * 1024

Space = tuple[int, int]
"""Bytes that are free to this user, and bytes in all."""


def space_of(url: str) -> Space | None:
    """The space of the disk that a storage's ``url`` is on; None for an object store, or where it is not known."""
    folder = folder_of(url)
    if folder is None:
        return None
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class DiskReserve:
    """Looks about once a second; one thread's."""

    def __init__(self, space: Callable[[], Space | None], clock: Clock) -> None:
        self._space = space
        self._clock = clock
        self._next_look = 0.0
        self._reason: str | None = None

    def look(self, only_receiving_helps: Callable[[], bool] = lambda: False) -> str | None:
        """Why receiving has to pause, None while there is enough room. ``only_receiving_helps`` is asked when there is
        little: if so, receiving goes on into the reserve, down to the hard one.
        """
        now = self._clock.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._reason = self._judge(self._space(), only_receiving_helps)
        return self._reason

    def _judge(self, space: Space | None, only_receiving_helps: Callable[[], bool]) -> str | None:
        if space is None:
            return None
        free, total = space
        reserve = min(RESERVE_BYTES, total * RESERVE_SHARE)
        resume = reserve * RESUME_AT
        if free >= (resume if self._reason is not None else reserve):
            return None
        # Nobody frees anything below the hard reserve, so it needs no second bound to go on at.
        if free >= reserve * HARD_SHARE and only_receiving_helps():
            return None
        return (
            f"the log's disk is nearly full: {free / _MIB:.1f} MiB are free, and {reserve / _MIB:.1f} MiB are left to "
            f"the batches and the ledger; receiving goes on with {resume / _MIB:.1f} MiB"
        )
