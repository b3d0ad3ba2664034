"""A job that several streams share: one real process with Spark, real Kafka, and a ledger with all streams.

The tests are steps of one story, in order: a process takes 25 s of a processor to start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.spark.application import JOBS, SECRET, Application, environment, new_application, until
from tests.support.living_process import is_alive

from headrace.ledger import BatchState, JobState, Ledger
from headrace.ledger.tables import JobRow
from headrace.processes import PROCESS
from headrace.receiver.health import REVISION
from headrace.runs.receiver_job import newest_job, receiving, request_job, start_if_absent
from headrace.spark.attempts.batch_server import socket_path
from headrace.spark.job_token import APPLICATION, FINGERPRINT, secret_fingerprint
from headrace.stream import SparkSettings, Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Three receivers, one more stream's, and one for batches.
SPARK = SparkSettings(master="local[5]", job="shared")


class SharedStreams:
    """Streams of one shared job, requested as their tasks in Airflow do it."""

    def __init__(self, kafka: str, folder: Path) -> None:
        self._kafka = kafka
        self.folder = folder
        self.ledger_url = f"sqlite:///{folder}/ledger.db"
        self.streams: dict[str, Application] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._requests = 0

    @property
    def ledger(self) -> Ledger:
        return next(iter(self.streams.values())).ledger

    def add(self, name: str, **fields: Any) -> Application:
        fields = {"spark": SPARK, "storage": str(self.folder / name), "ledger": self.ledger_url, **fields}
        self.streams[name] = new_application(self._kafka, self.folder, name=name, **fields)
        return self.streams[name]

    def request(self, name: str) -> None:
        stream = self.streams[name].stream
        self._requests += 1
        revision, holder = self.ledger.streams.get(name).revision, f"request {self._requests}"
        # As the operator does: the job of a process of this machine that was killed is ended first.
        newest_job(self.ledger, name)
        request_job(self.ledger, stream, revision=revision, holder=holder, lease_ms=240_000)
        self.start_process(stream, holder)

    def start_process(self, stream: Stream, holder: str) -> None:
        def start() -> Any:
            log = (self.folder / "shared.log").open("a")
            arguments = ("--ledger", self.ledger_url, "--stream", stream.name, "--holder", holder)
            command = [sys.executable, str(JOBS / "receiver.py"), *arguments]
            self.processes.append(
                subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
            return self.processes[-1]

        start_if_absent(self.ledger, "shared", holder=holder, start=start)

    def job(self, name: str) -> JobRow:
        job = self.ledger.jobs.current(name)
        assert job is not None
        return job

    def until_receiving(self, *names: str) -> None:
        for name in names:
            stream = self.streams[name].stream
            until(
                f"stream {name} to be received",
                lambda stream=stream: (
                    receiving(self.ledger, stream.name, receivers=stream.receivers, max_silence_ms=30_000).ok
                ),
            )

    def request_until_received(self, *names: str) -> None:
        for name in names:
            self.request(name)
        self.until_receiving(*names)

    def starts(self, name: str) -> tuple[Any, ...]:
        """What changes if the stream's job or one of its receivers starts again."""
        receivers = self.ledger.receivers.all(name)
        return self.job(name).epoch, self.job(name).attributes["pid"], [(one.epoch, one.restarts) for one in receivers]

    def stored(self, name: str) -> int:
        return sum(row.next_offset for row in self.ledger.positions.all(name))

    def log(self) -> str:
        return (self.folder / "shared.log").read_text()

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()
        for application in self.streams.values():
            application.ledger.close()


@pytest.fixture(scope="module")
def shared(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStreams]:
    streams = SharedStreams(kafka, tmp_path_factory.mktemp("shared"))
    yield streams
    streams.close()


def test_batches_of_each_stream_run_in_the_shared_application(shared: SharedStreams) -> None:
    for name in ("clicks", "orders"):
        shared.add(name)
    shared.request_until_received("clicks", "orders")
    assert len(shared.processes) == 1, "one process for all"
    until("the batch server", socket_path(shared.ledger_url, "@shared").exists)
    for name in ("clicks", "orders"):
        application = shared.streams[name]
        assert socket_path(shared.ledger_url, name).resolve() == socket_path(shared.ledger_url, "@shared")
        application.produce(f"from {name}")
        time_ms = application.allocate_next()
        done = application.run_batch(time_ms)
        assert done.returncode == 0, done.stderr
        assert f"from {name}" in done.stdout
        assert "attempt 1, connect" in done.stderr
        assert application.ledger.batches.get(name, time_ms).state is BatchState.COMPLETED
    job = shared.job("clicks")
    assert job.attributes[APPLICATION] == ["@shared", 1]
    assert job.attributes[FINGERPRINT] == secret_fingerprint(SECRET, "@shared")
    until("the pools", lambda: {"receivers", "batches of clicks", "batches of orders"} <= _pools(job))


def _pools(job: JobRow) -> set[str]:
    """The pools of the stages that Spark's pages have so far."""
    url = f"{job.attributes['ui_url']}/api/v1/applications/{job.attributes['application_id']}/stages"
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the driver's own page
        text = answer.read()
    try:
        return {stage["schedulingPool"] for stage in json.loads(text)}
    except json.JSONDecodeError:
        # While stages end, Spark may fail in the middle of its answer.
        return set()


def test_streams_of_one_job_fail_stop_and_change_by_themselves(shared: SharedStreams) -> None:
    broken_storage = shared.folder / "file"
    broken_storage.touch()
    shared.add("visits")
    shared.request_until_received("visits")
    assert len(shared.processes) == 1, "one process for all"
    identity = shared.job("clicks").attributes[PROCESS]
    assert {shared.job(name).attributes[PROCESS]["pid"] for name in shared.streams} == {identity["pid"]}
    before = shared.starts("clicks")

    # One of them cannot start.
    shared.add("broken", storage=str(broken_storage / "storage"))
    shared.request("broken")
    until("the failure", lambda: shared.job("broken").state is JobState.FAILED)
    assert "cannot be written to" in str(shared.job("broken").error)

    # One fails while it runs: its lease is taken from it.
    shared.ledger.jobs.end_dead("orders", shared.job("orders").epoch, "a test")
    until("its job to have left", lambda: "stream orders has left" in shared.log())
    shared.request_until_received("orders")
    assert shared.job("orders").epoch == 2

    # One gets a new definition: its job is stopped and requested again.
    changed = Stream(**{**shared.streams["visits"].stream.model_dump(mode="json"), "block_interval": "500 ms"})
    row = shared.ledger.streams.register(
        "visits", changed.to_json(), batch_interval_ms=1_000, block_interval_ms=changed.block_interval_ms
    )
    shared.streams["visits"].stream = changed
    shared.ledger.jobs.request_stop("visits", "a new definition")
    until("the stop", lambda: shared.job("visits").state is JobState.STOPPED)
    shared.request_until_received("visits")
    assert (shared.job("visits").attributes[REVISION], row.revision) == (2, 2)

    # One is stopped for good.
    shared.ledger.jobs.request_stop("orders", "a test")
    until("the stop", lambda: shared.job("orders").state is JobState.STOPPED)

    assert shared.starts("clicks") == before, "neither its job nor its receiver has started again"
    stored = shared.stored("clicks")
    shared.streams["clicks"].produce("one", "two")
    until("its records", lambda: shared.stored("clicks") == stored + 2)
    assert len(shared.processes) == 1
    assert not socket_path(shared.ledger_url, "orders").is_symlink()

    # A stream whose settings differ, and one with too many receivers, are refused.
    shared.add("other", spark=SPARK.model_copy(update={"conf": {"spark.ui.retainedJobs": "7"}}))
    shared.request("other")
    until("the refusal", lambda: shared.job("other").state is JobState.FAILED)
    error = str(shared.job("other").error)
    assert "spark.conf is {'spark.ui.retainedJobs': '7'}, and none there" in error
    assert "Streams that run there: clicks, visits." in error
    wide = shared.add("wide")
    wide.stream = wide.stream.model_copy(
        update={"inputs": (wide.stream.inputs[0].model_copy(update={"receivers": 3}),)}
    )
    shared.ledger.streams.register("wide", wide.stream.to_json(), batch_interval_ms=1_000, block_interval_ms=200)
    shared.request("wide")
    until("the refusal", lambda: shared.job("wide").state is JobState.FAILED)
    assert "has 5 task slot(s), and each of its 5 receiver(s)" in str(shared.job("wide").error)
    assert shared.starts("clicks") == before


@pytest.mark.skipif(sys.platform != "linux", reason="processes have an identity on Linux only")
def test_all_streams_come_back_after_their_process_was_killed(shared: SharedStreams) -> None:
    names = ("clicks", "orders", "visits")
    shared.request_until_received("orders")
    stored = {name: shared.stored(name) for name in names}
    for name in names:
        shared.streams[name].produce("before")
    until("the records", lambda: all(shared.stored(name) == stored[name] + 1 for name in names))
    epochs = {name: shared.job(name).epoch for name in names}
    pid = shared.job("clicks").attributes["pid"]
    family = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    shared.processes[0].wait()
    for name in names:
        shared.streams[name].produce("after")
    shared.request_until_received(*names)
    assert len(shared.processes) == 2, "the first request starts the process again, the others find it"
    assert {name: shared.job(name).epoch for name in names} == {name: epoch + 1 for name, epoch in epochs.items()}
    until("the records", lambda: all(shared.stored(name) == stored[name] + 2 for name in names))
    until("the end of the killed one's JVM and workers", lambda: not any(map(is_alive, family)))


def test_a_process_without_a_stream_ends_for_other_settings(shared: SharedStreams) -> None:
    names = ("clicks", "orders", "visits")
    for name in names:
        shared.ledger.jobs.request_stop(name, "a test")
    until("the stops", lambda: all(shared.job(name).state is JobState.STOPPED for name in names))
    other = shared.add("late", spark=SPARK.model_copy(update={"master": "local[3]"}))
    shared.request("late")
    assert shared.processes[1].wait(240) == 0
    # As its task does while the request waits.
    shared.start_process(other.stream, "late again")
    shared.until_receiving("late")
    assert (len(shared.processes), shared.job("late").attributes["task_slots"]) == (3, 3)
    pid = shared.job("late").attributes["pid"]
    family = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGTERM)
    assert shared.processes[2].wait(240) == 143
    assert (shared.job("late").state, shared.job("late").error) == (JobState.FAILED, "the process received SIGTERM")
    until("the end of its JVM and workers", lambda: not any(map(is_alive, family)))
