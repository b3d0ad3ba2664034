"""Sends a receiver's heartbeat: it renews the lease, reports stats and failures, and receives the orders.

It runs in the thread that stores, so a receiver that cannot store is not alive, whatever else of it still runs (rule 8
of the design).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from headrace.blocks import TopicPartition
from headrace.clock import Clock
from headrace.kafka.record_batches import RecordChunk
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.models import ReceiverLease, ReceiverOrders
from headrace.ledger.states import EventKind, ReceiverState
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.block_store import BlockStore
from headrace.receiver.end_offset_tracker import EndOffsetTracker
from headrace.receiver.garbage import OccasionalCollection
from headrace.receiver.kafka_receiver import KafkaReceiver
from headrace.receiver.ledger_clock import LedgerClock
from headrace.receiver.partition_state import FetchState
from headrace.receiver.pausing import Pausing
from headrace.receiver.receiver_stats import ReceiverStats

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
_COMMIT_REPEAT_SECONDS = 5.0

Orders = tuple[ReceiverOrders, frozenset[TopicPartition]]
"""The ledger's orders, and the partitions that were reported as failed before it gave them."""


class Heartbeat:
    """Used by the pushing thread, except ``state``, ``take_orders`` and ``goes_on``."""

    def __init__(
        self,
        lease: ReceiverLease,
        ledger: Ledger,
        *,
        kafka: KafkaReceiver,
        store: BlockStore,
        generator: BlockGenerator[RecordChunk],
        stats: ReceiverStats,
        pausing: Pausing,
        end_offsets: EndOffsetTracker | None,
        ledger_clock: LedgerClock,
        recreated: Callable[[TopicPartition], bool | None],
        clock: Clock,
    ) -> None:
        """``end_offsets`` makes the claims of a stream by timestamp. ``recreated`` returns whether a partition's topic
        was created again, None while that is unknown."""
        self._lease = lease
        self._ledger = ledger
        self._kafka = kafka
        self._store = store
        self._generator = generator
        self._stats = stats
        self._pausing = pausing
        self._end_offsets = end_offsets
        self._ledger_clock = ledger_clock
        self._recreated = recreated
        self._clock = clock
        self._collect_garbage = OccasionalCollection()
        self._lock = threading.Lock()
        self._orders: Orders | None = None
        self._next_beat = 0.0
        self._next_commit = 0.0
        self._had_news = False
        self._reported_failed: set[TopicPartition] = set()
        self._reported_commit_error: str | None = None
        self.state = ReceiverState.STARTING

    def tick(self) -> None:
        """Beat if it is due, or if there are new claims that a batch may wait for."""
        if self._end_offsets is not None and self._end_offsets.look():
            self._next_beat = 0.0
        self.beat_if_due()

    def beat_if_due(self) -> None:
        """Beat once a second, or at once for a new pause. If the ledger does not answer, try again after a second.

        Raises LeaseLostError.
        """
        now = self._clock.monotonic()
        news = self._pausing.look()
        if news and not self._had_news:
            self._next_beat = 0.0
        self._had_news = news
        if now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT_SECONDS
        reported_failed = frozenset(self._reported_failed)
        try:
            orders = self._beat(now)
        except LedgerUnavailableError as error:
            logger.warning("receiver %s: no heartbeat, the ledger does not answer: %s", self._lease.receiver_id, error)
            return
        with self._lock:
            self._orders = (orders, reported_failed)
        self.state = ReceiverState.RUNNING if self.state is ReceiverState.STARTING else self.state
        if self._kafka.commits.open and now >= self._next_commit:
            self._next_commit = now + _COMMIT_REPEAT_SECONDS
            self._kafka.commits.repeat()
        self._store.idle()
        self._collect_garbage()

    def take_orders(self) -> Orders | None:
        """Return the newest orders; each is returned once."""
        with self._lock:
            orders, self._orders = self._orders, None
            return orders

    def forget_orders(self) -> None:
        """Drop orders that are out of date."""
        with self._lock:
            self._orders = None

    def goes_on(self, partition: TopicPartition) -> None:
        """Note that the partition is read again: another failure is then reported again."""
        self._reported_failed.discard(partition)

    def _beat(self, now: float) -> ReceiverOrders:
        stats = self._stats.collect(now, self._kafka, self._store, self._generator.queued)
        sealed = self._generator.sealed_through_ms()
        drained = None if self._end_offsets is None else self._end_offsets.claims()
        asked_at = self._clock.monotonic()
        orders = self._ledger.receivers.heartbeat(
            self._lease,
            sealed_through_ms=sealed,
            stats=stats,
            state=self.state,
            error=self._kafka.client_error,
            drained=drained,
            paused_reason=self._pausing.reason,
        )
        self._ledger_clock.observe(asked_at, orders.now_ms)
        self._kafka.commits.allow_until(asked_at + self._lease.lease_ms / 1000)
        if self._end_offsets is not None and drained:
            self._end_offsets.reported(drained)
        self._pausing.report()
        self._report_failures()
        return orders

    def _report_failures(self) -> None:
        receiver_id = self._lease.receiver_id
        commit_error = self._kafka.commits.last_error
        if commit_error != self._reported_commit_error:
            self._reported_commit_error = commit_error
            payload = {"receiver": str(receiver_id), "error": commit_error}
            self._ledger.events.append(receiver_id.stream, EventKind.COMMIT_FAILED, payload)
        for status in self._kafka.status():
            if (
                status.state is FetchState.FAILED
                and status.partition not in self._reported_failed
                # Not if its topic was deleted: the tracker detects that, ends the partition, and begins the new topic.
                and self._recreated(status.partition) is False
            ):
                self._ledger.positions.fail(self._lease, status.partition, status.error or "failed")
                self._reported_failed.add(status.partition)
