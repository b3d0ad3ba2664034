"""Reads a segment from its beginning: every frame, the torn tail, and damage by the recovery mode.

After damage it searches for the next frame. Which offsets the unreadable bytes held is known from the ledger, from the
frame's own header, or by inference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import pyarrow as pa

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, TopicPartition
from headrace.wal import frame
from headrace.wal.errors import (
    DamagedFrameError,
    LogVersionError,
    SegmentMissingError,
    StorageError,
    StoredFileMissingError,
    TornTailError,
    is_unreadable,
    ranges_text,
)
from headrace.wal.frame import AnyHeader, FrameFault, FrameHeader, Prefix, SegmentEnd, SegmentHeader, segment_id
from headrace.wal.log_storage import LogStorage, RandomAccessFile
from headrace.wal.reader import Frame, decode_block, read_frame

WINDOW_BYTES = 4 << 20  # Fetched at a time: a few blocks, so that small frames do not cost a request each.
SEARCH_BYTES = 64 << 10
SECTOR_BYTES = 4096
READ_TRIES = 3  # After so many failed reads the bytes count as unreadable.

logger = logging.getLogger(__name__)


class Window:
    """Reads a file ahead, one window at a time. No read allocates more than the file's size.

    With ``blank_unreadable``, sectors that the disk cannot read become zeros, which never pass for a frame.
    """

    def __init__(
        self, file: RandomAccessFile, *, read_ahead: int = WINDOW_BYTES, blank_unreadable: bool = False
    ) -> None:
        self._file = file
        self._read_ahead = read_ahead
        self._blank_unreadable = blank_unreadable
        self._start = 0
        self._data = pa.py_buffer(b"")
        self.size = file.size

    def another(self) -> Window:
        """A separate window on the same file."""
        return Window(self._file, read_ahead=self._read_ahead, blank_unreadable=self._blank_unreadable)

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Up to ``length`` bytes, fewer where the file ends."""
        at = offset - self._start
        if at < 0 or at + length > self._data.size:
            self._data = self._fetch(offset, max(length, self._read_ahead))
            self._start, at = offset, 0
        return self._data[at : at + length]

    def _fetch(self, offset: int, length: int) -> pa.Buffer:
        try:
            return self._file.read_at(offset, length)
        except StorageError as error:
            if not self._blank_unreadable or not is_unreadable(error):
                raise
        end = min(offset + length, self.size)
        starts = [offset, *range((offset // SECTOR_BYTES + 1) * SECTOR_BYTES, end, SECTOR_BYTES)]
        sectors = zip(starts, [*starts[1:], end], strict=True)
        return pa.py_buffer(b"".join(self._sector(start, stop) for start, stop in sectors))

    def _sector(self, start: int, stop: int) -> bytes:
        for tried in range(1, READ_TRIES + 1):
            try:
                data: bytes = self._file.read_at(start, stop - start).to_pybytes()
            except StorageError as error:
                if not is_unreadable(error):
                    raise
                if tried == READ_TRIES:
                    logger.warning("%s These bytes are treated as damaged.", error.what)
            else:
                return data
        return bytes(stop - start)

    def frame(self, segment: int, offset: int, end: int) -> Frame:
        """The frame at ``offset``, checked, if it ends at or before ``end``; FrameFault if not."""
        prefix = self._prefix(segment, offset, end)
        # The header's checksum covers the payload's length, so the header is checked before the length is used.
        header_end = frame.PREFIX_BYTES + prefix.header_length
        head = self.read(offset, min(header_end, end - offset))
        frame.parse_header(prefix, head[frame.PREFIX_BYTES :].to_pybytes())
        return read_frame(self.read(offset, min(prefix.frame_length, end - offset)), segment=segment, offset=offset)

    def header(self, segment: int, offset: int = 0) -> AnyHeader:
        """The header of the frame at ``offset``, without reading its payload; FrameFault if there is none."""
        prefix = self._prefix(segment, offset, self.size)
        return frame.parse_header(prefix, self.read(offset + frame.PREFIX_BYTES, prefix.header_length).to_pybytes())

    def next_frame(self, segment: int, offset: int, end: int) -> int | None:
        """The offset of the next frame with a whole header in [offset, end); None if there is none.

        A frame holds its segment and offset, so bytes that only look like a frame are skipped. The search is for the
        segment's id, not for the magic before it: record values full of magics cost nothing.
        """
        needle = frame.segment_id_bytes(segment)
        at = offset + frame.SEGMENT_ID_OFFSET
        while (at := self._find(needle, at, end)) >= 0:
            if self._has_header(segment, at - frame.SEGMENT_ID_OFFSET):
                return at - frame.SEGMENT_ID_OFFSET
            at += 1
        return None

    def _has_header(self, segment: int, offset: int) -> bool:
        """Whether a frame with a whole header starts at ``offset``."""
        try:
            self.header(segment, offset)
        except FrameFault as fault:
            # A frame of another version is a frame too, so the bytes before it are not a tail.
            return fault.foreign
        return True

    def _prefix(self, segment: int, offset: int, end: int) -> Prefix:
        return frame.parse_prefix(
            self.read(offset, min(frame.PREFIX_BYTES, end - offset)).to_pybytes(),
            segment=segment,
            offset=offset,
            header=lambda length: self.read(offset + frame.PREFIX_BYTES, length).to_pybytes(),
        )

    def _find(self, what: bytes, offset: int, end: int) -> int:
        """The first offset of ``what`` in [offset, end), -1 if there is none."""
        while offset < end:
            chunk = self.read(offset, min(SEARCH_BYTES, end - offset)).to_pybytes()
            place: int = chunk.find(what)
            if place >= 0:
                return offset + place
            if offset + len(chunk) >= end or len(chunk) < len(what):
                return -1
            offset += len(chunk) - len(what) + 1
        return -1


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
        return max((block.handle.offset + block.handle.length for block in self.accepted or ()), default=0)

    def accepted_between(self, offset: int, end: int | None) -> tuple[OffsetRange, ...] | None:
        """The ranges of the accepted blocks that overlap the bytes [offset, end); None: there is no ledger to query."""
        if self.accepted is None:
            return None
        touched = (
            block
            for block in sorted(self.accepted, key=lambda block: block.handle)
            if block.handle.offset + block.handle.length > offset and (end is None or block.handle.offset < end)
        )
        return tuple(r for block in touched for r in block.ranges)


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
        positions: dict[TopicPartition, int] = {}
        while offset < end:
            try:
                read = self._ahead.frame(self._segment, offset, end)
            except FrameFault:
                break
            if isinstance(read.header, FrameHeader):
                for r in read.header.ranges:
                    positions.setdefault(r.partition, r.from_offset)
            offset += read.length
        return {**self._known.positions_after, **positions}


class RecoveryMode(StrEnum):
    """What to do about damage; the names are RocksDB's."""

    TOLERATE_CORRUPTED_TAIL_RECORDS = "kTolerateCorruptedTailRecords"
    """A torn tail at a place where a crash can leave one ends the segment and is reported. Other damage is an error."""
    ABSOLUTE_CONSISTENCY = "kAbsoluteConsistency"
    """A torn tail is an error too."""
    POINT_IN_TIME_RECOVERY = "kPointInTimeRecovery"
    """Reading stops before the first damage, which is reported."""
    SKIP_ANY_CORRUPTED_RECORDS = "kSkipAnyCorruptedRecords"
    """Reading continues after damage, which is reported: to save what can be saved."""

    @property
    def passes_over(self) -> bool:
        """Whether damage is reported instead of raised, including sectors that the disk repeatedly fails to read."""
        return self in (RecoveryMode.POINT_IN_TIME_RECOVERY, RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)


@dataclass(frozen=True, slots=True)
class TornTail:
    """Bytes at a segment's end that are no whole frame, or that their writer never acknowledged.

    ``ranges`` are its offsets if a header in it is whole, else None. They were not acknowledged, so Kafka has them.
    ``kept`` is the path of the copy if the tail was cut off (`headrace.wal.recovery`), None if it was not.
    """

    segment: str
    offset: int
    length: int
    reason: str
    ranges: tuple[OffsetRange, ...] | None
    kept: str | None = None

    def __str__(self) -> str:
        reported = "unknown" if self.ranges is None else ranges_text(self.ranges)
        return (
            f"Segment {self.segment} has a torn tail of {self.length} bytes at offset {self.offset}: {self.reason}. "
            f"Offsets in it: {reported}."
            + ("" if self.kept is None else f" It was cut off and is kept as {self.kept}.")
        )


@dataclass(frozen=True, slots=True)
class ScannedFrame:
    """A whole frame of a block; its records are decoded on demand."""

    handle: BlockHandle
    header: FrameHeader
    payload: pa.Buffer

    def batch(self) -> pa.RecordBatch:
        """The block's records; DamagedFrameError when the payload does not fit the header."""
        return decode_block(self.handle, self.header, self.payload)


ScanEvent = SegmentHeader | ScannedFrame | SegmentEnd


class SegmentScan:
    """One scan of a segment. Iterate once over the blocks; afterwards the attributes describe how the segment ended.

    ``opening`` and ``ending`` are the segment's header and end frames (None: not found). ``valid_bytes`` is the end of
    the last whole frame, ``torn_tail`` follows it. ``damage`` is the damage found, which some modes do not raise.
    ``is_open``: neither an end frame nor a later header ends the segment, as when it is being written.
    """

    def __init__(
        self,
        storage: LogStorage,
        segment: str,
        *,
        newest: bool,
        durable_length: int | None,
        known: KnownOfSegment,
        mode: RecoveryMode,
    ) -> None:
        self._storage = storage
        self._id = frame.segment_id(segment)
        self._newest = newest
        # Blocks that the ledger has accepted must be there, even if a later writer found fewer bytes.
        self._durable_length = None if durable_length is None else max(durable_length, known.accepted_end)
        self._known = known
        self._mode = mode
        self._positions = ReaderPositions(segment, known)
        self._last_sequence = -1
        self.segment = segment
        self.opening: SegmentHeader | None = None
        self.ending: SegmentEnd | None = None
        self.valid_bytes = 0
        self.torn_tail: TornTail | None = None
        self.damage: list[DamagedFrameError] = []

    @property
    def is_open(self) -> bool:
        return self.ending is None and self._durable_length is None

    @property
    def next_offsets(self) -> Mapping[TopicPartition, int]:
        """The next offset of each of the receiver's partitions, after what was read and what was reported as lost."""
        return self._positions.next_offsets

    def __iter__(self) -> Iterator[ScannedFrame]:
        return (event for event in self.events() if isinstance(event, ScannedFrame))

    def events(self) -> Iterator[ScanEvent]:
        """The segment's header frame, its blocks and its end frame."""
        try:
            with self._storage.open(self.segment) as file:
                yield from self._frames(Window(file, blank_unreadable=self._mode.passes_over))
        except StoredFileMissingError as error:
            lost = self._known.accepted_between(0, None)
            raise SegmentMissingError(self.segment, named_by="the scan of the log", ranges=lost) from error

    def _frames(self, file: Window) -> Iterator[ScanEvent]:
        # Bytes after the durable length were never acknowledged: they are not part of the log.
        end = file.size if self._durable_length is None else min(file.size, self._durable_length)
        offset = 0
        while offset < end:
            try:
                read = self._read(file, offset, end)
            except FrameFault as fault:
                behind = self._meet(file, offset, end, fault)
                if behind is None:
                    return
                offset = behind
                continue
            if isinstance(read.header, FrameHeader):
                self._follow(read.header)
                handle = BlockHandle(self.segment, offset, read.length)
                offset += read.length
                self.valid_bytes = offset
                yield ScannedFrame(handle, read.header, read.payload)
            else:
                self._note(read.header)
                offset += read.length
                self.valid_bytes = offset
                yield read.header
        self._finish(file, end)

    def _read(self, file: Window, offset: int, end: int) -> Frame:
        if self.ending is not None:
            raise FrameFault("bytes follow the segment's end frame")
        read = file.frame(self._id, offset, end)
        if (offset == 0) != isinstance(read.header, SegmentHeader):
            raise FrameFault("a segment has one header, at its beginning")
        opening = self.opening
        if opening is not None and (read.header.receiver, read.header.epoch) != (opening.receiver, opening.epoch):
            raise FrameFault(f"the frame is of {read.header.receiver}, epoch {read.header.epoch}")
        if isinstance(read.header, FrameHeader) and read.header.sequence <= self._last_sequence:
            raise FrameFault(f"sequence {read.header.sequence} comes after {self._last_sequence}")
        return read

    def _follow(self, header: FrameHeader) -> None:
        self._last_sequence = header.sequence
        self._positions.follow(header.ranges)

    def _note(self, header: SegmentHeader | SegmentEnd) -> None:
        if isinstance(header, SegmentHeader):
            self.opening = header
            self._positions.open(header)
            self._last_sequence = header.next_sequence - 1
        else:
            self.ending = header

    def _meet(self, file: Window, offset: int, end: int, fault: FrameFault) -> int | None:
        """Classify the damage at ``offset``. Returns the offset to continue from, or None to stop. Raises the damage,
        unless it is a tolerated torn tail or the mode reports it."""
        if fault.foreign:
            raise LogVersionError(self.segment, offset, fault.reason) from fault
        if isinstance(fault.header, FrameHeader) and fault.end < end:
            # Only the payload is damaged: the header's checksum matches, so its lengths are right.
            behind: int | None = fault.end
        else:
            behind = file.next_frame(self._id, offset + 1, end)
        rest = self._rest_of_write(file, offset, behind, end)
        at_tail = rest is not None
        if rest is not None and self._newest and self._durable_length is None:
            of_fault = fault.header.ranges if isinstance(fault.header, FrameHeader) else ()
            ranges = (*of_fault, *(r for header in rest for r in header.ranges)) or None
            self.torn_tail = TornTail(self.segment, offset, file.size - offset, fault.reason, ranges)
            if self._mode is RecoveryMode.ABSOLUTE_CONSISTENCY:
                accepted = self._known.accepted_between(offset, None)
                raise TornTailError(self.segment, offset, fault.reason, ranges if accepted is None else accepted)
            return None
        lost = self._positions.lost(file, offset, behind, end, fault)
        kind = TornTailError if at_tail else DamagedFrameError
        return self._pass_over(kind(self.segment, offset, fault.reason, lost.ranges, exact=lost.exact), behind)

    def _rest_of_write(self, file: Window, offset: int, behind: int | None, end: int) -> list[FrameHeader] | None:
        """The headers of the whole frames behind the damage at ``offset``, if a crash can have left all this at the end
        of a segment; None if not. ``behind``: where the frames may begin, None if there are none.

        Several blocks may be one write, and so are a segment's header and its first blocks; a crash may have lost any
        page of it. A later write, or a block that the ledger has, shows that the bytes had been whole.
        """
        if self.ending is not None or offset < self._known.accepted_end:
            return None
        headers: list[FrameHeader] = []
        if behind is None:
            return headers
        if self._known.accepted is None:
            return None  # A block behind the damage may have been accepted.
        at = file.next_frame(self._id, offset + 1, end)
        while at is not None:
            try:
                header = file.header(self._id, at)
            except FrameFault:
                return None  # A frame of a newer version.
            is_with = offset == 0 or (
                isinstance(header, FrameHeader) and header.first_sequence <= self._last_sequence + 1
            )
            if not is_with:
                return None
            if isinstance(header, FrameHeader):
                headers.append(header)
            at = file.next_frame(self._id, at + 1, end)
        return headers

    def _pass_over(self, error: DamagedFrameError, behind: int | None) -> int | None:
        self.damage.append(error)
        if self._mode is RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS:
            return behind
        if self._mode is RecoveryMode.POINT_IN_TIME_RECOVERY:
            return None
        raise error

    def _finish(self, file: Window, end: int) -> None:
        durable = self._durable_length
        if durable is not None and file.size < durable:
            self._end_early(DamagedFrameError, file.size, f"{durable} bytes were durable, the file ends here")
        elif file.size < self._known.accepted_end:
            reason = f"the ledger has blocks up to {self._known.accepted_end}, the file ends here"
            self._end_early(DamagedFrameError, file.size, reason)
        elif file.size > end and self.ending is not None:
            self._pass_over(DamagedFrameError(self.segment, end, "bytes follow the segment's end frame", ()), None)
        elif file.size > end:
            self.torn_tail = self._abandoned(file, end)
        elif not self._newest and self.ending is None and durable is None:
            reason = "the segment ends without its end frame, though a later one was opened"
            self._end_early(TornTailError, end, reason)

    def _end_early(self, kind: type[DamagedFrameError], end: int, reason: str) -> None:
        accepted = self._known.accepted_between(end, None)
        if accepted is None:
            lost = self._positions.lost_until(self._known.positions_after)
        else:
            lost = Lost(accepted, exact=True)
        self._pass_over(kind(self.segment, end, reason, lost.ranges, exact=lost.exact), None)

    def _abandoned(self, file: Window, end: int) -> TornTail:
        reason = "its writer never acknowledged these bytes"
        ranges: list[OffsetRange] = []
        offset, is_whole = end, True
        while offset < file.size and is_whole:
            header: AnyHeader | None
            try:
                read = file.frame(self._id, offset, file.size)
                header, offset = read.header, offset + read.length
            except FrameFault as fault:
                header, is_whole = fault.header, False
            if isinstance(header, FrameHeader):
                ranges += header.ranges
        return TornTail(self.segment, end, file.size - end, reason, tuple(ranges) or None)


def scan_segment(
    storage: LogStorage,
    segment: str,
    *,
    newest: bool,
    durable_length: int | None = None,
    known: KnownOfSegment | None = None,
    mode: RecoveryMode = RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS,
) -> SegmentScan:
    """Scan the blocks of ``segment`` in order; ``storage`` is rooted at the log.

    ``newest``: no segment was opened after it, so a crash may have left a torn tail. It is reported in ``torn_tail``.
    ``durable_length``: this segment's length in bytes as the next segment's header gives it. So many bytes must be
    whole, the rest is reported. A segment that is not newest and has no durable length must have an end frame.
    ``known``: what the ledger and other segments know of this one. Bytes on which the ledger relies are never part of
    a torn tail, and errors take the lost ranges from it. A live writer's unfinished last frame looks like a torn tail.

    Raises, while iterated, SegmentMissingError, TornTailError and DamagedFrameError, and in every mode LogVersionError.
    """
    return SegmentScan(
        storage, segment, newest=newest, durable_length=durable_length, known=known or KnownOfSegment(), mode=mode
    )
