"""Real Spark for the tests, and logs and manifests written by the real writer without Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.batching.manifest import Manifest, ManifestBlock
from headrace.blocks import OffsetRange, ReceiverId, TopicPartition
from headrace.spark.sessions import classic_session
from headrace.spark.wal_source import WalDataSource
from headrace.wal.payload import RECORD_SCHEMA
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

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
        pa.array([1] * count, pa.int32()),
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
        partition = TopicPartition(batch.column("topic")[0].as_py(), "topic-id", batch.column("partition")[0].as_py())
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
