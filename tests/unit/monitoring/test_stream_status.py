"""A stream's numbers, and when it does not look well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.allocation import allocate
from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.monitoring.stream_status import StreamStatus, last_error, readable_seconds, stream_status
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext
from headrace.testing.records import TOPIC_ID

T = 1_700_000_000_000


class Shop:
    def __init__(self, stream: Stream, ledger: Ledger, clock: ManualClock) -> None:
        self.stream, self.ledger, self.clock = stream, ledger, clock
        self.job = ledger.jobs.acquire("shop", holder="test", lease_ms=3_600_000)
        self.receiver = ReceiverId("shop", "records", 0)
        self.lease = ledger.receivers.register(self.job, self.receiver, host="h", lease_ms=3_600_000)
        self.partition = TopicPartition("clicks", TOPIC_ID, 0)
        ledger.topics.observe(self.job, "records", "clicks", TOPIC_ID, 1)
        ledger.positions.ensure_all(self.job, "records", {self.partition: 0})
        ledger.positions.assign(self.job, "records", {self.partition: 0})
        ledger.jobs.update(self.job, state="running")
        self.beat()

    def beat(self, paused: str | None = None, **stats: Any) -> None:
        numbers = {"total_lag": 0, "lag_unknown": 0, "lag_seconds": 0.0, "rate": 12.5, **stats}
        self.ledger.receivers.heartbeat(self.lease, sealed_through_ms=T, stats=numbers, paused_reason=paused)

    def store(self) -> int:
        ranges, handle = (OffsetRange(self.partition, 0, 1, 1),), BlockHandle("0.wal", 0, 1)
        block = BlockInfo(self.receiver, self.lease.epoch, 0, self.clock.now_ms(), handle, ranges, 1, 1)
        return self.ledger.blocks.add(self.lease, block).batch_time_ms

    def status(self) -> StreamStatus:
        return stream_status(self.ledger, self.ledger.streams.get("shop"))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="kafka:9092", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    clock = ManualClock(T)
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        yield Shop(stream, ledger, clock)


def test_a_stream_that_is_well(shop: Shop) -> None:
    found = shop.status()
    assert (found.health, found.lag, found.lag_seconds, found.rate) == ("well", 0, 0.0, 12.5)
    assert found.oldest_unfinished is None
    shop.ledger.streams.set_desired_state("shop", "stopped")
    assert shop.status().health == "stopped"


def test_a_lag_of_which_a_part_is_unknown_is_not_0_seconds(shop: Shop) -> None:
    shop.beat(total_lag=7, lag_unknown=1, lag_seconds=None)
    found = shop.status()
    assert (found.lag, found.lag_unknown, found.lag_seconds) == (7, 1, None)


def test_what_is_behind_or_paused_or_not_received_does_not_look_well(shop: Shop) -> None:
    shop.beat(paused="the disk is full", total_lag=10_000, lag_seconds=150.0)
    assert shop.status().health == "paused, 2 min 30 s behind Kafka"
    health = {"records": {"asked_ms": T, "error": "Kafka at kafka:9092 cannot be asked", "topics": {}}}
    shop.ledger.jobs.renew(shop.job, attributes={"inputs": health, "troubles": ["rogue is in the group"]})
    shop.beat()
    found = shop.status()
    assert found.health == "not received"
    assert "kafka:9092" in found.troubles[0]
    assert found.troubles[1] == "rogue is in the group"


def test_a_batch_time_that_nobody_runs_makes_the_stream_late(shop: Shop) -> None:
    at_ms = shop.store()
    assert shop.status().oldest_unfinished is None, "its interval is not over"
    shop.clock.advance(40_000)
    found = shop.status()
    assert found.health == "well"
    assert found.oldest_unfinished is not None
    assert (found.oldest_unfinished.batch_time_ms, found.oldest_unfinished.state) == (at_ms, "not allocated")
    shop.clock.advance(180_000)
    assert shop.status().health == "late by 3 min 30 s"


def test_a_batch_that_fails_is_the_oldest_with_its_error_also_while_it_is_tried_again(shop: Shop) -> None:
    at_ms = shop.store()
    shop.clock.advance(15_000)
    allocate(StreamContext(shop.stream, shop.ledger), at_ms)
    begin = {"holder": "test", "way": "connect", "lease_ms": 60_000}
    attempt = shop.ledger.attempts.begin("shop", at_ms, **begin)  # type: ignore[arg-type]
    shop.ledger.attempts.fail(attempt, "the index is read-only")
    shop.ledger.attempts.begin("shop", at_ms, **begin)  # type: ignore[arg-type]
    batch = shop.ledger.batches.get("shop", at_ms)
    assert (batch.state.value, batch.error) == ("running", None)
    assert last_error(shop.ledger, batch) == "the index is read-only"
    found = shop.status()
    assert found.health == "failing"
    assert found.oldest_unfinished is not None
    assert found.oldest_unfinished.error == "the index is read-only"
    attempts = shop.ledger.attempts.of_batch("shop", at_ms)
    shop.ledger.attempts.renew(attempts[-1].claim(), attributes={"warning": "Elasticsearch does not answer"})
    assert last_error(shop.ledger, batch) == "Elasticsearch does not answer"


def test_the_delays_are_of_the_last_batch(shop: Shop) -> None:
    shop.clock.advance(10_500)
    at_ms = T + 10_000
    allocate(StreamContext(shop.stream, shop.ledger), at_ms)
    attempt = shop.ledger.attempts.begin("shop", at_ms, holder="test", way="connect", lease_ms=60_000)
    shop.clock.advance(2_000)
    shop.ledger.attempts.record_output(attempt, "console", {})
    shop.ledger.attempts.complete(attempt)
    found = shop.status()
    assert (found.scheduling_delay_seconds, found.total_delay_seconds) == (0.5, 2.5)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2 s"), (59, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (7_300, "2 h 1 min")]
)
def test_lengths_of_time_are_readable(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text
