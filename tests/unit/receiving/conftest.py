"""A stream, its ledger and a Kafka in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.ledger import Ledger
from headrace.ledger.rows import JobLease
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.testing.fake_kafka import FakeKafka


@pytest.fixture
def fake_kafka() -> FakeKafka:
    return FakeKafka()


@pytest.fixture
def make_stream(tmp_path: Path) -> Callable[..., Stream]:
    def make(*, limits: Limits | None = None, **source: Any) -> Stream:
        source.setdefault("topics", ("flights",))
        return Stream(
            name="air",
            inputs=(KafkaInput(bootstrap_servers="nowhere:9092", **source),),
            outputs=(ConsoleOutput(id="console"),),
            batch_interval="1 s",
            block_interval="20 ms",
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            limits=limits or Limits(),
        )

    return make


@pytest.fixture
def open_ledger() -> Iterator[Callable[[Stream], tuple[Ledger, JobLease]]]:
    """Opens a stream's ledger, registers the stream and acquires its receiver job."""
    opened: list[Ledger] = []

    def make(stream: Stream) -> tuple[Ledger, JobLease]:
        ledger = Ledger.open(stream.ledger)
        opened.append(ledger)
        ledger.streams.register(
            stream.name,
            stream.model_dump_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
        )
        return ledger, ledger.jobs.acquire(stream.name, holder="test", lease_ms=60_000)

    yield make
    for ledger in opened:
        ledger.close()
