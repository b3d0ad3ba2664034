"""Cuts off torn tails as a receiver's next writer does, one segment at a time."""

from __future__ import annotations

from headrace.wal.log_storage import LogStorage
from headrace.wal.recovery import cut_off
from headrace.wal.scan import TornTail, scan_segment


def repair(storage: LogStorage, segment: str) -> TornTail | None:
    """Cut off the segment's torn tail, as the next writer does. Returns None if there is none."""
    scan = scan_segment(storage, segment, newest=True)
    for _ in scan:
        pass
    return None if scan.torn_tail is None else cut_off(storage, scan, scan.torn_tail)
