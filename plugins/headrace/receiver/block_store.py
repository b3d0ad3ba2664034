"""Stores what was received, always in this order (rule 1 of the design; `BlockStore.store`):

1. Drop records of topics that may have been created again, and join the others of each block that waits to one block
   for each event time.
2. Write all these blocks to the log, with one sync. A failure is retried in a new segment; a full disk is waited for.
3. Add them to the ledger, in one transaction with the partitions' positions: all or none. The outcome must be known
   before the next write, so this waits. Then copy them to the host's disk, if the stream has local copies.
4. Note the offsets, which the consuming thread then commits to Kafka.
5. Send a heartbeat if one is due, and end the segment if it is old enough.

What a receiver finds becomes an event of the stream (rule 11, no silence): torn tails and damage in its log when it
took over, and offsets that Kafka took back after they were read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

import pyarrow as pa

from headrace.blocks import BlockInfo, OffsetRange, TopicPartition
from headrace.kafka.records import RecordChunk, combine, without
from headrace.ledger import Ledger
from headrace.ledger.errors import (
    LeaseLostError,
    LedgerUnavailableError,
    PartitionNotAssignedError,
    PositionConflictError,
    SegmentRemovedError,
)
from headrace.ledger.events import DURATION_BOUNDS, observation
from headrace.ledger.receiving.tables import AddedBlock, EpochEnd, ReceiverLease
from headrace.ledger.states import EventKind
from headrace.receiver.block_generator import GeneratedBlock
from headrace.receiver.event_times import by_event_time
from headrace.receiver.health import LEDGER_TRANSACTION, LOG_WRITE, SLOW_SECONDS, SlowPart
from headrace.receiver.pausing import Pausing, room_for
from headrace.receiver.receiver import StoreFailedError
from headrace.receiver.record_source import Gap, RecordSource
from headrace.stream_context import StreamContext
from headrace.wal.errors import StorageError, WriteFailedError, is_out_of_space, ranges_text
from headrace.wal.frame import receiver_directory
from headrace.wal.local_copies import BlockCopies, CopyCounts
from headrace.wal.log_storage import LogStorage
from headrace.wal.recovery import LogRecovery, cut_is_reported, unreported_cuts
from headrace.wal.scan import TornTail
from headrace.wal.writer import NewBlock, WriteAheadLogWriter, WrittenFrame

logger = logging.getLogger(__name__)

T = TypeVar("T")

# One try and three retries, as Spark's ReliableKafkaReceiver; the log writes each to a new segment.
STORE_TRIES = 4
_FIRST_WAIT_SECONDS = 0.2
# A failover of Postgres, or a busy SQLite. The frames are durable and their outcome must be known before the next write
# (at most one write of an epoch is undecided, rule 10), so the receiver waits and does not write them again.
LEDGER_TIMEOUT_SECONDS = 60.0
FIRST_CHECK_SECONDS = 0.5
LONGEST_CHECK_SECONDS = 10.0
"""While the disk is full: the first and the longest wait before it is checked again."""
# Of each part of storing, so many durations are averaged; that a part is slow is logged this often.
_RECENT = 10
_WARN_SECONDS = 60.0
# Blocks that are written together, at most. The generator bounds their bytes; but records whose event times span a year
# are one block for each batch time.
_MAX_BLOCKS = 256
# The room needed to continue: this many times the blocks that wait, and at least this many bytes, so that the disk is
# not full again at once.
_ROOM_BLOCKS = 4
_ROOM_BYTES = 4 << 20


@dataclass(slots=True)
class StoreCounts:
    """What a receiver has stored since it began. The pushing thread writes it.

    ``durations`` are two histograms (`headrace.ledger.events.observation`): "log_write", writing and syncing a block,
    and "ledger_transaction", adding it to the ledger. ``recent`` has the last few of each.
    """

    blocks: int = 0
    records: int = 0
    payload_bytes: int = 0
    write_failures: int = 0
    dropped_records: int = 0
    late_records: int = 0
    durations: dict[str, float] = field(default_factory=dict)
    recent: dict[str, deque[float]] = field(default_factory=dict)
    copies: CopyCounts = field(default_factory=CopyCounts)

    def took(self, name: str, seconds: float) -> None:
        """Add a duration to one of the histograms."""
        for key, amount in observation(name, seconds, DURATION_BOUNDS).items():
            self.durations[key] = self.durations.get(key, 0.0) + amount
        self.recent.setdefault(name, deque(maxlen=_RECENT)).append(seconds)

    def recent_seconds(self) -> dict[str, float]:
        """The means of the last few durations, by name and ``_seconds``."""
        return {f"{name}_seconds": round(fmean(seconds), 3) for name, seconds in self.recent.items()}


class BlockStore:
    """Used by the pushing thread."""

    def __init__(
        self,
        context: StreamContext,
        lease: ReceiverLease,
        *,
        writer: WriteAheadLogWriter,
        source: RecordSource,
        pausing: Pausing,
        counts: StoreCounts,
        next_offsets: dict[TopicPartition, int],
        wait: Callable[[float], None],
        not_to_store: Callable[[Sequence[TopicPartition]], Sequence[TopicPartition]],
        beat: Callable[[], bool],
        copies: BlockCopies | None = None,
    ) -> None:
        """``next_offsets`` are the ledger's positions, for the headers of new segments; this class keeps them current.

        ``wait`` waits for seconds while heartbeats continue; it raises to give up.
        ``not_to_store`` returns the partitions whose records may belong to another incarnation of their topic.
        ``beat`` sends a heartbeat if one is due, and says whether the ledger answered one.
        ``copies`` gets each stored block; None: no copies.
        """
        self._lease = lease
        self._ledger = context.ledger
        self._clock = context.clock
        self._disk_url = context.storage.url
        self._writer = writer
        self._source = source
        self._pausing = pausing
        self.counts = counts
        self._next_offsets = next_offsets
        self._wait = wait
        self._not_to_store = not_to_store
        self._beat = beat
        self._copies = copies
        self._last_accepted: int | None = None
        self._is_undecided = False
        self._writing_since: float | None = None
        self._next_warning: dict[str, float] = {}

    @property
    def writing_seconds(self) -> float:
        """Seconds since the running call of the log's writer began; 0.0 if none runs. May be called by any thread."""
        since = self._writing_since
        return 0.0 if since is None else self._clock.monotonic() - since

    def store(self, generated: Sequence[GeneratedBlock[RecordChunk]]) -> None:
        """Store what was cut, in order, as one block per cut and event time; chunks without records only move
        positions.

        Raises:
            StoreFailedError: all tries failed; Kafka still has the records, and a custom receiver has no
                acknowledgement for them.
            LeaseLostError: another receiver has taken over; nothing more was accepted.
        """
        chunks = (chunk for block in generated for chunk in block.items)
        partitions = dict.fromkeys(offset_range.partition for chunk in chunks for offset_range in chunk.ranges)
        dropped = self._not_to_store(list(partitions))
        blocks = (self._joined(group, block.cut_time_ms) for block in generated for group in by_event_time(block.items))
        waiting = deque(self._left(blocks, dropped))
        while waiting:
            group = _next_group(waiting)
            try:
                self._store_group(group)
            except PartitionNotAssignedError as error:
                # The partition was taken away by force. Frames that were written stay intents, and the other records
                # are written again: the ledger refused the whole group.
                logger.warning("%s", error)
                waiting.extendleft(reversed(self._left(group, [error.partition])))
                continue
            for block in group:
                self._next_offsets.update((r.partition, r.until_offset) for r in block.ranges)
                self._source.commits.note(block.ranges)
            self.tick()

    def _left(self, blocks: Iterable[_Unstored], dropped: Sequence[TopicPartition]) -> list[_Unstored]:
        """What is left of the blocks without these partitions."""
        return [left for block in blocks if (left := block.without(dropped, self.counts)).ranges]

    def _joined(self, chunks: Sequence[RecordChunk], cut_time_ms: int) -> _Unstored:
        records, ranges = combine(chunks)
        ranges = tuple(self._with_leader_epoch(offset_range) for offset_range in ranges)
        return _Unstored(records, ranges, cut_time_ms, chunks[0].event_time_ms, _source_position(chunks))

    def _store_group(self, group: Sequence[_Unstored]) -> None:
        """Store blocks that are written together, or move the positions of one without records."""
        blocks = [block.to_write() for block in group if block.records is not None]
        if blocks:
            self._write_and_add(blocks)
        else:
            self._advance([r for block in group for r in block.ranges])

    def _with_leader_epoch(self, offset_range: OffsetRange) -> OffsetRange:
        end = (
            self._source.leader_epochs.end_at(offset_range.partition, offset_range.until_offset)
            if offset_range.records
            else None
        )
        return offset_range if end is None else replace(offset_range, leader_epoch=end.leader_epoch)

    def advance(self, partition: TopicPartition, from_offset: int, until_offset: int, gap: str | None) -> None:
        """Advance a position over offsets that hold no record, or that are lost (``gap`` says why)."""

        def step() -> None:
            try:
                self._ledger.positions.advance(self._lease, partition, from_offset, until_offset, gap=gap)
            except PositionConflictError as error:
                # An earlier try succeeded, but its answer was lost.
                if error.expected != until_offset:
                    raise

        self._retried(step)
        self._next_offsets[partition] = until_offset

    def record_gap(self, gap: Gap) -> None:
        """Record lost offsets, or report offsets that Kafka took back. (Not if the topic was created again: the tracker
        reports that.)"""
        if self._not_to_store([gap.partition]):
            return
        try:
            if gap.taken_back:
                self._retried(lambda: report_reused(gap, self._lease, self._ledger))
            else:
                self.advance(gap.partition, gap.from_offset, gap.until_offset, gap.reason)
        except PartitionNotAssignedError as error:
            # The partition was taken away by force; its new receiver finds the same.
            logger.warning("%s", error)

    def tick(self) -> None:
        """Send a heartbeat if one is due. If the ledger answered it, end the log's segment if it is old enough.

        Called regularly, also while there is nothing to store. Also called after each block of one call of `store`:
        records whose event times span a year become one block for each batch time, which takes longer than a lease.
        """
        if self._beat():
            with self._writing():
                closed = self._writer.roll_if_due(self._settled)
            self._report_closed(closed)

    def close(self) -> None:
        """End the segment and report that to the ledger if it answers."""
        with self._writing():
            closed = self._writer.close(self._settled)
        self._report_closed(closed)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._writing_since = self._clock.monotonic()
        try:
            yield
        finally:
            self._writing_since = None

    @property
    def _settled(self) -> int | None:
        """The last accepted sequence for an end frame; None if unknown."""
        # A block without an answer must not appear as refused in the log: a lost ledger is rebuilt from it.
        return None if self._is_undecided else self._last_accepted

    def _advance(self, ranges: Sequence[OffsetRange]) -> None:
        for offset_range in ranges:
            self.advance(offset_range.partition, offset_range.from_offset, offset_range.until_offset, None)

    def _write_and_add(self, blocks: Sequence[NewBlock]) -> None:
        last: Exception | None = None
        failures = full = 0
        while failures < STORE_TRIES:
            if failures:
                self._wait(_FIRST_WAIT_SECONDS * 2 ** (failures - 1))
            try:
                with self._writing():
                    frames = self._writer.write_all(blocks, last_accepted_sequence=self._last_accepted)
                # Here, not after the ledger's answer: if the ledger refuses the blocks, perhaps no other follows, and
                # the receiver would pause for good on a disk that has room.
                self._pausing.stored(sum(frame.payload_bytes for frame in frames))
                self._took(LOG_WRITE, frames[0].seconds, blocks=len(frames))
                infos = [
                    BlockInfo(
                        receiver=self._lease.receiver_id,
                        epoch=self._lease.epoch,
                        sequence=frame.sequence,
                        cut_time_ms=block.cut_time_ms,
                        handle=frame.handle,
                        ranges=block.ranges,
                        records=block.records.num_rows,
                        payload_bytes=frame.payload_bytes,
                        event_time_ms=block.event_time_ms,
                        source_position=block.source_position,
                    )
                    for block, frame in zip(blocks, frames, strict=True)
                ]
                self._add(infos, frames)
            except (WriteFailedError, SegmentRemovedError, StorageError, OSError) as error:
                self.counts.write_failures += 1
                last = error
                if is_out_of_space(error):
                    # Not this receiver's failure: a restarted receiver would have the same problem, and would first
                    # have to read everything again.
                    self._await_room(error, sum(block.records.nbytes for block in blocks), full)
                    full += 1
                    continue
                failures += 1
                logger.warning("storing %s failed (%d of %d tries): %s", _sizes(blocks), failures, STORE_TRIES, error)
            else:
                return
        raise StoreFailedError(
            f"{_sizes(blocks)} could not be stored in {STORE_TRIES} tries: {last}.",
            remedy="The receiver starts again from the ledger's positions; check the log's disk or object store.",
        ) from last

    def _await_room(self, error: Exception, nbytes: int, waited: int) -> None:
        """Wait until the disk has room for blocks of ``nbytes``. ``waited``: number of earlier waits for this block."""
        self._pausing.disk_is_full(error)
        needed = max(_ROOM_BLOCKS * nbytes, _ROOM_BYTES)
        seconds = min(LONGEST_CHECK_SECONDS, FIRST_CHECK_SECONDS * 2 ** min(waited, 8))
        self._wait(seconds)
        while not room_for(self._disk_url, needed):
            seconds = min(LONGEST_CHECK_SECONDS, seconds * 2)
            self._wait(seconds)

    def _add(self, infos: Sequence[BlockInfo], frames: Sequence[WrittenFrame]) -> None:
        self._is_undecided = True
        ends = {
            offset_range.partition: end
            for info in infos
            for offset_range in info.ranges
            if (end := self._source.leader_epochs.end_at(offset_range.partition, offset_range.until_offset)) is not None
        }
        added = self._retried(lambda: self._add_to_ledger(infos, ends))
        self._is_undecided = False
        self._last_accepted = infos[-1].sequence
        for info, frame, of_ledger in zip(infos, frames, added, strict=True):
            self.counts.blocks += 1
            self.counts.records += info.records
            self.counts.late_records += info.records if of_ledger.late else 0
            self.counts.payload_bytes += info.payload_bytes
            if self._copies is not None:
                self._copies.write(frame.handle, frame.parts)
        self._report_closed(frames[0].closed)

    def _add_to_ledger(
        self, infos: Sequence[BlockInfo], ends: Mapping[TopicPartition, EpochEnd]
    ) -> Sequence[AddedBlock]:
        began = self._clock.monotonic()
        added = self._ledger.blocks.add_all(self._lease, infos, ends)
        self._took(LEDGER_TRANSACTION, self._clock.monotonic() - began, blocks=len(infos))
        return added

    def _took(self, name: str, seconds: float, *, blocks: int) -> None:
        self.counts.took(name, seconds)
        now = self._clock.monotonic()
        if seconds >= SLOW_SECONDS and now >= self._next_warning.get(name, 0.0):
            self._next_warning[name] = now + _WARN_SECONDS
            part = SlowPart(self._lease.receiver_id, name, seconds)
            logger.warning("Storing %d block(s) is slow: %s. %s", blocks, part, part.remedy)

    def _report_closed(self, segments: Sequence[str]) -> None:
        for segment in segments:
            try:
                self._ledger.segments.closed(self._lease, segment)
            except (LedgerUnavailableError, LeaseLostError) as error:
                # The next epoch's registration closes it too; only its cleanup is delayed.
                logger.warning("segment %s could not be reported as closed: %s", segment, error)

    def _retried(self, step: Callable[[], T]) -> T:
        """Repeat ``step`` while the ledger does not answer. Adding a block twice is harmless: the ledger knows its
        sequence."""
        until = self._clock.monotonic() + LEDGER_TIMEOUT_SECONDS
        seconds = _FIRST_WAIT_SECONDS
        while True:
            try:
                return step()
            except LedgerUnavailableError as error:
                if self._clock.monotonic() >= until:
                    raise StoreFailedError(
                        f"The ledger did not answer for {LEDGER_TIMEOUT_SECONDS:.0f} s: {error}.",
                        remedy="The receiver starts again from the ledger's positions when the ledger answers.",
                    ) from error
                logger.warning("the ledger does not answer; trying again in %.1f s: %s", seconds, error)
                self._wait(seconds)
                seconds = min(5.0, seconds * 2)


@dataclass(frozen=True, slots=True)
class _Unstored:
    """A block that is not stored yet; ``records`` is None if it only moves positions. The rest is as in `NewBlock`."""

    records: pa.RecordBatch | None
    ranges: tuple[OffsetRange, ...]
    cut_time_ms: int
    event_time_ms: int | None
    source_position: str | None

    def without(self, dropped: Sequence[TopicPartition], counts: StoreCounts) -> _Unstored:
        """Return the block without the records of these partitions, which are counted as dropped."""
        gone = [r for r in self.ranges if r.partition in dropped]
        if not gone:
            return self
        counts.dropped_records += sum(r.records for r in gone)
        if self.records is None:
            return replace(self, ranges=tuple(r for r in self.ranges if r not in gone))
        records, ranges = without(self.records, self.ranges, dropped)
        return replace(self, records=records, ranges=ranges)

    def to_write(self) -> NewBlock:
        """Return the block for the log; it must have records."""
        return NewBlock(self.records, self.ranges, self.cut_time_ms, self.event_time_ms, self.source_position)


def _next_group(waiting: deque[_Unstored]) -> list[_Unstored]:
    """Take the next blocks that are written together: all that have records, or one without."""
    group = [waiting.popleft()]
    if group[0].records is not None:
        while waiting and waiting[0].records is not None and len(group) < _MAX_BLOCKS:
            group.append(waiting.popleft())
    return group


def _sizes(blocks: Sequence[NewBlock]) -> str:
    records = sum(block.records.num_rows for block in blocks)
    return f"A block of {records} records" if len(blocks) == 1 else f"{len(blocks)} blocks of {records} records"


def _source_position(chunks: Sequence[RecordChunk]) -> str | None:
    """Where the source stands after the last chunk that says so."""
    return next((chunk.source_position for chunk in reversed(chunks) if chunk.source_position is not None), None)


# The number of newest events among which a repeated finding is looked for.
_NEWEST = 1_000


def report_recovery(recovered: LogRecovery, lease: ReceiverLease, ledger: Ledger, log: LogStorage) -> None:
    """Append an event for each torn tail that was cut off, and for each damage.

    ``log_repaired`` has the path of the tail's copy, and includes cuts of a receiver that was killed before it could
    report them. ``log_damaged`` is for damage and for tails that could not be cut. Each is reported once, although a
    writer that ends before its first block leaves its findings to the next one.
    """
    stream = lease.receiver_id.stream
    writer = {"receiver": str(lease.receiver_id), "epoch": lease.epoch}
    # Includes the tails that this receiver cut off.
    cuts = unreported_cuts(log, receiver_directory(lease.receiver_id))
    repaired = {event.payload.get("kept") for event in ledger.events.latest(stream, [EventKind.LOG_REPAIRED])}
    for tail in cuts:
        if tail.kept not in repaired:
            ledger.events.append(stream, EventKind.LOG_REPAIRED, {**writer, **_reported(tail), "kept": tail.kept})
        cut_is_reported(log, tail)
    damaged: list[dict[str, object]] = [_reported(tail) for tail in recovered.torn_tails if tail.kept is None]
    for damage in recovered.damage:
        lost = None if damage.ranges is None else ranges_text(damage.ranges)
        damaged.append({"segment": damage.segment, "offset": damage.offset, "error": str(damage), "lost": lost})
    if not damaged:
        return
    latest = ledger.events.latest(stream, [EventKind.LOG_DAMAGED])
    known = {(event.payload.get("segment"), event.payload.get("offset")) for event in latest}
    for entry in damaged:
        if (entry["segment"], entry["offset"]) not in known:
            ledger.events.append(stream, EventKind.LOG_DAMAGED, {**writer, **entry})


def _reported(tail: TornTail) -> dict[str, object]:
    return {
        "segment": tail.segment,
        "offset": tail.offset,
        "bytes": tail.length,
        "error": f"torn tail: {tail.reason}",
    }


def report_reused(gap: Gap, lease: ReceiverLease, ledger: Ledger) -> None:
    """Report that Kafka took back the offsets of ``gap`` and gives them to other records, unless another receiver has
    reported it. They are not a gap in the ledger: blocks contain these offsets.

    The next receiver then continues at the position without a check. Raises LedgerUnavailableError; repeat the call
    then.
    """
    if gap.until_offset > gap.from_offset:
        _report_offsets(gap, lease, ledger)
    ledger.positions.forget_epoch_end(lease, gap.partition)


def _report_offsets(gap: Gap, lease: ReceiverLease, ledger: Ledger) -> None:
    receiver_id, partition = lease.receiver_id, gap.partition
    of_partition = {
        "input": receiver_id.input_id,
        "topic": partition.topic,
        "topic_id": partition.topic_id,
        "partition": partition.partition,
        "until_offset": gap.until_offset,
    }
    for event in ledger.events.latest(receiver_id.stream, [EventKind.OFFSETS_REUSED], _NEWEST):
        is_same = all(event.payload.get(name) == value for name, value in of_partition.items())
        if is_same and event.payload["from_offset"] <= gap.from_offset:
            return
    payload = {**of_partition, "from_offset": gap.from_offset, "reason": gap.reason}
    ledger.events.append(receiver_id.stream, EventKind.OFFSETS_REUSED, payload)
