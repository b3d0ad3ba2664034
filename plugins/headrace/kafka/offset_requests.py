"""Requests offsets of partitions from Kafka, with one request to each broker and a bounded wait."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from typing import Any

from confluent_kafka import IsolationLevel
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

EARLIEST: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]

# How long an answer may take through librdkafka after its timeout.
_SLACK_SECONDS = 5.0


def request_offsets(
    admin: Any, specs: Mapping[tuple[str, int], Any], *, isolation: IsolationLevel, seconds: float
) -> dict[tuple[str, int], concurrent.futures.Future[Any]]:
    """Request an offset of each (topic, partition) by its ``OffsetSpec``. Returns the futures of the answers; those
    that did not arrive in time are not done.

    Raises KafkaException when the request cannot be made; errors of single partitions are in their futures.
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
