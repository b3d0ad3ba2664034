"""A stream over the real Kafka, its log and its ledger on this machine."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from tests.integration.receiver.launchers import ProcessLauncher, ThreadLauncher
from tests.integration.receiver.secure_kafka import PASSWORD, SecureKafka

from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RecordedRange, in_order, joined
from headrace.ledger import Ledger
from headrace.receiver.tracker import ReceiverTracker, TrackerReport
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream_context import StreamContext
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage


class Rig:
    """A stream with its tracker; the tests produce, wait for positions and read the log back."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self.folder, self.bootstrap = folder, bootstrap
        self.prefix = f"t{uuid.uuid4().hex[:8]}"
        self.topic = f"{self.prefix}-flights"
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        self.launcher: Any = ThreadLauncher()
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        self.report: TrackerReport | None = None
        self.ledger: Ledger

    def create(self, topic: str | None = None, partitions: int = 2, **settings: str) -> None:
        new = NewTopic(topic or self.topic, partitions, 1, config={k.replace("_", "."): v for k, v in settings.items()})
        self.admin.create_topics([new])[topic or self.topic].result()

    def grow(self, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(self.topic, partitions)])[self.topic].result()

    def configure(self, **settings: str) -> None:
        """Change settings of the topic."""
        entries = [
            ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result()

    def first_offset(self, partition: int) -> int:
        """The first offset that Kafka has of the partition."""
        return self._offset(partition, OffsetSpec.earliest())

    def end_offset(self, partition: int) -> int:
        """The offset after the last one that Kafka has of the partition, with the control records of transactions."""
        return self._offset(partition, OffsetSpec.latest())

    def _offset(self, partition: int, spec: OffsetSpec) -> int:
        (future,) = self.admin.list_offsets({TopicPartition(self.topic, partition): spec}).values()
        try:
            return int(future.result().offset)
        except KafkaException as error:
            # Other tests restart the broker; the client learns the leader's new epoch from this answer.
            if error.args[0].code() == KafkaError.FENCED_LEADER_EPOCH:
                return -1
            raise

    def produce(
        self,
        records: int,
        *,
        topic: str | None = None,
        partition: int = 0,
        tag: str = "r",
        settings: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """``settings`` are the producer's, ``fields`` each record's."""
        given = {"linger.ms": 5, "message.max.bytes": 2_000_000, **(settings or {})}
        producer = Producer({"bootstrap.servers": self.bootstrap, **given})
        for number in range(records):
            producer.produce(topic or self.topic, f"{tag}-{number}".encode(), partition=partition, **fields)
            producer.poll(0)
        assert producer.flush(30) == 0

    def define(
        self,
        *,
        receivers: int = 1,
        batch_by: Literal["arrival", "timestamp"] = "arrival",
        limits: Limits | None = None,
        **source: Any,
    ) -> Stream:
        source.setdefault("topics", None if "topic_pattern" in source else (self.topic,))
        source = {name: value for name, value in source.items() if value is not None}
        return Stream(
            name="air",
            inputs=(
                KafkaInput(
                    bootstrap_servers=self.bootstrap, receivers=receivers, group=f"{self.prefix}-group", **source
                ),
            ),
            outputs=(ConsoleOutput(id="console"),),
            batch_interval="1 s",
            batch_by=batch_by,
            allowed_lateness="2 s",
            block_interval="100 ms",
            limits=limits or Limits(),
            storage=str(self.folder / "storage"),
            ledger=f"sqlite:///{self.folder}/ledger.db",
        )

    def begin(self, stream: Stream, **options: Any) -> None:
        self.stream = stream
        self.ledger = Ledger.open(stream.ledger)
        self.ledger.streams.register(
            "air",
            stream.model_dump_json(),
            batch_interval_ms=1_000,
            block_interval_ms=stream.block_interval_ms,
            batch_by=stream.batch_by,
            allowed_lateness_ms=stream.allowed_lateness_ms,
        )
        self.job = self.ledger.jobs.acquire("air", holder=uuid.uuid4().hex, lease_ms=60_000)
        options = {"receiver_lease_ms": 5_000, "restart_seconds": 0.5, "metadata_seconds": 0.5, **options}
        tracker = ReceiverTracker(StreamContext(stream, self.ledger), self.launcher, self.job, **options)
        self.stop = threading.Event()
        self.report = None

        def run() -> None:
            self.report = tracker.run(self.stop)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self) -> TrackerReport:
        assert self.thread is not None
        self.stop.set()
        self.thread.join(90)
        self.thread = None
        assert self.report is not None
        self.ledger.jobs.release(self.job)
        return self.report

    def positions(self) -> dict[tuple[str, int], int]:
        return {
            (row.partition.topic, row.partition.partition): row.next_offset
            for row in self.ledger.positions.all("air")
            if row.state != "ended"
        }

    def await_positions(self, wanted: dict[tuple[str, int], int], seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while self.positions() != wanted:
            assert time.monotonic() < until, f"{self.positions()} is not {wanted}"
            time.sleep(0.05)

    def eventually(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "did not happen in time"
            time.sleep(0.05)

    def rows(self) -> list[dict[str, Any]]:
        """All records of accepted blocks, in the order of blocks."""
        log = open_storage(self.stream.folder_url).below("log")
        blocks = [
            block
            for each in self.ledger.blocks.unclaimed("air", limit=100_000)
            for block in self.ledger.allocations.blocks_of("air", each.batch_time_ms)
        ]
        return [row for block in blocks for row in read_block(log, block.info.handle)[1].to_pylist()]

    def read_again(self) -> int:
        """Read the records of all accepted blocks again from Kafka; returns their number."""
        ranges = [
            RecordedRange(each.partition, each.from_offset, each.until_offset, each.records, each.leader_epoch)
            for unclaimed in self.ledger.blocks.unclaimed("air", limit=100_000)
            for block in self.ledger.allocations.blocks_of("air", unclaimed.batch_time_ms)
            for each in block.info.ranges
        ]
        with KafkaRangeReader(RangeClients.of(self.stream.inputs[0])) as reader:
            return sum(batch.num_rows for batch in reader.read(joined(in_order(ranges))))

    def offsets(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for row in self.rows():
            found.setdefault((row["topic"], row["partition"]), []).append(row["offset"])
        return found

    def timestamps(self) -> list[tuple[int, int]]:
        """Offset and timestamp in ms of all records of accepted blocks, also where Python has no such time."""
        log = open_storage(self.stream.folder_url).below("log")
        found = []
        for each in self.ledger.blocks.unclaimed("air", limit=100_000):
            for block in self.ledger.allocations.blocks_of("air", each.batch_time_ms):
                batch = read_block(log, block.info.handle)[1]
                milliseconds = batch.column("timestamp").cast("int64").to_pylist()
                found += list(zip(batch.column("offset").to_pylist(), milliseconds, strict=True))
        return found

    def health(self) -> dict[str, Any]:
        """Whether the tracker could ask Kafka about the input."""
        job = self.ledger.jobs.current("air")
        assert job is not None
        return dict(job.attributes["inputs"]["records"])

    def stats(self) -> dict[str, Any]:
        rows = self.ledger.receivers.all("air")
        return rows[0].stats if rows else {}


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    made: list[Rig] = []

    def make(bootstrap: str) -> Rig:
        made.append(Rig(tmp_path, bootstrap))
        return made[-1]

    yield make
    for rig in made:
        if rig.thread is not None:
            rig.end()


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    kafka = SecureKafka(tmp_path_factory.mktemp("secure"))
    with kafka.server:
        kafka.set_password(PASSWORD)
        yield kafka
    kafka.tokens.close()


@pytest.fixture
def rig(make_rig: Callable[[str], Rig], kafka: str) -> Rig:
    return make_rig(kafka)


@pytest.fixture
def killable() -> ProcessLauncher:
    return ProcessLauncher()
