"""Runs one receiver from registration to release: its lease, its three threads, its orders and its end.

The caller's thread consumes, the cutter thread cuts blocks, and the pushing thread stores *and* sends the heartbeat: a
receiver that cannot store is not alive, whatever else of it still runs (rule 8 of the design).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.clock import Clock, SystemClock
from headrace.kafka.client_settings import admin_config, consumer_config, isolation_level
from headrace.kafka.range_reader import RangeClients
from headrace.kafka.record_batches import RecordChunk
from headrace.kafka.topic_ids import AdminTopicIds, IncarnationGuard, RecreatedTopics, TopicIds
from headrace.ledger import Ledger
from headrace.ledger.errors import JobStoppingError, LeaseLostError, LedgerUnavailableError
from headrace.ledger.models import AssignedPartition, JobLease, ReceiverLease, ReceiverOrders
from headrace.ledger.states import PartitionState, ReceiverState
from headrace.receiver.block_generator import BlockGenerator, GeneratedBlock
from headrace.receiver.block_store import BlockStore
from headrace.receiver.disk_reserve import DiskReserve, space_of
from headrace.receiver.disk_room import room_for
from headrace.receiver.end_offset_tracker import AdminEndOffsets, EndOffsets, EndOffsetTracker
from headrace.receiver.errors import GeneratorStateError, ReceivingError
from headrace.receiver.event_times import EventTimes
from headrace.receiver.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from headrace.receiver.kafka_receiver import KafkaReceiver
from headrace.receiver.lag_watch import LagWatch
from headrace.receiver.ledger_clock import LedgerClock
from headrace.receiver.log_budget import LogBudget
from headrace.receiver.offset_gaps import kafka_offset_gaps
from headrace.receiver.partition_state import Gap
from headrace.receiver.pausing import Pausing
from headrace.receiver.rate_limiter import RateLimiter
from headrace.receiver.receiver_stats import ReceiverStats
from headrace.receiver.recovery_report import report_recovery
from headrace.receiver.withheld_partitions import WithheldPartitions
from headrace.stream import Stream
from headrace.wal.storage import LogStorage
from headrace.wal.writer import WriteAheadLogWriter

logger = logging.getLogger(__name__)

# Ten heartbeats, so a garbage collection, a slow disk or a short outage of the ledger does not cost the lease.
LEASE_MS = 10_000
# While stopping: for how long Kafka may fail to confirm the topic ids of records that are still to be stored.
_DRAIN_TIMEOUT_SECONDS = 15.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """How a receiver ended: ``stopped`` when asked to, ``lost`` when another took over, ``failed`` with ``error``."""

    receiver: ReceiverId
    state: ReceiverState
    records: int = 0
    blocks: int = 0
    error: str | None = None


class ReceiverSupervisor:
    """Runs one receiver from registration to release. Use once."""

    def __init__(
        self,
        stream: Stream,
        receiver_id: ReceiverId,
        ledger: Ledger,
        storage: LogStorage,
        job_lease: JobLease,
        *,
        clock: Clock | None = None,
        host: str | None = None,
        lease_ms: int = LEASE_MS,
        kafka_factory: Callable[[], KafkaReceiver] | None = None,
        topic_ids: TopicIds | None = None,
        end_offsets: EndOffsets | None = None,
    ) -> None:
        """``storage`` is the stream's own folder (``Stream.folder_url``). The last three parameters are for tests."""
        self._stream = stream
        self._source = stream.input(receiver_id.input_id)
        self._receiver_id = receiver_id
        self._ledger = ledger
        self._storage = storage
        self._job_lease = job_lease
        self._clock = clock or SystemClock()
        self._host = host or socket.gethostname()
        self._lease_ms = lease_ms
        self._kafka_factory = kafka_factory or self._real_kafka
        self._topic_ids = topic_ids
        self._end_offsets = end_offsets
        self._limiter = RateLimiter(stream.limits.max_rate, self._clock)
        self._ledger_clock = LedgerClock(ledger.now_ms, self._clock)
        self._event_times: EventTimes | None = None
        self._give_up_at = float("inf")
        self._next_beat = 0.0
        self._releasing: set[TopicPartition] = set()
        self._next_offsets: dict[TopicPartition, int] = {}
        self._lease: ReceiverLease
        self._kafka: KafkaReceiver
        self._pausing: Pausing
        self._withheld: WithheldPartitions
        self._lag_watch: LagWatch
        self._stats: ReceiverStats
        self._store: BlockStore
        self._generator: BlockGenerator[RecordChunk]
        self._heartbeat: Heartbeat

    def run(self, stop: threading.Event | None = None) -> ReceiverReport:
        """Receive until ``stop`` is set or the ledger orders a stop; store what was read, then return.

        Always returns a report, also when the lease is lost (then nothing more is stored) or something fails.
        """
        try:
            self._lease = self._ledger.receivers.register(
                self._job_lease, self._receiver_id, host=self._host, lease_ms=self._lease_ms
            )
        except (LeaseLostError, JobStoppingError) as refused:
            return ReceiverReport(self._receiver_id, ReceiverState.LOST, error=str(refused))
        error: BaseException | None = None
        try:
            self._set_up()
        except Exception as failure:
            logger.exception("receiver %s could not start", self._receiver_id)
            return self._end(failure, store=None)
        try:
            self._generator.start()
            self._receive(stop or threading.Event())
        except Exception as failure:
            error = failure
        error = self._drain(error)
        return self._end(error, store=self._store)

    # -- the consuming thread --------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        for _ in range(3):
            self._ledger_clock.sample()
        limits = self._stream.limits
        self._kafka = self._kafka_factory()
        # One client for all queries, created on first use.
        admin = cache(lambda: AdminClient(admin_config(self._source)))
        topic_ids = self._topic_ids or AdminTopicIds(admin())
        self._withheld = WithheldPartitions(IncarnationGuard(topic_ids, self._wait))
        ends = cache(lambda: self._end_offsets or AdminEndOffsets(admin(), isolation_level(self._source)))
        self._lag_watch = LagWatch(ends, lambda: list(self._kafka.partitions), self._ledger_clock.now_ms, self._clock)
        self._stats = ReceiverStats(self._lag_watch, self._stored_positions, self._ledger_clock.now_ms)
        self._pausing = Pausing(
            self._lease,
            self._ledger,
            self._clock,
            budget=self._budget(),
            reserve=DiskReserve(partial(space_of, self._storage.url), self._clock),
        )
        end_offsets = None
        if self._stream.batch_by == "timestamp":
            self._event_times = EventTimes(self._stream.batch_interval_ms, self._ledger_clock.now_ms)
            end_offsets = EndOffsetTracker(
                ends(),
                self._stored_positions,
                self._ledger_clock.now_ms,
                lateness_ms=self._stream.allowed_lateness_ms,
            )
        writer = WriteAheadLogWriter(
            self._storage,
            "log",
            self._receiver_id,
            self._lease.epoch,
            segment_bytes=limits.segment_bytes,
            segment_seconds=limits.segment_interval.total_seconds(),
            clock=self._clock,
            positions=lambda: self._next_offsets,
            accepted=self._accepted,
            progress=self._still_setting_up,
        )
        self._stats.torn_tail_bytes = writer.torn_tail_bytes
        self._stats.log_damages = len(writer.recovery.damage)
        report_recovery(writer.recovery, self._lease, self._ledger, self._storage.below("log"))
        self._store = BlockStore(
            self._lease,
            self._ledger,
            writer,
            commit=self._kafka.commits.note,
            wait=self._wait,
            clock=self._clock,
            pausing=self._pausing,
            room_for=partial(room_for, self._storage.url),
            next_offsets=self._next_offsets,
            epoch_end=self._kafka.leader_epochs.end_at,
            recreated=self._withheld.not_to_store,
            stored=self.on_tick,
        )
        self._generator = BlockGenerator(
            self._receiver_id,
            self,
            block_interval_ms=self._stream.block_interval_ms,
            max_block_bytes=limits.max_block_bytes,
            max_queued_blocks=limits.max_queued_blocks,
            clock=self._clock,
            now_ms=self._ledger_clock.now_ms,
        )
        self._heartbeat = Heartbeat(
            self._lease,
            self._ledger,
            kafka=self._kafka,
            store=self._store,
            generator=self._generator,
            stats=self._stats,
            pausing=self._pausing,
            end_offsets=end_offsets,
            ledger_clock=self._ledger_clock,
            recreated=RecreatedTopics(topic_ids).look,
            clock=self._clock,
        )

    def _still_setting_up(self) -> None:
        """Send a heartbeat during the set-up: reading the log's last segment may take longer than a lease."""
        now = self._clock.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT_SECONDS
        try:
            self._ledger.receivers.heartbeat(self._lease, sealed_through_ms=0, state=ReceiverState.STARTING)
        except LedgerUnavailableError as error:
            logger.warning("receiver %s: no heartbeat while it is set up: %s", self._receiver_id, error)

    def _budget(self) -> LogBudget | None:
        most = self._stream.limits.max_log_bytes
        if most is None:
            return None
        return LogBudget(self._stream, self._ledger, most, lambda: self._store.payload_bytes, self._clock)

    def _accepted(self, segment: str) -> list[BlockInfo]:
        return [block.info for block in self._ledger.blocks.of_segment(self._stream.name, segment)]

    def _receive(self, stop: threading.Event) -> None:
        while not stop.is_set():
            given = self._heartbeat.take_orders()
            if given is not None:
                orders, reported_failed = given
                if orders.stop:
                    logger.info("receiver %s was asked to stop", self._receiver_id)
                    return
                self._follow(orders, reported_failed)
            if self._generator.failure is not None:
                return
            self._lag_watch.look()
            self._withheld.put_back(self._kafka, self._next_offsets.get, self._generator.after_push)
            if self._pausing.reason is not None:
                self._kafka.listen()
                self._clock.wait(stop, _POLL_SECONDS)
                continue
            if not self._generator.wait_for_room(_POLL_SECONDS):
                self._kafka.serve()
                continue
            granted = self._limiter.grant(1_000_000)
            if granted == 0:
                self._clock.wait(stop, min(_POLL_SECONDS, self._limiter.delay()))
                continue
            self._take_in(self._kafka.fetch(_POLL_SECONDS, granted))

    def _take_in(self, events: Sequence[RecordChunk | Gap]) -> None:
        for event in events:
            if isinstance(event, RecordChunk):
                self._limiter.spend(event.records)
                for chunk in (event,) if self._event_times is None else self._event_times.split(event):
                    self._generator.add_data(chunk, chunk.nbytes)
            else:
                self._generator.after_push(partial(self._store_gap, event))

    def _follow(self, orders: ReceiverOrders, reported_failed: frozenset[TopicPartition]) -> None:
        """``reported_failed``: partitions reported as failed before the ledger gave these orders."""
        self._limiter.update(orders.max_rate)
        mine = self._kafka.partitions
        for partition, assigned in orders.assigned.items():
            if partition in self._releasing:
                continue
            reported = partition in reported_failed
            if assigned.state is not PartitionState.ACTIVE:
                if partition in mine and not reported:
                    self._leave(partition)
            elif reported or partition not in mine:
                # New, or reactivated by a person or the tracker.
                self._heartbeat.goes_on(partition)
                self._begin(partition, assigned, mine.get(partition, assigned.next_offset))
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
        self._kafka.assign(partition, next_offset, assigned.epoch_end)
        logger.info("receiver %s reads %s from %d", self._receiver_id, partition, next_offset)

    def _leave(self, partition: TopicPartition) -> None:
        self._kafka.unassign(partition)
        if self._event_times is not None:
            self._event_times.forget(partition)

    # -- the pushing thread ----------------------------------------------------------------------------------------

    def on_push_block(self, block: GeneratedBlock[RecordChunk]) -> None:
        self._store.store(block.items, block.cut_time_ms)

    def on_tick(self) -> None:
        self._heartbeat.tick()

    def on_error(self, message: str, error: BaseException) -> None:
        logger.error("receiver %s: %s: %s", self._receiver_id, message, error)

    def on_add_data(self, item: RecordChunk, metadata: object) -> None:
        """Nothing: a chunk carries its own ranges."""

    def on_generate_block(self, block: GeneratedBlock[RecordChunk]) -> None:
        """Nothing: a block's ranges are its chunks'."""

    def _stored_positions(self) -> dict[TopicPartition, int]:
        """Return the ledger's positions of the partitions that are read."""
        mine = self._kafka.partitions
        return {each: self._next_offsets[each] for each in mine if each in self._next_offsets}

    def _store_gap(self, gap: Gap) -> None:
        if gap.taken_back:
            self._store.report_reused(gap)
        else:
            self._store.advance(gap.partition, gap.from_offset, gap.until_offset, gap.reason)

    def _release(self, partitions: Sequence[TopicPartition]) -> None:
        """Release partitions. Everything read from them is stored by now."""
        self._ledger.positions.release(self._lease, partitions)
        # The orders are older than the release and would repeat it.
        self._heartbeat.forget_orders()
        for partition in partitions:
            self._kafka.commits.forget(partition.topic, partition.partition)
            self._next_offsets.pop(partition, None)
            self._releasing.discard(partition)
            logger.info("receiver %s has released %s", self._receiver_id, partition)

    def _wait(self, seconds: float) -> None:
        """Pause the pushing thread while heartbeats continue. Raises ReceivingError when draining takes too long."""
        until = self._clock.monotonic() + seconds
        while True:
            self._heartbeat.beat_if_due()
            if self._clock.monotonic() > self._give_up_at:
                raise ReceivingError("The receiver stops, and what it still held could not be stored in time.")
            left = until - self._clock.monotonic()
            if left <= 0:
                return
            self._clock.wait(threading.Event(), min(0.1, left))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _drain(self, error: BaseException | None) -> BaseException | None:
        """Store what was read, unless the lease or the store is gone."""
        self._heartbeat.state = ReceiverState.STOPPING
        self._give_up_at = self._clock.monotonic() + _DRAIN_TIMEOUT_SECONDS
        self._generator.stop()
        failure = self._generator.failure
        if failure is not None and (error is None or isinstance(error, GeneratorStateError)):
            return failure
        return error

    def _end(self, error: BaseException | None, store: BlockStore | None) -> ReceiverReport:
        lost = isinstance(error, LeaseLostError)
        state = ReceiverState.STOPPED if error is None else ReceiverState.LOST if lost else ReceiverState.FAILED
        text = None if error is None else f"{type(error).__name__}: {error}"
        if error is not None:
            logger.error("receiver %s ends: %s", self._receiver_id, text, exc_info=error if not lost else None)
        for step in self._last_steps(store, state, text):
            try:
                step()
            except Exception:
                logger.exception("receiver %s: a step of its end failed", self._receiver_id)
        records, blocks = (store.records, store.blocks) if store is not None else (0, 0)
        return ReceiverReport(self._receiver_id, state, records, blocks, text)

    def _last_steps(
        self, store: BlockStore | None, state: ReceiverState, text: str | None
    ) -> list[Callable[[], object]]:
        steps: list[Callable[[], object]] = []
        if store is not None and state is not ReceiverState.LOST:
            steps.append(store.close)
        kafka = getattr(self, "_kafka", None)
        if kafka is not None:
            # If another receiver has taken over, a late commit of this one would set that one's offsets back.
            lost = state is ReceiverState.LOST
            steps.append(partial(kafka.close, 0.0 if lost else 2.0))
        if state is not ReceiverState.LOST:
            steps.append(lambda: self._ledger.receivers.release(self._lease, state, text))
        return steps

    def _real_kafka(self) -> KafkaReceiver:
        group = self._stream.group_of(self._source)
        config = consumer_config(self._source, group=group, limits=self._stream.limits)
        committed_only = isolation_level(self._source) is IsolationLevel.READ_COMMITTED
        return KafkaReceiver(
            config,
            on_lost_offsets=self._source.on_lost_offsets,
            offset_gaps=kafka_offset_gaps(partial(RangeClients.of, self._source), committed_only=committed_only),
            max_chunk_bytes=self._stream.limits.max_block_bytes,
            clock=self._clock,
        )
