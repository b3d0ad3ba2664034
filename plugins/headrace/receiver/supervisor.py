"""Runs one receiver: its loop of consuming, its draining and its end.

A receiver has three threads. The caller's thread consumes, the cutter thread cuts blocks, and the pushing thread stores
*and* sends the heartbeat: a receiver that cannot store is not alive, whatever else of it still runs (rule 8 of the
design).
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from headrace.blocks import ReceiverId
from headrace.kafka.records import RecordChunk
from headrace.ledger.errors import LeaseLostError
from headrace.ledger.models import ReceiverLease
from headrace.ledger.states import ReceiverState
from headrace.receiver.block_generator import BlockGenerator, GeneratedBlock
from headrace.receiver.block_store import BlockStore, StoreCounts
from headrace.receiver.errors import GeneratorStateError
from headrace.receiver.event_times import EventTimes
from headrace.receiver.heartbeat import Heartbeat
from headrace.receiver.lag_watch import LagWatch
from headrace.receiver.partition_orders import PartitionOrders
from headrace.receiver.partition_state import Gap
from headrace.receiver.pausing import Pausing
from headrace.receiver.rate_limiter import RateLimiter
from headrace.receiver.record_source import RecordSource
from headrace.receiver.unauthorized_topics import UnauthorizedTopics
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

# While stopping: for how long Kafka may fail to confirm the topic ids of records that are still to be stored.
_DRAIN_TIMEOUT_SECONDS = 15.0
_POLL_SECONDS = 0.05
_MOST_RECORDS = 1_000_000


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
        counts: StoreCounts,
        heartbeat: Heartbeat,
        orders: PartitionOrders,
        pausing: Pausing,
        lag_watch: LagWatch,
        unauthorized: UnauthorizedTopics,
    ) -> None:
        """``source`` reads records, ``limiter`` limits their rate, and ``event_times`` splits them by batch interval
        (in a stream by timestamp). ``generator`` cuts them into blocks, which ``store`` stores and ``counts`` counts.
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
        self._counts = counts
        self._heartbeat = heartbeat
        self._orders = orders
        self._pausing = pausing
        self._lag_watch = lag_watch
        self._unauthorized = unauthorized
        self._stop = threading.Event()
        self._drains = False

    def run(self, stop: threading.Event) -> ReceiverReport:
        """Receive until ``stop`` is set or the ledger orders a stop. Store what was read, then release the lease.

        Always returns a report, also when the lease is lost (then nothing more is stored) or something fails.
        """
        error: BaseException | None = None
        self._stop = stop
        try:
            self._generator.start(self._push, self._store.tick)
            self._receive()
            if self._generator.failure is None:
                # A source that still has something must not wait forever for a disk that is full.
                self._begin_draining()
                self._take_in(self._source.finish())
        except Exception as failure:
            error = failure
        return self._end(self._drain(error))

    # -- the consuming thread --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._stop.is_set():
            given = self._heartbeat.take_orders()
            if given is not None:
                orders, reported_failed = given
                if orders.stop:
                    logger.info("receiver %s was asked to stop", self._receiver_id)
                    return
                self._orders.follow(orders, reported_failed)
            if self._generator.failure is not None:
                return
            self._lag_watch.look()
            self._unauthorized.read_again()
            if self._pausing.reason is not None:
                self._source.listen()
                self._clock.wait(self._stop, _POLL_SECONDS)
                continue
            if not self._generator.wait_for_room(_POLL_SECONDS):
                self._source.serve()
                continue
            granted = self._limiter.grant(_MOST_RECORDS)
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
                self._generator.after_push(partial(self._store_gap, event))

    def _while_full(self) -> None:
        """Called while records wait because nothing can be stored, which may last: the disk is full, for example."""
        self._lag_watch.look()
        if self._pausing.reason is None:
            self._source.serve()
        else:
            self._source.listen()
        if self._heartbeat.is_stop_ordered or self._stop.is_set():
            self._begin_draining()

    def _begin_draining(self) -> None:
        """From now on the thread that stores gives up after a while."""
        if not self._drains:
            self._drains = True
            self._heartbeat.drain_until(self._clock.monotonic() + _DRAIN_TIMEOUT_SECONDS)

    # -- the pushing thread ----------------------------------------------------------------------------------------

    def _push(self, block: GeneratedBlock[RecordChunk]) -> None:
        self._store.store(block.items, block.cut_time_ms)

    def _store_gap(self, gap: Gap) -> None:
        if gap.taken_back:
            self._store.report_reused(gap)
        else:
            self._store.advance(gap.partition, gap.from_offset, gap.until_offset, gap.reason)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _drain(self, error: BaseException | None) -> BaseException | None:
        """Store what was read, unless the lease or the store is gone. Returns the error that ended the receiver."""
        self._heartbeat.drain_until(self._clock.monotonic() + _DRAIN_TIMEOUT_SECONDS)
        self._generator.stop()
        failure = self._generator.failure
        if failure is not None and (error is None or isinstance(error, GeneratorStateError)):
            return failure
        return error

    def _end(self, error: BaseException | None) -> ReceiverReport:
        report = ReceiverReport.of_end(self._receiver_id, error, self._counts)
        steps: list[Callable[[], object]]
        if report.state is ReceiverState.LOST:
            # Another receiver has taken over: a late commit of this one would set that one's offsets back.
            steps = [partial(self._source.close, 0.0)]
        else:
            steps = [
                self._store.close,
                self._source.close,
                partial(self._heartbeat.end, report.state, report.error, report.stack),
            ]
        for step in steps:
            try:
                step()
            except Exception:
                logger.exception("receiver %s: a step of its end failed", self._receiver_id)
        return report
