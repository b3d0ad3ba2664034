"""Six walks through the package, and the files of it in which each one calls functions.

    python -m tests.unit.pins.walks FILE

writes each walk's name with its files, as JSON. What is real: ledger, log, tasks, commands, the code of Spark's tasks,
requests over HTTP. What stands in: Kafka, the answers of Elasticsearch, Airflow, and the session of Spark, which runs
its tasks in this process. What comes before `Entered.measured` does not count, nor what an import does.

Each walk has a fork of this process to itself, so that it finds no cache of another one.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.support.fake_elasticsearch import FakeElasticsearch
from tests.support.page_server import NoAirflow
from tests.support.seeded_ledger import SITUATIONS, seed
from tests.unit.batch.conftest import T1, Receiving, take
from tests.unit.operators import toy_micro_batch
from tests.unit.operators.conftest import Source, Task
from tests.unit.pins.freezing import STORED
from typer.testing import CliRunner

import headrace
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.cli.main import app as commands
from headrace.hooks.ledger import register
from headrace.ledger import JobState, Ledger
from headrace.operators.batch_steps import AllocateBlocksOperator
from headrace.operators.replay_batch import ReplayBatchOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.spark.attempts import batch_command
from headrace.spark.attempts.batch_server import run_in_server
from headrace.spark.versions import current_versions
from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaInput, Output, Stream
from headrace.stream.stream import replayed
from headrace.testing.fake_kafka import FakeKafka
from headrace.testing.stream_on_clock import StreamOnClock
from headrace.timetables.micro_batch import from_ms
from headrace.ui.api.app import create_app
from headrace.views.streams import Placed

PACKAGE = f"{Path(headrace.__file__).parent}{os.sep}"
# The package's doubles for users' tests.
DOUBLES = f"{PACKAGE}testing{os.sep}"


class Entered:
    """The files of the package in which functions were called, in all threads or only in those begun meanwhile."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    @contextmanager
    def measured(self, *, own_thread: bool = True) -> Iterator[None]:
        threading.setprofile(self._called)
        sys.setprofile(self._called if own_thread else None)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or file in self.files or not file.startswith(PACKAGE) or file.startswith(DOUBLES):
            return
        callers: FrameType | None = frame
        while callers is not None:
            # A module that is imported, which happens once in a process, or the body of a class.
            if callers.f_code.co_filename.startswith(PACKAGE) and not callers.f_code.co_flags & inspect.CO_OPTIMIZED:
                return
            callers = callers.f_back
        self.files.add(file)


class TasksHere:
    """As much of a Connect session as an attempt asks for whose tasks read the log: they run in this process."""

    conf = SimpleNamespace(set=lambda *_: None)
    client = SimpleNamespace(set_retry_policies=lambda _: None)
    clearTags = addTag = stop = _set_default_and_active_session = staticmethod(lambda *_: None)  # noqa: N815

    def range(self, start: int, end: int, step: int, _tasks: int) -> Any:
        numbers = pa.record_batch({"id": pa.array(range(start, end, step), pa.int64())})

        def done(run: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], _schema: str) -> Any:
            return SimpleNamespace(toArrow=lambda: pa.Table.from_batches(list(run(iter([numbers])))))

        return SimpleNamespace(mapInArrow=done)


TasksHere.__module__ = "pyspark.sql.connect.session"


def run_batch(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """What ``spark_jobs/micro_batch.py`` does."""
    with patch.dict(os.environ, environment):
        code = run_in_server(arguments)
        sys.exit(batch_command.main(arguments) if code is None else code)


@contextmanager
def elasticsearch() -> Iterator[tuple[FakeElasticsearch, str]]:
    """An Elasticsearch in memory, with its address."""
    fake = FakeElasticsearch()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            answer = fake.request(self.command, self.path, body)
            self.send_response(answer.status)
            self.send_header("X-Elastic-Product", "Elasticsearch")
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield fake, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def stream_in(folder: Path, output: Output, *, interval: str) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=output,
        batch_interval=interval,
        coalesce=False,
        storage=folder / "storage",
        ledger=f"sqlite:///{folder}/ledger.db",
    )


@contextmanager
def allocated(folder: Path) -> Iterator[tuple[Stream, Task, FakeElasticsearch]]:
    """A stream with a batch of three records, a task of its run, and the index that it is for."""
    processes = SimpleNamespace(Popen=toy_micro_batch.InThisProcess, PIPE=None, STDOUT=None, DEVNULL=None)
    with (
        elasticsearch() as (index, url),
        patch("headrace.runs.processes.subprocess", processes),
        patch("tests.unit.operators.toy_micro_batch.run", run_batch),
        patch("headrace.spark.attempts.batch_command.connect_session", lambda *_, **__: TasksHere()),
    ):
        stream = stream_in(folder, ElasticsearchOutput(hosts=url, index="flights"), interval="200 ms")
        with Ledger.open(stream.ledger) as ledger:
            register(ledger, stream)
            source = Source(stream, ledger)
            at_ms = source.store()
            # The next job's application takes batches.
            ledger.jobs.release(source.job, JobState.STOPPED)
            job = ledger.jobs.acquire(stream.name, holder="test", lease_ms=600_000, versions=current_versions())
            ledger.jobs.update(job, state=JobState.RUNNING, attributes={"connect_url": "sc://localhost:15002"})
            while ledger.now_ms() < at_ms:
                threading.Event().wait(0.01)
            task = Task(from_ms(at_ms - stream.batch_interval_ms))
            AllocateBlocksOperator(task_id="allocate", stream=stream).execute(task.context)
            yield stream, task, index


def batch(folder: Path, entered: Entered) -> None:
    """From the task of an output to its documents in Elasticsearch."""
    with allocated(folder) as (stream, task, index):
        with entered.measured():
            WalSparkSubmitOperator(task_id="generate", stream=stream).execute(task.context)
        assert len(index.documents("flights")) == 3


def replay(folder: Path, entered: Entered) -> None:
    """From its task to its documents in Elasticsearch."""
    with allocated(folder) as (stream, task, index):
        WalSparkSubmitOperator(task_id="generate", stream=stream).execute(task.context)
        elsewhere = replayed(stream, {"elasticsearch": {"index": "flights-v2"}})
        step = ReplayBatchOperator(task_id="replay", stream=stream, replay=elsewhere, target="v2", step="elasticsearch")
        with entered.measured():
            step.execute(task.context)
        assert len(index.documents("flights-v2")) == 3


def receiver(folder: Path, entered: Entered) -> None:
    """From its tracker to its end, in their threads."""
    kafka = FakeKafka()
    kafka.create("flights", 1)
    stream = stream_in(folder, ConsoleOutput(), interval="10 s")
    with entered.measured(own_thread=False), StreamOnClock(stream, kafka) as running:
        for value in (b"a", b"b"):
            kafka.produce("flights", 0, value)
            running.receive()
            running.advance(10)
        assert sum(len(each.records) for each in running.run_due()) == 2


def recovery(folder: Path, entered: Entered) -> None:
    """From the command to the ledger."""
    shutil.copytree(STORED / "shop", folder / "shop")
    options = ("--ledger", f"sqlite:///{folder}/new.db", "--storage", str(folder), "--force", "--accept-code")
    with entered.measured():
        done = CliRunner().invoke(commands, ["streams", "recover", "shop", *options])
    assert done.exit_code == 0, done.output


def page(folder: Path, entered: Entered) -> None:
    """From the request for all streams to its JSON."""
    url = f"sqlite:///{folder}/ledger.db"
    with Ledger.open(url) as ledger:
        names = seed(ledger, streams=len(SITUATIONS), batches=3)
    placed = [Placed(name, url, f"{name}_batches", f"{name}_receiver", ()) for name in names]
    root, api = FastAPI(), create_app(NoAirflow(streams=placed), ledger_seconds=600)
    root.mount("/headrace", api)
    with entered.measured():
        answer = TestClient(root).get("/headrace/api/v1/streams", headers={"X-User": "admin"})
    assert len(answer.json()["streams"]) == len(SITUATIONS), answer.text
    api.state.ledgers.close()


def cleanup(folder: Path, entered: Entered) -> None:
    """From a checkpointed batch to a log without it."""
    receiving = Receiving(folder)
    receiving.store(3)
    receiving.new_segment()
    receiving.clock.advance(10_000)
    take(receiving, T1)
    receiving.complete(T1)
    write_checkpoint(receiving.context, T1)
    receiving.clock.advance(60_000)
    with entered.measured():
        assert clean_up(receiving.context).segments == 1
    receiving.ledger.close()


WALKS = {walk.__name__: walk for walk in (batch, receiver, recovery, replay, page, cleanup)}


def walked(name: str) -> list[str]:
    """The files of a walk."""
    entered = Entered()
    with tempfile.TemporaryDirectory() as folder:
        WALKS[name](Path(folder), entered)
    return sorted(file.removeprefix(PACKAGE) for file in entered.files)


if __name__ == "__main__":
    for slow in ("alembic.autogenerate", "pandas", "pyspark.sql.connect.client.retries"):
        # Once, and not in each fork.
        import_module(slow)
    with get_context("fork").Pool(len(WALKS), maxtasksperchild=1) as pool:
        files = dict(zip(WALKS, pool.map(walked, WALKS, chunksize=1), strict=True))
    Path(sys.argv[1]).write_text(json.dumps(files), encoding="utf-8")
