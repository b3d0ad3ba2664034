"""A check of a stream against a real Kafka, with its ledger in a real Postgres."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.blocks import ReceiverId
from headrace.blocks import TopicPartition as Partition
from headrace.checking.findings import Problem, Report
from headrace.checking.stream_check import check_stream
from headrace.ledger import Ledger
from headrace.ledger.rows import ReceiverLease
from headrace.stream import ConsoleOutput, KafkaInput, Stream

INPUT = "clicks"
RECORDS = 10


class Rig:
    """A topic of one partition, and a stream whose position a test moves."""

    def __init__(self, folder: Path, bootstrap: str, ledger_url: str) -> None:
        self.bootstrap = bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        self.topic = f"fsck-{uuid.uuid4().hex[:8]}"
        self.stream = Stream(
            name="shop",
            inputs=KafkaInput(id=INPUT, bootstrap_servers=bootstrap, topics=self.topic),
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            storage=folder,
            ledger=ledger_url,
        )
        self.create()
        self.ledger = Ledger.open(ledger_url)
        self.ledger.streams.register("shop", self.stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        self.job = self.ledger.jobs.acquire("shop", holder="test", lease_ms=600_000)
        self.partition = Partition(self.topic, self.topic_id(), 0)
        self.ledger.topics.observe(self.job, INPUT, self.topic, self.partition.topic_id, 1)
        self.ledger.positions.ensure(self.job, INPUT, self.partition, 0)
        self.ledger.positions.assign(self.job, INPUT, {self.partition: 0})
        self.lease: ReceiverLease = self.ledger.receivers.register(
            self.job, ReceiverId("shop", INPUT, 0), host="here", lease_ms=600_000
        )

    def create(self) -> None:
        self.admin.create_topics([NewTopic(self.topic, 1, 1)])[self.topic].result()

    def topic_id(self) -> str:
        (future,) = self.admin.describe_topics(TopicCollection([self.topic])).values()
        return str(future.result().topic_id)

    def produce(self, records: int = RECORDS) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for number in range(records):
            producer.produce(self.topic, b"%d" % number, partition=0)
        assert producer.flush(30) == 0

    def receive(self, start: int, until: int) -> None:
        """What a receiver gives up as lost: offsets that are accounted for without a log."""
        self.ledger.positions.advance(self.lease, self.partition, start, until, gap="for the test")

    def pass_over(self, start: int, until: int) -> None:
        self.ledger.positions.advance(self.lease, self.partition, start, until)

    def check(self) -> Report:
        return check_stream(self.ledger, "shop")

    def found(self) -> list[tuple[Problem, str]]:
        report = self.check()
        assert report.unchecked == []
        return [(finding.problem, finding.subject) for finding in report.findings]

    @property
    def name(self) -> str:
        return f"{INPUT}/{self.topic}-0"


@pytest.fixture
def rig(tmp_path: Path, kafka: str, postgres: str) -> Iterator[Rig]:
    rig = Rig(tmp_path, kafka, postgres)
    rig.produce()
    yield rig
    rig.ledger.close()


def until(holds: Callable[[], bool]) -> None:
    """Kafka tells of some changes a moment later."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_holes_of_which_kafka_has_nothing_any_more_are_noted(rig: Rig) -> None:
    rig.pass_over(0, 5)
    rig.admin.delete_records([TopicPartition(rig.topic, 0, 5)])[TopicPartition(rig.topic, 0)].result()
    report = rig.check()
    assert report.findings == []
    assert "Kafka no longer has them" in report.notes[0]


def test_a_topic_that_was_created_again_is_told(rig: Rig) -> None:
    rig.receive(0, 5)
    rig.admin.delete_topics([rig.topic])[rig.topic].result()
    until(lambda: rig.topic not in rig.admin.list_topics(timeout=10).topics)
    assert any("is gone from Kafka" in note for note in rig.check().notes)
    rig.create()
    until(lambda: rig.found() == [(Problem.KAFKA_TOPIC_REPLACED, rig.name)])
