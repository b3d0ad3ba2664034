"""Follows the ledger's orders about partitions: which of them a receiver begins to read, releases, or leaves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from headrace.blocks import TopicPartition
from headrace.kafka.records import RecordChunk
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.receiving.tables import AssignedPartition, ReceiverLease, ReceiverOrders
from headrace.ledger.states import PartitionState
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.event_times import EventTimes
from headrace.receiver.heartbeat import Heartbeat
from headrace.receiver.rates import RateLimiter
from headrace.receiver.record_source import RecordSource
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)


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
