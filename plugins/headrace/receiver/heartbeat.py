"""Sends a receiver's heartbeat: it renews the lease, reports stats and failures, and follows the ledger's orders.

It runs in the thread that stores, so a receiver that cannot store is not alive, whatever else of it still runs (rule 8
of the design). The answers give an estimate of the ledger's clock: batch times come from it (rule 4), and asking it per
block costs a round trip.

`LagWatch` asks Kafka for the end offsets of all partitions in one request to each broker. The answer also proves that a
silent partition is empty: librdkafka does not report a broker that does not answer its fetches.

Python's garbage collector is off while a receiver runs, so that it does not traverse a million messages. Every
consume() makes up to 20,000 objects that the collector tracks. Every few hundred of them start a collection of the
young objects, and some of these a collection of all. A receiver's records contain no cycles: reference counts free
them. With the collector on, a receiver received half as many records.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from headrace.blocks import TopicPartition
from headrace.clock import Clock, LedgerClock
from headrace.kafka.records import RecordChunk
from headrace.kafka.topics import error_text
from headrace.ledger.errors import LedgerUnavailableError, PartitionNotAssignedError
from headrace.ledger.receiving_tables import AssignedPartition, ReceiverLease, ReceiverOrders
from headrace.ledger.states import EventKind, PartitionState, ReceiverState
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.block_store import StoreCounts
from headrace.receiver.event_times import EndOffsets, EndOffsetTracker, Ends, EventTimes, Key
from headrace.receiver.health import CLOCK_AHEAD, OPEN_TRANSACTIONS, UNREADABLE_TOPICS
from headrace.receiver.pausing import Pausing
from headrace.receiver.rates import RateLimiter
from headrace.receiver.receiver import ReceivingError
from headrace.receiver.record_source import FetchState, PartitionStatus, RecordSource, SourceError
from headrace.stream_context import StreamContext
from headrace.wal.recovery import LogRecovery

logger = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0
# Ten heartbeats, so a garbage collection, a slow disk or a short outage of the ledger does not cost the lease.
LEASE_MS = 10_000
_COMMIT_REPEAT_SECONDS = 5.0
# The window of the rate: long enough to be steady, short enough to show a stall.
_RATE_SECONDS = 10.0
# Flink's sinks, for example, keep a transaction open from one checkpoint to the next.
_OPEN_TRANSACTION_MS = 60_000
_MAX_TRANSACTIONS = 20
# The lag is listed for at most this many partitions, the largest first.
_MAX_LISTED = 500
ASK_SECONDS = 2.0
_GONE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})
# Exceptions with tracebacks do make cycles; once a minute is enough for those.
_COLLECT_SECONDS = 60.0
Orders = tuple[ReceiverOrders, frozenset[TopicPartition]]
"""The ledger's orders, and the partitions that were reported as failed before it gave them."""


class Heartbeat:
    """Used by the pushing thread, except ``state``, ``take_orders``, ``is_stop_ordered``, ``drain_until``,
    ``forget_failure``, ``end``."""

    def __init__(
        self,
        context: StreamContext,
        lease: ReceiverLease,
        *,
        source: RecordSource,
        generator: BlockGenerator[RecordChunk],
        stats: ReceiverStats,
        pausing: Pausing,
        end_offsets: EndOffsetTracker | None,
        ledger_clock: LedgerClock,
        recreated: Callable[[TopicPartition], bool | None],
    ) -> None:
        """``end_offsets`` is for a stream by timestamp: up to which time its partitions are stored completely.
        ``recreated`` returns whether a partition's topic was created again, None while that is unknown."""
        self._lease = lease
        self._ledger = context.ledger
        self._clock = context.clock
        self._source = source
        self._generator = generator
        self._stats = stats
        self._pausing = pausing
        self._end_offsets = end_offsets
        self._ledger_clock = ledger_clock
        self._recreated = recreated
        self._collect_garbage = OccasionalCollection()
        self._lock = threading.Lock()
        self._orders: Orders | None = None
        self._batch_interval_ms = context.stream.batch_interval_ms
        # How many batch intervals since the epoch had all their blocks stored when a heartbeat was last sent for that.
        self._sealed_intervals = 0
        self._next_beat = 0.0
        self._next_commit = 0.0
        self._give_up_at = math.inf
        self._had_news = False
        self._reported_failed: set[TopicPartition] = set()
        self._reported_commit_error: str | None = None
        self._errors: deque[SourceError] = deque()
        self.state = ReceiverState.STARTING

    def tick(self) -> bool:
        """Beat if it is due, or if a batch may wait for the news: partitions are drained up to a later time, or by
        arrival the blocks of a batch interval are all stored.

        Returns whether the ledger answered a heartbeat.
        """
        has_news = self._has_sealed_a_batch() if self._end_offsets is None else self._end_offsets.poll()
        if has_news:
            self._next_beat = 0.0
        return self.beat_if_due()

    def beat_if_due(self) -> bool:
        """Beat once a second, or at once for a new pause. If the ledger does not answer, try again after a second.

        Returns whether the ledger answered a heartbeat.

        Raises LeaseLostError.
        """
        now = self._clock.monotonic()
        news = self._pausing.poll()
        if news and not self._had_news:
            self._next_beat = 0.0
        self._had_news = news
        if now < self._next_beat:
            return False
        self._next_beat = now + HEARTBEAT_SECONDS
        reported_failed = frozenset(self._reported_failed)
        try:
            orders = self._beat(now)
        except LedgerUnavailableError as error:
            logger.warning("receiver %s: no heartbeat, the ledger does not answer: %s", self._lease.receiver_id, error)
            return False
        with self._lock:
            self._orders = (orders, reported_failed)
        self.state = ReceiverState.RUNNING if self.state is ReceiverState.STARTING else self.state
        if self._source.commits.open and now >= self._next_commit:
            self._next_commit = now + _COMMIT_REPEAT_SECONDS
            self._source.commits.repeat()
        self._collect_garbage()
        return True

    def wait(self, seconds: float) -> None:
        """Wait while heartbeats continue. Raises LeaseLostError, and ReceivingError after the time of `drain_until`."""
        until = self._clock.monotonic() + seconds
        while True:
            self.beat_if_due()
            if self._clock.monotonic() > self._give_up_at:
                raise ReceivingError("The receiver stops. Records that it still held could not be stored in time.")
            left = until - self._clock.monotonic()
            if left <= 0:
                return
            self._clock.wait(threading.Event(), min(0.1, left))

    def drain_until(self, monotonic_seconds: float) -> None:
        """Report that the receiver is stopping. After this time `wait` gives up."""
        self.state = ReceiverState.STOPPING
        self._give_up_at = monotonic_seconds

    def end(self, state: ReceiverState, error: str | None, stack: str | None = None) -> None:
        """Release the lease, with what the receiver has counted and reported since the last heartbeat.

        Call it when the source has ended, and the pushing thread has too, or hangs. Raises LeaseLostError and
        LedgerUnavailableError.
        """
        self._report_errors()
        self._ledger.receivers.release(self._lease, state, error, self._stats.totals(), stack=stack)

    def take_orders(self) -> Orders | None:
        """Return the newest orders; each is returned once."""
        with self._lock:
            orders, self._orders = self._orders, None
            return orders

    @property
    def is_stop_ordered(self) -> bool:
        """Whether the newest orders, which nobody has taken yet, are to stop."""
        with self._lock:
            return self._orders is not None and self._orders[0].stop

    def forget_orders(self) -> None:
        """Drop orders that are out of date."""
        with self._lock:
            self._orders = None

    def forget_failure(self, partition: TopicPartition) -> None:
        """Note that the partition is read again: another failure is then reported again."""
        self._reported_failed.discard(partition)

    def _has_sealed_a_batch(self) -> bool:
        """Whether all blocks of another batch time are stored; True once for each."""
        before = self._sealed_intervals
        self._sealed_intervals = self._generator.sealed_through_ms() // self._batch_interval_ms
        return self._sealed_intervals > before

    def _beat(self, now: float) -> ReceiverOrders:
        stats = self._stats.collect(now, self._generator.queued)
        stats[CLOCK_AHEAD] = round((self._clock.now_ms() - self._ledger_clock.now_ms()) / 1000)
        sealed = self._generator.sealed_through_ms()
        drained = None if self._end_offsets is None else self._end_offsets.drained()
        asked_at = self._clock.monotonic()
        orders = self._ledger.receivers.heartbeat(
            self._lease,
            sealed_through_ms=sealed,
            stats=stats,
            state=self.state,
            error=self._source.client_error,
            drained=drained,
            paused_reason=self._pausing.reason,
        )
        self._ledger_clock.observe(asked_at, orders.now_ms)
        self._source.commits.allow_until(asked_at + self._lease.lease_ms / 1000)
        if self._end_offsets is not None and drained:
            self._end_offsets.reported(drained)
        self._pausing.report()
        self._report_failures()
        return orders

    def _report_failures(self) -> None:
        receiver_id = self._lease.receiver_id
        commit_error = self._source.commits.last_error
        if commit_error != self._reported_commit_error:
            payload = {"receiver": str(receiver_id), "error": commit_error}
            self._ledger.events.append(receiver_id.stream, EventKind.COMMIT_FAILED, payload)
            self._reported_commit_error = commit_error
        self._report_errors()
        for status in self._source.status():
            if (
                status.state is FetchState.FAILED
                and status.partition not in self._reported_failed
                # Not if its topic was deleted: the tracker detects that, ends the partition, and begins the new topic.
                and self._recreated(status.partition) is False
            ):
                try:
                    self._ledger.positions.fail(self._lease, status.partition, status.error or "failed")
                except PartitionNotAssignedError as error:
                    # The partition was taken away by force; its new receiver finds the same.
                    logger.warning("%s", error)
                else:
                    self._reported_failed.add(status.partition)

    def _report_errors(self) -> None:
        # Kept until the ledger has them: it may go away between two of its transactions.
        self._errors.extend(self._source.take_errors())
        while self._errors:
            self._ledger.receivers.report_error(self._lease, self._errors[0].error, self._errors[0].stack)
            self._errors.popleft()


class PartitionOrders:
    """Used by the consuming thread. Releases happen in the pushing thread, after everything read before is stored."""

    def __init__(
        self,
        context: StreamContext,
        lease: ReceiverLease,
        *,
        source: RecordSource,
        generator: BlockGenerator[RecordChunk],
        heartbeat: Heartbeat,
        limiter: RateLimiter,
        event_times: EventTimes | None,
        next_offsets: dict[TopicPartition, int],
    ) -> None:
        """``event_times`` is for a stream by timestamp. ``next_offsets`` are the ledger's positions."""
        self._ledger = context.ledger
        self._lease = lease
        self._source = source
        self._generator = generator
        self._heartbeat = heartbeat
        self._limiter = limiter
        self._event_times = event_times
        self._next_offsets = next_offsets
        self._releasing: set[TopicPartition] = set()

    def follow(self, orders: ReceiverOrders, reported_failed: frozenset[TopicPartition]) -> None:
        """Do what the ledger orders. ``reported_failed`` are the partitions that were reported as failed before the
        ledger gave these orders."""
        self._limiter.update(orders.max_rate)
        mine = self._source.partitions
        for partition, assigned in orders.assigned.items():
            if partition in self._releasing:
                continue
            reported = partition in reported_failed
            if assigned.state is not PartitionState.ACTIVE:
                if partition in mine and not reported:
                    self._leave(partition)
            elif reported or partition not in mine:
                # New, or reactivated by a person or the tracker.
                self._heartbeat.forget_failure(partition)
                self._begin(partition, assigned, mine.get(partition, assigned.next_offset))
            elif self._event_times is not None:
                # It is forgotten when records that were not stored are read again.
                self._event_times.begin(partition, assigned.watermark_ms)
        for partition in set(mine) - set(orders.assigned):
            self._leave(partition)
        revoked = sorted(orders.revoked - self._releasing)
        if revoked:
            self._releasing.update(revoked)
            self._generator.after_push(partial(self._release, revoked))

    def _begin(self, partition: TopicPartition, assigned: AssignedPartition, next_offset: int) -> None:
        # If blocks of it were stored here, the orders are not newer than the last of them.
        if assigned.next_offset > self._next_offsets.get(partition, -1):
            self._next_offsets[partition] = assigned.next_offset
        if self._event_times is not None:
            self._event_times.begin(partition, assigned.watermark_ms)
        self._source.assign(partition, next_offset, assigned.epoch_end, assigned.source_position)
        logger.info("receiver %s reads %s from %d", self._lease.receiver_id, partition, next_offset)

    def _leave(self, partition: TopicPartition) -> None:
        self._source.unassign(partition)
        if self._event_times is not None:
            self._event_times.forget(partition)

    def _release(self, partitions: Sequence[TopicPartition]) -> None:
        """Release partitions in the ledger. Everything read from them is stored by now."""
        try:
            self._ledger.positions.release(self._lease, partitions)
        except LedgerUnavailableError as error:
            # The next orders revoke them again, if the ledger did not release them.
            logger.warning("the ledger does not answer, and is asked again to release %s: %s", partitions, error)
        else:
            # The orders are older than the release and would repeat it.
            self._heartbeat.forget_orders()
            logger.info("receiver %s has released %s", self._lease.receiver_id, ", ".join(map(str, partitions)))
        for partition in partitions:
            self._source.commits.forget(partition.topic, partition.partition)
            self._next_offsets.pop(partition, None)
            self._releasing.discard(partition)


class ReceiverStats:
    """Collects a receiver's numbers. Used by the pushing thread."""

    def __init__(
        self,
        source: RecordSource,
        counts: StoreCounts,
        lag_watch: LagWatch,
        *,
        pausing: Pausing,
        recovery: LogRecovery,
        stored_positions: Callable[[], Mapping[TopicPartition, int]],
        now_ms: Callable[[], int],
    ) -> None:
        """``recovery`` is what this receiver's writer found in the log. ``stored_positions`` returns the ledger's
        positions, ``now_ms`` its time."""
        self._source = source
        self._counts = counts
        self._lag_watch = lag_watch
        self._pausing = pausing
        self._torn_tail_bytes = sum(tail.length for tail in recovery.torn_tails)
        self._log_damages = len(recovery.damage)
        self._stored_positions = stored_positions
        self._now_ms = now_ms
        self._stored: deque[tuple[float, int]] = deque()

    def collect(self, now: float, queued: tuple[int, int]) -> dict[str, Any]:
        """Return the stats as JSON values.

        ``rate`` is in records/s over the last 10 s. ``lag_seconds``: everything that Kafka had this long ago is stored;
        None if unknown for a partition. ``lag`` has these seconds and the lag in offsets of each partition: by topic
        and number, (offsets, seconds), each None if unknown. ``lag_unknown`` counts the partitions whose lag is not in
        ``total_lag``, which is None if the lag of no partition is known. ``totals`` only grow while this receiver
        lives; the ledger sums them over its instances.
        """
        source, counts = self._source, self._counts
        self._stored.append((now, counts.records))
        while len(self._stored) > 2 and now - self._stored[0][0] > _RATE_SECONDS:
            self._stored.popleft()
        seconds = now - self._stored[0][0]
        statuses = source.status()
        partition_errors = {
            f"{status.partition.topic}-{status.partition.partition}": {
                "state": status.state.value,
                "error": status.error,
            }
            for status in statuses
            if status.error is not None
        }
        lag_of = self._lag_watch.lags(self._stored_positions())
        lags = [lag.records for lag in lag_of.values()]
        return {
            "records": counts.records,
            "blocks": counts.blocks,
            "bytes": counts.payload_bytes,
            "rate": round((counts.records - self._stored[0][1]) / seconds, 1) if seconds > 0 else 0.0,
            "queued_blocks": queued[0],
            "queued_bytes": queued[1],
            "partitions": len(statuses),
            "at_end": sum(status.state is FetchState.AT_END for status in statuses),
            "failed": sum(status.state is FetchState.FAILED for status in statuses),
            "leaderless": sum(status.state is FetchState.LEADERLESS for status in statuses),
            "lag": self._listed(lag_of),
            "total_lag": self._total(lags),
            "lag_unknown": sum(lag is None for lag in lags),
            "lag_seconds": self._seconds_behind(list(lag_of.values())),
            UNREADABLE_TOPICS: self._lag_watch.unreadable_topics(
                lag_of, statuses, None if source.connected else source.client_error
            ),
            OPEN_TRANSACTIONS: self._lag_watch.open_transactions(),
            "troubled": partition_errors,
            "commit_failures": source.commits.failures,
            "commit_error": source.commits.last_error,
            "store_failures": counts.write_failures,
            "torn_tail_bytes": self._torn_tail_bytes,
            "log_damages": self._log_damages,
            "below_position": source.below_position,
            "not_owned": source.not_owned,
            "lost_offsets": source.lost_offsets,
            "offsets_without_record": source.offsets_without_record,
            "unreadable_headers": source.unreadable_headers,
            "dropped": counts.dropped_records,
            "late_records": counts.late_records,
            "copied_blocks": counts.copies.written,
            "copied_bytes": counts.copies.bytes_written,
            "copy_failures": counts.copies.failures,
            "partition_errors": source.errors,
            "connected": source.connected,
            "client_error": source.client_error,
            "disk": self._pausing.disk,
            **counts.recent_seconds(),
            "totals": self.totals(),
        }

    def totals(self) -> dict[str, float]:
        """Return the numbers that only grow."""
        source, counts = self._source, self._counts
        return {
            "store_failures": counts.write_failures,
            "dropped_records": counts.dropped_records,
            "late_records": counts.late_records,
            "commit_failures": source.commits.failures,
            "partition_errors": source.errors,
            "unreadable_headers": source.unreadable_headers,
            "pauses": self._pausing.pauses,
            "paused_seconds": round(self._pausing.paused_seconds, 3),
            **{name: round(value, 6) for name, value in counts.durations.items()},
        }

    def _listed(self, lags: Mapping[TopicPartition, Lag]) -> dict[str, dict[str, tuple[int | None, float | None]]]:
        largest = sorted(lags.items(), key=lambda item: -(item[1].records or 0))[:_MAX_LISTED]
        listed: dict[str, dict[str, tuple[int | None, float | None]]] = defaultdict(dict)
        for partition, lag in largest:
            seconds = 0 if lag.records == 0 else self._seconds_behind([lag])
            # Each topic's name once: the names would be most of the heartbeat.
            listed[partition.topic][str(partition.partition)] = (lag.records, seconds)
        return listed

    def _total(self, lags: Collection[int | None]) -> int | None:
        known = [lag for lag in lags if lag is not None]
        # Without a connection a receiver does not even know its partitions.
        return sum(known) if known or (not lags and self._source.connected) else None

    def _seconds_behind(self, lags: Collection[Lag]) -> float | None:
        behind = [lag for lag in lags if lag.records != 0]
        drained = [lag.drained_ms for lag in behind if lag.drained_ms is not None]
        if len(drained) < len(behind):
            return None
        return round(max(0, self._now_ms() - min(drained)) / 1000, 1) if drained else 0.0


@dataclass(frozen=True, slots=True)
class Lag:
    """``records`` is the number of offsets between the stored position and the end of Kafka's log, which is beyond what
    open transactions let a consumer read. Everything that Kafka had at ``drained_ms`` of the ledger's clock is stored.
    None means unknown."""

    records: int | None
    drained_ms: int | None


class LagWatch:
    """The consuming thread calls `poll`, the pushing thread the rest."""

    def __init__(
        self,
        ends: EndOffsets,
        partitions: Callable[[], Collection[TopicPartition]],
        now_ms: Callable[[], int],
        clock: Clock,
        *,
        readable_ends: EndOffsets | None = None,
    ) -> None:
        """``ends`` are those of the log, ``readable_ends`` those of the input's consumers if they may be others: before
        the first open transaction."""
        self._ends = ends
        self._readable_ends = readable_ends
        self._partitions = partitions
        self._now_ms = now_ms
        self._clock = clock
        self._next_question = 0.0
        self._question: tuple[int, Collection[TopicPartition], Callable[[], tuple[Ends, Ends] | None]] | None = None
        # Replaced as a whole, so that both threads may read it.
        self._asked: Mapping[TopicPartition, _Asked] = {}
        self._to_reach: dict[TopicPartition, tuple[int, int]] = {}
        self._drained: dict[TopicPartition, int] = {}
        self._unread_since: dict[TopicPartition, int] = {}
        # Where the readable end is before the log's end: this end, and since when it is there.
        self._held_back: dict[TopicPartition, tuple[int, int]] = {}

    def poll(self) -> None:
        """Send a query when it is due, and take its answer, without waiting."""
        if self._question is not None:
            asked_ms, partitions, answer = self._question
            ends = answer()
            if ends is not None:
                self._question = None
                self._asked = {partition: self._heard(partition, ends, asked_ms) for partition in partitions}
                self._watch_transactions(asked_ms)
            return
        now = self._clock.monotonic()
        mine = self._partitions()
        if now < self._next_question or not mine:
            return
        self._next_question = now + ASK_SECONDS
        asked_ms = self._now_ms()
        try:
            self._question = (
                asked_ms,
                mine,
                self._ask([(partition.topic, partition.partition) for partition in mine]),
            )
        except KafkaException as error:
            logger.warning("Kafka did not return the end offsets of the partitions: %s", error)
            failed = Ends({}, {(partition.topic, partition.partition): error for partition in mine})
            self._asked = {partition: self._heard(partition, (failed, failed), asked_ms) for partition in mine}

    def _ask(self, keys: Collection[Key]) -> Callable[[], tuple[Ends, Ends] | None]:
        log = self._ends.ask(keys)
        readable = log if self._readable_ends is None else self._readable_ends.ask(keys)

        def answer() -> tuple[Ends, Ends] | None:
            first, second = log(), readable()
            return None if first is None or second is None else (first, second)

        return answer

    def _heard(self, partition: TopicPartition, ends: tuple[Ends, Ends], asked_ms: int) -> _Asked:
        key: Key = (partition.topic, partition.partition)
        end, readable = (each.offsets.get(key) for each in ends)
        if end is not None and readable is not None:
            return _Asked(end, asked_ms, readable_end=readable)
        before = self._asked.get(partition)
        failure = next((each.failures[key] for each in ends if key in each.failures), None)
        # The last known end stays true for a topic that is gone; otherwise the end may have moved since.
        kept = before.end if before is not None and _code(failure) in _GONE else None
        why = "no answer" if failure is None else error_text(failure)
        return _Asked(kept, asked_ms if before is None else before.asked_ms, why)

    def _watch_transactions(self, asked_ms: int) -> None:
        held_back: dict[TopicPartition, tuple[int, int]] = {}
        for partition, asked in self._asked.items():
            if asked.end is not None and asked.readable_end is not None and asked.readable_end < asked.end:
                before = self._held_back.get(partition)
                if before is not None and before[0] == asked.readable_end:
                    held_back[partition] = before
                else:
                    held_back[partition] = (asked.readable_end, asked_ms)
        self._held_back = held_back

    def open_transactions(self) -> list[dict[str, Any]]:
        """The partitions of which nothing more can be read for a minute or longer, since a transaction is open at
        ``offset``: with ``since_ms`` of the ledger's clock, when that was first seen, and the offsets ``behind`` it."""
        now_ms, asked = self._now_ms(), self._asked
        found = []
        for partition, (offset, since_ms) in sorted(self._held_back.items(), key=lambda item: item[1][1]):
            end = known.end if (known := asked.get(partition)) is not None else None
            if now_ms - since_ms >= _OPEN_TRANSACTION_MS and end is not None:
                where = {"topic": partition.topic, "partition": partition.partition, "offset": offset}
                found.append({**where, "since_ms": since_ms, "behind": end - offset})
        return found[:_MAX_TRANSACTIONS]

    def lags(self, stored: Mapping[TopicPartition, int]) -> dict[TopicPartition, Lag]:
        """Return the lag of each partition, given its position in the ledger."""
        asked = self._asked
        for known in (self._to_reach, self._drained, self._unread_since):
            for partition in known.keys() - stored.keys():
                del known[partition]
        return {
            partition: self._lag(partition, position, asked.get(partition)) for partition, position in stored.items()
        }

    def _lag(self, partition: TopicPartition, position: int, asked: _Asked | None) -> Lag:
        awaited = self._to_reach.get(partition)
        if awaited is not None and position >= awaited[0]:
            self._drained[partition] = awaited[1]
            del self._to_reach[partition]
        if asked is None or asked.end is None:
            return Lag(None, self._drained.get(partition))
        if asked.error is None and partition not in self._to_reach:
            if position >= asked.end:
                self._drained[partition] = asked.asked_ms
            else:
                # Records are stored some time after they are read: this end stays until it is reached.
                self._to_reach[partition] = (asked.end, asked.asked_ms)
        return Lag(max(0, asked.end - position), self._drained.get(partition))

    def unreadable_topics(
        self, lags: Mapping[TopicPartition, Lag], statuses: Collection[PartitionStatus], client_error: str | None
    ) -> list[dict[str, Any]]:
        """Return the topics with partitions that cannot be queried or read, for the receiver's stats.

        ``asked_ms`` in an entry is the last time at which that worked. ``client_error`` is the client's last error
        about its brokers. Failed partitions are not included: the ledger has their state.
        """
        asked = self._asked
        errors_of: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for status in statuses:
            if status.state is FetchState.FAILED:
                continue
            number, known, lag = (
                status.partition.partition,
                asked.get(status.partition),
                lags.get(status.partition),
            )
            unread = status.error is not None and (lag is None or lag.records != 0)
            if not unread:
                self._unread_since.pop(status.partition, None)
            if known is not None and known.error is not None:
                error = f"cannot be asked about ({client_error or known.error})"
                errors_of[status.partition.topic].append((number, known.asked_ms, error))
            elif unread:
                since_ms = self._unread_since.setdefault(status.partition, self._now_ms())
                errors_of[status.partition.topic].append((number, since_ms, f"cannot be read ({status.error})"))
        return [_reported(topic, sorted(problems)) for topic, problems in sorted(errors_of.items())]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The last answer about one partition: its ``end`` at ``asked_ms`` of the ledger's clock. ``error`` says why there
    is no newer answer."""

    end: int | None
    asked_ms: int
    error: str | None = None
    readable_end: int | None = None


def _reported(topic: str, problems: list[tuple[int, int, str]]) -> dict[str, Any]:
    number, _, error = problems[0]
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    asked_ms = min(since_ms for _, since_ms, _ in problems)
    return {"topic": topic, "asked_ms": asked_ms, "error": f"partition {number}{more} {error}"}


def _code(error: BaseException | None) -> int | None:
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else None
    return inner.code() if isinstance(inner, KafkaError) else None


@contextmanager
def collector_off() -> Iterator[None]:
    """Freeze all existing objects and switch the collector off. For a process that only receives."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class OccasionalCollection:
    """Collects once a minute while the collector is off."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _COLLECT_SECONDS

    def __call__(self) -> None:
        if time.monotonic() >= self._next and not gc.isenabled():
            gc.collect()
            self._next = time.monotonic() + _COLLECT_SECONDS
