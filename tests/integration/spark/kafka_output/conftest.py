"""A topic for the messages of batches, and what a consumer sees of it."""

from __future__ import annotations

import threading
import time
import uuid

import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

T = 1_700_000_010_000


@pytest.fixture
def topic(kafka_admin: AdminClient) -> str:
    name = f"enriched-{uuid.uuid4().hex}"
    create(kafka_admin, name)
    return name


def create(admin: AdminClient, topic: str) -> None:
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result()
    deadline = time.monotonic() + 30
    # The answer comes before every request sees the topic.
    while topic not in admin.list_topics(timeout=5).topics:
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


def read(kafka: str, topic: str) -> list[Message]:
    """Everything in the topic that is committed, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "tests",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    partitions = [TopicPartition(topic, number, 0) for number in range(3)]
    consumer.assign(partitions)
    messages, ended = [], set()
    deadline = time.monotonic() + 30
    while len(ended) < 3:
        assert time.monotonic() < deadline
        message = consumer.poll(1)
        if message is not None and message.error() is not None:
            ended.add(message.partition())
        elif message is not None:
            messages.append(message)
    consumer.close()
    return sorted(messages, key=lambda each: (each.partition(), each.offset()))


def values(kafka: str, topic: str) -> list[bytes | None]:
    return sorted((each.value() for each in read(kafka, topic)), key=lambda value: value or b"")


def groups(admin: AdminClient, name: str) -> list[str]:
    return [each.group_id for each in admin.list_consumer_groups().result().valid if each.group_id == name]
