"""Asking Kafka for offsets of partitions, all in one request to each broker, and waiting for a bounded time."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from typing import Any

from confluent_kafka import IsolationLevel
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

EARLIEST: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]

# How long after its time is up an answer may still be on its way through librdkafka.
_SLACK_SECONDS = 5.0


def request_offsets(
    admin: Any, specs: Mapping[tuple[str, int], Any], *, isolation: IsolationLevel, seconds: float
) -> dict[tuple[str, int], concurrent.futures.Future[Any]]:
    """Ask for an offset of each (topic, partition) by its ``OffsetSpec``; the answers, as far as they came in time.

    Raises KafkaException where the request cannot be made; those about single partitions are in their futures.
    """
    if not specs:
        return {}
    futures = admin.list_offsets(
        {KafkaPartition(topic, number): spec for (topic, number), spec in specs.items()},
        isolation_level=isolation,
        request_timeout=seconds,
    )
    concurrent.futures.wait(futures.values(), timeout=seconds + _SLACK_SECONDS)
    return {(each.topic, each.partition): future for each, future in futures.items()}
