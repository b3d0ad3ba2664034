"""Reads assigned partitions from Kafka, by position, with ``assign()`` and no consumer group.

It never decides where to begin (the ledger does) and never commits before something is stored. An error of one
partition never stops another: an offset out of range, a damaged message or a missing topic stays that partition's
state, visible in ``status()``.

Offsets are committed for lag tools only: headrace reads nothing from them (rule 1 of the design). A commit that fails
is counted, shown and repeated with the next one. It never stops a receiver.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from headrace.blocks import OffsetRange, TopicPartition
from headrace.clock import Clock, SystemClock
from headrace.kafka.client import open_consumer
from headrace.kafka.client_errors import KeptError, plain
from headrace.kafka.records import (
    FIRST_RECORDS,
    MAX_RECORDS,
    OUT_OF_RANGE,
    Cursor,
    MessageColumns,
    RecordChunk,
    chunks_of,
    consume,
    convert,
)
from headrace.ledger.receiving.tables import EpochEnd
from headrace.receiver.kafka_errors import Findings, OffsetGaps, PartitionErrors, partition_name
from headrace.receiver.rates import RateLimiter
from headrace.receiver.receiver import KafkaClientError
from headrace.receiver.record_source import FetchState, Gap, LeaderEpochs, OwnedPartition, PartitionStatus, SourceError

logger = logging.getLogger(__name__)


class OffsetCommits:
    """Commits stored offsets asynchronously.

    The pushing thread calls ``note``. The consuming thread calls ``send`` and runs the callback: librdkafka's Python
    client deadlocked when one thread committed while another consumed (commit() keeps the interpreter's lock while it
    waits for the client's).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], int] = {}
        self._failures = 0
        self._due = False
        self._last_error: str | None = None
        self._allowed_until = math.inf

    @property
    def failures(self) -> int:
        with self._lock:
            return self._failures

    @property
    def last_error(self) -> str | None:
        with self._lock:
            return self._last_error

    @property
    def open(self) -> int:
        """The number of partitions whose last stored position is not known to be committed."""
        with self._lock:
            return len(self._open)

    def allow_until(self, monotonic_seconds: float) -> None:
        """Send nothing after this time. If a receiver was asleep past its lease, another has taken its place: a late
        commit would set that one's committed offsets back."""
        with self._lock:
            self._allowed_until = monotonic_seconds

    def note(self, ranges: Iterable[OffsetRange]) -> None:
        """Note the ends of ``ranges`` for the next commit."""
        with self._lock:
            for offset_range in ranges:
                self._open[offset_range.partition.topic, offset_range.partition.partition] = offset_range.until_offset
            self._due = True

    def repeat(self) -> None:
        """Have everything that is not acknowledged yet committed again."""
        with self._lock:
            self._due = True

    def send(self, consumer: Any, now: float) -> None:
        """Commit everything noted and not acknowledged, unless ``now`` (monotonic seconds) is past the allowed time.

        Kafka's errors are counted, not raised.
        """
        with self._lock:
            if not self._due or now > self._allowed_until:
                return
            self._due = False
            offsets = [KafkaPartition(topic, number, offset) for (topic, number), offset in self._open.items()]
        if not offsets:
            return
        try:
            consumer.commit(offsets=offsets, asynchronous=True)
        except (KafkaException, RuntimeError) as error:
            self._failed(str(error))

    def forget(self, topic: str, partition: int) -> None:
        """Forget a partition that another receiver has now: a late commit would set its committed offset back."""
        with self._lock:
            self._open.pop((topic, partition), None)

    def on_commit(self, error: object, partitions: Iterable[Any]) -> None:
        """librdkafka's callback: ``error`` is for all partitions; each may also have its own."""
        for committed in partitions:
            failed = committed.error or error
            if failed is not None:
                self._failed(str(failed))
                continue
            with self._lock:
                if self._open.get((committed.topic, committed.partition)) == committed.offset:
                    del self._open[committed.topic, committed.partition]

    def _failed(self, error: str) -> None:
        with self._lock:
            self._failures += 1
            repeated = error == self._last_error
            self._last_error = error
        if not repeated:
            logger.warning("a commit to Kafka failed and is repeated with the next block: %s", error)


ConsumerFactory = Callable[[dict[str, Any]], Any]

# The most messages that one `serve_paused` takes from the client and drops.
_MAX_DROPPED = 1_000
# Errors for data that librdkafka cannot read, or skips unless it is fetched again: damaged messages, and messages that
# it cannot decompress because the codec is unknown or memory is short.
_DAMAGED = frozenset(
    {
        KafkaError._BAD_MSG,
        KafkaError._BAD_COMPRESSION,
        KafkaError._NOT_IMPLEMENTED,
        KafkaError._CRIT_SYS_RESOURCE,
        KafkaError.INVALID_MSG,
        KafkaError.MSG_SIZE_TOO_LARGE,
    }
)


class KafkaReceiver:
    """One Kafka consumer, used by one thread.

    Only ``commits.note``, ``leader_epochs``, ``status`` and the counters may be used from another thread.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        on_lost_offsets: Literal["fail", "reset"] = "fail",
        offset_gaps: OffsetGaps | None = None,
        max_chunk_bytes: int = 16 * 1024 * 1024,
        max_rate_per_partition: float | None = None,
        clock: Clock | None = None,
        consumer_factory: ConsumerFactory = open_consumer,
    ) -> None:
        """``config`` is made by `headrace.kafka.client.consumer_config`. Chunks have at most about ``max_chunk_bytes``;
        ``max_rate_per_partition`` is in records per second.

        ``offset_gaps`` decides which of the offsets that Kafka skipped are lost; without it, none are.
        """
        self._offset_gaps = offset_gaps
        self._max_chunk_bytes = max_chunk_bytes
        self._max_rate_per_partition = max_rate_per_partition
        self._most_in_a_second = None if max_rate_per_partition is None else max(1, int(max_rate_per_partition))
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._owned: dict[tuple[str, int], OwnedPartition] = {}
        # All that were ever assigned: the client may still return messages of a partition that was taken away.
        self._topics: set[str] = set()
        self._records_at_once = FIRST_RECORDS
        self._commits = OffsetCommits()
        self.leader_epochs = LeaderEpochs()
        self._fatal: str | None = None
        self._closed = False
        self._last_error = KeptError(config)
        self.connected: bool | None = None
        """Whether any broker is reachable, None while unknown."""
        self.below_position = 0
        self.not_owned = 0
        self.errors = 0
        self.unreadable_headers = 0
        self.lost_offsets = 0
        """The number of offsets in the gaps that this receiver has reported."""
        self._consumer = consumer_factory(
            {
                **config,
                "on_commit": self._commits.on_commit,
                "error_cb": self._on_error,
                "stats_cb": self._on_statistics,
            }
        )
        self._partition_errors = PartitionErrors(
            self._consumer,
            self._owned,
            self._lock,
            self.leader_epochs,
            on_lost_offsets=on_lost_offsets,
            clock=self._clock,
        )

    # -- assignment ------------------------------------------------------------------------------------------------

    def assign(
        self,
        partition: TopicPartition,
        next_offset: int,
        epoch_end: EpochEnd | None = None,
        source_position: str | None = None,  # noqa: ARG002 - of other sources
    ) -> None:
        """Begin to read ``partition`` at ``next_offset``; other assigned partitions are not disturbed.

        With the ``epoch_end`` of the records read so far, Kafka is asked whether its log was truncated since. For a
        partition that this receiver already reads, it keeps its own knowledge. Kafka has no ``source_position``.
        """
        key = (partition.topic, partition.partition)
        with self._lock:
            known = self._owned.get(key)
            limiter = RateLimiter(self._max_rate_per_partition, self._clock)
            self._owned[key] = OwnedPartition(partition, next_offset, limiter)
            self._topics.add(partition.topic)
        if known is not None:
            self._partition_errors.unassign(key)
        if known is None or known.partition != partition:
            self.leader_epochs.begin(partition, epoch_end)
        self._partition_errors.assign(key, next_offset)

    def unassign(self, partition: TopicPartition) -> None:
        """Stop reading the partition. Chunks that were already returned stay valid."""
        key = (partition.topic, partition.partition)
        with self._lock:
            owned = self._owned.get(key)
            if owned is None or owned.partition != partition:
                return
            del self._owned[key]
        self._partition_errors.unassign(key)
        self.leader_epochs.forget(partition)

    def put_back(self, partition: TopicPartition, next_offset: int, error: str, *, seconds: float) -> None:
        """Read the partition again from ``next_offset``, after ``seconds``. Records read since then were not stored."""
        key = (partition.topic, partition.partition)
        with self._lock:
            owned = self._owned.get(key)
            if owned is None or owned.partition != partition or owned.state is FetchState.FAILED:
                return
            owned.next_offset = next_offset
        self._partition_errors.unassign(key)
        self._partition_errors.wait_for(owned, error, seconds)

    @property
    def partitions(self) -> dict[TopicPartition, int]:
        """The partitions owned now, with their next offsets."""
        with self._lock:
            return {owned.partition: owned.next_offset for owned in self._owned.values()}

    # -- reading ---------------------------------------------------------------------------------------------------

    def fetch(self, timeout: float, max_records: int | None = None) -> list[RecordChunk | Gap]:
        """Return what has arrived, in order: chunks of records and gaps. Waits up to ``timeout`` seconds.

        Raises KafkaClientError when the client cannot continue.
        """
        if self._partition_errors.paused:
            self._partition_errors.resume()
        self.serve()
        bounds = (self._records_at_once, max_records, self._most_in_a_second)
        most = min(bound for bound in bounds if bound is not None)
        findings = Findings()
        try:
            columns = consume(
                self._consumer,
                most,
                timeout,
                separate_errors=partial(self._separate_errors, findings=findings),
                topic=self._only_topic,
            )
        except KafkaException as error:
            raise KafkaClientError(f"Kafka's client failed: {error}.") from error
        if self._fatal is not None:
            raise KafkaClientError(f"Kafka's client cannot continue: {self._fatal}.")
        if columns is None and not findings.ends and not findings.held:
            return []
        chunks = self._convert(columns, findings)
        self._partition_errors.keep_to_rate(chunks)
        gaps = [*self._hole_gaps(findings), *self._lost_gaps(findings)]
        self.lost_offsets += sum(gap.until_offset - gap.from_offset for gap in gaps)
        return [*chunks, *gaps]

    def serve_paused(self) -> None:
        """Handle commits, errors and statistics without reading records. Called instead of `fetch` while paused.

        Otherwise they would accumulate in the client. Records in flight are fetched again later.
        Raises KafkaClientError when the client cannot continue.
        """
        if not self._partition_errors.paused:
            self._partition_errors.pause()
        self.serve()
        try:
            messages = self._consumer.consume(_MAX_DROPPED, 0)
        except KafkaException as error:
            raise KafkaClientError(f"Kafka's client failed: {error}.") from error
        for message in messages:
            if message.error() is not None and message.topic() is None:
                self._on_error(message.error())
        if self._fatal is not None:
            raise KafkaClientError(f"Kafka's client cannot continue: {self._fatal}.")

    @property
    def _only_topic(self) -> str | None:
        """The topic of all messages that the client can return, if there is only one."""
        return next(iter(self._topics)) if len(self._topics) == 1 else None

    def _convert(self, columns: MessageColumns | None, findings: Findings) -> list[RecordChunk]:
        with self._lock:
            cursors = {key: Cursor(owned.partition, owned.next_offset) for key, owned in self._owned.items()}
        converted = convert(columns, cursors)
        self.below_position += converted.below_position
        self.not_owned += converted.not_owned
        self.unreadable_headers += converted.unreadable_headers
        positions = self._positions(converted.positions, cursors, findings)
        if self._offset_gaps is not None:
            findings.holes = self._offset_gaps.find(converted, positions, cursors)
        if findings.holes:
            # Records after a lost range are fetched again later.
            converted = convert(None if columns is None else columns.before(findings.holes), cursors)
            positions.update((cursors[key].partition, begin) for key, (begin, _) in findings.holes.items())
        if converted.batch is not None:
            average = max(1, converted.batch.nbytes // converted.batch.num_rows)
            # A quarter of a chunk at a time, so that one consume() cannot return much more than a block.
            self._records_at_once = max(1, min(MAX_RECORDS, self._max_chunk_bytes // 4 // average))
        for partition, records in converted.epochs.items():
            self.leader_epochs.note(partition, records)
        standing = {cursor.partition: cursor.next_offset for cursor in cursors.values()}
        chunks = chunks_of(converted, standing, positions, self._max_chunk_bytes)
        with self._lock:
            for partition, position in positions.items():
                owned = self._owned[partition.topic, partition.partition]
                if (partition.topic, partition.partition) in findings.held:
                    owned.next_offset = position
                else:
                    owned.progressed(position)
            for key, end in findings.ends.items():
                at_end = self._owned.get(key)
                if at_end is not None and key not in findings.held and at_end.next_offset >= end:
                    at_end.state, at_end.error = FetchState.AT_END, None
        return chunks

    def _positions(
        self,
        last: Mapping[TopicPartition, int],
        cursors: Mapping[tuple[str, int], Cursor],
        findings: Findings,
    ) -> dict[TopicPartition, int]:
        """Return the position of each partition with news: after control records and compacted offsets."""
        positions = dict(last)
        touched = [
            key
            for key, cursor in cursors.items()
            if (cursor.partition in last or key in findings.ends) and key not in findings.held
        ]
        for reported in self._consumer.position([KafkaPartition(*key) for key in touched]) if touched else ():
            key = (reported.topic, reported.partition)
            cursor = cursors[key]
            candidates = (
                positions.get(cursor.partition, cursor.next_offset),
                findings.ends.get(key, 0),
                reported.offset,
            )
            positions[cursor.partition] = max(candidates)
        return {partition: position for partition, position in positions.items() if position >= 0}

    @property
    def offsets_without_record(self) -> int:
        """The number of offsets that Kafka skipped and that are not lost. See ``OffsetGaps.explained``."""
        return 0 if self._offset_gaps is None else self._offset_gaps.explained

    def _hole_gaps(self, findings: Findings) -> list[Gap]:
        """Continue after the lost ranges that `OffsetGaps` found; returns them. Called after earlier records."""
        gaps = []
        for key, (begin, until) in findings.holes.items():
            owned = self._owned[key]
            if key in findings.held:
                # Another error already makes it fetch again from before the hole.
                continue
            self._partition_errors.unassign(key)
            if begin == until:
                self._partition_errors.back_off(owned, f"Kafka skipped offset {begin}, and does not say why")
                continue
            logger.error("%s: Kafka skipped offsets [%d, %d)", partition_name(owned.partition), begin, until)
            self._partition_errors.pass_over(owned, until)
            reason = "skipped: Kafka skipped these offsets, and neither compaction nor transactions explain it"
            gaps.append(Gap(owned.partition, begin, until, reason))
        return gaps

    @property
    def client_error(self) -> str | None:
        """The client's last real error that is not about a partition; None once it is connected again."""
        return self._last_error.text

    # -- errors ----------------------------------------------------------------------------------------------------

    def _separate_errors(self, messages: Sequence[Any], findings: Findings) -> list[Any]:
        """Return the records among ``messages``; put the rest into ``findings``."""
        good = []
        for message in messages:
            key = (message.topic(), message.partition())
            error = message.error()
            if error is None:
                if key not in findings.held:
                    good.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                if key in self._owned and key not in findings.held:
                    findings.ends[key] = message.offset()
            elif key[0] is None or key not in self._owned:
                self._on_error(error)
            else:
                self._on_partition_error(key, message, findings)
        return good

    def _on_partition_error(self, key: tuple[str, int], message: Any, findings: Findings) -> None:
        error = message.error()
        self.errors += 1
        if key in findings.held:
            # After damage librdkafka continues at an invalid offset if the fetch also had other partitions.
            return
        findings.held.add(key)
        owned = self._owned[key]
        if error.code() in OUT_OF_RANGE:
            findings.lost.append((key, error.str()))
            self._partition_errors.unassign(key)
        elif error.code() in _DAMAGED:
            self._partition_errors.on_damage(owned, error, message.offset())
        else:
            self._partition_errors.on_refusal(owned, f"{error.name()}: {error.str()}")

    def _lost_gaps(self, findings: Findings) -> list[Gap]:
        """Handle partitions whose offset Kafka does not have; returns their gaps. Called after earlier records."""
        gaps = [
            self._partition_errors.on_lost(self._owned[key], error)
            for key, error in findings.lost
            if key in self._owned
        ]
        return [gap for gap in gaps if gap is not None]

    def _on_error(self, error: Any) -> None:
        """Note an error of the client itself; most are transient, since librdkafka reconnects by itself."""
        self._last_error.note(error)
        if error.fatal() or error.code() == KafkaError._FATAL:
            self._fatal = plain(error)
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.connected = False

    def _on_statistics(self, text: str) -> None:
        statistics = json.loads(text)
        brokers = statistics.get("brokers", {}).values()
        self.connected = any(broker.get("state") == "UP" for broker in brokers)
        if self.connected:
            self._last_error.connected()
        topics = statistics.get("topics", {})
        with self._lock:
            for (topic, number), owned in self._owned.items():
                known = topics.get(topic, {}).get("partitions", {}).get(str(number), {})
                self._partition_errors.on_leader(owned, known.get("leader"))

    # -- commits, status and end -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Send commits that are due and resume partitions whose backoff is over. ``fetch`` does this too."""
        self._commits.send(self._consumer, self._clock.monotonic())
        self._partition_errors.resume_due()

    @property
    def commits(self) -> OffsetCommits:
        return self._commits

    def finish(self) -> tuple[RecordChunk, ...]:
        """What Kafka's client holds is not stored: it is read again from the ledger's position."""
        return ()

    def take_errors(self) -> tuple[SourceError, ...]:
        """Kafka's errors are those of the client and of partitions."""
        return ()

    def status(self) -> list[PartitionStatus]:
        """Return each partition's state."""
        with self._lock:
            return [
                PartitionStatus(owned.partition, owned.next_offset, owned.state, owned.error)
                for owned in self._owned.values()
            ]

    def close(self, commit_seconds: float = 2.0) -> None:
        """Send open commits, wait up to ``commit_seconds`` for their acknowledgement, and close the consumer.

        With 0 seconds no commit is sent.
        """
        if self._closed:
            return
        until = self._clock.monotonic() + commit_seconds
        for partition in self.partitions:
            self._partition_errors.unassign((partition.topic, partition.partition))
        if commit_seconds > 0:
            self._commits.send(self._consumer, self._clock.monotonic())
        while self._commits.open and self._clock.monotonic() < until and self.connected is not False:
            self._consumer.consume(1, 0.05)
        self._closed = True
        self._consumer.close()
