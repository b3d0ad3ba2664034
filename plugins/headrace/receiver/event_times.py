"""Assigns records to batch intervals by timestamp, using the latest timestamp so far in the partition.

With this running maximum, instead of each record's own timestamp, the batches of a partition never go back. So a batch
has one offset range of each partition, and a record that is slightly older than its neighbour stays with it.

Batches by timestamp must not wait for idle partitions. So `EndOffsetTracker` tracks up to which time everything that
Kafka had of a partition is stored. It asks Kafka for the end offsets of the partitions. The answer is of a moment after
the request. So once a partition's stored position reaches that end, everything that Kafka had at the request is stored,
whatever happened in between: an idle partition, a full queue, a refused fetch. Without a broker's answer nothing new is
reported. An empty fetch proves less: librdkafka reports the end of a partition once and then stays silent, whether the
broker still answers or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from confluent_kafka import IsolationLevel, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka.records import RecordChunk

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Topic and partition."""

# The interval of the requests, one to each broker, which answers from memory.
ASK_EVERY_MS = 1_000
_QUESTION_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ends:
    """The end offsets of partitions as the input's consumers see them, and the errors of the other partitions."""

    offsets: Mapping[Key, int]
    failures: Mapping[Key, BaseException] = field(default_factory=dict)


class EndOffsets(Protocol):
    """Asks Kafka for the end offsets of partitions."""

    def ask(self, partitions: Collection[Key]) -> Callable[[], Ends | None]:
        """Send the request without waiting. The returned function does not wait either; None while unanswered."""
        ...


class AdminEndOffsets:
    """``EndOffsets`` that uses an AdminClient. For read_committed consumers a partition ends where its first open
    transaction begins, for others where its log ends."""

    def __init__(self, admin: Any, isolation: IsolationLevel) -> None:
        self._admin = admin
        self._isolation = isolation

    def ask(self, partitions: Collection[Key]) -> Callable[[], Ends | None]:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        futures = self._admin.list_offsets(
            {KafkaPartition(*key): latest for key in partitions},
            isolation_level=self._isolation,
            request_timeout=_QUESTION_SECONDS,
        )

        def answer() -> Ends | None:
            if not all(future.done() for future in futures.values()):
                return None
            offsets: dict[Key, int] = {}
            failures: dict[Key, BaseException] = {}
            for key, future in futures.items():
                failure = future.exception()
                if failure is None:
                    offsets[key.topic, key.partition] = int(future.result().offset)
                else:
                    failures[key.topic, key.partition] = failure
            return Ends(offsets, failures)

        return answer


@dataclass(frozen=True, slots=True)
class _End:
    """At ``asked_ms`` of the ledger's clock, or a little later, the partition ended at ``offset``."""

    asked_ms: int
    offset: int


class EndOffsetTracker:
    """Finds up to which time each partition is drained: everything that Kafka had then is stored.

    Used by the pushing thread.

    ``stored`` returns the ledger's position of each of the receiver's partitions, ``now_ms`` the ledger's time.

    Kafka is asked once a second, ``lateness_ms`` after each full second. So the answer is new when the allowed lateness
    of a batch ends.
    """

    def __init__(
        self,
        ends: EndOffsets,
        stored: Callable[[], Mapping[TopicPartition, int]],
        now_ms: Callable[[], int],
        *,
        lateness_ms: int,
    ) -> None:
        self._ends = ends
        self._stored = stored
        self._now_ms = now_ms
        self._lateness_ms = lateness_ms
        self._asked_turn: int | None = None
        self._asked_ms = 0
        self._asked_positions: Mapping[TopicPartition, int] = {}
        self._answer: Callable[[], Ends | None] | None = None
        self._to_reach: dict[TopicPartition, _End] = {}
        self._drained: dict[TopicPartition, int] = {}
        self._reported: dict[TopicPartition, int] = {}

    def poll(self) -> bool:
        """Send a request when it is due, or take its answer, without waiting. Returns whether an answer that has just
        come drained a partition up to a later time."""
        if self._answer is not None:
            return self._take_answer(self._answer)
        now_ms = self._now_ms()
        turn = (now_ms - self._lateness_ms) // ASK_EVERY_MS
        if turn == self._asked_turn:
            return False
        self._asked_turn, self._asked_ms, self._asked_positions = turn, now_ms, dict(self._stored())
        if self._asked_positions:
            try:
                keys = [(partition.topic, partition.partition) for partition in self._asked_positions]
                self._answer = self._ends.ask(keys)
            except KafkaException as error:
                logger.warning("Kafka did not return the end offsets of the partitions: %s", error)
        return False

    def drained(self) -> dict[TopicPartition, int]:
        """Return, for each partition, the ledger's time up to which everything that Kafka had is stored. Only times
        that are later than the reported ones."""
        stored = self._stored()
        self._settle(stored)
        return {
            partition: drained_ms
            for partition, drained_ms in self._drained.items()
            if partition in stored and drained_ms > self._reported.get(partition, 0)
        }

    def reported(self, drained: Mapping[TopicPartition, int]) -> None:
        """Note that ``drained`` was reported to the ledger."""
        self._reported.update(drained)

    def _settle(self, stored: Mapping[TopicPartition, int]) -> None:
        for partition, end in list(self._to_reach.items()):
            if stored.get(partition, -1) >= end.offset:
                self._drained[partition] = end.asked_ms
                del self._to_reach[partition]

    def _take_answer(self, answer: Callable[[], Ends | None]) -> bool:
        ends = answer()
        if ends is None:
            return False
        self._answer = None
        stored = self._stored()
        self._settle(stored)
        for partition, position in self._asked_positions.items():
            end = ends.offsets.get((partition.topic, partition.partition))
            awaited = self._to_reach.get(partition)
            # Records are stored some time after they are read, and an end that moves with every answer is never
            # reached. So the first end stays, unless the log was truncated below it. An end below the position at the
            # time of the request belongs to another topic of this name, or to a truncated log.
            if end is not None and end >= position and (awaited is None or end < awaited.offset):
                self._to_reach[partition] = _End(self._asked_ms, end)
        for known in (self._to_reach, self._drained, self._reported):
            for partition in known.keys() - stored.keys():
                del known[partition]
        return bool(self.drained())


_NO_TIMESTAMP = -1

_Rows = np.ndarray[Any, Any] | slice


class EventTimes:
    """Splits chunks at the ends of batch intervals. Used by the consuming thread.

    A timestamp ahead of ``now_ms()`` (the ledger's clock) counts as now: otherwise one record from the year 2100 would
    move its partition there. A record without a timestamp counts as the maximum so far, or as now if there is none.

    The maximum is kept as the start of its interval: nothing else is needed, and the ledger stores no more.
    """

    def __init__(self, batch_interval_ms: int, now_ms: Callable[[], int]) -> None:
        self._interval_ms = batch_interval_ms
        self._now_ms = now_ms
        self._watermarks: dict[TopicPartition, int] = {}

    def begin(self, partition: TopicPartition, watermark_ms: int | None) -> None:
        """Begin to track ``partition``. ``watermark_ms`` is the maximum of its earlier records; None or 0 without any.

        A partition that is tracked already keeps the later watermark.
        """
        if watermark_ms:
            start_ms = watermark_ms - watermark_ms % self._interval_ms
            self._watermarks[partition] = max(start_ms, self._watermarks.get(partition, start_ms))

    def forget(self, partition: TopicPartition) -> None:
        """Forget a partition that another receiver reads, or that is read again from an earlier offset."""
        self._watermarks.pop(partition, None)

    def split(self, chunk: RecordChunk) -> list[RecordChunk]:
        """Split the chunk into one per interval, earliest first, with ``event_time_ms`` set to the interval's start.

        Offsets without a record go with the offsets before them; with None if their partition had no record yet.
        """
        moved = [offset_range for offset_range in chunk.ranges if not offset_range.records]
        parts = [
            RecordChunk(
                None,
                tuple(
                    offset_range for offset_range in moved if self._watermarks.get(offset_range.partition) == start_ms
                ),
                0,
                start_ms,
            )
            for start_ms in dict.fromkeys(self._watermarks.get(offset_range.partition) for offset_range in moved)
        ]
        if chunk.batch is not None:
            ranges = (
                chunk.ranges
                if not moved
                else tuple(offset_range for offset_range in chunk.ranges if offset_range.records)
            )
            parts += self._split(chunk.batch, ranges, chunk.nbytes)
        return sorted(parts, key=lambda part: _order(part.event_time_ms))

    def _split(self, batch: pa.RecordBatch, ranges: tuple[OffsetRange, ...], nbytes: int) -> list[RecordChunk]:
        now_ms = self._now_ms()
        times = np.minimum(batch.column("timestamp").view(pa.int64()).to_numpy(), now_ms)
        missing = (batch.column("timestampType").to_numpy() < 0) | (times < 0)
        if missing.any():
            times = np.where(missing, _NO_TIMESTAMP, times)
        # The usual case: all records are in one interval, and no partition is past it.
        first_ms, last_ms = int(times.min()), int(times.max())
        start_ms = first_ms - first_ms % self._interval_ms
        latest_ms = max(self._watermarks.get(offset_range.partition, 0) for offset_range in ranges)
        if first_ms >= 0 and last_ms < start_ms + self._interval_ms and latest_ms <= start_ms:
            self._watermarks.update((offset_range.partition, start_ms) for offset_range in ranges)
            return [RecordChunk(batch, ranges, nbytes, start_ms)]
        return self._split_by_interval(batch, ranges, times, now_ms)

    def _split_by_interval(
        self, batch: pa.RecordBatch, ranges: Sequence[OffsetRange], times: np.ndarray[Any, Any], now_ms: int
    ) -> list[RecordChunk]:
        starts = np.empty(len(times), dtype=np.int64)
        offsets = batch.column("offset").to_numpy()
        parts: dict[int, list[OffsetRange]] = {}
        for whole, rows in _by_partition(batch, ranges):
            own = self._starts(whole.partition, times[rows], now_ms)
            starts[rows] = own
            self._watermarks[whole.partition] = int(own[-1])
            bounds = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(own)]
            begins = [whole.from_offset, *offsets[rows][bounds[1:-1]].tolist(), whole.until_offset]
            for number, start_ms in enumerate(own[bounds[:-1]].tolist()):
                records = bounds[number + 1] - bounds[number]
                part = OffsetRange(whole.partition, begins[number], begins[number + 1], records)
                parts.setdefault(start_ms, []).append(part)
        if (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts, kind="stable")
            batch = batch.take(pa.array(order))
        chunks, at = [], 0
        for start_ms in sorted(parts):
            records = sum(offset_range.records for offset_range in parts[start_ms])
            piece = batch.slice(at, records)
            chunks.append(RecordChunk(piece, tuple(parts[start_ms]), piece.nbytes, start_ms))
            at += records
        return chunks

    def _starts(self, partition: TopicPartition, times: np.ndarray[Any, Any], now_ms: int) -> np.ndarray[Any, Any]:
        """Return the start of the interval of each record's running maximum. ``times``: one partition's, in order."""
        reached = self._watermarks.get(partition)
        if reached is None and times[0] == _NO_TIMESTAMP:
            reached = now_ms
        running: np.ndarray[Any, Any] = np.maximum.accumulate(times if reached is None else np.maximum(times, reached))
        starts: np.ndarray[Any, Any] = running - running % self._interval_ms
        return starts


def by_event_time(chunks: Sequence[RecordChunk]) -> list[list[RecordChunk]]:
    """Group chunks by event time, earliest first; each group keeps the order in which its chunks were read.

    Event times never go back within a partition, so its offsets stay in order.
    """
    groups: dict[int | None, list[RecordChunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.event_time_ms, []).append(chunk)
    return [groups[event_time_ms] for event_time_ms in sorted(groups, key=_order)]


def _order(event_time_ms: int | None) -> int:
    return -1 if event_time_ms is None else event_time_ms


def _by_partition(batch: pa.RecordBatch, ranges: Sequence[OffsetRange]) -> Iterator[tuple[OffsetRange, _Rows]]:
    """Yield each range with its rows, in the order of offsets."""
    if len(ranges) == 1:
        yield ranges[0], slice(None)
        return
    keys = batch.column("partition").to_numpy().astype(np.int64)
    names = [ranges[0].partition.topic]
    if any(offset_range.partition.topic != names[0] for offset_range in ranges):
        coded = batch.column("topic").dictionary_encode()
        names = coded.dictionary.to_pylist()
        keys |= coded.indices.to_numpy().astype(np.int64) << 32
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    code_of = {name: code for code, name in enumerate(names)}
    for offset_range in ranges:
        key = code_of[offset_range.partition.topic] << 32 | offset_range.partition.partition
        begin, end = np.searchsorted(sorted_keys, [key, key + 1])
        yield offset_range, order[begin:end]
