"""Real Spark for the tests, and logs and manifests written by the real writer without Kafka."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from headrace.batch.allocation import allocate
from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.devstack.cluster import SparkCluster
from headrace.ledger import JobState, Ledger
from headrace.ledger.models import Attempt, JobRow, ReceiverLease
from headrace.spark.attempt_run import BatchResult, run_attempt
from headrace.spark.batch_attempt import BatchAttempt
from headrace.spark.sessions import classic_session
from headrace.spark.wal_source import WalDataSource
from headrace.stream import ConsoleOutput, KafkaInput, SparkSettings, Stream
from headrace.stream_context import StreamContext
from headrace.wal.payload import RECORD_SCHEMA
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

JOBS = Path(__file__).parents[3] / "spark_jobs"
SECRET = "a secret for the tests"
# Several engineers' JVMs may share the machine.
FIRST_LOOK_SECONDS = 240.0

BATCH_TIME_MS = 1_700_000_010_000
# 2023-11-14 22:13:20.123 UTC
FIRST_TIMESTAMP_MS = 1_700_000_000_123


def records(
    values: Sequence[bytes | None],
    *,
    first_offset: int = 0,
    topic: str = "clicks",
    partition: int = 0,
    timestamps: Sequence[int] | None = None,
    incarnation: int = 1,
) -> pa.RecordBatch:
    count = len(values)
    times = [FIRST_TIMESTAMP_MS + index for index in range(count)] if timestamps is None else list(timestamps)
    columns = [
        pa.array([b"key-%d" % (first_offset + index) for index in range(count)], pa.binary()),
        pa.array(list(values), pa.binary()),
        pa.array([topic] * count, pa.string()),
        pa.array([partition] * count, pa.int32()),
        pa.array(range(first_offset, first_offset + count), pa.int64()),
        pa.array(times, pa.int64()).cast(RECORD_SCHEMA.field("timestamp").type),
        pa.array([0] * count, pa.int8()),
        pa.array([[{"key": "trace", "value": b"\x00\xff"}]] * count, RECORD_SCHEMA.field("headers").type),
        pa.array([incarnation] * count, pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


@dataclass
class WrittenLog:
    """A stream's folder with one log writer per input; ``manifest`` writes what was added since the last one."""

    folder: Path
    stream: str = "clicks"
    added: dict[str, list[ManifestBlock]] = field(default_factory=dict)
    writers: dict[str, WriteAheadLogWriter] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch, *, input_id: str = "records") -> ManifestBlock:
        storage = open_storage(str(self.folder))
        if input_id not in self.writers:
            self.writers[input_id] = WriteAheadLogWriter(storage, "log", ReceiverId(self.stream, input_id, 0), 1)
        writer = self.writers[input_id]
        first = batch.column("offset")[0].as_py()
        topic, number, incarnation = (batch.column(name)[0].as_py() for name in ("topic", "partition", "incarnation"))
        partition = TopicPartition(topic, "topic-id" if incarnation == 1 else f"id-{incarnation}", number, incarnation)
        ranges = (OffsetRange(partition, first, first + batch.num_rows, batch.num_rows),)
        accepted = writer.next_sequence - 1 if writer.next_sequence else None
        written = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=accepted)
        block = ManifestBlock(written.handle, batch.num_rows, written.payload_bytes, ranges)
        self.added.setdefault(input_id, []).append(block)
        return block

    def manifest(self, batch_time_ms: int = BATCH_TIME_MS, interval_ms: int = 10_000) -> str:
        inputs = {name: tuple(blocks) for name, blocks in self.added.items()}
        self.added = {}
        manifest = Manifest(self.stream, batch_time_ms, interval_ms, inputs, str(self.folder))
        manifest.write(open_storage(str(self.folder)))
        return manifest.uri


class BatchLedger:
    """A ledger with a stream whose blocks come from a `WrittenLog` instead of Kafka."""

    def __init__(self, stream: Stream, log: WrittenLog) -> None:
        self.stream = stream
        self.log = log
        self.ledger = Ledger.open(stream.ledger)
        self.ledger.streams.register(
            stream.name,
            stream.to_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
            outputs=stream.steps,
            ordered=stream.is_ordered,
        )
        self._job = self.ledger.jobs.acquire(stream.name, holder="test", lease_ms=600_000)
        self._leases: dict[str, ReceiverLease] = {}

    def add(self, batch: pa.RecordBatch, *, input_id: str = "records") -> None:
        """Write a block and take it into the next open batch."""
        lease = self._leases.get(input_id)
        if lease is None:
            receiver = ReceiverId(self.stream.name, input_id, 0)
            lease = self.ledger.receivers.register(self._job, receiver, host="test", lease_ms=600_000)
            self._leases[input_id] = lease
        sequence = self.log.writers[input_id].next_sequence if input_id in self.log.writers else 0
        block = self.log.add(batch, input_id=input_id)
        partition, first = block.ranges[0].partition, block.ranges[0].from_offset
        if first == 0:
            self.ledger.topics.observe(self._job, input_id, partition.topic, partition.topic_id, 1)
            self.ledger.positions.ensure_all(self._job, input_id, {partition: 0})
            self.ledger.positions.assign(self._job, input_id, {partition: 0})
        info = BlockInfo(
            lease.receiver_id, lease.epoch, sequence, 0, block.handle, block.ranges, block.records, block.payload_bytes
        )
        self.ledger.blocks.add(lease, info)

    def begin_partition(self, partition: TopicPartition, offset: int, *, input_id: str = "records") -> None:
        """Know of a partition that the stream reads from this offset on."""
        self.ledger.topics.observe(self._job, input_id, partition.topic, partition.topic_id, 1)
        self.ledger.positions.ensure_all(self._job, input_id, {partition: offset})

    def allocate(self) -> int:
        """Allocate the next batch time; the batch time."""
        sealed = self.ledger.streams.get(self.stream.name).sealed_until_ms
        batch_time_ms = sealed + self.stream.batch_interval_ms
        allocate(StreamContext(self.stream, self.ledger), batch_time_ms)
        return batch_time_ms

    def begin(
        self,
        batch_time_ms: int,
        *,
        way: str = "submit",
        force: bool = False,
        outputs: Sequence[str] | None = None,
    ) -> Attempt:
        return self.ledger.attempts.begin(
            self.stream.name, batch_time_ms, holder="test", way=way, lease_ms=30_000, force=force, outputs=outputs
        )

    def run(self, spark: Any, attempt: Attempt, *, stream: Stream | None = None, **options: Any) -> BatchResult:
        """Run the attempt in this session, or in the one that the function ``spark`` opens."""
        open_session = spark if callable(spark) else lambda: spark
        context = StreamContext(stream or self.stream, self.ledger)
        return run_attempt(BatchAttempt(context, attempt, open_session, **options))


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
        return [process for process in family if process.status() != psutil.STATUS_ZOMBIE]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def produce(self, *values: str) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap_servers})
        for value in values:
            producer.produce(self.stream.inputs[0].topics[0], value=value)
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


@pytest.fixture
def cluster(server_folder: Path) -> Iterator[SparkCluster]:
    """A standalone cluster of two workers with two cores each, on loopback.

    It takes applications that have its settings: ``SPARK_CONF_DIR`` names their folder.
    """
    with SparkCluster(server_folder, workers=2, cores=2, memory="1g", secret=uuid.uuid4().hex) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def application_of(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Application]]:
    """Builds an `Application` for a module's tests from the source of its transform, in a folder of code of its own.

    ``{folder!r}`` in the source is the application's folder; ``listener`` is a class there.
    """
    made: list[Application] = []

    def make(source: str, *, listener: str | None = None) -> Application:
        folder = tmp_path_factory.mktemp("application")
        name = f"transform_{uuid.uuid4().hex}"
        (folder / "code").mkdir()
        (folder / "code" / f"{name}.py").write_text(source.format(folder=str(folder)))
        spark = SparkSettings(master="local[3]", py_files=(str(folder / "code"),))
        listeners = () if listener is None else (f"{name}:{listener}",)
        made.append(new_application(kafka, folder, transform=f"{name}:transform", spark=spark, listeners=listeners))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def receiver_application(kafka: str, tmp_path: Path) -> Iterator[Callable[..., Application]]:
    """Builds an `Application` of this test's own; its processes end with the test."""
    made: list[Application] = []

    def make(**fields: Any) -> Application:
        made.append(new_application(kafka, tmp_path, **fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def make_batch_ledger(tmp_path: Path) -> Iterator[Callable[..., BatchLedger]]:
    """Builds a `BatchLedger`; takes the fields of a Stream, with a console output by default."""
    made: list[BatchLedger] = []

    def make(**fields: Any) -> BatchLedger:
        stream = Stream(
            **{
                "name": "clicks",
                "inputs": KafkaInput(bootstrap_servers="localhost:9092", topics="clicks"),
                "outputs": ConsoleOutput(),
                "batch_interval": "10 s",
                "storage": str(tmp_path / "storage"),
                "ledger": f"sqlite:///{tmp_path}/ledger.db",
                **fields,
            }
        )
        made.append(BatchLedger(stream, WrittenLog(tmp_path / "storage" / stream.name, stream.name)))
        return made[-1]

    yield make
    for batch_ledger in made:
        batch_ledger.ledger.close()


@pytest.fixture
def written_log(tmp_path: Path) -> WrittenLog:
    return WrittenLog(tmp_path / "clicks")


@pytest.fixture(scope="session")
def make_records() -> Callable[..., pa.RecordBatch]:
    return records


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A classic session, shared: leave its settings as they were."""
    session = classic_session("headrace tests", master="local[2]", conf={"spark.ui.enabled": "false"})
    session.dataSource.register(WalDataSource)
    yield session
    session.stop()
