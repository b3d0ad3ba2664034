"""A check of a stream against a real Kafka, with its ledger in a real Postgres."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.blocks import ReceiverId
from headrace.blocks import TopicPartition as Partition
from headrace.fsck.findings import Problem, Report
from headrace.fsck.stream_check import check_stream
from headrace.ledger import Ledger
from headrace.ledger.receiving.tables import ReceiverLease
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
        self.ledger.topics.observe(self.job, INPUT, [(self.topic, self.partition.topic_id, 1)])
        self.ledger.positions.ensure_all(self.job, INPUT, {self.partition: 0})
        self.ledger.positions.assign(self.job, INPUT, {self.partition: 0})
        self.lease: ReceiverLease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, ReceiverId("shop", INPUT, 0)), host="here", lease_ms=600_000
        )

    def create(self) -> None:
        self.admin.create_topics([NewTopic(self.topic, 1, 1)])[self.topic].result()

    def topic_id(self) -> str:
        (future,) = self.admin.describe_topics(TopicCollection([self.topic])).values()
        return str(future.result().topic_id)

    def produce(self, records: int = RECORDS, *, transactional: bool = False) -> None:
        settings = {"bootstrap.servers": self.bootstrap}
        if transactional:
            settings["transactional.id"] = self.topic
        producer = Producer(settings)
        if transactional:
            producer.init_transactions(30)
            producer.begin_transaction()
        for number in range(records):
            producer.produce(self.topic, b"%d" % number, partition=0)
        if transactional:
            producer.commit_transaction(30)
        assert producer.flush(30) == 0

    def end(self) -> int:
        """Where Kafka's log ends."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.topic})
        try:
            return int(consumer.get_watermark_offsets(TopicPartition(self.topic, 0), timeout=10)[1])
        finally:
            consumer.close()

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


def test_records_received_or_still_to_come_are_no_finding(rig: Rig) -> None:
    assert rig.found() == []
    rig.receive(0, RECORDS)
    assert rig.found() == []
    rig.produce()
    assert rig.found() == []
    assert rig.check().notes == []


def test_passed_over_records_are_reported_and_markers_are_not(rig: Rig) -> None:
    rig.receive(0, RECORDS)
    rig.produce(3, transactional=True)
    rig.receive(RECORDS, RECORDS + 3)
    # The transaction's marker has an offset and is no record. It is written after the commit has been answered, and no
    # receiver's position is behind it before.
    until(lambda: rig.end() == RECORDS + 4)
    rig.pass_over(RECORDS + 3, RECORDS + 4)
    assert rig.found() == []
    rig.produce(2)
    rig.pass_over(RECORDS + 4, RECORDS + 6)
    assert rig.found() == [(Problem.OFFSETS_MISSING, f"{rig.name} [{RECORDS + 3}, {RECORDS + 6})")]


def test_a_position_beyond_kafkas_end_is_reported(rig: Rig) -> None:
    rig.receive(0, RECORDS + 1)
    assert rig.found() == [(Problem.KAFKA_LOG_CUT, rig.name)]


def test_records_that_kafka_deleted_unreceived_are_reported(rig: Rig) -> None:
    rig.receive(0, 2)
    rig.admin.delete_records([TopicPartition(rig.topic, 0, 5)])[TopicPartition(rig.topic, 0)].result()
    assert rig.found() == [(Problem.KAFKA_RECORDS_GONE, rig.name)]
    rig.pass_over(2, 6)
    # Whether there were records from 2 to 5, nobody can tell; at 5 there is one.
    report = rig.check()
    assert [finding.problem for finding in report.findings] == [Problem.OFFSETS_MISSING]


def test_holes_of_which_kafka_has_nothing_any_more_are_noted(rig: Rig) -> None:
    rig.pass_over(0, 5)
    rig.admin.delete_records([TopicPartition(rig.topic, 0, 5)])[TopicPartition(rig.topic, 0)].result()
    report = rig.check()
    assert report.findings == []
    assert "Kafka no longer has them" in report.notes[0]


def test_a_topic_that_was_created_again_is_reported(rig: Rig) -> None:
    rig.receive(0, 5)
    rig.admin.delete_topics([rig.topic])[rig.topic].result()
    until(lambda: rig.topic not in rig.admin.list_topics(timeout=10).topics)
    assert any("Kafka no longer has topic" in note for note in rig.check().notes)
    rig.create()
    until(lambda: rig.found() == [(Problem.KAFKA_TOPIC_REPLACED, rig.name)])


def test_a_commit_beyond_the_position_is_reported(rig: Rig) -> None:
    rig.receive(0, 5)
    group = rig.stream.group_of(rig.stream.inputs[0])
    consumer = Consumer({"bootstrap.servers": rig.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(rig.topic, 0, 5)], asynchronous=False)
    assert rig.found() == []
    consumer.commit(offsets=[TopicPartition(rig.topic, 0, 6)], asynchronous=False)
    consumer.close()
    assert rig.found() == [(Problem.COMMITTED_TOO_FAR, rig.name)]
