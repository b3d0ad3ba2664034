"""Writes the log: one writer per receiver and epoch appends blocks to rolling segments."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from headrace.blocks import BlockHandle, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import Clock, SystemClock
from headrace.wal import frame
from headrace.wal.errors import StaleWriterError, WriteFailedError
from headrace.wal.frame import (
    Codec,
    FrameHeader,
    PreviousSegment,
    PreviousState,
    SegmentEnd,
    SegmentHeader,
    SegmentName,
    encode,
    receiver_directory,
    segments_in,
)
from headrace.wal.log_storage import Data, LogStorage, SegmentFile
from headrace.wal.recovery import Accepted, LogRecovery, recover_log

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 128 << 20
SEGMENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be written: records (``RECORD_SCHEMA``) with the ranges that hold them. The rest is as in `BlockInfo`.

    Raises ValueError if the ranges do not hold as many records.
    """

    records: pa.RecordBatch
    ranges: tuple[OffsetRange, ...]
    cut_time_ms: int
    event_time_ms: int | None = None
    source_position: str | None = None

    def __post_init__(self) -> None:
        held = sum(r.records for r in self.ranges)
        if held != self.records.num_rows:
            raise ValueError(f"ranges of {held} records, a block of {self.records.num_rows}")


@dataclass(frozen=True, slots=True)
class WrittenFrame:
    """A block that is durable, or written without a sync.

    ``opened`` is the segment that this write created (None: it appended to an open one). ``closed`` are the segments
    closed or given up since the last write: they never grow again. Both are those of a write's first frame. ``seconds``
    is the time that the store took to write and sync all frames of the write, ``parts`` are the frame's bytes."""

    handle: BlockHandle
    sequence: int
    payload_bytes: int
    opened: str | None
    closed: tuple[str, ...]
    seconds: float
    parts: tuple[Data, ...] = field(default=(), repr=False, compare=False)


class _OpenSegment:
    """The segment that is being written."""

    def __init__(self, name: SegmentName, opened_at: float) -> None:
        self.path = name.path
        self.id = frame.segment_id(name.path)
        self.opened_at = opened_at
        self.length = 0
        self.blocks = 0
        self.file: SegmentFile | None = None

    def append(self, storage: LogStorage, parts: Sequence[Data], *, sync: bool) -> None:
        """Write ``parts``; with ``sync`` they, and all before them, are durable when this returns."""
        if self.file is None:
            self.file = storage.create_segment(self.path)
        self.file.append(parts, sync=sync)
        self.length += sum(len(memoryview(part)) for part in parts)

    def release(self) -> None:
        """Close the file. Never raises: nothing is written."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None


@dataclass(frozen=True, slots=True)
class SegmentSettings:
    """A segment is closed when the next block would take it past ``segment_bytes``, or when it is ``segment_seconds``
    old."""

    segment_bytes: int = SEGMENT_BYTES
    segment_seconds: float = SEGMENT_SECONDS
    codec: Codec = "zstd"
    close_after_write: bool | None = None
    """Whether each write gets a file or object of its own. None: where the store cannot append."""
    sync_blocks: bool = True
    """Whether each write is synced. If not, a local file is synced when it begins and when it ends."""


class WriteAheadLogWriter:
    """Appends blocks to the log below ``root`` of ``storage``, for one receiver in one epoch. Thread-safe.

    ``positions`` returns the next offset of each of the receiver's partitions; it is called when a segment opens.

    The constructor reads the last segment of the receiver's earlier epochs and cuts its torn tail off; ``recovery``
    holds the tail and any damage. With ``accepted`` (returns the blocks in a segment that the ledger has accepted),
    bytes on which the ledger relies are never cut off. ``progress`` is called after each frame read: a slow disk takes
    longer to read a segment of many megabytes than a lease lasts. The ledger must have granted the epoch before, so
    that later writes of older writers do not count.

    Raises StaleWriterError when there are segments of this epoch or a later one, LogVersionError when a newer version
    of headrace wrote the last segment.
    """

    def __init__(
        self,
        storage: LogStorage,
        root: str,
        receiver: ReceiverId,
        epoch: int,
        *,
        segments: SegmentSettings | None = None,
        clock: Clock | None = None,
        positions: Callable[[], Mapping[TopicPartition, int]] = dict,
        accepted: Accepted | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage.below(root)
        self._receiver = receiver
        self._epoch = epoch
        self._settings = segments or SegmentSettings()
        self._clock = clock or SystemClock()
        self._positions = positions
        own = self._settings.close_after_write
        self._close_after_write = not storage.appends if own is None else own
        self._lock = threading.Lock()
        self._segment: _OpenSegment | None = None
        self._next_number = 0
        self._next_sequence = 0
        self._last_accepted: int | None = None
        self._is_closed = False
        self._previous: list[PreviousSegment] = []
        self._closed: list[str] = []
        self.recovery = self._inherit(accepted, progress)
        self._previous.extend(self.recovery.segments)

    @property
    def next_sequence(self) -> int:
        """The sequence that the next block gets."""
        return self._next_sequence

    def write(
        self,
        records: pa.RecordBatch,
        ranges: Sequence[OffsetRange],
        *,
        cut_time_ms: int,
        last_accepted_sequence: int | None,
        event_time_ms: int | None = None,
        source_position: str | None = None,
    ) -> WrittenFrame:
        """Append one block, as `write_all` does with the `NewBlock` of these fields."""
        block = NewBlock(records, tuple(ranges), cut_time_ms, event_time_ms, source_position)
        return self.write_all([block], last_accepted_sequence=last_accepted_sequence)[0]

    def write_all(self, blocks: Sequence[NewBlock], *, last_accepted_sequence: int | None) -> tuple[WrittenFrame, ...]:
        """Append blocks to one segment with one sync; with ``sync_blocks`` they are durable, file and directory, when
        this returns.

        ``last_accepted_sequence`` is the newest of this writer's sequences that the ledger has accepted, None before
        the first. The ledger must accept all these blocks in one transaction, or none of them.

        Raises WriteFailedError when the blocks are not durable: the segment is given up and the sequences are not used
        again. The blocks may be written again; they get a new segment and new sequences. Raises PayloadError and
        FrameTooLongError with nothing written.
        """
        payloads = [encode(block.records, self._settings.codec) for block in blocks]
        with self._lock:
            if self._is_closed:
                raise ValueError("write to a closed log")
            self._last_accepted = last_accepted_sequence
            first = self._next_sequence
            headers = [
                FrameHeader(
                    receiver=self._receiver,
                    epoch=self._epoch,
                    sequence=sequence,
                    last_accepted_sequence=last_accepted_sequence,
                    cut_time_ms=block.cut_time_ms,
                    ranges=block.ranges,
                    records=block.records.num_rows,
                    raw_bytes=block.records.nbytes,
                    event_time_ms=block.event_time_ms,
                    source_position=block.source_position,
                    written_with=None if sequence == first else first,
                )
                for sequence, block in enumerate(blocks, first)
            ]
            self._roll_if_due(sum(payload.size for payload in payloads))
            return self._write(headers, payloads)

    def roll_if_due(self, last_accepted_sequence: int | None) -> tuple[str, ...]:
        """Close the segment if it is ``segment_seconds`` old; for a receiver that has nothing to write. Returns the
        segments closed or given up since the last call or write, so that cleanup can delete them."""
        with self._lock:
            self._last_accepted = last_accepted_sequence
            self._roll_if_due(0)
            return self._take_closed()

    def close(self, last_accepted_sequence: int | None = None) -> tuple[str, ...]:
        """End the segment with an end frame. Returns the segments closed or given up since the last write.

        ``last_accepted_sequence`` records whether the last block was accepted (None: not known). Does not raise when
        the end frame cannot be written: every block is durable already.
        """
        with self._lock:
            self._last_accepted = last_accepted_sequence
            self._end_segment()
            self._is_closed = True
            return self._take_closed()

    def _write(self, headers: Sequence[FrameHeader], payloads: Sequence[pa.Buffer]) -> tuple[WrittenFrame, ...]:
        segment = self._segment
        opening: list[Data] = []
        if segment is None:
            segment, opening_frame = self._next_segment()
            opening = [opening_frame]
        offset = segment.length + sum(len(memoryview(part)) for part in opening)
        placed: list[tuple[BlockHandle, tuple[Data, Data]]] = []
        for header, payload in zip(headers, payloads, strict=True):
            built = frame.build(header, payload, segment=segment.id, offset=offset)
            placed.append((BlockHandle(segment.path, offset, len(built[0]) + payload.size), built))
            offset += placed[-1][0].length
        # Whatever happens from here on, the sequences and a new segment's number are not used again.
        self._next_sequence += len(headers)
        if opening:
            self._next_number += 1
        parts: list[Data] = [*opening, *(part for _, built in placed for part in built)]
        began = self._clock.monotonic()
        try:
            if self._close_after_write:
                self._write_whole(segment, parts, offset, len(headers))
            else:
                segment.append(self._storage, parts, sync=self._settings.sync_blocks)
        except BaseException as error:
            self._give_up(segment)
            if isinstance(error, Exception):
                raise WriteFailedError(segment.path, headers[0].sequence, error) from error
            raise
        seconds = self._clock.monotonic() - began
        segment.blocks += len(headers)
        if opening:
            self._previous.clear()
            self._segment = segment
        if self._close_after_write:
            self._leave(segment, PreviousState.CLOSED)
        opened, closed = segment.path if opening else None, self._take_closed()
        return tuple(
            WrittenFrame(
                handle=handle,
                sequence=header.sequence,
                payload_bytes=payload.size,
                opened=None if number else opened,
                closed=() if number else closed,
                seconds=seconds,
                parts=(built[0], payload),
            )
            for number, (header, payload, (handle, built)) in enumerate(zip(headers, payloads, placed, strict=True))
        )

    def _write_whole(self, segment: _OpenSegment, parts: list[Data], end_offset: int, blocks: int) -> None:
        """Write a segment of so many blocks as one object."""
        # The ledger cannot have accepted these blocks yet, so the end frame names no accepted sequence.
        self._last_accepted = None
        end, _ = frame.build(self._end(blocks, self._next_sequence), None, segment=segment.id, offset=end_offset)
        whole = b"".join(memoryview(part) for part in [*parts, end])
        self._storage.write_atomically(segment.path, whole, exclusive=True)
        segment.length = len(whole)

    def _next_segment(self) -> tuple[_OpenSegment, bytes]:
        opened_ms = self._clock.now_ms()
        token = "" if self._storage.appends else secrets.token_hex(8)
        name = SegmentName(
            self._receiver.input_id, self._receiver.index, self._epoch, self._next_number, opened_ms, token
        )
        segment = _OpenSegment(name, self._clock.monotonic())
        header = SegmentHeader(
            receiver=self._receiver,
            epoch=self._epoch,
            number=self._next_number,
            opened_ms=opened_ms,
            next_sequence=self._next_sequence,
            last_accepted_sequence=self._last_accepted,
            positions=dict(self._positions()),
            previous=tuple(self._previous),
        )
        head, _ = frame.build(header, None, segment=segment.id, offset=0)
        return segment, head

    def _roll_if_due(self, payload_bytes: int) -> None:
        segment = self._segment
        if segment is None:
            return
        age = self._clock.monotonic() - segment.opened_at
        if age >= self._settings.segment_seconds or segment.length + payload_bytes > self._settings.segment_bytes:
            self._end_segment()

    def _end_segment(self) -> None:
        segment = self._segment
        if segment is None:
            return
        end, _ = frame.build(
            self._end(segment.blocks, self._next_sequence), None, segment=segment.id, offset=segment.length
        )
        try:
            segment.append(self._storage, [end], sync=True)
        except Exception:
            # No block is lost that was synced. The next header says how many bytes of this segment count.
            logger.exception(
                "Segment %s could not be ended; it is given up after %d bytes.", segment.path, segment.length
            )
            self._give_up(segment)
        else:
            self._leave(segment, PreviousState.CLOSED)

    def _end(self, blocks: int, next_sequence: int) -> SegmentEnd:
        return SegmentEnd(
            receiver=self._receiver,
            epoch=self._epoch,
            blocks=blocks,
            next_sequence=next_sequence,
            last_accepted_sequence=self._last_accepted,
            closed_ms=self._clock.now_ms(),
        )

    def _give_up(self, segment: _OpenSegment) -> None:
        """Poison: this file is never written to again."""
        self._leave(segment, PreviousState.POISONED)

    def _leave(self, segment: _OpenSegment, state: PreviousState) -> None:
        segment.release()
        self._previous.append(PreviousSegment(segment.path, segment.length, state))
        self._closed.append(segment.path)
        self._segment = None

    def _take_closed(self) -> tuple[str, ...]:
        closed = tuple(self._closed)
        self._closed.clear()
        return closed

    def _inherit(self, accepted: Accepted | None, progress: Callable[[], None]) -> LogRecovery:
        names = segments_in(self._storage.paths(receiver_directory(self._receiver)))
        if names and names[-1].epoch >= self._epoch:
            raise StaleWriterError(
                f"The log of {self._receiver} has segments of epoch {names[-1].epoch}, this writer's is {self._epoch}.",
                remedy="Register the receiver with the ledger again: it then gets an epoch of its own.",
            )
        return recover_log(self._storage, names, accepted, progress=progress)
