"""Runs one receiver (`ReceiverSupervisor.run`):

1. Start the thread that cuts blocks (``block_generator``) and the one that stores them (``block_store``).
2. Receive, until a stop is asked for: follow the ledger's orders (``heartbeat``), wait while receiving is paused, there
   is no room, or the rate is used up, then take what the source has (``kafka_source``, ``custom_source``).
3. Drain: take in what the source still has, and store everything that was read.
4. End: close the segment and the source, and release the lease. A receiver that has lost its lease only closes its
   source.

A receiver has three threads. The caller's thread consumes, the cutter thread cuts blocks, and the pushing thread stores
*and* sends the heartbeat: a receiver that cannot store is not alive, whatever else of it still runs (rule 8 of the
design). `run_receiver` is the whole as one function call with a picklable argument, for a Spark task, a thread or a
process.
"""

from __future__ import annotations

import logging
import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from confluent_kafka import IsolationLevel

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.clock import LedgerClock
from headrace.kafka.client import admin_config, consumer_config, isolation_level, open_admin
from headrace.kafka.range_reader import RangeClients
from headrace.kafka.records import RecordChunk
from headrace.kafka.topics import AdminTopicIds, IncarnationGuard, RecreatedTopics, TopicIds
from headrace.ledger import Ledger
from headrace.ledger.errors import JobStoppingError, LeaseLostError, LedgerUnavailableError, ReceiverRefusedError
from headrace.ledger.receiving.tables import ReceiverLease, ScheduledReceiver
from headrace.ledger.states import ReceiverState
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.block_store import BlockStore, StoreCounts, report_recovery
from headrace.receiver.custom_source import CustomSource, NoEndOffsets, NoTopicIds
from headrace.receiver.event_times import AdminEndOffsets, EndOffsets, EndOffsetTracker, EventTimes
from headrace.receiver.garbage_collection import collector_off
from headrace.receiver.heartbeat import HEARTBEAT_SECONDS, LEASE_MS, Heartbeat
from headrace.receiver.kafka_errors import KafkaEvidence, OffsetGaps, UnauthorizedTopics
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.lag_watch import LagWatch
from headrace.receiver.partition_orders import PartitionOrders
from headrace.receiver.pausing import Pausing
from headrace.receiver.rates import RateLimiter
from headrace.receiver.receiver import GeneratorStateError, StoreFailedError
from headrace.receiver.receiver_stats import ReceiverStats
from headrace.receiver.record_source import Gap, RecordSource
from headrace.stream import Stream
from headrace.stream.inputs import Input, KafkaInput
from headrace.stream_context import StreamContext
from headrace.stream_folder import set_back, unknown_block
from headrace.wal.frame import receiver_directory, segments_in
from headrace.wal.local_copies import BlockCopies, CopyCounts, CopySettings
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

logger = logging.getLogger(__name__)


DRAIN_SECONDS = 15.0
"""How long a receiver that stops tries to store what it has read: Kafka may not confirm the topics' ids, or the disk be
full."""
_POLL_SECONDS = 0.05
_MAX_RECORDS = 1_000_000


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """How a receiver ended: ``stopped`` when asked to, ``lost`` when another took over, ``failed`` with ``error``.

    ``stack`` is the traceback of a failure."""

    receiver: ReceiverId
    state: ReceiverState
    records: int = 0
    blocks: int = 0
    error: str | None = None
    stack: str | None = None

    @classmethod
    def of_end(
        cls, receiver: ReceiverId, error: BaseException | None, counts: StoreCounts | None = None
    ) -> ReceiverReport:
        """The report of a receiver that ended with ``error``, None if it was asked to stop. Logs the error."""
        counts = counts or StoreCounts()
        if error is None:
            return cls(receiver, ReceiverState.STOPPED, counts.records, counts.blocks)
        lost = isinstance(error, LeaseLostError)
        text = f"{type(error).__name__}: {error}"
        logger.error("receiver %s ends: %s", receiver, text, exc_info=None if lost else error)
        state = ReceiverState.LOST if lost else ReceiverState.FAILED
        stack = None if lost else "".join(traceback.format_exception(error))
        return cls(receiver, state, counts.records, counts.blocks, text, stack)


class ReceiverSupervisor:
    """Runs one receiver with its collaborators, which `ReceiverFactory` has opened. Use once."""

    def __init__(
        self,
        context: StreamContext,
        lease: ReceiverLease,
        *,
        source: RecordSource,
        limiter: RateLimiter,
        event_times: EventTimes | None,
        generator: BlockGenerator[RecordChunk],
        store: BlockStore,
        heartbeat: Heartbeat,
        orders: PartitionOrders,
        pausing: Pausing,
        lag_watch: LagWatch,
        unauthorized: UnauthorizedTopics,
    ) -> None:
        """``source`` reads records, ``limiter`` limits their rate, and ``event_times`` splits them by batch interval
        (in a stream by timestamp). ``generator`` cuts them into blocks, which ``store`` stores and counts.
        ``heartbeat`` renews the lease and gets the ledger's orders, which ``orders`` follows. ``pausing`` says when to
        stop reading, ``lag_watch`` measures the lag, and ``unauthorized`` has records read again that could not be
        stored because their topic may not be described."""
        self._receiver_id = lease.receiver_id
        self._clock = context.clock
        self._source = source
        self._limiter = limiter
        self._event_times = event_times
        self._generator = generator
        self._store = store
        self._heartbeat = heartbeat
        self._orders = orders
        self._pausing = pausing
        self._lag_watch = lag_watch
        self._unauthorized = unauthorized
        # After so many seconds in one call of the log's writer the receiver gives up. An object store has a timeout of
        # its own.
        timeout = context.stream.limits.store_timeout.total_seconds()
        self._store_timeout = timeout if context.storage.appends else None
        self._log_url = context.storage.url
        self._stop = threading.Event()
        self._drains = False
        self._hang: StoreFailedError | None = None

    def run(self, stop: threading.Event) -> ReceiverReport:
        """Receive until ``stop`` is set or the ledger orders a stop. Store what was read, then release the lease.

        Always returns a report, also when the lease is lost (then nothing more is stored) or something fails.
        """
        error: BaseException | None = None
        self._stop = stop
        try:
            self._generator.start(self._store.store, self._store.tick)
            self._receive()
            if self._generator.failure is None:
                # A source that still has something must not wait forever for a disk that is full.
                self._begin_draining()
                self._take_in(self._source.finish())
        except Exception as failure:
            error = failure
        error = self._drain(error)
        return self._end(error)

    @property
    def is_storing(self) -> bool:
        """Whether a block that was cut is not stored yet."""
        return self._generator.is_pushing

    # -- the consuming thread --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._stop.is_set():
            self._check_log()
            given = self._heartbeat.take_orders()
            if given is not None:
                orders, reported_failed = given
                if orders.stop:
                    logger.info("receiver %s was asked to stop", self._receiver_id)
                    return
                self._orders.follow(orders, reported_failed)
            if self._generator.failure is not None:
                return
            self._lag_watch.poll()
            self._unauthorized.read_again()
            if self._pausing.reason is not None:
                self._source.serve_paused()
                self._clock.wait(self._stop, _POLL_SECONDS)
                continue
            if not self._generator.wait_for_room(_POLL_SECONDS):
                self._source.serve()
                continue
            granted = self._limiter.grant(_MAX_RECORDS)
            if granted == 0:
                self._clock.wait(self._stop, min(_POLL_SECONDS, self._limiter.delay()))
                continue
            self._take_in(self._source.fetch(_POLL_SECONDS, granted))

    def _take_in(self, events: Iterable[RecordChunk | Gap]) -> None:
        for event in events:
            if isinstance(event, RecordChunk):
                self._limiter.spend(event.records)
                for chunk in (event,) if self._event_times is None else self._event_times.split(event):
                    self._generator.add_data(chunk, chunk.nbytes, waiting=self._while_full)
            else:
                self._generator.after_push(partial(self._store.record_gap, event))

    def _while_full(self) -> None:
        """Called while records wait because nothing can be stored, which may last: the disk is full, for example."""
        self._check_log()
        self._lag_watch.poll()
        if self._pausing.reason is None:
            self._source.serve()
        else:
            self._source.serve_paused()
        if self._heartbeat.is_stop_ordered or self._stop.is_set():
            self._begin_draining()

    def _check_log(self) -> None:
        """Raise StoreFailedError if the log's disk hangs: no call can interrupt the write of the pushing thread."""
        if (hang := self._find_hang()) is not None:
            raise hang

    def _find_hang(self) -> StoreFailedError | None:
        """The error of a write that hangs, None if none does. Once there was one, the receiver ends."""
        seconds = self._store.writing_seconds
        if self._hang is None and self._store_timeout is not None and seconds > self._store_timeout:
            self._hang = StoreFailedError(
                f"A write to the log in {self._log_url} has not returned for {seconds:.0f} s.",
                remedy="Check whether the disk hangs. The receiver starts again from the ledger's positions.",
            )
        return self._hang

    def _begin_draining(self) -> None:
        """From now on the thread that stores gives up after a while."""
        if not self._drains:
            self._drains = True
            self._heartbeat.drain_until(self._clock.monotonic() + DRAIN_SECONDS)

    # -- draining and ending ---------------------------------------------------------------------------------------

    def _drain(self, error: BaseException | None) -> BaseException | None:
        """Store what was read, unless the lease or the store is gone. Returns the error that ended the receiver."""
        self._heartbeat.drain_until(self._clock.monotonic() + DRAIN_SECONDS)
        self._generator.stop(give_up=lambda: self._find_hang() is not None)
        if self._hang is not None:
            return self._hang
        failure = self._generator.failure
        if failure is not None and (error is None or isinstance(error, GeneratorStateError)):
            return failure
        return error

    def _end(self, error: BaseException | None) -> ReceiverReport:
        report = ReceiverReport.of_end(self._receiver_id, error, self._store.counts)
        steps: list[Callable[[], object]]
        if report.state is ReceiverState.LOST:
            # Another receiver has taken over: a late commit of this one would set that one's offsets back.
            steps = [partial(self._source.close, 0.0)]
        else:
            release = partial(self._heartbeat.end, report.state, report.error, report.stack)
            # A segment whose disk hangs cannot be ended. The pushing thread is left to itself: without the lease, the
            # ledger refuses its block.
            steps = [self._source.close, release] if self._hang else [self._store.close, self._source.close, release]
        for step in steps:
            try:
                step()
            except Exception:
                logger.exception("receiver %s: a step of its shutdown failed", self._receiver_id)
        return report


_CLOCK_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class ReceiverClients:
    """What a receiver reads: its source, which is closed with the receiver, and the queries about its topics.

    ``log_ends`` are the ends of the logs if ``end_offsets`` may be before them: at the first open transaction.
    """

    consumer: RecordSource
    topic_ids: TopicIds
    end_offsets: EndOffsets
    log_ends: EndOffsets | None = None


OpenClients = Callable[[StreamContext, Input], ReceiverClients]


def open_clients(context: StreamContext, source: Input) -> ReceiverClients:
    """Open what one receiver of an input reads.

    Raises:
        ReceiverClassError: the class of a custom receiver cannot be used.
        KafkaClientError, and the errors of a wrong connection.
    """
    if (kafka := source.in_kafka) is None:
        custom = CustomSource(source, max_block_bytes=context.stream.limits.max_block_bytes, clock=context.clock)
        return ReceiverClients(custom, NoTopicIds(source), NoEndOffsets())
    return _open_kafka(context, kafka)


def _open_kafka(context: StreamContext, source: KafkaInput) -> ReceiverClients:
    admin = open_admin(admin_config(source))
    limits = context.stream.limits
    isolation = isolation_level(source)
    consumer = KafkaReceiver(
        consumer_config(source, group=context.stream.group_of(source), limits=limits),
        on_lost_offsets=source.on_lost_offsets,
        offset_gaps=OffsetGaps(
            lambda: KafkaEvidence(RangeClients.of(source)), committed_only=isolation is IsolationLevel.READ_COMMITTED
        ),
        max_chunk_bytes=limits.max_block_bytes,
        max_rate_per_partition=limits.max_rate_per_partition,
        clock=context.clock,
    )
    log_ends = AdminEndOffsets(admin, IsolationLevel.READ_UNCOMMITTED)
    if isolation is IsolationLevel.READ_UNCOMMITTED:
        return ReceiverClients(consumer, AdminTopicIds(admin), log_ends)
    return ReceiverClients(consumer, AdminTopicIds(admin), AdminEndOffsets(admin, isolation), log_ends)


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
        """Open the log's writer, which inspects the log of earlier epochs, and report its findings.

        Raises:
            LedgerSetBackError: the ledger is older than the log: it was replaced while the job was running.
        """
        limits = self._context.stream.limits
        self._refuse_if_set_back()
        writer = WriteAheadLogWriter(
            self._context.storage,
            "log",
            self._lease.receiver_id,
            self._lease.epoch,
            segments=SegmentSettings(
                limits.segment_bytes,
                limits.segment_interval.total_seconds(),
                sync_blocks=self._context.stream.delivery == "exactly_once",
            ),
            clock=self._context.clock,
            positions=lambda: self._next_offsets,
            accepted=self._accepted,
            progress=self._beat_if_due,
        )
        report_recovery(writer.recovery, self._lease, self._context.ledger, self._context.storage.below("log"))
        return writer

    def _refuse_if_set_back(self) -> None:
        context, log = self._context, self._context.storage.below("log")
        context.storage.mark.check()
        for name in sorted(segments_in(log.paths(receiver_directory(self._lease.receiver_id))))[-1:]:
            block = unknown_block(context.name, context.ledger, log, name.path)
            if block is not None:
                why = f"{block} was accepted, and the ledger does not have it"
                raise set_back(context.name, context.stream.storage.url, f"{log.url}/{name.path}", why)

    def _assemble(self, clients: ReceiverClients, writer: WriteAheadLogWriter) -> ReceiverSupervisor:
        context, lease, source, next_offsets = self._context, self._lease, clients.consumer, self._next_offsets
        now_ms, stored_positions = self._ledger_clock.now_ms, partial(_stored_positions, source, next_offsets)
        lag_watch = LagWatch(
            clients.log_ends or clients.end_offsets,
            lambda: list(source.partitions),
            now_ms,
            context.clock,
            readable_ends=clients.end_offsets if clients.log_ends is not None else None,
        )
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
            recreated=RecreatedTopics(clients.topic_ids).is_recreated,
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
        if self._source.in_kafka is not None:
            return limits.max_rate
        # A custom receiver has one partition.
        return min((rate for rate in (limits.max_rate, limits.max_rate_per_partition) if rate), default=None)

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
    return {partition: next_offsets[partition] for partition in source.partitions if partition in next_offsets}


@dataclass(frozen=True, slots=True)
class ReceiverTask:
    """All that a receiver needs. Has no secrets: connections are in the environment of the process that runs it."""

    stream_json: str
    scheduled: ScheduledReceiver
    lease_ms: int = LEASE_MS

    @property
    def receiver_id(self) -> ReceiverId:
        return self.scheduled.receiver_id


def run_receiver(task: ReceiverTask, stop: threading.Event | None = None) -> ReceiverReport:
    """Run one receiver until it is asked to stop, loses its lease, or fails; the report says which.

    Call it once, in its own process (or thread). ``stop`` may be set from another thread; without it the ledger's
    orders stop the receiver. Python's garbage collector is off while the receiver runs.
    """
    stream = Stream.model_validate_json(task.stream_json)
    ledger = Ledger.open(stream.ledger, create=False)
    try:
        with collector_off():
            return receive(StreamContext(stream, ledger), task.scheduled, lease_ms=task.lease_ms, stop=stop)
    finally:
        ledger.close()


def receive(
    context: StreamContext,
    scheduled: ScheduledReceiver,
    *,
    lease_ms: int = LEASE_MS,
    stop: threading.Event | None = None,
    clients: OpenClients = open_clients,
    opened: Callable[[ReceiverSupervisor], None] = lambda _: None,
) -> ReceiverReport:
    """Register a scheduled receiver, open it, and run it until ``stop`` is set, the ledger orders a stop, or it cannot
    continue.

    Always returns a report: also if it is refused (``lost``) or could not be opened (``failed``). Its lease is then
    released. ``clients`` opens its clients of Kafka; ``opened`` gets the receiver before it runs.
    """
    ledger, receiver_id = context.ledger, scheduled.receiver_id
    try:
        lease = ledger.receivers.register(scheduled, host=socket.gethostname(), lease_ms=lease_ms)
    except (LeaseLostError, JobStoppingError, ReceiverRefusedError) as refused:
        logger.error("%s", refused)
        return ReceiverReport(receiver_id, ReceiverState.LOST, error=str(refused))
    try:
        supervisor = ReceiverFactory(context, lease, clients).make()
    except Exception as failure:
        report = ReceiverReport.of_end(receiver_id, failure)
        if report.state is not ReceiverState.LOST:
            try:
                ledger.receivers.release(lease, report.state, report.error, stack=report.stack)
            except Exception:
                logger.exception("receiver %s could not be opened, and its lease could not be released", receiver_id)
        return report
    opened(supervisor)
    return supervisor.run(stop or threading.Event())
