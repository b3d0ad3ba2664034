"""The lag that a receiver reports, by what Kafka has reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.blocks import TopicPartition
from headrace.receiver.block_store import StoreCounts
from headrace.receiver.heartbeat import ReceiverStats
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.lag import Lag


@pytest.fixture
def receiver() -> Any:
    """A receiver whose broker does not answer."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0, "enable.auto.commit": False}
    receiver = KafkaReceiver(settings)
    yield receiver
    receiver.close()


@pytest.mark.parametrize(
    ("lags", "connected", "total", "unknown"),
    [
        ([], None, None, 0),
        ([], True, 0, 0),
        ([None, None], False, None, 2),
        ([5, None], False, 5, 1),
        ([5, 0], True, 5, 0),
    ],
)
def test_the_lag_is_not_0_unless_kafka_has_reported_it(
    receiver: KafkaReceiver, lags: list[int | None], connected: bool | None, total: int | None, unknown: int
) -> None:
    receiver.connected = connected
    found = {TopicPartition("t", "id", number): Lag(records, None) for number, records in enumerate(lags)}
    watch: Any = SimpleNamespace(lags=lambda _: found, unreadable_topics=lambda *_: [])
    pausing: Any = SimpleNamespace(disk=None, pauses=0, paused_seconds=0.0)
    recovery: Any = SimpleNamespace(torn_tails=[], damage=[])
    stats = ReceiverStats(
        receiver, StoreCounts(), watch, pausing=pausing, recovery=recovery, stored_positions=dict, now_ms=lambda: 0
    )
    reported = stats.collect(0.0, (0, 0))
    assert (reported["total_lag"], reported["lag_unknown"]) == (total, unknown)
