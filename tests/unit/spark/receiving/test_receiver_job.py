"""How a receiver job starts and ends, and what it waits for, without Spark and receivers."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.kafka import client
from headrace.ledger import BatchState, JobState, Ledger
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.ledger.receiving.jobs import REQUESTED_OF
from headrace.listeners import StreamingStarted, StreamListener
from headrace.listeners.job_listeners import JobListeners
from headrace.receiver.health import REVISION
from headrace.receiver.tracker import TrackerEnd, TrackerReport, find_sign
from headrace.spark.job_token import APPLICATION
from headrace.spark.receiving import job_application, receiver_job, receiver_process
from headrace.spark.receiving.job_log import LOG_VARIABLE
from headrace.spark.receiving.receiver_application import ReceiverApplication
from headrace.spark.receiving.receiver_job import BatchDrain, ReceiverJob, StorageNotUsableError
from headrace.spark.receiving.receiver_process import ReceiverProcess
from headrace.spark.sessions import REPLACED_BY
from headrace.stream import ConsoleOutput, ExecutorAllocation, KafkaInput, Listener, SparkSettings, Stream
from headrace.stream_context import StreamContext
from headrace.views.streams import default_place, stream_detail


class FlakyJobs:
    """The ledger's jobs; once the receivers have ended, so many calls fail before one gets through."""

    def __init__(self, jobs: Any) -> None:
        self._jobs = jobs
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        if self.failures:
            self.failures -= 1
            raise LedgerUnavailableError("it does not answer")
        return getattr(self._jobs, name)


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.jobs = FlakyJobs(ledger.jobs)  # type: ignore[assignment]
        yield ledger


@pytest.fixture
def stream(tmp_path: Path, ledger: Ledger) -> Stream:
    stream = Stream(
        name="clicks",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=ledger.url,
    )
    ledger.streams.register("clicks", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
    return stream


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch, ledger: Any) -> SimpleNamespace:
    """The started application. Its receivers end at once; from then on the ledger is away for ``ledger_failures``."""
    spark = SimpleNamespace(stopped=False, ledger_failures=0)
    spark.stop = lambda: setattr(spark, "stopped", True)
    spark.sparkContext = SimpleNamespace(_gateway=None)
    session: Any = spark
    application = ReceiverApplication(session, "app-1", "local[2]", None, "sc://localhost:1", 2, 1)

    class Tracker:
        def __init__(self, *_: object) -> None: ...

        def run(self) -> TrackerReport:
            ledger.jobs.failures = spark.ledger_failures
            return TrackerReport(TrackerEnd.STOPPED, "a test")

    monkeypatch.setenv("HEADRACE_SECRET_KEY", "a secret for the tests")
    monkeypatch.setattr(job_application, "start_application", lambda *_, **__: application)
    monkeypatch.setattr(receiver_job, "check_part", lambda _: [])
    monkeypatch.setattr(job_application, "task_slots", lambda _: 3)
    monkeypatch.setattr(job_application, "jvm_gone", lambda _: lambda: False)
    monkeypatch.setattr(job_application, "warm_up_connect", lambda *_: None)
    monkeypatch.setattr(job_application, "start_batch_server", lambda *_: None)
    monkeypatch.setattr(receiver_job, "ReceiverTracker", Tracker)
    monkeypatch.setattr(receiver_job, "_REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(receiver_job, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(receiver_process, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"the process was ended with {code}"))
    return spark


def test_a_job_notes_where_its_log_is(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_VARIABLE, "/var/log/headrace/clicks/receiver.log")
    assert ReceiverProcess(StreamContext(stream, ledger), revision=1, holder="a test").run() == 0
    job = stream_detail(ledger, "clicks", default_place("clicks", "ledger"), {}).receiver_job
    assert job is not None
    assert job.log_path == "/var/log/headrace/clicks/receiver.log"


@pytest.mark.parametrize("executors", [None, ExecutorAllocation()], ids=["disabled", "enabled"])
def test_executors_are_allocated_while_the_receivers_run(
    stream: Stream,
    ledger: Any,
    spark: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    executors: ExecutorAllocation | None,
) -> None:
    happened: list[str] = []

    @contextlib.contextmanager
    def allocating(_: StreamContext, settings: ExecutorAllocation, application: Any, *__: Any) -> Iterator[None]:
        assert (settings, application.spark) == (executors, spark)
        happened.append("begins")
        yield
        happened.append("ends")

    def run(_: Any) -> TrackerReport:
        happened.append("receivers run")
        return TrackerReport(TrackerEnd.STOPPED, "a test")

    monkeypatch.setattr(receiver_job, "ExecutorAllocationManager", allocating)
    monkeypatch.setattr(receiver_job.ReceiverTracker, "run", run)
    on_cluster = SparkSettings(master="spark://host:7077", executors=executors)
    context = StreamContext(stream.model_copy(update={"spark": on_cluster}), ledger)
    assert ReceiverProcess(context, revision=1, holder="a test").run() == 0
    assert happened == (["receivers run"] if executors is None else ["begins", "receivers run", "ends"])


def test_a_job_shows_a_sign_of_life_before_spark_starts(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, started = StreamContext(stream, ledger), job_application.start_application

    def start(*arguments: Any, **options: Any) -> Any:
        sign = find_sign(context.storage)
        assert sign is not None and sign.lease_ms == receiver_process.LEASE_MS
        return started(*arguments, **options)

    monkeypatch.setattr(job_application, "start_application", start)
    assert ReceiverProcess(context, revision=1, holder="a test").run() == 0


def test_a_ledger_that_is_away_fails_no_job_that_starts(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job would have to start Spark first."""
    signs, write, start = [0, 0], receiver_job.write_sign, job_application.start_application
    starts: list[str] = []

    def write_sign(*arguments: Any) -> None:
        if signs:
            signs.pop()
            raise LedgerUnavailableError("it does not answer")
        write(*arguments)

    def start_application(*arguments: Any, **options: Any) -> ReceiverApplication:
        ledger.jobs.failures = 2
        starts.append("Spark")
        return start(*arguments, **options)

    monkeypatch.setattr(receiver_job, "write_sign", write_sign)
    monkeypatch.setattr(job_application, "start_application", start_application)
    assert ReceiverProcess(StreamContext(stream, ledger), revision=1, holder="a test").run() == 0
    assert (signs, starts, ledger.jobs.failures) == ([], ["Spark"], 0)
    assert (ledger.jobs.current("clicks").state, ledger.jobs.current("clicks").error) == (JobState.STOPPED, None)


def test_a_ledger_that_stays_away_keeps_no_job_that_starts(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = job_application.start_application

    def start_application(*arguments: Any, **options: Any) -> ReceiverApplication:
        ledger.jobs.failures = 1_000_000
        return start(*arguments, **options)

    monkeypatch.setattr(job_application, "start_application", start_application)
    monkeypatch.setattr(receiver_job, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(LedgerUnavailableError):
        ReceiverProcess(StreamContext(stream, ledger), revision=1, holder="a test").run()
    assert spark.stopped


@pytest.mark.parametrize("failures", [0, 1, 2, 10])
def test_a_ledger_away_for_a_while_fails_no_stopping_job(
    stream: Stream, ledger: Any, spark: SimpleNamespace, failures: int
) -> None:
    spark.ledger_failures = failures
    assert ReceiverProcess(StreamContext(stream, ledger), revision=1, holder="a test").run() == 0
    job = ledger.jobs.current("clicks")
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert spark.stopped


def test_a_ledger_that_stays_away_keeps_no_job_alive(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_job, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("headrace.spark.receiving.receiver_job._MAX_INTERVALS", 0)
    spark.ledger_failures = 1_000_000
    assert ReceiverProcess(StreamContext(stream, ledger), revision=1, holder="a test").run() == 0
    assert spark.stopped


def requested(stream: Stream, ledger: Any, name: str, **spark: Any) -> StreamContext:
    """A stream whose task has requested its job of the shared job "mill"."""
    settings = SparkSettings(**{"master": "local[3]", "job": "mill", **spark})
    sharing = stream.model_copy(update={"name": name, "spark": settings})
    ledger.streams.register(name, sharing.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
    attributes = {REQUESTED_OF: "mill", REVISION: 1}
    ledger.jobs.acquire(name, holder=f"task of {name}", lease_ms=60_000, attributes=attributes)
    return StreamContext(sharing, ledger)


def test_a_shared_process_runs_its_requests_and_ends_without_any(
    stream: Stream, ledger: Any, spark: SimpleNamespace
) -> None:
    first = requested(stream, ledger, "orders")
    requested(stream, ledger, "visits")
    requested(stream, ledger, "other", conf={"spark.a": "b"})
    assert ReceiverProcess(first, revision=1, holder="a test", idle_seconds=0.0).run() == 0
    assert spark.stopped
    for name in ("orders", "visits"):
        job = ledger.jobs.current(name)
        assert (job.state, job.error) == (JobState.STOPPED, None)
        assert job.attributes[APPLICATION] == ["@mill", 1]
    assert ledger.shared_jobs.current("mill").ended_at_ms is not None


def test_a_shared_process_that_cannot_start_fails_its_requests(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are those that wait."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(job_application, "start_application", fail)
    first = requested(stream, ledger, "orders")
    with pytest.raises(RuntimeError, match="no memory"):
        ReceiverProcess(first, revision=1, holder="a test").run()
    job = ledger.jobs.current("orders")
    assert job.state is JobState.FAILED
    assert job.error.startswith("the shared job mill failed: RuntimeError: no memory")


class Listening(StreamListener):
    """Notes the job epochs that it gets; with ``hangs``, it never comes back from the first call; without ``begins``,
    it is never made."""

    epochs: ClassVar[list[int]] = []
    gate: ClassVar[threading.Event] = threading.Event()

    def __init__(self, *, hangs: bool = False, fails: bool = False, begins: bool = True) -> None:
        if fails:
            raise OSError("no server")
        if not begins:
            self.gate.wait()
        self._hangs = hangs

    def on_streaming_started(self, event: StreamingStarted) -> None:
        self.epochs.append(event.job_epoch)
        if self._hangs:
            self.gate.wait()


def run_with_listeners(stream: Stream, ledger: Any, monkeypatch: pytest.MonkeyPatch, *listeners: Listener) -> int:
    """Run the job of the stream with these listeners, whose module is this one."""
    monkeypatch.setitem(sys.modules, "listening", SimpleNamespace(Listening=Listening))
    monkeypatch.setattr(Listening, "epochs", [])
    monkeypatch.setattr(Listening, "gate", threading.Event())
    changed = Stream(
        **{**stream.model_dump(mode="json"), "listeners": [listener.model_dump() for listener in listeners]}
    )
    return ReceiverProcess(StreamContext(changed, ledger), revision=1, holder="a test").run()


def test_the_jobs_listeners_get_its_events_from_start_to_end(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Listener(reference="listening:Listening", name="broken", arguments={"fails": True})
    assert run_with_listeners(stream, ledger, monkeypatch, broken, Listener(reference="listening:Listening")) == 0
    assert Listening.epochs == [1]
    status = ledger.jobs.current("clicks").attributes["listeners"]
    assert status["listening:Listening"] == {"dropped": 0, "missed": 0, "failed": 0}
    assert "OSError: no server" in status["broken"]["error"]


def test_a_listener_that_hangs_does_not_keep_the_job_from_ending(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_job, "LISTENERS_SECONDS", 2.0)
    hanging = Listener(reference="listening:Listening", arguments={"hangs": True})
    assert run_with_listeners(stream, ledger, monkeypatch, hanging) == 0
    assert Listening.epochs == [1]
    job = ledger.jobs.current("clicks")
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert spark.stopped
    Listening.gate.set()


def test_a_stopping_job_renews_its_lease_while_a_listener_hangs(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = threading.Event()
    stop, renew = JobListeners.stop, ledger.jobs.renew

    def stopped(*given: Any) -> None:
        ending.set()
        stop(*given)

    def renewed(*given: Any, **more: Any) -> Any:
        if ending.is_set():
            Listening.gate.set()
        return renew(*given, **more)

    monkeypatch.setattr(receiver_job, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(JobListeners, "stop", stopped)
    ledger.jobs.renew = renewed
    hanging = Listener(reference="listening:Listening", arguments={"hangs": True})
    assert run_with_listeners(stream, ledger, monkeypatch, hanging) == 0
    assert Listening.gate.is_set()


def test_receiving_does_not_wait_for_a_listeners_constructor(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_job, "LISTENERS_SECONDS", 0.1)
    unmade = Listener(reference="listening:Listening", arguments={"begins": False})
    assert run_with_listeners(stream, ledger, monkeypatch, unmade) == 0
    assert ledger.jobs.current("clicks").state is JobState.STOPPED
    Listening.gate.set()


def test_a_failed_job_releases_its_lease_before_a_listener_ends(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for a listener that hangs."""

    def fail(*_: object) -> None:
        raise RuntimeError("a test")

    monkeypatch.setattr(receiver_job, "LISTENERS_SECONDS", 120.0)
    monkeypatch.setattr(receiver_job, "ReceiverTracker", fail)
    hanging = Listener(reference="listening:Listening", arguments={"hangs": True})
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="a test"):
        run_with_listeners(stream, ledger, monkeypatch, hanging)
    assert time.monotonic() - begun < 60
    assert ledger.jobs.current("clicks").state is JobState.FAILED
    Listening.gate.set()


def make(tmp_path: Path, storage: str) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=storage,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


def test_a_storage_that_cannot_be_written_to_ends_the_job(tmp_path: Path) -> None:
    """It ends at once, and the error has the path."""
    (tmp_path / "file").write_text("")
    stream = make(tmp_path, f"{tmp_path}/file/shop")
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        with pytest.raises(StorageNotUsableError):
            ReceiverProcess(StreamContext(stream, ledger), revision=1, holder="test").run()
        job = ledger.jobs.current("shop")
    assert job is not None
    assert job.state.value == "failed"
    assert f"{tmp_path}/file" in (job.error or "")


def test_a_kafka_that_is_away_is_logged_while_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the job's log and in the ledger."""
    monkeypatch.setattr(client, "HOPE_SECONDS", 0.2)
    stream = make(tmp_path, str(tmp_path / "storage"))
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        lease = ledger.jobs.acquire("shop", holder="test", lease_ms=60_000)
        ReceiverJob(StreamContext(stream, ledger), lease, end_hangs=lambda _: None)._check_inputs()
        job = ledger.jobs.current("shop")
    assert job is not None
    (trouble,) = job.attributes["troubles"]
    assert trouble.startswith("input records: 127.0.0.1:1: Kafka at 127.0.0.1:1 cannot be asked")
    assert trouble in caplog.text


T = 1_700_000_000_000
INTERVAL_MS = 10_000


class SteppingClock(ManualClock):
    """A clock with which nothing waits: ``on_wait`` is called with the seconds instead."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        self.on_wait: Callable[[float], None] = lambda seconds: None

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.on_wait(seconds)
        return event.is_set()


class World:
    """A stopping job, the blocks that it received, and the batches that somebody runs while it waits."""

    def __init__(self, folder: Path, clock: SteppingClock) -> None:
        self.clock = clock
        self.stream = Stream(
            name="clicks",
            inputs=KafkaInput(bootstrap_servers="localhost:9", topics="clicks"),
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            storage=str(folder),
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        self.ledger = Ledger.open(self.stream.ledger, clock=clock)
        self.ledger.streams.register(
            "clicks", self.stream.to_json(), batch_interval_ms=INTERVAL_MS, block_interval_ms=200
        )
        self.job = self.ledger.jobs.acquire("clicks", holder="driver", lease_ms=30_000)
        self.partition = TopicPartition("clicks", "id", 0)
        self.ledger.topics.observe(self.job, "records", [("clicks", "id", 1)])
        self.ledger.positions.ensure_all(self.job, "records", {self.partition: 0})
        self.ledger.positions.assign(self.job, "records", {self.partition: 0})
        self.receiver = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, ReceiverId("clicks", "records", 0)), host="h", lease_ms=600_000
        )
        self.offset = 0
        self.slept = 0

    def receive(self) -> int:
        """Store a block; its batch time."""
        at = self.offset
        self.offset += 1
        ranges = (OffsetRange(self.partition, at, at + 1, 1),)
        handle = BlockHandle("0.wal", at, 1)
        block = BlockInfo(self.receiver.receiver_id, self.receiver.epoch, at, self.clock.now_ms(), handle, ranges, 1, 1)
        return self.ledger.blocks.add(self.receiver, block).batch_time_ms

    def allocate(self, time_ms: int) -> None:
        self.clock.advance(max(0, time_ms - self.clock.now_ms()))
        self.ledger.allocations.seal("clicks", time_ms)
        blocks = len(self.ledger.allocations.blocks_of("clicks", time_ms))
        self.ledger.allocations.allocate(
            "clicks", time_ms, manifest_uri="m", manifest_sha256="0" * 64, blocks_expected=blocks
        )

    def run(self, time_ms: int) -> None:
        attempt = self.ledger.attempts.begin("clicks", time_ms, holder="task", way="connect", lease_ms=30_000)
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {})
        self.ledger.attempts.complete(attempt)

    def drain(self, *steps: Callable[[], object], most: int = 1_000) -> tuple[int, ...]:
        """Wait for the batches; at each poll the next of ``steps`` happens, and then nothing more."""
        left = list(steps)

        def sleep(seconds: float) -> None:
            self.slept += 1
            assert self.slept <= most, "it waits for nothing"
            self.clock.advance(int(seconds * 1000))
            if left:
                left.pop(0)()

        self.clock.on_wait = sleep
        return BatchDrain(StreamContext(self.stream, self.ledger, clock=self.clock), self.job).wait()


@pytest.fixture(scope="module")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated ledger, to be copied: migrations take longer than a test."""
    path = tmp_path_factory.mktemp("empty") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def world(empty_ledger: Path, tmp_path: Path) -> Iterator[World]:
    shutil.copy(empty_ledger, tmp_path / "ledger.db")
    made = World(tmp_path, SteppingClock(T))
    yield made
    made.ledger.close()


def test_a_stop_does_not_wait_for_batches_if_none_are_run(world: World) -> None:
    world.receive()
    assert world.drain(most=0) == ()


def test_all_that_was_received_is_waited_for(world: World) -> None:
    """That includes what is still to be allocated."""
    first = world.receive()
    world.allocate(first)
    world.run(first)
    second = world.receive()
    world.allocate(second)
    third = world.receive()
    world.ledger.jobs.request_stop("clicks", "maintenance")
    world.ledger.jobs.update(world.job, state="stopping")
    left = world.drain(lambda: world.run(second), lambda: world.allocate(third), lambda: world.run(third))
    assert left == ()
    states = [world.ledger.batches.get("clicks", time_ms).state for time_ms in (first, second, third)]
    assert states == [BatchState.COMPLETED] * 3


def test_the_job_keeps_its_lease_meanwhile(world: World) -> None:
    """Nobody takes the application away from under the batches."""
    times = []
    for _ in range(4):
        times.append(world.receive())
        world.allocate(times[-1])
    world.run(times.pop(0))

    def one_more() -> None:
        if world.slept % 15 == 0:
            world.run(times.pop(0))

    assert world.drain(*[one_more] * 45) == ()
    assert world.slept == 45, "longer than a lease"
    job = world.ledger.jobs.current("clicks")
    assert job is not None
    assert job.alive(world.clock.now_ms())


def test_a_stop_waits_for_a_limited_time_without_progress(world: World) -> None:
    """The time is limited where batches make no progress."""
    time_ms = world.receive()
    world.allocate(time_ms)
    world.run(time_ms)
    late = world.receive()
    assert world.drain() == (late,)
    assert world.slept <= 26, "an interval and 15 s"


def test_a_stop_waits_for_a_backlog_for_at_most_ten_intervals(world: World) -> None:
    first = world.receive()
    world.allocate(first)
    world.run(first)
    times = []
    for _ in range(40):
        times.append(world.receive())
        world.clock.advance(INTERVAL_MS)

    def one_more() -> None:
        if world.slept % 5 == 0:
            world.allocate(times[0])
            world.run(times.pop(0))

    left = world.drain(*[one_more] * 150)
    assert left == tuple(times)
    assert len(times) == 20
    assert 100 <= world.slept <= 102


def test_a_replaced_job_leaves_what_does_not_run_yet_to_the_next(world: World) -> None:
    first = world.receive()
    world.allocate(first)
    world.run(first)
    second = world.receive()
    world.allocate(second)
    attempt = world.ledger.attempts.begin("clicks", second, holder="task", way="connect", lease_ms=30_000)
    world.receive()
    world.ledger.jobs.request_stop("clicks", "an upgrade", attributes={REPLACED_BY: {"headrace": "2.0"}})
    assert world.drain(lambda: world.ledger.attempts.fail(attempt, "over"), most=1) == ()


def test_a_job_that_lost_its_lease_meanwhile_waits_no_longer(world: World) -> None:
    time_ms = world.receive()
    world.allocate(time_ms)
    world.run(time_ms)
    world.receive()

    def taken_over() -> None:
        world.clock.advance(31_000)
        world.ledger.jobs.acquire("clicks", holder="other", lease_ms=30_000)

    with pytest.raises(LeaseLostError):
        world.drain(taken_over)


def test_a_ledger_that_does_not_answer_for_a_while_ends_no_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.receive()
    world.allocate(first)
    world.run(first)
    late = world.receive()
    renew = world.ledger.jobs.renew

    def away(*_: object) -> None:
        raise LedgerUnavailableError("it does not answer")

    def goes() -> None:
        monkeypatch.setattr(world.ledger.jobs, "renew", away)

    def comes_back() -> None:
        monkeypatch.setattr(world.ledger.jobs, "renew", renew)
        world.allocate(late)
        world.run(late)

    # Longer than the time that the drain waits without any change.
    assert world.drain(goes, *[lambda: None] * 40, comes_back) == ()
    assert world.slept == 42
