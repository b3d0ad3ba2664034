"""Which offsets were in bytes that cannot be read: from the ledger, from the frame's own header, else by inference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.blocks import BlockInfo, OffsetRange, TopicPartition
from headrace.wal.frame import FrameFault, segment_id
from headrace.wal.headers import FrameHeader, SegmentHeader
from headrace.wal.window import Window


@dataclass(frozen=True, slots=True)
class KnownOfSegment:
    """What is known of a segment besides its own bytes.

    ``accepted`` are the blocks in it that the ledger has accepted (None: no ledger was asked). ``positions_before`` and
    ``positions_after`` are its receiver's next offsets as the segments around it tell.
    """

    accepted: Sequence[BlockInfo] | None = None
    positions_before: Mapping[TopicPartition, int] = field(default_factory=dict)
    positions_after: Mapping[TopicPartition, int] = field(default_factory=dict)

    @property
    def accepted_end(self) -> int:
        """Up to where the ledger relies on the segment."""
        return max((each.handle.offset + each.handle.length for each in self.accepted or ()), default=0)

    def accepted_between(self, offset: int, end: int | None) -> tuple[OffsetRange, ...] | None:
        """The ranges of the accepted blocks that stand, in part, in [offset, end); None: no ledger was asked."""
        if self.accepted is None:
            return None
        touched = (
            each
            for each in sorted(self.accepted, key=lambda each: each.handle)
            if each.handle.offset + each.handle.length > offset and (end is None or each.handle.offset < end)
        )
        return tuple(r for each in touched for r in each.ranges)


class Lost(NamedTuple):
    """Offset ranges that are gone; None: not known."""

    ranges: tuple[OffsetRange, ...] | None
    exact: bool


class ReaderPositions:
    """The next offsets of the partitions in a segment as its reader goes along, and what they miss."""

    def __init__(self, segment: str, known: KnownOfSegment) -> None:
        self._segment = segment_id(segment)
        self._known = known
        self._ahead: Window | None = None
        self.next_offsets = dict(known.positions_before)

    def open(self, header: SegmentHeader) -> None:
        """A writer may have been given partitions, or had them back, since the segment before."""
        self.next_offsets.update(header.positions)

    def follow(self, ranges: Iterable[OffsetRange]) -> None:
        self.next_offsets.update((r.partition, r.until_offset) for r in ranges)

    def lost(self, file: Window, offset: int, behind: int | None, end: int, fault: FrameFault) -> Lost:
        """What the damage at ``offset`` cost; the next frame stands at ``behind`` (None: there is none).

        What is inferred is not inferred again for the damage that comes after it.
        """
        accepted = self._known.accepted_between(offset, behind)
        if accepted is not None:
            self.follow(accepted)
            return Lost(accepted, exact=True)
        if isinstance(fault.header, FrameHeader):
            self.follow(fault.header.ranges)
            return Lost(fault.header.ranges, exact=True)
        until = self._positions_behind(file, end if behind is None else behind, end)
        return self.lost_until(until)

    def lost_until(self, until: Mapping[TopicPartition, int]) -> Lost:
        """The offsets from where the reader is to ``until``, of the partitions of which both are known."""
        ranges = tuple(
            OffsetRange(partition, known, until_offset, until_offset - known)
            for partition, until_offset in until.items()
            if (known := self.next_offsets.get(partition)) is not None and known < until_offset
        )
        self.follow(ranges)
        return Lost(ranges or None, exact=False)

    def _positions_behind(self, file: Window, offset: int, end: int) -> dict[TopicPartition, int]:
        """Where the partitions went on behind the damage: as the frames up to the next damage say, then what comes
        after the segment. Looking no further, each byte is looked at once however much is damaged."""
        if self._ahead is None:
            self._ahead = file.another()
        found: dict[TopicPartition, int] = {}
        while offset < end:
            try:
                read = self._ahead.frame(self._segment, offset, end)
            except FrameFault:
                break
            if isinstance(read.header, FrameHeader):
                for r in read.header.ranges:
                    found.setdefault(r.partition, r.from_offset)
            offset += read.length
        return {**self._known.positions_after, **found}
