"""Handles partitions that cannot be read, or not yet: fetch again later, fail, or skip lost offsets as a gap.

An error of one partition does not stop the others.

A consumer gets the next record, wherever it is: it skips a segment that is missing from a broker's disk without an
error. Compaction and transactions leave offsets without a record too. Those are counted. A hole is a loss if neither of
them can explain it (rule 2 of the design): the topic is not compacted, and the cluster has no transactions or they
leave no hole of this size.

Records of a topic that this client may no longer describe cannot be distinguished from those of another topic with the
same name. If the reader continued and dropped records, the position would stay behind the reader. So the reader goes
back to the position and waits there.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

import numpy as np
from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from headrace.blocks import TopicPartition
from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.offsets import OffsetQuestions
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.kafka.records import Converted, Cursor, RecordChunk
from headrace.kafka.topics import IncarnationGuard
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.event_times import EventTimes
from headrace.receiver.record_source import FetchState, Gap, LeaderEpochs, OwnedPartition, RecordSource

logger = logging.getLogger(__name__)


_ERROR = "its topic may not be described, so that its records are not stored; let the connection's user DESCRIBE it"
READ_AGAIN_SECONDS = 10.0
"""After this time the records of a topic that may not be described are read again."""


class UnauthorizedTopics:
    """The pushing thread calls `not_to_store`, the consuming thread `read_again`."""

    def __init__(
        self,
        guard: IncarnationGuard,
        source: RecordSource,
        generator: BlockGenerator[RecordChunk],
        next_offsets: Mapping[TopicPartition, int],
        event_times: EventTimes | None = None,
    ) -> None:
        """``next_offsets`` are the ledger's positions. ``event_times`` is that of a stream by timestamp."""
        self._guard = guard
        self._source = source
        self._generator = generator
        self._next_offsets = next_offsets
        self._event_times = event_times
        self._withheld: set[TopicPartition] = set()
        self._found: SimpleQueue[TopicPartition] = SimpleQueue()

    def not_to_store(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return those of ``partitions`` whose records must be dropped. Waits as `IncarnationGuard.to_drop` does."""
        foreign = self._guard.to_drop(partitions)
        for partition in foreign.unauthorized:
            if partition not in self._withheld:
                self._withheld.add(partition)
                self._found.put(partition)
        # Records read before the reader went back do not follow the position.
        return [partition for partition in partitions if partition in foreign.recreated or partition in self._withheld]

    def read_again(self) -> None:
        """Have the partitions that were found meanwhile read again, later, from their positions in the ledger."""
        while True:
            try:
                partition = self._found.get_nowait()
            except Empty:
                return
            next_offset = self._next_offsets.get(partition)
            if next_offset is not None:
                if self._event_times is not None:
                    # The records that were read and not stored do not count.
                    self._event_times.forget(partition)
                self._source.put_back(partition, next_offset, _ERROR, seconds=READ_AGAIN_SECONDS)
            # What was read before must be dropped before the partition is stored again.
            self._generator.after_push(partial(self._withheld.discard, partition))


Offsets = tuple[int, int]
"""``[from, until)`` of one partition."""

# A transaction ends with one control record. Many transactional producers may each leave one in a row, as when all
# tasks of a job commit at once. A longer run cannot be control records.
_MAX_CONTROL_RECORDS = 1_000
_ANSWER_SECONDS = 5.0
_SHOWN = 10


class Evidence(Protocol):
    """What Kafka knows about holes. Each method raises HeadraceError if Kafka does not answer."""

    def compaction(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None if this client may not know."""
        ...

    def has_transactions(self) -> bool:
        """Whether transactions were ever used in this cluster."""
        ...

    def record_offsets(self, partition: TopicPartition, offsets: Offsets) -> np.ndarray[Any, Any]:
        """The offsets of all records in the range, including those of aborted transactions.

        Raises RangesGoneError if they cannot be read any more.
        """
        ...


class KafkaEvidence:
    """``Evidence`` with its own clients, which are created on first use."""

    def __init__(self, clients: RangeClients) -> None:
        uncommitted = {**clients.consumer, "isolation.level": "read_uncommitted"}
        self._clients = replace(clients, consumer=uncommitted)
        self._questions: OffsetQuestions | None = None

    def compaction(self, topic: str) -> bool | None:
        return self._ask().compaction(topic)

    def has_transactions(self) -> bool:
        return self._ask().has_transactions()

    def record_offsets(self, partition: TopicPartition, offsets: Offsets) -> np.ndarray[Any, Any]:
        from_offset, until_offset = offsets
        run = RangeRun.of([RecordedRange(partition, from_offset, until_offset, None)])
        clients = self._clients.for_offsets(until_offset - from_offset)
        offsets_read = []
        with KafkaRangeReader(clients, stall_seconds=_ANSWER_SECONDS, questions=self._ask()) as reader:
            for batch in reader.read([run]):
                offsets_read.append(batch.column("offset").to_numpy())
        return np.concatenate(offsets_read) if offsets_read else np.empty(0, dtype=np.int64)

    def _ask(self) -> OffsetQuestions:
        if self._questions is None:
            self._questions = self._clients.questions(answer_seconds=_ANSWER_SECONDS)
        return self._questions


class OffsetGaps:
    """Used by the consuming thread, which waits for Kafka's answers."""

    def __init__(self, evidence: Callable[[], Evidence], *, committed_only: bool = True) -> None:
        """``evidence`` is called at the first hole. ``committed_only``: the consumer skips aborted records."""
        self._make_evidence = evidence
        self._committed_only = committed_only
        self._evidence: Evidence | None = None
        self._compacted: set[tuple[str, str]] = set()
        self._has_transactions = False
        self.explained = 0
        """The number of offsets without a record that are not lost: control records, records of aborted transactions,
        and what compaction removed. Also all holes of a topic that this client may not describe."""

    def find(
        self,
        converted: Converted,
        positions: Mapping[TopicPartition, int],
        cursors: Mapping[tuple[str, int], Cursor],
    ) -> dict[tuple[str, int], Offsets]:
        """Return the first lost range of each partition among ``converted``, which moves it to its new position.

        The caller fetches everything after it again. An empty range means: Kafka does not answer, so it is unknown
        whether the offsets from there on are lost.
        """
        lost_in: dict[tuple[str, int], Offsets] = {}
        for partition, position in positions.items():
            key = (partition.topic, partition.partition)
            begin = cursors[key].next_offset
            if position - begin <= converted.counts.get(partition, 0):
                continue
            holes = holes_between(_offsets_of(converted, partition), begin, position)
            try:
                lost = self.first_lost(partition, holes)
            except HeadraceError as error:
                logger.warning("%s-%d skipped offsets %s, and the reason is unknown: %s", *key, holes[:_SHOWN], error)
                lost = (holes[0][0], holes[0][0])
            if lost is not None:
                lost_in[key] = lost
        return lost_in

    def first_lost(self, partition: TopicPartition, holes: Sequence[Offsets]) -> Offsets | None:
        """Return the first part of ``holes`` that is lost, or None. Counts the offsets before it as `explained`.

        Raises HeadraceError if Kafka does not answer.
        """
        lost = self._first_lost(partition, holes)
        self.explained += sum(
            min(until, until if lost is None else lost[0]) - begin
            for begin, until in holes
            if lost is None or begin < lost[0]
        )
        return lost

    def _first_lost(self, partition: TopicPartition, holes: Sequence[Offsets]) -> Offsets | None:
        topic = (partition.topic, partition.topic_id)
        long_holes = [hole for hole in holes if _is_long(hole)]
        if topic in self._compacted or (self._has_transactions and not long_holes):
            return None
        if self._evidence is None:
            self._evidence = self._make_evidence()
        if self._evidence.compaction(partition.topic) is not False:
            # A topic that this client may not describe counts as compacted.
            self._compacted.add(topic)
            return None
        self._has_transactions = self._has_transactions or self._evidence.has_transactions()
        if not self._has_transactions:
            return holes[0]
        parts = (part for hole in long_holes for part in self._without_aborted(partition, hole, self._evidence))
        return next((part for part in parts if _is_long(part)), None)

    def _without_aborted(self, partition: TopicPartition, hole: Offsets, evidence: Evidence) -> list[Offsets]:
        """Return the parts of ``hole`` that hold no records of aborted transactions either."""
        if self._committed_only:
            try:
                return holes_between(evidence.record_offsets(partition, hole), *hole)
            except RangesGoneError as error:
                logger.warning("offsets %s of %s, which were skipped, cannot be read: %s", hole, partition, error)
        return [hole]


def holes_between(offsets: np.ndarray[Any, Any], from_offset: int, until_offset: int) -> list[Offsets]:
    """Return the ranges of ``[from_offset, until_offset)`` that contain none of ``offsets`` (ascending)."""
    edges = np.concatenate(([from_offset - 1], offsets, [until_offset]))
    wide = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[place]) + 1, int(edges[place + 1])) for place in wide.tolist()]


def _is_long(hole: Offsets) -> bool:
    return hole[1] - hole[0] > _MAX_CONTROL_RECORDS


def _offsets_of(converted: Converted, partition: TopicPartition) -> np.ndarray[Any, Any]:
    """Return the offsets of the partition's records, in order."""
    batch = converted.batch
    if batch is None or partition not in converted.counts:
        return np.empty(0, dtype=np.int64)
    offsets: np.ndarray[Any, Any] = batch.column("offset").to_numpy()
    if len(converted.counts) > 1:
        mine = batch.column("partition").to_numpy() == partition.partition
        mine &= np.array([topic == partition.topic for topic in batch.column("topic").to_pylist()])
        offsets = offsets[mine]
    return offsets


# Timeout of one query to Kafka; the other partitions wait meanwhile.
_QUERY_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 1.0
"""The time between a failed query about a partition's offsets and the next one; it doubles each time."""
_LONGEST_BACKOFF_SECONDS = 60.0
# The longest backoff is reached by then. After a thousand doublings the power would overflow a float.
_MAX_DOUBLINGS = 10
# 1 + 2 + 4 + ... + 60: about two minutes. Data that is still unreadable then is permanently damaged.
_DAMAGE_ATTEMPTS = 7
# A right that is given again, or a topic that comes back, is noticed after this time.
_REFUSED_SECONDS = 5.0
# librdkafka has no error code for a Kafka log that was truncated below the position and has grown again.
_TRUNCATED = "log truncation detected"
_TRUNCATED_AT = re.compile(r"broker end offset is (\d+)")
# The offsets between the last record and the position hold no record. Up to this many of them are read again.
_MAX_PASSED_AGAIN = 10_000
_DAMAGE_REMEDY = (
    "Repair the broker's log, or delete the records up to the end of the batch (kafka-delete-records) and set "
    'on_lost_offsets="reset": the deleted offsets are then a gap. Then start the receiver job again.'
)
# Fetched again when their time has come.
_WAITING = (FetchState.BACKING_OFF, FetchState.LIMITED)
_LEADERLESS = "no broker has this partition at the moment (it has no leader)"


@dataclass(slots=True)
class Findings:
    """The non-record results of one consume(). ``held`` partitions stay at their position for now; ``holes`` are the
    first lost offsets of a partition."""

    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    held: set[tuple[str, int]] = field(default_factory=set)
    lost: list[tuple[tuple[str, int], str]] = field(default_factory=list)
    holes: dict[tuple[str, int], Offsets] = field(default_factory=dict)


class PartitionErrors:
    """Used by the consuming thread. ``lock`` guards the parts of ``owned`` that other threads read."""

    def __init__(
        self,
        consumer: Any,
        owned: Mapping[tuple[str, int], OwnedPartition],
        lock: threading.Lock,
        epochs: LeaderEpochs,
        *,
        on_lost_offsets: Literal["fail", "reset"],
        clock: Clock,
    ) -> None:
        self._consumer = consumer
        self._owned = owned
        self._lock = lock
        self._epochs = epochs
        self._on_lost_offsets = on_lost_offsets
        self._clock = clock
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether reading is paused for all partitions."""
        return self._paused

    def pause(self) -> None:
        """Read nothing until `resume`. librdkafka drops what it has prefetched, and fetches it again later."""
        self._paused = True
        for key in list(self._owned):
            self.unassign(key)

    def resume(self) -> None:
        """Continue to read each partition at its next offset."""
        self._paused = False
        for key, owned in list(self._owned.items()):
            if owned.state is not FetchState.FAILED and owned.state not in _WAITING:
                self.assign(key, owned.next_offset)

    def on_lost(self, owned: OwnedPartition, error_text: str) -> Gap | None:
        """Handle a position that Kafka does not have: fail, back off, or continue at Kafka's earliest offset.

        Returns the gap to record, or None.
        """
        if _TRUNCATED in error_text.lower():
            end = _TRUNCATED_AT.search(error_text)
            return self._on_taken_back(owned, error_text, None if end is None else int(end[1]))
        key = (owned.partition.topic, owned.partition.partition)
        position = owned.next_offset
        try:
            low, high = self._consumer.get_watermark_offsets(KafkaPartition(*key), timeout=_QUERY_SECONDS, cached=False)
        except KafkaException as error:
            self.back_off(owned, f"offset {position} is out of range, and Kafka's range is unknown: {error}")
            return None
        if low <= position <= high:
            # After a damaged batch librdkafka 2.16 requests an invalid offset: about every other fetch ends here.
            # Or reading began at the last known record, which is gone together with what followed it.
            self._epochs.begin(owned.partition, None)
            self.back_off(owned, f"offset {position} was out of range for a moment ({error_text}): [{low}, {high})")
        elif position > high:
            text = f"Kafka's log ends at {high}, before the position {position}: truncated, or the topic was re-created"
            return self._on_taken_back(owned, text, high)
        elif self._on_lost_offsets == "fail":
            self._fail(
                owned,
                f"offsets [{position}, {low}) are gone from Kafka (retention). "
                'Set on_lost_offsets="reset" and start the receiver job again: it continues at the earliest offset and '
                "records the gap.",
            )
        else:
            logger.error("%s: offsets [%d, %d) are gone from Kafka", partition_name(owned.partition), position, low)
            self.pass_over(owned, low)
            return Gap(owned.partition, position, low, "retention: Kafka no longer has these offsets")
        return None

    def _on_taken_back(self, owned: OwnedPartition, error: str, end: int | None) -> Gap | None:
        """Handle a Kafka log that was truncated at ``end``: from there, offsets that were read belong to other records.

        Those records would get the document ids of the records that were read. So they are reported and not read, and
        the position in the ledger is never set back.
        """
        position = owned.next_offset
        # The truncation is reported now; later assignments must not detect it again.
        self._epochs.begin(owned.partition, None)
        if end is None or end >= position:
            self._fail(
                owned,
                f"{error}. Kafka deleted offsets below {position} that were read; it is unknown from which offset on",
            )
            return Gap(owned.partition, position, position, error, taken_back=True)
        text = (
            f"{error}. Kafka assigns offsets [{end}, {position}), which were read, to other records. These are not read"
        )
        reported = position if owned.taken_back is None else owned.taken_back
        if self._on_lost_offsets == "fail":
            self._fail(owned, f"{text}. Start the receiver job again to continue at the position.")
        else:
            self.back_off(owned, f"{text}. Reading continues at the position when Kafka's log has reached it")
        if end >= reported:
            return None
        owned.taken_back = end
        return Gap(owned.partition, end, reported, error, taken_back=True)

    def on_damage(self, owned: OwnedPartition, error: Any, base_offset: int | None) -> None:
        """Handle damaged data: fetch it again, since damage is often transient, and then fail the partition.

        It is never skipped: librdkafka does not say where a damaged record batch ends. ``base_offset`` is where the
        batch begins, as the client reports it.
        """
        self.unassign((owned.partition.topic, owned.partition.partition))
        at = owned.next_offset if base_offset is None or base_offset < 0 else base_offset
        text = f"the record batch at offset {at} cannot be read ({error.name()}: {error.str()})"
        if owned.attempts < _DAMAGE_ATTEMPTS:
            self.back_off(owned, text)
        else:
            self._fail(owned, f"{text}. {_DAMAGE_REMEDY}")

    def on_refusal(self, owned: OwnedPartition, error: str) -> None:
        """Handle any other error, such as a missing right: fetch again from the same offset.

        librdkafka fetches again by itself, but does not say when the error is over if there is no new record.
        """
        if owned.error != error:
            logger.warning("%s: %s", partition_name(owned.partition), error)
        self.unassign((owned.partition.topic, owned.partition.partition))
        self.wait_for(owned, error, _REFUSED_SECONDS)

    def pass_over(self, owned: OwnedPartition, until_offset: int) -> None:
        """Continue to read at ``until_offset``, after lost offsets."""
        # The last record read lies before the lost offsets; reading cannot continue from there.
        self._epochs.begin(owned.partition, None)
        with self._lock:
            owned.progressed(until_offset)
        self.assign((owned.partition.topic, owned.partition.partition), until_offset)

    def back_off(self, owned: OwnedPartition, error: str) -> None:
        seconds = min(_LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(owned.attempts, _MAX_DOUBLINGS))
        logger.warning("%s: %s; fetched again in %.0f s", partition_name(owned.partition), error, seconds)
        owned.attempts += 1
        self.wait_for(owned, error, seconds)

    def wait_for(self, owned: OwnedPartition, error: str, seconds: float) -> None:
        """Fetch the partition again in ``seconds``, because of its ``error``."""
        with self._lock:
            owned.state, owned.error = FetchState.BACKING_OFF, error
            owned.resume_at = self._clock.monotonic() + seconds

    def keep_to_rate(self, chunks: Sequence[RecordChunk]) -> None:
        """After these chunks, leave each partition until its rate allows more. librdkafka drops what it prefetched."""
        for offset_range in (offset_range for chunk in chunks for offset_range in chunk.ranges):
            key = (offset_range.partition.topic, offset_range.partition.partition)
            owned = self._owned.get(key)
            if owned is None:
                continue
            owned.limiter.spend(offset_range.records)
            seconds = owned.limiter.delay()
            if seconds and owned.state in (FetchState.FETCHING, FetchState.AT_END):
                self.unassign(key)
                with self._lock:
                    owned.state, owned.resume_at = FetchState.LIMITED, self._clock.monotonic() + seconds

    def _fail(self, owned: OwnedPartition, error: str) -> None:
        logger.error("%s is not read any more: %s", partition_name(owned.partition), error)
        with self._lock:
            owned.state, owned.error = FetchState.FAILED, error

    def resume_due(self) -> None:
        now = self._clock.monotonic()
        for key, owned in list(self._owned.items()):
            if owned.state in _WAITING and owned.resume_at <= now:
                with self._lock:
                    owned.state = FetchState.FETCHING
                self.assign(key, owned.next_offset)

    def on_leader(self, owned: OwnedPartition, leader: int | None) -> None:
        """Note whether the partition has a leader; librdkafka waits for one without reporting it."""
        if leader == -1 and owned.state in (FetchState.FETCHING, FetchState.AT_END):
            logger.warning("%s: %s", partition_name(owned.partition), _LEADERLESS)
            owned.state, owned.error = FetchState.LEADERLESS, _LEADERLESS
        elif leader is not None and leader >= 0 and owned.state is FetchState.LEADERLESS:
            owned.state, owned.error = FetchState.FETCHING, None

    def assign(self, key: tuple[str, int], offset: int) -> None:
        """Continue to read at ``offset``, after checking whether Kafka's log was truncated below it."""
        if self._paused:
            return
        owned = self._owned[key]
        read = self._epochs.end_at(owned.partition, offset)
        if read is not None and offset - read.end_offset > _MAX_PASSED_AGAIN:
            read = None
        begin = offset if read is None else read.end_offset
        # Incremental, so the other partitions keep what is prefetched for them. There is no subscription and no group
        # member; this only adds to what assign() would set.
        self._consumer.incremental_assign([KafkaPartition(*key, begin)])
        if read is None:
            return
        try:
            # librdkafka 2.16 validates an offset against the log when it seeks. When it is assigned, it does so only
            # if it did not know the partition's leader before.
            self._consumer.seek(KafkaPartition(*key, begin, leader_epoch=read.leader_epoch))
        except KafkaException as error:
            self.unassign(key)
            self.back_off(owned, f"it could not be compared with Kafka's log: {error}")

    def unassign(self, key: tuple[str, int]) -> None:
        try:
            self._consumer.incremental_unassign([KafkaPartition(*key)])
        except KafkaException as error:
            # Already unassigned: it was backing off or had failed.
            logger.debug("%s/%d was not assigned: %s", *key, error)


def partition_name(partition: TopicPartition) -> str:
    """Return the topic and the partition number, for people."""
    return f"{partition.topic}/{partition.partition}"
