from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from airflow.sdk.exceptions import AirflowTaskTimeout
from airflow.sdk.execution_time.timeout import timeout
from tests.support.records import TOPIC_ID, make_block
from tests.unit.operators import toy_micro_batch

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.devstack.state import living_processes
from headrace.hooks.ledger import register
from headrace.hooks.spark_submit import StreamSparkSubmitHook
from headrace.ledger import Ledger
from headrace.operators.batch_steps import AllocateBlocksOperator
from headrace.spark.termination import EXIT_TERMINATED
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream
from headrace.timetables.micro_batch import from_ms
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

TOY = Path(__file__).with_name("toy_receiver.py")


@pytest.fixture(autouse=True)
def deferrable(monkeypatch):
    """As the embedded stack and compose have it."""
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "True")


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=ElasticsearchOutput(hosts="http://localhost:9", index="flights"),
        batch_interval="200 ms",
        # A task here is about the time of its date; what takes over others asks for it.
        coalesce=False,
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        spark={"master": "local[2]"},
    )


@pytest.fixture
def ledger(stream):
    with Ledger.open(stream.ledger) as opened:
        register(opened, stream)
        yield opened


class Task:
    """As much of a task instance and its run as the operators ask for."""

    def __init__(
        self,
        logical_date: datetime | None = None,
        conf: dict | None = None,
        *,
        run_id: str = "run",
        clear_number: int = 0,
        run_type: str = "scheduled",
        try_number: int = 1,
        retries: int = 4,
        started: datetime = datetime(2026, 1, 1, tzinfo=UTC),
    ) -> None:
        self.dag_id, self.run_id, self.task_id, self.try_number = "flights_batches", run_id, "task", try_number
        self.max_tries = retries
        self.task = SimpleNamespace(retries=retries)
        self.xcoms: dict[str, object] = {}
        self.events: list[dict] = []
        # What Airflow says of other runs' tasks: state by run and task.
        self.states: dict[str, dict[str, str]] = {}
        # The logical dates, or ids, of the batch DAG's runs that are queued or running; whether that DAG is paused.
        self.waiting_runs: set[datetime | str] = set()
        self.paused = False
        self.dag_run = SimpleNamespace(
            logical_date=logical_date,
            run_after=logical_date or datetime.now(UTC),
            data_interval_end=None,
            run_id=run_id,
            conf=conf or {},
            clear_number=clear_number,
            run_type=run_type,
            start_date=started,
        )

    def again(self, **changes) -> Task:
        """Another task of a run about the same batch."""
        return Task(self.dag_run.logical_date, **{"conf": self.dag_run.conf, **changes})

    def get_task_states(self, *, dag_id, task_ids, run_ids):
        assert (dag_id, task_ids) == (self.dag_id, [self.task_id])
        return {run_id: self.states.get(run_id, {}) for run_id in run_ids}

    def get_dr_count(self, *, dag_id, states, logical_dates=None, run_ids=None):
        assert dag_id == "flights_batches"
        assert "running" in states
        return len(self.waiting_runs.intersection(logical_dates or run_ids))

    def get_dag(self, dag_id):
        assert dag_id == "flights_batches"
        return SimpleNamespace(is_paused=self.paused)

    def xcom_push(self, key, value):
        self.xcoms[key] = value

    @property
    def context(self):
        outlet = SimpleNamespace(add=lambda asset, extra: self.events.append(extra))
        return {"ti": self, "dag_run": self.dag_run, "params": {}, "outlet_events": defaultdict(lambda: outlet)}


@pytest.fixture
def task() -> Task:
    return Task()


@pytest.fixture
def toy(monkeypatch, stream, tmp_path):
    """The toy in place of spark-submit; whatever it started is ended with the test."""
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "k" * 32)
    monkeypatch.setenv("AIRFLOW__HEADRACE__LOG_FOLDER", str(tmp_path / "logs"))

    def command(hook, application):
        return [sys.executable, str(TOY), *hook._application_args]

    monkeypatch.setattr(StreamSparkSubmitHook, "command", command)

    def behave(how: str) -> None:
        monkeypatch.setenv("TOY", how)

    yield behave
    for process in living_processes():
        with contextlib.suppress(psutil.Error):
            if stream.ledger in process.cmdline():
                process.kill()
                process.wait(5)


def until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError("did not happen in time")


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture
def expire():
    """Executes an operator whose process hangs, lets its execution timeout expire, and checks that it ends."""

    def run(operator, task):
        processes = []

        def expires():
            processes.append(until(lambda: operator._process)._process)
            os.kill(os.getpid(), signal.SIGALRM)

        threading.Thread(target=expires).start()
        # Without `expires` it would be 10 minutes; the toy hangs for one.
        with timeout(600), pytest.raises(AirflowTaskTimeout):
            operator.execute(task.context)
        assert processes[0].returncode in (-signal.SIGTERM, EXIT_TERMINATED)

    return run


@pytest.fixture
def make_task():
    return Task


class Source:
    """The stream as a receiver fills it: ``store`` adds a block to log and ledger."""

    def __init__(self, stream: Stream, ledger: Ledger) -> None:
        self.stream, self.ledger = stream, ledger
        self.job = ledger.jobs.acquire(stream.name, holder="test", lease_ms=600_000)
        self.receiver = ReceiverId(stream.name, "records", 0)
        self.partition = TopicPartition("flights", TOPIC_ID, 0)
        ledger.topics.observe(self.job, "records", [("flights", TOPIC_ID, 1)])
        ledger.positions.ensure_all(self.job, "records", {self.partition: 0})
        ledger.positions.assign(self.job, "records", {self.partition: 0})
        self.position = 0
        self.begin()

    def begin(self) -> None:
        """Begin to receive in a new epoch, as a restarted receiver does: the segment before is closed."""
        scheduled = self.ledger.receivers.schedule(self.job, self.receiver)
        self.lease = self.ledger.receivers.register(scheduled, host="h", lease_ms=600_000)
        storage = open_storage(self.stream.storage.url)
        self.writer = WriteAheadLogWriter(storage, f"{self.stream.name}/log", self.receiver, self.lease.epoch)
        self.accepted: int | None = None

    def store(self, records: int = 3) -> int:
        """Store a block; the batch time that it got."""
        block, ranges = make_block([b"{}"] * records, from_offset=self.position)
        self.position += records
        now_ms = self.ledger.now_ms()
        written = self.writer.write(block, ranges, cut_time_ms=now_ms, last_accepted_sequence=self.accepted)
        info = BlockInfo(
            self.receiver, self.lease.epoch, written.sequence, now_ms, written.handle, ranges, records,
            written.payload_bytes,
        )  # fmt: skip
        added = self.ledger.blocks.add(self.lease, info)
        self.accepted = written.sequence
        return added.batch_time_ms

    def seal(self) -> None:
        self.ledger.receivers.heartbeat(self.lease, sealed_through_ms=self.ledger.now_ms())


@pytest.fixture
def source(stream, ledger) -> Source:
    return Source(stream, ledger)


@pytest.fixture
def allocated(stream, source, make_task):
    """A batch of three records, allocated, and the task whose run is about it."""

    def make(records: int = 3, **conf) -> tuple[int, Task]:
        at_ms = source.store(records) if records else (source.ledger.now_ms() // 200 + 1) * 200
        until(lambda: source.ledger.now_ms() >= at_ms)
        task = make_task(from_ms(at_ms - stream.batch_interval_ms), conf)
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
        return at_ms, task

    return make


@pytest.fixture
def toy_process(monkeypatch):
    """The toy in place of the batch's process."""
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "k" * 32)
    path = toy_micro_batch.__file__
    monkeypatch.setattr("headrace.hooks.spark_submit.application", lambda name: path)

    def behave(how: str) -> None:
        monkeypatch.setenv("TOY_BATCH", how)

    return behave


@pytest.fixture
def toy_batch(monkeypatch, toy_process):
    """The toy in this process, for tests that are not about the batch's process."""
    subprocess = SimpleNamespace(Popen=toy_micro_batch.InThisProcess, PIPE=None, STDOUT=None, DEVNULL=None)
    monkeypatch.setattr("headrace.runs.processes.subprocess", subprocess)
    # Nobody runs the stream's own batches here: a range that is new would wait for them for a minute.
    monkeypatch.setattr("headrace.batch.next_attempt.processors_are_short", lambda _: False)
    return toy_process


@pytest.fixture
def connectable(source, ledger):
    """The receiver job's application takes batches."""
    ledger.jobs.update(source.job, state="running", attributes={"connect_url": "sc://localhost:15002"})
