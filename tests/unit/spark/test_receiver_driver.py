"""How the receiver job's driver starts and ends, without Spark and receivers."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace.kafka import topics
from headrace.ledger import JobState, Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.listeners import StreamingStarted, StreamListener
from headrace.listeners.job_listeners import JobListeners
from headrace.receiver.tracker import TrackerEnd, TrackerReport, find_sign
from headrace.spark import receiver_job
from headrace.spark.job_log import LOG_VARIABLE
from headrace.spark.receiver_job import ReceiverJob, StorageNotUsableError
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
    application = SimpleNamespace(spark=spark, connect_url="sc://localhost:1", batch_slots=1, attributes=dict)

    class Tracker:
        def __init__(self, *_: object) -> None: ...

        def run(self) -> TrackerReport:
            ledger.jobs.failures = spark.ledger_failures
            return TrackerReport(TrackerEnd.STOPPED, "a test")

    monkeypatch.setenv("HEADRACE_SECRET_KEY", "a secret for the tests")
    monkeypatch.setattr(receiver_job, "start_application", lambda *_, **__: application)
    monkeypatch.setattr(receiver_job, "check_input", lambda _: [])
    monkeypatch.setattr(receiver_job, "jvm_gone", lambda _: lambda: False)
    monkeypatch.setattr(receiver_job, "warm_up_connect", lambda *_: None)
    monkeypatch.setattr(receiver_job, "start_batch_server", lambda *_: None)
    monkeypatch.setattr(receiver_job, "ReceiverTracker", Tracker)
    monkeypatch.setattr(receiver_job, "_RELEASE_PERIOD_SECONDS", 0.0)
    monkeypatch.setattr("headrace.spark.receiver_application._PERIOD_SECONDS", 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"the process was ended with {code}"))
    return spark


def test_a_job_notes_where_its_log_is(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_VARIABLE, "/var/log/headrace/clicks/receiver.log")
    assert ReceiverJob(StreamContext(stream, ledger), revision=1, holder="a test").run() == 0
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
    assert ReceiverJob(context, revision=1, holder="a test").run() == 0
    assert happened == (["receivers run"] if executors is None else ["begins", "receivers run", "ends"])


def test_a_job_shows_a_sign_of_life_before_spark_starts(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, started = StreamContext(stream, ledger), receiver_job.start_application

    def start(*arguments: Any, **options: Any) -> Any:
        sign = find_sign(context.storage)
        assert sign is not None and sign.lease_ms == receiver_job.LEASE_MS
        return started(*arguments, **options)

    monkeypatch.setattr(receiver_job, "start_application", start)
    assert ReceiverJob(context, revision=1, holder="a test").run() == 0


@pytest.mark.parametrize("failures", [0, 1, 2, 10])
def test_a_ledger_that_is_away_for_a_while_fails_no_job_that_stops(
    stream: Stream, ledger: Any, spark: SimpleNamespace, failures: int
) -> None:
    spark.ledger_failures = failures
    assert ReceiverJob(StreamContext(stream, ledger), revision=1, holder="a test").run() == 0
    job = ledger.jobs.current("clicks")
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert spark.stopped


def test_a_ledger_that_stays_away_keeps_no_job_alive(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_job, "_RELEASE_SECONDS", 0.0)
    monkeypatch.setattr("headrace.spark.receiver_application._MOST_INTERVALS", 0)
    spark.ledger_failures = 1_000_000
    assert ReceiverJob(StreamContext(stream, ledger), revision=1, holder="a test").run() == 0
    assert spark.stopped


class Listening(StreamListener):
    """Notes the job epochs that it gets; with ``hangs``, it never comes back from the first call."""

    epochs: ClassVar[list[int]] = []
    gate: ClassVar[threading.Event] = threading.Event()

    def __init__(self, *, hangs: bool = False, fails: bool = False) -> None:
        if fails:
            raise OSError("no server")
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
    changed = Stream(**{**stream.model_dump(mode="json"), "listeners": [each.model_dump() for each in listeners]})
    return ReceiverJob(StreamContext(changed, ledger), revision=1, holder="a test").run()


def test_the_jobs_listeners_get_its_events_from_its_start_to_its_end(
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
    monkeypatch.setattr(receiver_job, "_LISTENERS_SECONDS", 2.0)
    hanging = Listener(reference="listening:Listening", arguments={"hangs": True})
    assert run_with_listeners(stream, ledger, monkeypatch, hanging) == 0
    assert Listening.epochs == [1]
    job = ledger.jobs.current("clicks")
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert spark.stopped
    Listening.gate.set()


def test_a_job_that_stops_renews_its_lease_while_it_waits_for_a_listener(
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


def test_receiving_does_not_wait_for_a_listener_whose_constructor_hangs(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_job, "_LISTENERS_SECONDS", 0.1)
    gate = threading.Event()
    monkeypatch.setattr(Listening, "__init__", lambda _: gate.wait())
    assert run_with_listeners(stream, ledger, monkeypatch, Listener(reference="listening:Listening")) == 0
    assert ledger.jobs.current("clicks").state is JobState.STOPPED
    gate.set()


def test_a_failed_job_releases_its_lease_without_waiting_for_a_listener_that_hangs(
    stream: Stream, ledger: Any, spark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("a test")

    monkeypatch.setattr(receiver_job, "_LISTENERS_SECONDS", 120.0)
    monkeypatch.setattr(ReceiverJob, "_track", fail)
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


def test_a_storage_that_cannot_be_written_to_ends_the_job_at_once_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = make(tmp_path, f"{tmp_path}/file/shop")
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        with pytest.raises(StorageNotUsableError):
            ReceiverJob(StreamContext(stream, ledger), revision=1, holder="test").run()
        job = ledger.jobs.current("shop")
    assert job is not None
    assert job.state.value == "failed"
    assert f"{tmp_path}/file" in (job.error or "")


def test_a_kafka_that_is_away_is_in_the_jobs_log_and_the_ledger_while_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topics, "_HOPE_SECONDS", 0.2)
    stream = make(tmp_path, str(tmp_path / "storage"))
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        lease = ledger.jobs.acquire("shop", holder="test", lease_ms=60_000)
        ReceiverJob(StreamContext(stream, ledger), revision=1, holder="test")._look_at_inputs(lease)
        job = ledger.jobs.current("shop")
    assert job is not None
    (trouble,) = job.attributes["troubles"]
    assert trouble.startswith("input records: 127.0.0.1:1: Kafka at 127.0.0.1:1 cannot be asked")
    assert trouble in caplog.text
