"""Determines which offsets unreadable bytes held: from the ledger, from the frame's own header, else by inference."""

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

    ``accepted`` are the blocks in it that the ledger has accepted (None: there is no ledger to query).
    ``positions_before`` and ``positions_after`` are its receiver's next offsets, taken from the segments around it.
    """

    accepted: Sequence[BlockInfo] | None = None
    positions_before: Mapping[TopicPartition, int] = field(default_factory=dict)
    positions_after: Mapping[TopicPartition, int] = field(default_factory=dict)

    @property
    def accepted_end(self) -> int:
        """The end, in bytes, of the last block in the segment that the ledger has accepted; 0 if there is none."""
        return max((each.handle.offset + each.handle.length for each in self.accepted or ()), default=0)

    def accepted_between(self, offset: int, end: int | None) -> tuple[OffsetRange, ...] | None:
        """The ranges of the accepted blocks that overlap the bytes [offset, end); None: there is no ledger to query."""
        if self.accepted is None:
            return None
        touched = (
            each
            for each in sorted(self.accepted, key=lambda each: each.handle)
            if each.handle.offset + each.handle.length > offset and (end is None or each.handle.offset < end)
        )
        return tuple(r for each in touched for r in each.ranges)


class Lost(NamedTuple):
    """Offset ranges that are lost; None: unknown."""

    ranges: tuple[OffsetRange, ...] | None
    exact: bool


class ReaderPositions:
    """Follows the next offset of each partition while a segment is read, and finds which offsets damage has cost."""

    def __init__(self, segment: str, known: KnownOfSegment) -> None:
        self._segment = segment_id(segment)
        self._known = known
        self._ahead: Window | None = None
        self.next_offsets = dict(known.positions_before)

    def open(self, header: SegmentHeader) -> None:
        """Take over the header's positions: the writer's partitions may have changed since the previous segment."""
        self.next_offsets.update(header.positions)

    def follow(self, ranges: Iterable[OffsetRange]) -> None:
        self.next_offsets.update((r.partition, r.until_offset) for r in ranges)

    def lost(self, file: Window, offset: int, behind: int | None, end: int, fault: FrameFault) -> Lost:
        """The offsets lost by the damage at ``offset``; the next whole frame is at ``behind`` (None: there is none).

        Moves the positions past them, so that later damage does not report them again.
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
        """The offsets from the reader's position up to ``until``, for each partition where both are known."""
        ranges = tuple(
            OffsetRange(partition, known, until_offset, until_offset - known)
            for partition, until_offset in until.items()
            if (known := self.next_offsets.get(partition)) is not None and known < until_offset
        )
        self.follow(ranges)
        return Lost(ranges or None, exact=False)

    def _positions_behind(self, file: Window, offset: int, end: int) -> dict[TopicPartition, int]:
        """Each partition's first offset after the damage: from the frames up to the next damage, else from the
        positions after the segment. It reads no further than the next damage, so each byte is read once, however much
        is damaged."""
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
