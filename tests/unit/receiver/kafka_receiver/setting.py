"""One consumer over a Kafka in memory."""

from __future__ import annotations

from typing import Any

from tests.support.fake_evidence import FakeEvidence

from headrace.blocks import OffsetRange, TopicPartition
from headrace.clock import ManualClock
from headrace.kafka.records import RecordChunk
from headrace.receiver.kafka_errors import OffsetGaps
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.record_source import FetchState, Gap
from headrace.testing.fake_kafka import FakeConsumer, FakeEntry, FakeKafka

CONTROL = FakeEntry(None, kind="control")
DAMAGED = FakeEntry(None, kind="damaged")
GONE = FakeEntry(None, kind="gone")


class Setting:
    def __init__(self, policy: Any = "fail", **options: Any) -> None:
        self.kafka = FakeKafka()
        self.clock = ManualClock(0)
        topic_id = self.kafka.create("a", 2)
        self.p0, self.p1 = TopicPartition("a", topic_id, 0), TopicPartition("a", topic_id, 1)
        self.consumers: list[FakeConsumer] = []
        self.evidence = FakeEvidence(self.kafka)
        self.receiver = KafkaReceiver(
            {},
            on_lost_offsets=policy,
            offset_gaps=OffsetGaps(lambda: self.evidence),
            clock=self.clock,
            consumer_factory=self._consumer,
            **options,
        )

    def _consumer(self, config: dict[str, Any]) -> FakeConsumer:
        self.config = config
        self.consumers.append(FakeConsumer(self.kafka, config))
        return self.consumers[-1]

    def fetch(self) -> list[RecordChunk | Gap]:
        events: list[RecordChunk | Gap] = []
        for _ in range(5):
            events += self.receiver.fetch(0)
        return events

    def ranges(self) -> list[OffsetRange]:
        return [covered for event in self.fetch() if isinstance(event, RecordChunk) for covered in event.ranges]

    def state(self, partition: TopicPartition) -> FetchState:
        return next(status.state for status in self.receiver.status() if status.partition == partition)


def reported(events: list[RecordChunk | Gap]) -> list[tuple[str, int, int]]:
    return [
        ("gap" if isinstance(event, Gap) else "records", covered.from_offset, covered.until_offset)
        for event in events
        for covered in ([event] if isinstance(event, Gap) else event.ranges)
    ]
