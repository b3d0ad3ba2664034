"""A segment read from its beginning: every frame, or the reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.wal import frame
from headrace.wal.errors import (
    DamagedFrameError,
    SegmentMissingError,
    StoredFileMissingError,
    TornTailError,
    tell_ranges,
)
from headrace.wal.frame import FrameFault
from headrace.wal.headers import AnyHeader, FrameHeader, SegmentEnd, SegmentHeader
from headrace.wal.reader import Frame, decode_block, read_frame
from headrace.wal.storage import LogStorage, RandomAccessFile

WINDOW_BYTES = 4 << 20  # Fetched at a time: a few blocks, so that small frames do not cost a request each.
SEARCH_BYTES = 64 << 10


class RecoveryMode(StrEnum):
    """What to do about damage; the names are RocksDB's."""

    TOLERATE_CORRUPTED_TAIL_RECORDS = "kTolerateCorruptedTailRecords"
    """A torn tail, where a crash can leave one, ends the segment and is reported; anything else is an error."""
    ABSOLUTE_CONSISTENCY = "kAbsoluteConsistency"
    """A torn tail is an error too."""
    POINT_IN_TIME_RECOVERY = "kPointInTimeRecovery"
    """Reading stops before the first damage, which is reported."""
    SKIP_ANY_CORRUPTED_RECORDS = "kSkipAnyCorruptedRecords"
    """Reading goes on behind damage, which is reported: for saving what can be saved."""


@dataclass(frozen=True, slots=True)
class TornTail:
    """Bytes at a segment's end that are no whole frame, or that their writer never acknowledged.

    ``ranges`` are the offsets in it if its header is whole, else None; they were not acknowledged, so Kafka has them.
    """

    segment: str
    offset: int
    length: int
    reason: str
    ranges: tuple[OffsetRange, ...] | None

    def __str__(self) -> str:
        told = "unknown" if self.ranges is None else tell_ranges(self.ranges)
        return (
            f"Segment {self.segment} has a torn tail of {self.length} bytes at offset {self.offset}: {self.reason}. "
            f"Offsets in it: {told}."
        )


@dataclass(frozen=True, slots=True)
class ScannedFrame:
    """A block's frame, whole; its records are decoded on demand."""

    handle: BlockHandle
    header: FrameHeader
    payload: pa.Buffer

    def batch(self) -> pa.RecordBatch:
        """The records; DamagedFrameError when the writer wrote something else than it said."""
        return decode_block(self.handle, self.header, self.payload)


ScanEvent = SegmentHeader | ScannedFrame | SegmentEnd


class SegmentScan:
    """Iterate once over the blocks; afterwards the attributes tell how the segment ended.

    ``opening`` and ``ending`` are its header and end frames (None: not there), ``valid_bytes`` the length of what is
    whole, ``torn_tail`` what follows it, ``damage`` what was passed over (in the modes that do). ``is_open``: neither
    an end frame nor a later header says that this is all of it, as with a segment that is being written.
    """

    def __init__(
        self, storage: LogStorage, segment: str, *, newest: bool, durable_length: int | None, mode: RecoveryMode
    ) -> None:
        self._storage = storage
        self._id = frame.segment_id(segment)
        self._newest = newest
        self._durable_length = durable_length
        self._mode = mode
        self._positions: dict[TopicPartition, int] = {}
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

    def __iter__(self) -> Iterator[ScannedFrame]:
        return (event for event in self.events() if isinstance(event, ScannedFrame))

    def events(self) -> Iterator[ScanEvent]:
        """The blocks, and the segment's header and end frames between them."""
        try:
            file = self._storage.open(self.segment)
        except StoredFileMissingError as error:
            raise SegmentMissingError(self.segment, named_by="the scan of the log") from error
        with file:
            yield from self._frames(_Window(file))

    def _frames(self, file: _Window) -> Iterator[ScanEvent]:
        # What lies behind the durable length was never acknowledged: it is no part of the log.
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

    def _read(self, file: _Window, offset: int, end: int) -> Frame:
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
        for r in header.ranges:
            self._positions[r.partition] = r.until_offset

    def _note(self, header: SegmentHeader | SegmentEnd) -> None:
        if isinstance(header, SegmentHeader):
            self.opening = header
            self._positions.update(header.positions)
            self._last_sequence = header.next_sequence - 1
        else:
            self.ending = header

    def _meet(self, file: _Window, offset: int, end: int, fault: FrameFault) -> int | None:
        """Settle what is wrong at ``offset``: where to go on, None to stop; or raise."""
        behind = self._next_frame(file, offset, end)
        ranges = fault.header.ranges if isinstance(fault.header, FrameHeader) else None
        at_tail = behind is None and self.ending is None and (fault.end == 0 or fault.end >= end)
        if at_tail and self._newest and self._durable_length is None:
            self.torn_tail = TornTail(self.segment, offset, file.size - offset, fault.reason, ranges)
            if self._mode is RecoveryMode.ABSOLUTE_CONSISTENCY:
                raise TornTailError(self.segment, offset, fault.reason, ranges)
            return None
        exact = ranges is not None
        if ranges is None and behind is not None:
            ranges = self._gap_before(file, behind, end) or None
        kind = TornTailError if at_tail else DamagedFrameError
        return self._pass_over(kind(self.segment, offset, fault.reason, ranges, exact=exact), behind)

    def _pass_over(self, error: DamagedFrameError, behind: int | None) -> int | None:
        self.damage.append(error)
        if self._mode is RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS:
            return behind
        if self._mode is RecoveryMode.POINT_IN_TIME_RECOVERY:
            return None
        raise error

    def _finish(self, file: _Window, end: int) -> None:
        durable = self._durable_length
        if durable is not None and file.size < durable:
            reason = f"{durable} bytes were durable, the file ends here"
            self._pass_over(DamagedFrameError(self.segment, file.size, reason), None)
        elif file.size > end and self.ending is not None:
            self._pass_over(DamagedFrameError(self.segment, end, "bytes follow the segment's end frame", ()), None)
        elif file.size > end:
            self.torn_tail = self._abandoned(file, end)
        elif not self._newest and self.ending is None and durable is None:
            reason = "the segment ends without its end frame, though a later one was opened"
            self._pass_over(TornTailError(self.segment, end, reason), None)

    def _abandoned(self, file: _Window, end: int) -> TornTail:
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

    def _next_frame(self, file: _Window, damaged_at: int, end: int) -> int | None:
        """Where the next frame with a whole header stands behind damage: the magic is looked for, and a frame knows
        its segment and offset, so what merely looks like one is passed by."""
        offset = damaged_at + 1
        while (offset := file.find(frame.MAGIC, offset, end)) >= 0:
            if file.has_header(self._id, offset):
                return offset
            offset += 1
        return None

    def _gap_before(self, file: _Window, offset: int, end: int) -> tuple[OffsetRange, ...]:
        """Offsets between the last frame before the damage and the first behind it, as far as both are known."""
        lost: dict[TopicPartition, OffsetRange] = {}
        seen: set[TopicPartition] = set()
        while offset < end:
            try:
                read = file.frame(self._id, offset, end)
            except FrameFault:
                break
            if isinstance(read.header, FrameHeader):
                for r in read.header.ranges:
                    known = self._positions.get(r.partition)
                    if r.partition not in seen and known is not None and known < r.from_offset:
                        lost[r.partition] = OffsetRange(r.partition, known, r.from_offset, r.from_offset - known)
                    seen.add(r.partition)
            offset += read.length
        return tuple(lost.values())


def scan_segment(
    storage: LogStorage,
    segment: str,
    *,
    newest: bool,
    durable_length: int | None = None,
    mode: RecoveryMode = RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS,
) -> SegmentScan:
    """The blocks of ``segment`` in order; ``storage`` is rooted at the log.

    ``newest``: nothing was opened after it, so a crash may have left a torn tail, which is reported in ``torn_tail``.
    ``durable_length``: what the next segment's header says of this one: exactly so much must be whole, the rest is
    reported. Where neither holds an end frame is due. Raises, while iterated, SegmentMissingError, TornTailError and
    DamagedFrameError. A live writer's unfinished last frame looks like a torn tail.
    """
    return SegmentScan(storage, segment, newest=newest, durable_length=durable_length, mode=mode)


class _Window:
    """A file read ahead, a window at a time. No read allocates more than the file has."""

    def __init__(self, file: RandomAccessFile) -> None:
        self._file = file
        self._start = 0
        self._data = pa.py_buffer(b"")
        self.size = file.size

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Up to ``length`` bytes, fewer where the file ends."""
        at = offset - self._start
        if at < 0 or at + length > self._data.size:
            self._data = self._file.read_at(offset, max(length, WINDOW_BYTES))
            self._start, at = offset, 0
        return self._data[at : at + length]

    def frame(self, segment: int, offset: int, end: int) -> Frame:
        """The frame at ``offset``, checked, if it ends at ``end`` or before; FrameFault if not."""
        raw = self.read(offset, min(frame.PREFIX_BYTES, end - offset)).to_pybytes()
        prefix = frame.parse_prefix(raw, segment=segment, offset=offset)
        # The header's checksum covers the payload's length, so it is read first: only then is the length trusted.
        header_end = frame.PREFIX_BYTES + prefix.header_length
        head = self.read(offset, min(header_end, end - offset))
        frame.parse_header(prefix, head[frame.PREFIX_BYTES :].to_pybytes())
        return read_frame(self.read(offset, min(prefix.frame_length, end - offset)), segment=segment, offset=offset)

    def has_header(self, segment: int, offset: int) -> bool:
        """Whether a frame with a whole header starts at ``offset``, whatever its payload."""
        try:
            raw = self.read(offset, frame.PREFIX_BYTES).to_pybytes()
            prefix = frame.parse_prefix(raw, segment=segment, offset=offset)
            frame.parse_header(prefix, self.read(offset + frame.PREFIX_BYTES, prefix.header_length).to_pybytes())
        except FrameFault:
            return False
        return True

    def find(self, what: bytes, offset: int, end: int) -> int:
        """The first place of ``what`` in [offset, end), -1 if there is none."""
        while offset < end:
            chunk = self.read(offset, min(SEARCH_BYTES, end - offset)).to_pybytes()
            found: int = chunk.find(what)
            if found >= 0:
                return offset + found
            if offset + len(chunk) >= end or len(chunk) < len(what):
                return -1
            offset += len(chunk) - len(what) + 1
        return -1
