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
from headrace.wal.recovery import Accepted, LogRecovery, recover_log
from headrace.wal.storage import Data, LogStorage, SegmentFile

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 128 << 20
SEGMENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class WrittenFrame:
    """A block that is durable, or written without a sync.

    ``opened`` is the segment that this write created (None: it appended to an open one). ``closed`` are the segments
    closed or given up since the last write: they never grow again. ``seconds`` is the time that the store took to write
    and sync the frame, ``parts`` are the frame's bytes."""

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


class WriteAheadLogWriter:
    """Appends blocks to the log below ``root`` of ``storage``, for one receiver in one epoch. Thread-safe.

    ``positions`` returns the next offset of each of the receiver's partitions; it is called when a segment opens.
    A segment is closed when the next block would take it past ``segment_bytes``, or when it is ``segment_seconds`` old.
    A store that cannot append gets one object per write (``close_after_write``). Without ``sync_blocks`` a local file
    is synced when it begins and when it ends, and not for each block.

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
        segment_bytes: int = SEGMENT_BYTES,
        segment_seconds: float = SEGMENT_SECONDS,
        clock: Clock | None = None,
        codec: Codec = "zstd",
        positions: Callable[[], Mapping[TopicPartition, int]] = dict,
        accepted: Accepted | None = None,
        progress: Callable[[], None] = lambda: None,
        close_after_write: bool | None = None,
        sync_blocks: bool = True,
    ) -> None:
        self._storage = storage.below(root)
        self._receiver = receiver
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._clock = clock or SystemClock()
        self._codec = codec
        self._positions = positions
        self._close_after_write = not storage.appends if close_after_write is None else close_after_write
        self._sync_blocks = sync_blocks
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
        """Append a block (``RECORD_SCHEMA``); with ``sync_blocks`` it is durable, file and directory, when this
        returns.

        ``ranges`` must hold as many records as ``records``. ``last_accepted_sequence`` is the newest of this writer's
        sequences that the ledger has accepted, None before the first. ``event_time_ms`` and
        ``source_position``: as in `BlockInfo`.

        Raises WriteFailedError when the block is not durable: the segment is given up and the sequence is not used
        again. The block may be written again; it gets a new segment and sequence. Raises PayloadError and
        FrameTooLongError with nothing written.
        """
        if sum(r.records for r in ranges) != records.num_rows:
            raise ValueError(f"ranges of {sum(r.records for r in ranges)} records, a block of {records.num_rows}")
        payload = encode(records, self._codec)
        with self._lock:
            if self._is_closed:
                raise ValueError("write to a closed log")
            self._last_accepted = last_accepted_sequence
            header = FrameHeader(
                receiver=self._receiver,
                epoch=self._epoch,
                sequence=self._next_sequence,
                last_accepted_sequence=last_accepted_sequence,
                cut_time_ms=cut_time_ms,
                ranges=tuple(ranges),
                records=records.num_rows,
                raw_bytes=records.nbytes,
                event_time_ms=event_time_ms,
                source_position=source_position,
            )
            self._roll_if_due(payload.size)
            return self._write(header, payload)

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

    def _write(self, header: FrameHeader, payload: pa.Buffer) -> WrittenFrame:
        segment = self._segment
        opening: list[Data] = []
        if segment is None:
            segment, opening_frame = self._next_segment()
            opening = [opening_frame]
        offset = segment.length + sum(len(memoryview(part)) for part in opening)
        head, body = frame.build(header, payload, segment=segment.id, offset=offset)
        length = len(head) + payload.size
        # Whatever happens from here on, the sequence and a new segment's number are not used again.
        self._next_sequence += 1
        if opening:
            self._next_number += 1
        parts: list[Data] = [*opening, head, body]
        began = self._clock.monotonic()
        try:
            if self._close_after_write:
                self._write_whole(segment, parts, offset + length, header.sequence)
            else:
                segment.append(self._storage, parts, sync=self._sync_blocks)
        except BaseException as error:
            self._give_up(segment)
            if isinstance(error, Exception):
                raise WriteFailedError(segment.path, header.sequence, error) from error
            raise
        seconds = self._clock.monotonic() - began
        segment.blocks += 1
        if opening:
            self._previous.clear()
            self._segment = segment
        if self._close_after_write:
            self._leave(segment, PreviousState.CLOSED)
        return WrittenFrame(
            handle=BlockHandle(segment.path, offset, length),
            sequence=header.sequence,
            payload_bytes=payload.size,
            opened=segment.path if opening else None,
            closed=self._take_closed(),
            seconds=seconds,
            parts=(head, payload),
        )

    def _write_whole(self, segment: _OpenSegment, parts: list[Data], end_offset: int, sequence: int) -> None:
        """Write a segment of one block as one object."""
        # The ledger cannot have accepted this block yet, so the end frame names no accepted sequence.
        self._last_accepted = None
        end, _ = frame.build(self._end(1, sequence + 1), None, segment=segment.id, offset=end_offset)
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
        if age >= self._segment_seconds or segment.length + payload_bytes > self._segment_bytes:
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
