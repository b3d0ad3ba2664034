"""A stream with a real log and a real ledger on SQLite, whose clock a test holds, and a receiver to add blocks by."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.batch.allocation import Allocation, allocate
from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.kafka.offsets import Kept
from headrace.kafka.topics import SeenTopic
from headrace.ledger import Ledger
from headrace.ledger.receiving.tables import AddedBlock
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext
from headrace.wal.frame import RECORD_SCHEMA
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

START_MS = 1_700_000_000_000
T1, T2 = START_MS + 10_000, START_MS + 20_000
PARTITION = TopicPartition("clicks", "topic-id", 0)


class Receiving:
    """A stream that receives: `store` writes a block of so many records to log and ledger."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(START_MS)
        self.stream = Stream(
            name="shop",
            inputs=KafkaInput(id="clicks", bootstrap_servers="127.0.0.1:1", topics="clicks"),
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            storage=folder / "storage",
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        self.storage = open_storage(self.stream.storage.url)
        self.ledger = Ledger.open(self.stream.ledger, clock=self.clock)
        self.ledger.streams.register(
            "shop",
            self.stream.to_json(),
            batch_interval_ms=self.stream.batch_interval_ms,
            block_interval_ms=self.stream.block_interval_ms,
        )
        self.job = self.ledger.jobs.acquire("shop", holder="test", lease_ms=3_600_000)
        self.receiver = ReceiverId("shop", "clicks", 0)
        self.new_segment()
        self.ledger.topics.observe(self.job, "clicks", [(PARTITION.topic, PARTITION.topic_id, 1)])
        self.ledger.positions.ensure_all(self.job, "clicks", {PARTITION: 0})
        self.ledger.positions.assign(self.job, "clicks", {PARTITION: 0})
        self.position = 0

    @property
    def context(self) -> StreamContext:
        return self.context_of(self.stream)

    def context_of(self, stream: Stream) -> StreamContext:
        """``stream``: another definition of this stream."""
        return StreamContext(stream, self.ledger, storage=self.storage.below("shop"), clock=self.clock)

    def new_segment(self) -> None:
        """Go on in a new epoch, as a restarted receiver does; the segments before are closed."""
        self.lease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, self.receiver), host="here", lease_ms=3_600_000
        )
        self.writer = WriteAheadLogWriter(
            self.storage,
            "shop/log",
            self.receiver,
            self.lease.epoch,
            clock=self.clock,
            positions=lambda: {PARTITION: self.position},
        )
        self.accepted: int | None = None

    def store(self, records: int, cut_time_ms: int | None = None) -> AddedBlock:
        """``cut_time_ms``: by default now; an earlier one is that of a block that was slow to be stored."""
        offsets = range(self.position, self.position + records)
        columns = {
            "key": [None] * records,
            "value": [b"%d" % offset for offset in offsets],
            "topic": ["clicks"] * records,
            "partition": [0] * records,
            "offset": list(offsets),
            "timestamp": [START_MS] * records,
            "timestampType": [0] * records,
            "headers": [None] * records,
            "incarnation": [1] * records,
        }
        batch = pa.RecordBatch.from_pydict({name: columns[name] for name in RECORD_SCHEMA.names}, RECORD_SCHEMA)
        ranges = (OffsetRange(PARTITION, self.position, self.position + records, records),)
        cut_time_ms = self.clock.now_ms() if cut_time_ms is None else cut_time_ms
        written = self.writer.write(batch, ranges, cut_time_ms=cut_time_ms, last_accepted_sequence=self.accepted)
        self.position += records
        self.accepted = written.sequence
        return self.ledger.blocks.add(
            self.lease,
            BlockInfo(
                receiver=self.receiver,
                epoch=self.lease.epoch,
                sequence=written.sequence,
                cut_time_ms=cut_time_ms,
                handle=written.handle,
                ranges=ranges,
                records=records,
                payload_bytes=written.payload_bytes,
            ),
        )

    def complete(self, batch_time_ms: int) -> None:
        attempt = self.ledger.attempts.begin("shop", batch_time_ms, holder="test", way="connect", lease_ms=60_000)
        self.ledger.attempts.record_output(attempt, "console", {"printed": 1})
        self.ledger.attempts.complete(attempt)

    def segments(self) -> list[str]:
        return self.storage.paths("shop/log")


class FakeOffsets:
    """A topic "clicks" in memory: ``times[p][o]`` is the timestamp at offset o of partition p, None where compaction
    left a hole; offsets below ``low[p]`` are gone."""

    def __init__(self, times: Mapping[int, list[int | None]], topic_id: str = "id-1") -> None:
        self.times = {partition: list(timestamps) for partition, timestamps in times.items()}
        self.low = dict.fromkeys(self.times, 0)
        self.topic_id = topic_id
        self.missing: list[str] = []

    def close(self) -> None:
        self.closed = True

    def topics(self) -> tuple[list[SeenTopic], list[str]]:
        seen = [] if self.missing else [SeenTopic("clicks", self.topic_id, len(self.times))]
        return seen, self.missing

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        return dict.fromkeys(topics, self.topic_id)

    def first_at(self, untils: Mapping[TopicPartition, int], timestamp_ms: int) -> Mapping[TopicPartition, int]:
        return {
            partition: next((at for at, time in self._records(partition, until) if time >= timestamp_ms), until)
            for partition, until in untils.items()
        }

    def kept(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Kept | None]:
        kept_offsets = {}
        for partition in partitions:
            low, end = self.low[partition.partition], len(self.times[partition.partition])
            kept_offsets[partition] = Kept(low, end, self.timestamp_of_first(partition, low, end))
        return kept_offsets

    def timestamp_of_first(self, partition: TopicPartition, begin: int, until: int) -> int | None:
        return next((time for at, time in self._records(partition, until) if at >= begin), None)

    def _records(self, partition: TopicPartition, until: int) -> Iterator[tuple[int, int]]:
        times = self.times[partition.partition]
        for at in range(self.low[partition.partition], until):
            if (time := times[at]) is not None:
                yield at, time


def take(receiving: Receiving, batch_time_ms: int) -> Allocation:
    return allocate(receiving.context, batch_time_ms)


@pytest.fixture
def receiving(tmp_path: Path) -> Iterator[Receiving]:
    source = Receiving(tmp_path)
    yield source
    source.ledger.close()
