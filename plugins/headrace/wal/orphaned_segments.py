"""Determines from the log alone whether a segment holds any block that a ledger has accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.wal.errors import DamagedFrameError, SegmentMissingError, StoredFileMissingError
from headrace.wal.headers import FrameHeader
from headrace.wal.scan import ScanEvent, ScannedFrame, scan_segment
from headrace.wal.segments import SegmentName
from headrace.wal.storage import LogStorage


def is_orphaned(storage: LogStorage, name: SegmentName, later: Sequence[SegmentName]) -> bool:
    """Whether a recovery would find no accepted block in the segment; its writer must have ended.

    Frames carry their writer's last accepted sequence, so a later frame shows that a block was accepted: in the same
    segment, or in its writer's next one. No later frame covers a writer's last block; a recovery drops it and reads it
    from Kafka again. ``later`` are the receiver's segments after this one, in the order of writing. A damaged segment
    does not count as orphaned.
    """
    first: int | None = None
    try:
        for event in _reported_by(storage, name, later):
            header = event.header if isinstance(event, ScannedFrame) else event
            accepted = header.last_accepted_sequence
            if first is not None and accepted is not None and accepted >= first:
                return False
            if first is None and isinstance(header, FrameHeader):
                first = header.sequence
    except DamagedFrameError:
        return False
    return True


def _reported_by(storage: LogStorage, name: SegmentName, later: Sequence[SegmentName]) -> Iterator[ScanEvent]:
    """The segment's frames, then the first frame of the writer's next segment that has one."""
    yield from _events(storage, name)
    for following in later:
        if following.epoch != name.epoch:
            return
        for event in _events(storage, following):
            yield event
            return


def _events(storage: LogStorage, name: SegmentName) -> Iterator[ScanEvent]:
    try:
        # Any ending may be the result of a crash, so a torn tail is tolerated.
        yield from scan_segment(storage, name.path, newest=True).events()
    except (SegmentMissingError, StoredFileMissingError):
        return
