"""What Kafka says against what the ledger says, asked of librdkafka's own mock broker by real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from headrace.fsck.coverage import Hole, check_coverage
from headrace.fsck.findings import Problem
from headrace.fsck.kafka import observe_kafka
from headrace.kafka.offsets import OffsetQuestions
from headrace.stream import KafkaInput

from .conftest import INPUT, STREAM, Shop

CLICKS_0, CLICKS_1 = "clicks/clicks-0", "clicks/clicks-1"


class Broker:
    """A broker in this process, with a topic of ten records in each of two partitions."""

    def __init__(self) -> None:
        self._producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
        (broker,) = self._producer.list_topics(timeout=30).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"
        self.produce(10)

    def produce(self, records: int) -> None:
        for _ in range(records):
            for partition in (0, 1):
                self._producer.produce("clicks", b"{}", partition=partition)
        assert self._producer.flush(30) == 0

    def commit(self, group: str, offset: int) -> None:
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": group, "log_level": 0})
        consumer.commit(offsets=[TopicPartition("clicks", 0, offset)], asynchronous=False)
        consumer.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    yield Broker()


@pytest.fixture
def read(make_shop: Callable[..., Shop], broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A stream that reads the broker's topic, and has received nothing of it yet."""
    # The mock broker reports no ids of topics.
    monkeypatch.setattr(OffsetQuestions, "topic_ids", lambda _, topics: dict.fromkeys(topics, "id-1"))
    source = KafkaInput(id=INPUT, bootstrap_servers=broker.servers, topics="clicks", group=f"group-{id(make_shop)}")
    return make_shop(inputs=source)


def problems(shop: Shop) -> list[tuple[Problem, str]]:
    report = shop.check(kafka=True)
    assert report.unchecked == []
    return [(finding.problem, finding.subject) for finding in report.findings]


def test_received_records_and_those_to_come_are_no_finding(read: Shop) -> None:
    assert problems(read) == []
    read.store({0: 10, 1: 4})
    assert problems(read) == []


def test_a_position_beyond_kafkas_end_is_reported(read: Shop) -> None:
    read.store({0: 11, 1: 10})
    assert problems(read) == [(Problem.KAFKA_LOG_CUT, CLICKS_0)]


def test_a_commit_beyond_the_position_is_reported(read: Shop, broker: Broker) -> None:
    read.store({0: 5})
    group = read.stream.inputs[0].group or ""
    broker.commit(group, 5)
    assert problems(read) == []
    broker.commit(group, 6)
    assert problems(read) == [(Problem.COMMITTED_TOO_FAR, CLICKS_0)]


def test_records_that_were_passed_over_are_reported(read: Shop) -> None:
    read.store({0: 3})
    read.advance(0, 2)
    read.store({0: 3})
    assert problems(read) == [(Problem.OFFSETS_MISSING, f"{CLICKS_0} [3, 5)")]


def test_another_topic_of_the_name_is_reported(read: Shop) -> None:
    read.sql("UPDATE topics SET topic_id = 'another'")
    read.sql("UPDATE positions SET topic_id = 'another'")
    assert problems(read) == [(Problem.KAFKA_TOPIC_REPLACED, CLICKS_0), (Problem.KAFKA_TOPIC_REPLACED, CLICKS_1)]


def test_a_topic_that_is_gone_is_noted_and_so_are_its_holes(read: Shop) -> None:
    read.advance(0, 2)
    snapshot = read.ledger.snapshots.take(STREAM)
    (hole,) = check_coverage(snapshot)[1]
    source = read.stream.inputs[0]
    gone = source.model_copy(update={"id": "other"})
    seen = observe_kafka(read.stream.model_copy(update={"inputs": (gone,)}), snapshot, [hole])
    assert isinstance(hole, Hole)
    assert "no longer in the stream's definition" in seen.notes[0]
    assert list(seen.judge(snapshot)) == []
