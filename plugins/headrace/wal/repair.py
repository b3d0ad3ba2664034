"""Cutting a torn tail off, with a copy of it kept."""

from __future__ import annotations

from dataclasses import replace

from headrace.wal.lost_ranges import KnownOfSegment
from headrace.wal.scan import SegmentScan, TornTail, scan_segment
from headrace.wal.storage import LogStorage

QUARANTINE = "torn"  # A directory below the log's root; its files do not end like segments do.
COPIES_KEPT = 10  # Of each receiver: a receiver that crashes every minute must not fill the disk with them.


def quarantine_path(tail: TornTail) -> str:
    """Where the bytes of a torn tail are kept."""
    return f"{QUARANTINE}/{tail.segment}-{tail.offset}.torn"


def repair_torn_tail(storage: LogStorage, segment: str, *, known: KnownOfSegment | None = None) -> TornTail | None:
    """Cut the torn tail of ``segment``, the last of its writer, after copying it aside; what was cut, None if nothing.

    ``storage`` is rooted at the log. With ``known`` nothing is cut on which the ledger relies. A segment without even
    a whole header is removed. The writer must be fenced, and a local file that is still open in one is refused
    (RepairRefusedError), and nothing is cut. DamagedFrameError when the damage is no torn tail: that is not repaired
    here. May be repeated after a crash. The last ``COPIES_KEPT`` copies of a receiver are kept.
    """
    scan = scan_segment(storage, segment, newest=True, known=known)
    for _ in scan:
        pass
    return None if scan.torn_tail is None else cut_off(storage, scan, scan.torn_tail)


def cut_off(storage: LogStorage, scan: SegmentScan, tail: TornTail) -> TornTail:
    """Cut off what a finished scan found; the tail with the place of its copy. Raises RepairRefusedError and
    StorageError, and then the segment is as it was."""
    with storage.open(tail.segment) as file:
        torn = file.read_at(tail.offset, file.size - tail.offset)
    path = quarantine_path(tail)
    storage.write_atomically(path, torn)
    storage.truncate(tail.segment, tail.offset)
    if scan.opening is None:
        storage.delete(tail.segment)
    for old in storage.list(path.rpartition("/")[0])[:-COPIES_KEPT]:
        storage.delete(old)
    return replace(tail, kept=path)
