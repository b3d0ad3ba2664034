"""Cutting a torn tail off, with a copy of it kept."""

from __future__ import annotations

from headrace.wal.scan import TornTail, scan_segment
from headrace.wal.storage import LogStorage

QUARANTINE = "torn"  # A directory below the log's root; its files do not end like segments do.


def quarantine_path(tail: TornTail) -> str:
    """Where the bytes of a torn tail are kept."""
    return f"{QUARANTINE}/{tail.segment}-{tail.offset}.torn"


def repair_torn_tail(storage: LogStorage, segment: str) -> TornTail | None:
    """Cut the torn tail of ``segment``, the last of its writer, after copying it aside; what was cut, None if nothing.

    ``storage`` is rooted at the log. A segment without even a whole header is removed. The writer must be gone: a
    local file that is still open in one is refused (RepairRefusedError), and nothing is cut. DamagedFrameError when
    the damage is no torn tail: that is not repaired here. May be repeated after a crash.
    """
    scan = scan_segment(storage, segment, newest=True)
    for _ in scan:
        pass
    tail = scan.torn_tail
    if tail is None:
        return None
    with storage.open(segment) as file:
        torn = file.read_at(tail.offset, file.size - tail.offset)
    storage.write_atomically(quarantine_path(tail), torn)
    storage.truncate(segment, tail.offset)
    if scan.opening is None:
        storage.delete(segment)
    return tail
