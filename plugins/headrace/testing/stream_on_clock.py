"""A whole stream whose time a test moves: tracker, receivers, schedule, batches, checkpoints and cleanup.

Everything is headrace's own but Kafka, which is in memory (`FakeKafka`), Spark's tasks and Airflow: receivers and
tracker run in threads, and `StreamOnClock.run_due` does what the tasks of the scheduled runs do. Ledger, log, tracker,
receivers and timetable share one `ManualClock`. The clock moves only when all threads wait for it: what Kafka has and
what custom receivers have given is read, and the blocks of intervals that have ended are cut and stored. So batch
times, block cuts, leases and the delays of restarts are exact, and a test of an hour takes seconds. The threads' work
takes real time, also that of a custom receiver's own threads; no call waits longer for it than ``LIMIT_SECONDS``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from airflow.timetables.base import TimeRestriction

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import Cleaned, clean_up
from headrace.batch.manifest import LOG_FOLDER
from headrace.clock import ManualClock, to_ms
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.ledger.states import JobState
from headrace.receiver.custom_source import CustomSource
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.partitioning import Discoverer, discoverer_of
from headrace.receiver.supervisor import ReceiverClients, ReceiverSupervisor, ReceiverTask, open_clients, receive
from headrace.receiver.tracker import ReceiverTracker, TrackerReport
from headrace.runs.batch_run import NothingToRun, begin_run, takes_over
from headrace.runs.readiness import Readiness, blocks_ready
from headrace.stream import Stream
from headrace.stream.inputs import Input
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeConsumer, FakeDiscoverer, FakeEndOffsets, FakeKafka, FakeTopicIds
from headrace.timetables.micro_batch import MicroBatchTimetable, from_ms
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMIT_SECONDS = 120.0
_LEASE_MS = 30_000
# Not longer than a heartbeat's interval, so that no lease is missed in a jump.
_STEP_MS = 500
# The names of threads.
_TRACKER, _READING = "headrace-tracker", "headrace-reading"
_POLL_SECONDS = 0.005
# How long the threads get to answer each other, before the clock moves on.
_MOMENT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class BatchOnClock:
    """A batch that a scheduled run has completed. ``records`` are (topic, partition, offset, value) in the log's order,
    ``absorbed`` the batch times that it took over, ``readiness`` why it was allocated, ``cleaned`` its cleanup."""

    batch_time_ms: int
    records: tuple[tuple[str, int, int, bytes | None], ...]
    absorbed: tuple[int, ...]
    readiness: Readiness
    cleaned: Cleaned


class StreamOnClock(AbstractContextManager["StreamOnClock"]):
    """Runs a stream by a clock that the test moves.

    >>> with StreamOnClock(stream, kafka) as running:
    ...     kafka.produce("orders", 0, b'{"item": "cup"}')
    ...     running.receive()
    ...     running.advance(10)
    ...     (batch,) = running.run_due(spark)
    """

    def __init__(self, stream: Stream, kafka: FakeKafka | None = None, *, start_ms: int = 1_700_000_000_000) -> None:
        """``kafka`` has the topics of the stream's inputs from Kafka. The stream's ledger and storage are created, or
        continued."""
        self.stream = stream
        self.kafka = kafka or FakeKafka()
        self.clock = ManualClock(start_ms)
        self.ledger = Ledger.open(stream.ledger, clock=self.clock)
        self.context = StreamContext(stream, self.ledger, clock=self.clock)
        self._trackers_clock = ThreadsClock(self.clock)
        self.report: TrackerReport | None = None
        self._timetable = MicroBatchTimetable(stream.batch_interval, catch_up=not stream.coalesces, clock=self.clock)
        # The schedule begins with the interval in which the stream begins.
        self._last = self._timetable.containing(from_ms(start_ms - stream.batch_interval_ms))
        self._receivers: dict[tuple[str, int], _Receiver] = {}
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> StreamOnClock:
        """Start the job. Returns when every partition has a receiver."""
        register(self.ledger, self.stream)
        self._lease = self.ledger.jobs.acquire(self.stream.name, holder="a test", lease_ms=_LEASE_MS)
        self.ledger.jobs.update(self._lease, state=JobState.RUNNING)
        context = StreamContext(self.stream, self.ledger, clock=self._trackers_clock)
        tracker = ReceiverTracker(context, self, self._lease, discoverer=self._discoverer)
        self._thread = threading.Thread(target=self._track, args=(tracker,), name=_TRACKER, daemon=True)
        self._thread.start()
        try:
            self._move_until("every partition has a receiver", self._all_assigned)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the job gracefully."""
        for receiver in self._receivers.values():
            receiver.resume()
        self._stop.set()
        until = time.monotonic() + LIMIT_SECONDS
        try:
            while not _comes_true(lambda: not self._thread.is_alive(), _MOMENT_SECONDS):
                self._check("the job stops", until)
                self.clock.advance(_STEP_MS)
            self.ledger.jobs.release(self._lease, JobState.STOPPED if self._failure is None else JobState.FAILED)
        finally:
            self.ledger.close()

    # -- time ------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Move the time forward, in steps with which tracker and receivers keep pace."""
        left_ms = round(seconds * 1000)
        self._keep_pace()
        while left_ms > 0:
            step_ms = min(left_ms, _STEP_MS)
            self._step(step_ms)
            left_ms -= step_ms

    def receive(self, records: int = 0) -> None:
        """Move the time forward, usually by one or two block intervals, until all that Kafka has and all that custom
        receivers have given is in the log, or waits in a block for a log that is held.

        Args:
            records: how many records of custom receivers the log has then, since the stream began. While one gives
                nothing, the time stands still.
        """

        def received() -> bool:
            return self._all_stored() or any(receiver.log_gate.waits for receiver in self._receivers.values())

        until = time.monotonic() + LIMIT_SECONDS
        while True:
            # What is read waits for the end of a block interval, and a rate limit for a later time.
            self._keep_pace()
            self._move_until("all records are in the log", received, step_ms=self.stream.block_interval_ms, seconds=0)
            stored = self._stored_of_custom_receivers()
            if stored >= records:
                return
            given = f"custom receivers have given {records} records, and not {stored}"
            _comes_true(lambda: not self._all_stored(), _MOMENT_SECONDS)
            self._check(given, until)

    # -- batches ---------------------------------------------------------------------------------------------------

    def run_due(self, spark: SparkSession | None = None) -> list[BatchOnClock]:
        """Run the batches of the runs that the schedule has made since the last call, in their order.

        With ``spark`` the outputs are written. Without it each output counts as written.
        """
        done: list[BatchOnClock] = []
        for run in self.due_runs():
            try:
                batch_time_ms = begin_run({"dag_run": run}, self.context)
            except NothingToRun:
                continue
            done.append(self._run(batch_time_ms, takes_over=takes_over({"dag_run": run}, self.stream), spark=spark))
        return done

    def due_runs(self) -> Iterator[SimpleNamespace]:
        """Yield the runs that the schedule has made since the last call, as Airflow describes a DAG run."""
        nothing_else = TimeRestriction(None, None, catchup=False)
        while True:
            info = self._timetable.next_dagrun_info(last_automated_data_interval=self._last, restriction=nothing_else)
            if info is None or info.data_interval is None or to_ms(info.run_after) > self.clock.now_ms():
                return
            self._last = info.data_interval
            yield SimpleNamespace(
                run_id=f"scheduled__{info.data_interval.end.isoformat()}",
                run_type="scheduled",
                logical_date=info.logical_date,
                data_interval_end=info.data_interval.end,
                run_after=info.run_after,
                clear_number=0,
            )

    def _run(self, batch_time_ms: int, *, takes_over: bool, spark: SparkSession | None) -> BatchOnClock:
        name = self.stream.name
        grace_ms = round(self.stream.limits.seal_grace.total_seconds() * 1000)

        def readiness() -> Readiness:
            return blocks_ready(self.ledger, name, batch_time_ms=batch_time_ms, grace_ms=grace_ms)

        self._move_until(f"batch {batch_time_ms} has its blocks", lambda: readiness().ready)
        found = readiness()
        allocation = allocate(self.context, batch_time_ms, takes_over=takes_over)
        way = "connect" if spark is None else "submit"
        claim = self.ledger.attempts.begin(name, batch_time_ms, holder="a test", way=way, lease_ms=60_000)
        if spark is None:
            for output in claim.outputs:
                self.ledger.attempts.record_output(claim, output, {})
            self.ledger.attempts.complete(claim)
        else:
            from headrace.spark.attempts.attempt import run_attempt
            from headrace.spark.attempts.batch_attempt import BatchAttempt

            run_attempt(BatchAttempt(self.context, claim, lambda: spark))
        records = self._records(batch_time_ms)
        write_checkpoint(self.context, batch_time_ms)
        return BatchOnClock(batch_time_ms, records, allocation.batch.absorbed, found, clean_up(self.context))

    def _records(self, batch_time_ms: int) -> tuple[tuple[str, int, int, bytes | None], ...]:
        log = self.context.storage.below(LOG_FOLDER)
        found: list[tuple[str, int, int, bytes | None]] = []
        for block in self.ledger.allocations.blocks_of(self.stream.name, batch_time_ms):
            _, batch = read_block(log, block.info.handle)
            found += [
                tuple(row[name] for name in ("topic", "partition", "offset", "value")) for row in batch.to_pylist()
            ]
        return tuple(found)

    # -- receivers -------------------------------------------------------------------------------------------------

    def pause(self, index: int, input_id: str | None = None) -> None:
        """Stop the time of a receiver, as if its process had stopped: it cuts no block and sends no heartbeat."""
        self._receiver(index, input_id).clock.pause()

    def hold_log(self, index: int, input_id: str | None = None) -> None:
        """Let the receiver's next write to the log wait, as on a disk that hangs. Heartbeats wait with it."""
        self._receiver(index, input_id).log_gate.opened.clear()

    def set_clock(self, index: int, ahead_seconds: float, input_id: str | None = None) -> None:
        """Let the receiver's host have a wrong time of day, so far ahead of the ledger's, or behind if negative."""
        self._receiver(index, input_id).clock.ahead_ms = round(ahead_seconds * 1000)

    def resume(self, index: int, input_id: str | None = None) -> None:
        """End `pause` and `hold_log`."""
        self._receiver(index, input_id).resume()

    def owners(self) -> dict[tuple[str, int], int | None]:
        """The index of the receiver of each partition."""
        rows = self.ledger.positions.all(self.stream.name, live=True)
        return {(row.partition.topic, row.partition.partition): row.receiver_index for row in rows}

    def start(self, task: ReceiverTask) -> _Receiver:
        """Start a receiver; called by the tracker, as `crowding` is."""
        receiver = _Receiver(self, task)
        self._receivers[task.receiver_id.input_id, task.receiver_id.index] = receiver
        return receiver

    def crowding(self) -> str | None:
        return None

    def _receiver(self, index: int, input_id: str | None) -> _Receiver:
        return self._receivers[input_id or self.stream.inputs[0].id, index]

    # -- keeping pace ----------------------------------------------------------------------------------------------

    def _track(self, tracker: ReceiverTracker) -> None:
        try:
            self.report = tracker.run(self._stop)
        except BaseException as error:
            self._failure = error

    def _move_until(
        self, what: str, condition: Callable[[], bool], *, step_ms: int = _STEP_MS, seconds: float = _MOMENT_SECONDS
    ) -> None:
        """Move the time by ``step_ms`` as often as ``condition`` does not come true within ``seconds`` of real time."""
        until = time.monotonic() + LIMIT_SECONDS
        while not _comes_true(condition, seconds):
            self._check(what, until)
            self._step(step_ms)

    def _step(self, step_ms: int) -> None:
        self.clock.advance(step_ms)
        self._keep_pace()

    def _keep_pace(self) -> None:
        """Wait until tracker and receivers have done what they can do and what is due by now."""
        now_ms, until = self.clock.now_ms(), time.monotonic() + LIMIT_SECONDS
        while not _comes_true(lambda: self._is_up_to(now_ms), _MOMENT_SECONDS):
            self._check("the tracker and the receivers have done what is due", until)

    def _is_up_to(self, now_ms: int) -> bool:
        return self._threads_wait() and self._has_beaten(now_ms)

    def _threads_wait(self) -> bool:
        working = [receiver for receiver in list(self._receivers.values()) if not receiver.is_stalled]
        return self._trackers_clock.is_waited_for(_TRACKER) and all(each.is_settled for each in working)

    def _has_beaten(self, now_ms: int) -> bool:
        working = {key: receiver for key, receiver in list(self._receivers.items()) if not receiver.is_stalled}
        beaten_ms = {
            (row.receiver_id.input_id, row.receiver_id.index): row.heartbeat_ms
            for row in self.ledger.receivers.all(self.stream.name)
        }
        # A heartbeat is due every second, and at the next step if it is not due in that very moment.
        return all(
            now_ms - beaten_ms.get(key, 0) <= 1_000 + _STEP_MS for key, each in working.items() if not each.done()
        )

    def _check(self, what: str, until: float) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() > until:
            raise TimeoutError(f"{LIMIT_SECONDS:.0f} s were not enough until {what}")

    def _discoverer(self, source: Input) -> Discoverer:
        return FakeDiscoverer(self.kafka) if source.in_kafka is not None else discoverer_of(source, self.stream)

    def _all_assigned(self) -> bool:
        owners, now_ms = self.owners(), self.clock.now_ms()
        rows = self.ledger.receivers.all(self.stream.name)
        running = [row for row in rows if row.alive(now_ms) and row.state.value == "running"]
        everything: set[tuple[str, int]] = set()
        for source in self.stream.inputs:
            if source.in_kafka is not None:
                everything |= {key for key in self.kafka.logs if source.matches(key[0])}
            else:
                everything |= {(source.id, index) for index in range(source.receivers)}
        read = set().union(*(each.partitions for each in self._receivers.values()))
        return len(running) == self.stream.receivers and read == owners.keys() == everything

    def _all_stored(self) -> bool:
        stored = {
            (row.partition.topic, row.partition.partition): row.next_offset
            for row in self.ledger.positions.all(self.stream.name, live=True)
        }
        with self.kafka.lock:
            of_kafka = all(log.high <= stored.get(key, log.high) for key, log in self.kafka.logs.items())
        return of_kafka and not any(receiver.unstored for receiver in self._receivers.values())

    def _stored_of_custom_receivers(self) -> int:
        # Their offsets begin with 0.
        custom = {source.id for source in self.stream.inputs if source.in_kafka is None}
        rows = self.ledger.positions.all(self.stream.name, live=True)
        return sum(row.next_offset for row in rows if row.partition.topic in custom)


class _Receiver:
    """A receiver in a thread: the handle that the tracker gets."""

    def __init__(self, running: StreamOnClock, task: ReceiverTask) -> None:
        self.clock = ThreadsClock(running.clock)
        self.log_gate = LogGate()
        self._supervisor: ReceiverSupervisor | None = None
        self._consumer: FakeConsumer | None = None
        self._custom: CustomSource | None = None
        self._stop = threading.Event()
        self._error: str | None = None
        storage = GatedStorage(open_storage(running.stream.folder_url), self.log_gate)
        context = StreamContext(running.stream, running.ledger, storage=storage, clock=self.clock)

        def make_consumer(config: Mapping[str, Any]) -> FakeConsumer:
            self._consumer = running.kafka.consumer(config)
            return self._consumer

        def opened(supervisor: ReceiverSupervisor) -> None:
            self._supervisor = supervisor

        def clients(context: StreamContext, source: Input) -> ReceiverClients:
            if (kafka := source.in_kafka) is None:
                opened = open_clients(context, source)
                self._custom = cast(CustomSource, opened.consumer)
                return opened
            consumer = KafkaReceiver(
                {}, on_lost_offsets=kafka.on_lost_offsets, clock=self.clock, consumer_factory=make_consumer
            )
            return ReceiverClients(consumer, FakeTopicIds(running.kafka), FakeEndOffsets(running.kafka))

        def run() -> None:
            try:
                self._error = receive(
                    context, task.scheduled, lease_ms=task.lease_ms, stop=self._stop, clients=clients, opened=opened
                ).error
            except Exception as error:
                # A task of Spark would fail with it.
                self._error = str(error)

        self._thread = threading.Thread(target=run, name=_READING, daemon=True)
        self._thread.start()

    @property
    def is_stalled(self) -> bool:
        return self.clock.is_paused or self.log_gate.waits

    @property
    def is_settled(self) -> bool:
        """Whether it is done, or can do nothing more before the time moves or Kafka has more for it."""
        return self.done() or (self._has_taken_all and self._has_stored_what_is_due)

    @property
    def _has_taken_all(self) -> bool:
        # It waits for the time by a rate limit, and in a pause.
        return (self._consumer is not None and self._consumer.is_idle) or self.clock.is_waited_for(_READING)

    @property
    def _has_stored_what_is_due(self) -> bool:
        # While the timer waits, all that is due is cut. What cannot be stored is tried again at a later time.
        return self.clock.is_waited_for("headrace-push") or (
            self.clock.is_waited_for("headrace-timer")
            and self._supervisor is not None
            and not self._supervisor.is_storing
        )

    @property
    def partitions(self) -> set[tuple[str, int]]:
        """What it reads."""
        if self._custom is not None:
            return {(partition.topic, partition.partition) for partition in self._custom.partitions}
        return set() if self._consumer is None else self._consumer.assigned

    @property
    def unstored(self) -> int:
        """How many records a custom receiver has given that are not stored."""
        return 0 if self._custom is None or self.done() else self._custom.unstored

    def resume(self) -> None:
        self.clock.resume()
        self.log_gate.opened.set()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def running_on(self) -> None:
        """Threads have no executor."""

    def error(self) -> str | None:
        return self._error

    def cancel(self) -> None:
        self._stop.set()


class ThreadsClock:
    """The test's clock as the threads of a receiver or of the tracker see it: it can be paused, and knows who waits."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._paused_ms: int | None = None
        # By how much the host's time of day is ahead; waits go by the time that passes.
        self.ahead_ms = 0
        # By the name of a waiting thread: the event for which it waits too.
        self._waits: dict[str, tuple[float, threading.Event]] = {}

    @property
    def is_paused(self) -> bool:
        return self._paused_ms is not None

    def is_waited_for(self, thread: str) -> bool:
        """Whether a thread whose name begins with ``thread`` waits for a later time, and for nothing that is there."""
        now, waits = self.monotonic(), self._waits.copy()
        return any(
            name.startswith(thread) and until > now and not event.is_set() for name, (until, event) in waits.items()
        )

    def pause(self) -> None:
        self._paused_ms = self._clock.now_ms()

    def resume(self) -> None:
        self._paused_ms = None

    def now_ms(self) -> int:
        return self._passed_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return self._passed_ms() / 1000

    def _passed_ms(self) -> int:
        paused_ms = self._paused_ms
        return self._clock.now_ms() if paused_ms is None else paused_ms

    def wait(self, event: threading.Event, seconds: float) -> bool:
        until = self.monotonic() + seconds
        thread = threading.current_thread().name
        self._waits[thread] = until, event
        while self.monotonic() < until:
            if event.wait(_POLL_SECONDS):
                break
        del self._waits[thread]
        return event.is_set()


class LogGate:
    """Lets writes wait while it is not ``opened``; ``waits`` while a write does."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.waits = False

    def pass_through(self) -> None:
        self.waits = not self.opened.is_set()
        self.opened.wait()
        self.waits = False


class GatedStorage:
    """A storage whose segments are written through a gate."""

    def __init__(self, storage: LogStorage, gate: LogGate) -> None:
        self._storage = storage
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> GatedStorage:
        return GatedStorage(self._storage.below(path), self._gate)

    def create_segment(self, path: str) -> Any:
        self._gate.pass_through()
        return _GatedFile(self._storage.create_segment(path), self._gate)


class _GatedFile:
    def __init__(self, file: Any, gate: LogGate) -> None:
        self._file = file
        self._gate = gate

    def append(self, parts: Any, *, sync: bool = True) -> None:
        self._gate.pass_through()
        self._file.append(parts, sync=sync)

    def close(self) -> None:
        self._file.close()


def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True
