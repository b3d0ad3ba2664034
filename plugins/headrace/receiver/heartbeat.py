"""Sends a receiver's heartbeat: it renews the lease, reports stats and failures, and takes the ledger's orders.

It runs in the thread that stores, so a receiver that cannot store is not alive, whatever else of it still runs (rule 8
of the design). The answers give an estimate of the ledger's clock: batch times come from it (rule 4), and asking it per
block costs a round trip.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

from headrace.blocks import TopicPartition
from headrace.clock import LedgerClock
from headrace.kafka.records import RecordChunk
from headrace.ledger.errors import LedgerUnavailableError, PartitionNotAssignedError
from headrace.ledger.receiving.tables import ReceiverLease, ReceiverOrders
from headrace.ledger.states import EventKind, ReceiverState
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.event_times import EndOffsetTracker
from headrace.receiver.garbage_collection import OccasionalCollection
from headrace.receiver.health import CLOCK_AHEAD
from headrace.receiver.pausing import Pausing
from headrace.receiver.receiver import ReceivingError
from headrace.receiver.receiver_stats import ReceiverStats
from headrace.receiver.record_source import FetchState, RecordSource, SourceError
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
# Ten heartbeats, so a garbage collection, a slow disk or a short outage of the ledger does not cost the lease.
LEASE_MS = 10_000
_COMMIT_REPEAT_SECONDS = 5.0
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
