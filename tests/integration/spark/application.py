"""A stream with its topic and ledger, and the processes of its receiver job and its batches."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from tests.support.living_process import is_alive

from headrace.batch.allocation import allocate
from headrace.ledger import JobState, Ledger
from headrace.ledger.tables import JobRow
from headrace.stream import ConsoleOutput, KafkaInput, SparkSettings, Stream
from headrace.stream_context import StreamContext

JOBS = Path(__file__).parents[3] / "spark_jobs"
SECRET = "a secret for the tests"
# Several engineers' JVMs may share the machine.
FIRST_LOOK_SECONDS = 240.0


def until(what: str, found: Callable[[], Any], seconds: float = FIRST_LOOK_SECONDS) -> Any:
    """What ``found`` gives once it is true; looks five times a second."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = found()
        if result:
            return result
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds} s for {what}")


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    inherited.pop("SPARK_CONNECT_MODE_ENABLED", None)
    return {
        **inherited,
        "HEADRACE_SECRET_KEY": SECRET,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **more,
    }


@dataclass
class Application:
    """A stream with its topic and ledger, and the processes that tests start for it."""

    stream: Stream
    ledger: Ledger
    bootstrap_servers: str
    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    until = staticmethod(until)
    environment = staticmethod(environment)

    def start(self, command: list[str], name: str, **env: str) -> subprocess.Popen[str]:
        log = (self.folder / f"{name}.log").open("a")
        process = subprocess.Popen(
            command, env=environment(**env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
        )
        self.processes.append(process)
        return process

    def start_job(
        self,
        *,
        submit: bool = False,
        master: str = "local[3]",
        name: str = "receiver",
        lease_ms: int = 30_000,
        **env: str,
    ) -> subprocess.Popen[str]:
        # ``java``, not the shell that spark-submit begins as: it has replaced itself when the job is up.
        spark_submit = [str(Path(sys.executable).parent / "spark-submit"), "--master", master]
        return self.start(
            [
                *(spark_submit if submit else [sys.executable]),
                str(JOBS / "receiver.py"),
                *("--ledger", self.stream.ledger, "--stream", self.stream.name, "--lease-ms", str(lease_ms)),
            ],
            name,
            **env,
        )

    def running_job(self, process: subprocess.Popen[str], name: str = "receiver") -> JobRow:
        def running() -> JobRow | None:
            assert process.poll() is None, self.log(name)
            job = self.ledger.jobs.current(self.stream.name)
            return job if job is not None and job.state is JobState.RUNNING else None

        return until("the receiver job", running)  # type: ignore[no-any-return]

    def job(self) -> JobRow:
        job = self.ledger.jobs.current(self.stream.name)
        assert job is not None
        return job

    def job_processes(self) -> list[psutil.Process]:
        """The running job's driver and all below it."""
        driver = psutil.Process(self.job().attributes["pid"])
        family = [driver, *driver.children(recursive=True)]
        return [process for process in family if is_alive(process)]

    def forked_batch(self, time_ms: int) -> psutil.Process:
        """The process that the job's batch server forked for this batch."""
        title = f"headrace batch {self.stream.name} {time_ms}"
        (found,) = [process for process in self.job_processes() if process.cmdline()[0] == title]
        return found

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def produce(self, *values: str) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap_servers})
        for value in values:
            producer.produce(self.stream.kafka_inputs[0].topics[0], value=value)
        producer.flush()

    def allocate_next(self) -> int:
        """Allocate the next batch time that has records."""
        time_ms = until("records in the log", lambda: self.ledger.batches.next_unclaimed(self.stream.name))
        until("the batch time", lambda: self.ledger.now_ms() >= time_ms)
        return allocate(StreamContext(self.stream, self.ledger), time_ms).batch.batch_time_ms

    def batch_command(self, time_ms: int, *more: str) -> list[str]:
        return [
            *(sys.executable, str(JOBS / "micro_batch.py"), "--ledger", self.stream.ledger),
            *("--stream", self.stream.name, "--batch-time", str(time_ms), *more),
        ]

    def run_batch(self, time_ms: int, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.batch_command(time_ms, *more),
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=FIRST_LOOK_SECONDS,
            check=False,
        )

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()
        self.ledger.close()


def new_application(kafka: str, folder: Path, **fields: Any) -> Application:
    topic = f"clicks-{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": kafka})
    for created in admin.create_topics([NewTopic(topic, 1, 1)]).values():
        created.result()
    stream = Stream(
        **{
            "name": "clicks",
            "inputs": KafkaInput(bootstrap_servers=kafka, topics=topic),
            "outputs": ConsoleOutput(),
            "batch_interval": "1 s",
            "storage": str(folder / "storage"),
            "ledger": f"sqlite:///{folder}/ledger.db",
            "spark": SparkSettings(master="local[3]"),
            **fields,
        }
    )
    ledger = Ledger.open(stream.ledger)
    ledger.streams.register(
        stream.name,
        stream.to_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
    )
    return Application(stream, ledger, kafka, folder)
