"""How far a receiver is behind, and what it says of partitions about which Kafka does not answer."""

from __future__ import annotations

import pytest

from headrace.blocks import TopicPartition
from headrace.clock import ManualClock
from headrace.receiver.lag import Lag, LagWatch
from headrace.receiver.record_source import FetchState, PartitionStatus
from headrace.testing.fake_kafka import FakeEndOffsets, FakeKafka

T = 1_700_000_000_000
P = TopicPartition("flights", "id", 0)


class Watched:
    def __init__(self) -> None:
        self.kafka, self.clock = FakeKafka(), ManualClock(T)
        self.kafka.create("flights", 1)
        self.ends = FakeEndOffsets(self.kafka)
        self.watch = LagWatch(self.ends, lambda: [P], self.clock.now_ms, self.clock)

    def ask(self) -> None:
        """A question and its answer; then the next one is due."""
        self.watch.poll()
        self.watch.poll()
        self.clock.advance(2_000)

    def lag(self, position: int) -> Lag:
        return self.watch.lags({P: position})[P]

    def unreadable_topics(
        self, position: int, state: FetchState = FetchState.FETCHING, error: str | None = None
    ) -> list[dict]:
        lags = self.watch.lags({P: position})
        return self.watch.unreadable_topics(lags, [PartitionStatus(P, position, state, error)], None)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nothing_is_known_before_the_first_answer(watched: Watched) -> None:
    assert watched.lag(0) == Lag(None, None)
    assert watched.unreadable_topics(0) == []


def test_the_lag_is_what_is_not_stored_and_says_since_when(watched: Watched) -> None:
    watched.kafka.produce("flights", 0, b"a", b"b", b"c")
    watched.ask()
    assert watched.lag(1) == Lag(2, None), "it was never seen to be up to date"
    assert watched.lag(3) == Lag(0, T)
    watched.kafka.produce("flights", 0, b"d")
    watched.ask()
    assert watched.lag(3) == Lag(1, T)
    watched.ask()
    assert watched.lag(4) == Lag(0, T + 4_000)


def test_a_topic_that_may_not_be_described_has_no_lag_of_0(watched: Watched) -> None:
    watched.ask()
    assert watched.lag(0).records == 0
    watched.ends.refused.add("flights")
    watched.ask()
    watched.ask()
    assert watched.lag(0).records is None
    assert watched.unreadable_topics(0) == [
        {
            "topic": "flights",
            "asked_ms": T,
            "error": "partition 0 cannot be asked about (TOPIC_AUTHORIZATION_FAILED: from the fake)",
        }
    ]
    watched.ends.refused.clear()
    watched.ask()
    assert watched.unreadable_topics(0) == []


def test_a_partition_that_cannot_be_read_is_one_as_long_as_there_is_something_to_read(watched: Watched) -> None:
    watched.ask()
    assert watched.unreadable_topics(0, error="no access") == []
    watched.kafka.produce("flights", 0, b"a")
    watched.ask()
    assert watched.unreadable_topics(0, error="no access") == [
        {"topic": "flights", "asked_ms": T + 4_000, "error": "partition 0 cannot be read (no access)"}
    ]
    watched.clock.advance(10_000)
    assert watched.unreadable_topics(0, error="no access")[0]["asked_ms"] == T + 4_000
    assert watched.unreadable_topics(1) == []
    assert watched.unreadable_topics(0, FetchState.FAILED, "gone") == [], "that is its state in the ledger"
