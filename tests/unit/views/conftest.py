"""A stream with one receiver, whose ledger a test fills by hand, and its summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.records import TOPIC_ID

from headrace.batch.allocation import allocate
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream_context import StreamContext
from headrace.views.streams import StreamSummary, default_place, summarize

T = 1_700_000_000_000
INTERVAL_MS = 10_000
_YEAR_MS = 365 * 86_400_000


class Shop:
    def __init__(self, stream: Stream, ledger: Ledger, clock: ManualClock) -> None:
        self.stream, self.ledger, self.clock = stream, ledger, clock
        self.job = ledger.jobs.acquire("shop", holder="test", lease_ms=_YEAR_MS)
        self.receiver = ReceiverId("shop", "records", 0)
        self.lease = ledger.receivers.register(
            ledger.receivers.schedule(self.job, self.receiver), host="h", lease_ms=_YEAR_MS
        )
        self.partition = TopicPartition("clicks", TOPIC_ID, 0)
        ledger.topics.observe(self.job, "records", [("clicks", TOPIC_ID, 1)])
        ledger.positions.ensure_all(self.job, "records", {self.partition: 0})
        ledger.positions.assign(self.job, "records", {self.partition: 0})
        ledger.jobs.update(self.job, state="running")
        self.beat()

    def beat(self, paused: str | None = None, **stats: Any) -> None:
        numbers = {"total_lag": 0, "lag_unknown": 0, "lag_seconds": 0.0, "rate": 12.5, **stats}
        self.ledger.receivers.heartbeat(self.lease, sealed_through_ms=T, stats=numbers, paused_reason=paused)

    def store(self, number: int = 0) -> int:
        """Store a block of one record; ``number`` is its sequence number and the record's offset."""
        ranges, handle = (OffsetRange(self.partition, number, number + 1, 1),), BlockHandle("0.wal", number, 1)
        block = BlockInfo(self.receiver, self.lease.epoch, number, self.clock.now_ms(), handle, ranges, 1, 1)
        return self.ledger.blocks.add(self.lease, block).batch_time_ms

    def begin(self, batch_time_ms: int, *, force: bool = False, stream: str = "shop") -> Attempt:
        """Begin an attempt, after registration and allocation if they are missing."""
        of = self.stream.model_copy(update={"name": stream})
        self.ledger.streams.register(stream, of.to_json(), batch_interval_ms=INTERVAL_MS, block_interval_ms=200)
        allocate(StreamContext(of, self.ledger), batch_time_ms)
        return self.ledger.attempts.begin(
            stream, batch_time_ms, holder="test", way="connect", lease_ms=_YEAR_MS, force=force
        )

    def complete(self, attempt: Attempt, **counts: int) -> None:
        self.ledger.attempts.record_output(attempt, "console", counts)
        self.ledger.attempts.complete(attempt)

    def latest(self) -> int:
        """The newest batch time that has passed."""
        return self.clock.now_ms() // INTERVAL_MS * INTERVAL_MS

    def summary(self) -> StreamSummary:
        return summarize(self.ledger, self.ledger.streams.get("shop"), default_place("shop", "ledger"), {})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="kafka:9092", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        limits=Limits(max_concurrent_batches=2),
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    clock = ManualClock(T)
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=INTERVAL_MS, block_interval_ms=200)
        yield Shop(stream, ledger, clock)
