"""Reads a segment from its beginning: every frame, the torn tail, and damage by the recovery mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.wal import frame
from headrace.wal.errors import (
    DamagedFrameError,
    LogVersionError,
    SegmentMissingError,
    StoredFileMissingError,
    TornTailError,
    ranges_text,
)
from headrace.wal.frame import FrameFault
from headrace.wal.headers import AnyHeader, FrameHeader, SegmentEnd, SegmentHeader
from headrace.wal.lost_ranges import KnownOfSegment, Lost, ReaderPositions
from headrace.wal.reader import Frame, decode_block
from headrace.wal.storage import LogStorage
from headrace.wal.window import Window


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
    ``kept`` is the path of the copy if the tail was cut off (`headrace.wal.repair`), None if it was not.
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
        # A segment's header and first block are one write; a crash may have lost any page of it.
        at_first_write = offset == 0 and self._known.accepted is not None
        is_relied_on = offset < self._known.accepted_end
        at_tail = (behind is None or at_first_write) and self.ending is None and not is_relied_on
        if at_tail and self._newest and self._durable_length is None:
            ranges = fault.header.ranges if isinstance(fault.header, FrameHeader) else None
            self.torn_tail = TornTail(self.segment, offset, file.size - offset, fault.reason, ranges)
            if self._mode is RecoveryMode.ABSOLUTE_CONSISTENCY:
                accepted = self._known.accepted_between(offset, None)
                raise TornTailError(self.segment, offset, fault.reason, ranges if accepted is None else accepted)
            return None
        lost = self._positions.lost(file, offset, behind, end, fault)
        kind = TornTailError if at_tail else DamagedFrameError
        return self._pass_over(kind(self.segment, offset, fault.reason, lost.ranges, exact=lost.exact), behind)

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
