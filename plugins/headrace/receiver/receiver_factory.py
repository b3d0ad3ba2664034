"""Makes a receiver: opens its source and its log, and connects what works between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient

from headrace.blocks import BlockInfo, TopicPartition
from headrace.kafka.client import admin_config, consumer_config, isolation_level
from headrace.kafka.range_reader import RangeClients
from headrace.kafka.records import RecordChunk
from headrace.kafka.topics import AdminTopicIds, IncarnationGuard, RecreatedTopics, TopicIds
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.models import ReceiverLease
from headrace.ledger.states import ReceiverState
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.block_store import BlockStore, StoreCounts
from headrace.receiver.custom_source import CustomSource, NoEndOffsets, NoTopicIds
from headrace.receiver.end_offset_tracker import AdminEndOffsets, EndOffsets, EndOffsetTracker
from headrace.receiver.event_times import EventTimes
from headrace.receiver.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from headrace.receiver.kafka_receiver import KafkaReceiver
from headrace.receiver.lag_watch import LagWatch
from headrace.receiver.ledger_clock import LedgerClock
from headrace.receiver.offset_gaps import kafka_offset_gaps
from headrace.receiver.partition_orders import PartitionOrders
from headrace.receiver.pausing import Pausing
from headrace.receiver.rate_limiter import RateLimiter
from headrace.receiver.receiver_events import report_recovery
from headrace.receiver.receiver_stats import ReceiverStats
from headrace.receiver.record_source import RecordSource
from headrace.receiver.supervisor import ReceiverSupervisor
from headrace.receiver.unauthorized_topics import UnauthorizedTopics
from headrace.stream.inputs import Input, KafkaInput, ReceiverInput
from headrace.stream_context import StreamContext
from headrace.wal.local_copies import BlockCopies, CopyCounts, CopySettings
from headrace.wal.writer import WriteAheadLogWriter

logger = logging.getLogger(__name__)

_CLOCK_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class ReceiverClients:
    """What a receiver reads: its source, which is closed with the receiver, and who knows its topics."""

    consumer: RecordSource
    topic_ids: TopicIds
    end_offsets: EndOffsets


OpenClients = Callable[[StreamContext, Input], ReceiverClients]


def open_clients(context: StreamContext, source: Input) -> ReceiverClients:
    """Open what one receiver of an input reads.

    Raises:
        ReceiverClassError: the class of a custom receiver cannot be used.
        KafkaClientError, and the errors of a wrong connection.
    """
    if isinstance(source, ReceiverInput):
        custom = CustomSource(
            source, max_block_bytes=context.stream.limits.max_block_bytes, now_ms=context.clock.now_ms
        )
        return ReceiverClients(custom, NoTopicIds(source), NoEndOffsets())
    return _open_kafka(context, source)


def _open_kafka(context: StreamContext, source: KafkaInput) -> ReceiverClients:
    admin = AdminClient(admin_config(source))
    limits = context.stream.limits
    isolation = isolation_level(source)
    consumer = KafkaReceiver(
        consumer_config(source, group=context.stream.group_of(source), limits=limits),
        on_lost_offsets=source.on_lost_offsets,
        offset_gaps=kafka_offset_gaps(
            partial(RangeClients.of, source), committed_only=isolation is IsolationLevel.READ_COMMITTED
        ),
        max_chunk_bytes=limits.max_block_bytes,
        max_rate_per_partition=limits.max_rate_per_partition,
        clock=context.clock,
    )
    return ReceiverClients(consumer, AdminTopicIds(admin), AdminEndOffsets(admin, isolation))


class ReceiverFactory:
    """Makes one registered receiver. Use once."""

    def __init__(self, context: StreamContext, lease: ReceiverLease, clients: OpenClients = open_clients) -> None:
        """``clients`` opens what the receiver reads; tests give their own."""
        self._context = context
        self._lease = lease
        self._source = context.stream.input(lease.receiver_id.input_id)
        self._open_clients = clients
        self._next_offsets: dict[TopicPartition, int] = {}
        self._ledger_clock = LedgerClock(context.ledger.now_ms, context.clock)
        self._next_beat = 0.0

    def make(self) -> ReceiverSupervisor:
        """Open everything that the receiver needs. If that fails, nothing stays open; the lease is the caller's to
        release."""
        for _ in range(_CLOCK_SAMPLES):
            self._ledger_clock.sample()
        clients = self._open_clients(self._context, self._source)
        try:
            return self._assemble(clients, self._open_log())
        except BaseException:
            clients.consumer.close(0.0)
            raise

    def _open_log(self) -> WriteAheadLogWriter:
        """Open the log's writer, which inspects the log of earlier epochs, and report its findings."""
        limits = self._context.stream.limits
        writer = WriteAheadLogWriter(
            self._context.storage,
            "log",
            self._lease.receiver_id,
            self._lease.epoch,
            segment_bytes=limits.segment_bytes,
            segment_seconds=limits.segment_interval.total_seconds(),
            clock=self._context.clock,
            positions=lambda: self._next_offsets,
            accepted=self._accepted,
            progress=self._beat_if_due,
            sync_blocks=self._context.stream.delivery == "exactly_once",
        )
        report_recovery(writer.recovery, self._lease, self._context.ledger, self._context.storage.below("log"))
        return writer

    def _assemble(self, clients: ReceiverClients, writer: WriteAheadLogWriter) -> ReceiverSupervisor:
        context, lease, source, next_offsets = self._context, self._lease, clients.consumer, self._next_offsets
        now_ms, stored_positions = self._ledger_clock.now_ms, partial(_stored_positions, source, next_offsets)
        lag_watch = LagWatch(clients.end_offsets, lambda: list(source.partitions), now_ms, context.clock)
        copies = self._copies()
        counts = StoreCounts(copies=CopyCounts() if copies is None else copies.counts)
        pausing = Pausing(context, lease)
        generator = self._generator()
        heartbeat = Heartbeat(
            context,
            lease,
            source=source,
            generator=generator,
            stats=ReceiverStats(
                source,
                counts,
                lag_watch,
                pausing=pausing,
                recovery=writer.recovery,
                stored_positions=stored_positions,
                now_ms=now_ms,
            ),
            pausing=pausing,
            end_offsets=self._end_offset_tracker(clients.end_offsets, stored_positions),
            ledger_clock=self._ledger_clock,
            recreated=RecreatedTopics(clients.topic_ids).look,
        )
        guard = IncarnationGuard(clients.topic_ids, heartbeat.wait)
        event_times = self._event_times()
        unauthorized = UnauthorizedTopics(guard, source, generator, next_offsets, event_times)
        store = BlockStore(
            context,
            lease,
            writer=writer,
            source=source,
            pausing=pausing,
            counts=counts,
            next_offsets=next_offsets,
            wait=heartbeat.wait,
            not_to_store=unauthorized.not_to_store,
            beat=heartbeat.tick,
            copies=copies,
        )
        limits = context.stream.limits
        initial_rate = None if limits.backpressure is None else limits.backpressure.initial_rate
        limiter = RateLimiter(self._max_rate(), context.clock, initial_rate=initial_rate)
        orders = PartitionOrders(
            context,
            lease,
            source=source,
            generator=generator,
            heartbeat=heartbeat,
            limiter=limiter,
            event_times=event_times,
            next_offsets=next_offsets,
        )
        return ReceiverSupervisor(
            context,
            lease,
            source=source,
            limiter=limiter,
            event_times=event_times,
            generator=generator,
            store=store,
            counts=counts,
            heartbeat=heartbeat,
            orders=orders,
            pausing=pausing,
            lag_watch=lag_watch,
            unauthorized=unauthorized,
        )

    def _copies(self) -> BlockCopies | None:
        """The local copies of the stream's log, if the stream has them."""
        settings = CopySettings.of(self._context.stream.storage)
        return None if settings is None else BlockCopies(self._context.storage.below("log").url, settings)

    def _generator(self) -> BlockGenerator[RecordChunk]:
        stream = self._context.stream
        return BlockGenerator(
            self._lease.receiver_id,
            block_interval_ms=stream.block_interval_ms,
            max_block_bytes=stream.limits.max_block_bytes,
            max_queued_blocks=stream.limits.max_queued_blocks,
            clock=self._context.clock,
            now_ms=self._ledger_clock.now_ms,
        )

    def _max_rate(self) -> float | None:
        """The most records per second of the receiver. A Kafka consumer keeps to the rate per partition itself."""
        limits = self._context.stream.limits
        if isinstance(self._source, KafkaInput):
            return limits.max_rate
        # A custom receiver has one partition.
        return min((each for each in (limits.max_rate, limits.max_rate_per_partition) if each), default=None)

    def _event_times(self) -> EventTimes | None:
        stream = self._context.stream
        if stream.batch_by != "timestamp":
            return None
        return EventTimes(stream.batch_interval_ms, self._ledger_clock.now_ms)

    def _end_offset_tracker(
        self, end_offsets: EndOffsets, stored_positions: Callable[[], dict[TopicPartition, int]]
    ) -> EndOffsetTracker | None:
        stream = self._context.stream
        if stream.batch_by != "timestamp":
            return None
        return EndOffsetTracker(
            end_offsets, stored_positions, self._ledger_clock.now_ms, lateness_ms=stream.allowed_lateness_ms
        )

    def _accepted(self, segment: str) -> list[BlockInfo]:
        return [block.info for block in self._context.ledger.blocks.of_segment(self._context.name, segment)]

    def _beat_if_due(self) -> None:
        """Renew the lease while the log is opened: reading its last segment may take longer than a lease."""
        now = self._context.clock.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT_SECONDS
        try:
            self._context.ledger.receivers.heartbeat(self._lease, sealed_through_ms=0, state=ReceiverState.STARTING)
        except LedgerUnavailableError as error:
            logger.warning("receiver %s: no heartbeat while its log is opened: %s", self._lease.receiver_id, error)


def _stored_positions(source: RecordSource, next_offsets: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return the ledger's positions of the partitions that are read."""
    return {each: next_offsets[each] for each in source.partitions if each in next_offsets}
