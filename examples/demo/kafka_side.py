"""Reads what Kafka holds, with a plain consumer that is independent of headrace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.demo.errors import DemoError
from examples.demo.proof import Place

from headrace.clock import Clock, SystemClock

if TYPE_CHECKING:
    from confluent_kafka import Consumer

_FETCH = 10_000
# Enough for loopback, and for a network while a person waits.
_TIMEOUT_SECONDS = 60.0
_CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class KafkaRecords:
    """A topic's records by place; ``held`` is their number according to the offsets."""

    held: int
    values: dict[Place, bytes | None]


def offsets(bootstrap_servers: str, topic: str) -> dict[int, tuple[int, int]]:
    """First and end offset by partition."""
    from confluent_kafka import Consumer

    consumer = Consumer(_settings(bootstrap_servers))
    try:
        return _watermarks(consumer, topic)
    finally:
        consumer.close()


def read_topic(bootstrap_servers: str, topic: str, *, clock: Clock | None = None) -> KafkaRecords:
    """Read the whole topic, up to the end offsets as they are now.

    Raises:
        DemoError: the end was not reached, or a record came twice.
    """
    from confluent_kafka import Consumer, TopicPartition

    clock = clock or SystemClock()
    consumer = Consumer(_settings(bootstrap_servers))
    try:
        ends = _watermarks(consumer, topic)
        values: dict[Place, bytes | None] = {}
        open_ends = {partition: end for partition, (first, end) in ends.items() if end > first}
        consumer.assign([TopicPartition(topic, partition, first) for partition, (first, _) in ends.items()])
        deadline = clock.monotonic() + _TIMEOUT_SECONDS
        while open_ends:
            for message in consumer.consume(_FETCH, 1.0):
                if (error := message.error()) is not None:
                    raise DemoError(f"Kafka cannot be read again: {error}.")
                partition, offset = message.partition(), message.offset()
                if partition is None or offset is None:  # only messages with errors have none
                    continue
                place = Place(topic, partition, offset)
                if place in values:
                    raise DemoError(f"The plain consumer was given {place} twice.")
                values[place] = message.value()
                deadline = clock.monotonic() + _TIMEOUT_SECONDS
            positions = consumer.position([TopicPartition(topic, partition) for partition in open_ends])
            open_ends = {p.partition: open_ends[p.partition] for p in positions if p.offset < open_ends[p.partition]}
            if clock.monotonic() > deadline:
                raise DemoError(
                    f"Kafka gave nothing for {_TIMEOUT_SECONDS:g} s, before the end of {sorted(open_ends)}."
                )
    finally:
        consumer.close()
    return KafkaRecords(sum(end - first for first, end in ends.values()), values)


def _watermarks(consumer: Consumer, topic: str) -> dict[int, tuple[int, int]]:
    from confluent_kafka import TopicPartition

    partitions = consumer.list_topics(topic, timeout=_CALL_SECONDS).topics[topic].partitions
    found = {}
    for partition in sorted(partitions):
        first, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=_CALL_SECONDS)
        found[partition] = (first, end)
    return found


def _settings(bootstrap_servers: str) -> dict[str, str | int | bool]:
    return {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "headrace-demo-proof",  # required by librdkafka; nothing is committed
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "queued.min.messages": 200_000,
        "log_level": 3,
    }
