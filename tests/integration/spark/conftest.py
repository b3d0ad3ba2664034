"""Real Spark for the tests, and logs and manifests written by the real writer without Kafka."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.integration.conftest import new_server_folder
from tests.integration.spark.application import Application, new_application

from headrace.batch.allocation import allocate
from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.connections import FILE_VARIABLE, variable_name
from headrace.devstack.registry import RegistryServer
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.ledger.receiving.tables import ReceiverLease
from headrace.spark.attempts.attempt import BatchResult, run_attempt
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.records.decoding import RecordDecoding
from headrace.spark.records.wal_source import LogBlocks
from headrace.spark.sessions import classic_session
from headrace.spark.versions import current_versions
from headrace.stream import ConsoleOutput, KafkaInput, SparkSettings, Stream
from headrace.stream_context import StreamContext
from headrace.wal.frame import RECORD_SCHEMA
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

BATCH_TIME_MS = 1_700_000_010_000
# A comparison of two transforms over five records took half the CPU that it takes with 8 partitions and adaptive
# execution.
SMALL_DATA = {"spark.sql.shuffle.partitions": "2", "spark.sql.adaptive.enabled": "false"}
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
        self.job = self.ledger.jobs.acquire(stream.name, holder="test", lease_ms=600_000, versions=current_versions())
        self._leases: dict[str, ReceiverLease] = {}

    def add(self, batch: pa.RecordBatch, *, input_id: str = "records") -> None:
        """Write a block and take it into the next open batch."""
        lease = self._leases.get(input_id)
        if lease is None:
            receiver = ReceiverId(self.stream.name, input_id, 0)
            lease = self.ledger.receivers.register(
                self.ledger.receivers.schedule(self.job, receiver), host="test", lease_ms=600_000
            )
            self._leases[input_id] = lease
        sequence = self.log.writers[input_id].next_sequence if input_id in self.log.writers else 0
        block = self.log.add(batch, input_id=input_id)
        partition, first = block.ranges[0].partition, block.ranges[0].from_offset
        if first == 0:
            self.ledger.topics.observe(self.job, input_id, [(partition.topic, partition.topic_id, 1)])
            self.ledger.positions.ensure_all(self.job, input_id, {partition: 0})
            self.ledger.positions.assign(self.job, input_id, {partition: 0})
        info = BlockInfo(
            lease.receiver_id, lease.epoch, sequence, 0, block.handle, block.ranges, block.records, block.payload_bytes
        )
        self.ledger.blocks.add(lease, info)

    def begin_partition(self, partition: TopicPartition, offset: int, *, input_id: str = "records") -> None:
        """Know of a partition that the stream reads from this offset on."""
        self.ledger.topics.observe(self.job, input_id, [(partition.topic, partition.topic_id, 1)])
        self.ledger.positions.ensure_all(self.job, input_id, {partition: offset})

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


def read_log(
    spark: SparkSession,
    *manifests: str,
    input_id: str = "records",
    tasks: int = 2,
    decoding: RecordDecoding | None = None,
) -> DataFrame:
    """The records of these batches in the log, as a batch reads them."""
    return LogBlocks.of(map(Manifest.load, manifests), input_id).frame(spark, tasks, decoding)


@pytest.fixture(scope="session")
def make_records() -> Callable[..., pa.RecordBatch]:
    return records


@pytest.fixture(scope="session")
def connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Defines a connection for this process and for Spark's workers; returns its new id."""
    path, defined = tmp_path_factory.mktemp("connections") / "connections.json", {}

    def define(**fields: Any) -> str:
        connection_id = f"connection_{uuid.uuid4().hex[:8]}"
        defined[variable_name(connection_id)] = json.dumps(fields)
        path.write_text(json.dumps(defined))
        return connection_id

    # Before the session: its workers have the environment that its JVM began with.
    os.environ[FILE_VARIABLE] = str(path)
    yield define
    del os.environ[FILE_VARIABLE]


@pytest.fixture(scope="session")
def spark(connections: Callable[..., str]) -> Iterator[SparkSession]:
    """A classic session, shared: leave its settings as they were."""
    session = classic_session("headrace tests", master="local[2]", conf={"spark.ui.enabled": "false"})
    yield session
    session.stop()


@pytest.fixture(scope="module")
def small_data(spark: SparkSession) -> Iterator[None]:
    """The shared session with settings for a few rows, for a module whose tests are not about Spark's own choices."""
    before = {name: str(spark.conf.get(name)) for name in SMALL_DATA}
    for name, value in SMALL_DATA.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture
def own_registry() -> Iterator[RegistryServer]:
    """A registry that the test may stop and set up again."""
    with new_server_folder() as folder, RegistryServer(folder / "first") as server:
        yield server
