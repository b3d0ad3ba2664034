"""How values stand in the ledger's columns: compact JSON, and ranges as short arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from headrace.blocks import OffsetRange, TopicPartition

Json = dict[str, Any]


def dump_json(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def dump_ranges(ranges: Iterable[OffsetRange]) -> list[list[Any]]:
    """Each range as [topic, topic id, partition, incarnation, from, until, records]."""
    return [
        [
            r.partition.topic,
            r.partition.topic_id,
            r.partition.partition,
            r.partition.incarnation,
            r.from_offset,
            r.until_offset,
            r.records,
        ]
        for r in ranges
    ]


def load_ranges(value: Iterable[list[Any]]) -> tuple[OffsetRange, ...]:
    """The reverse of `dump_ranges`."""
    return tuple(
        OffsetRange(TopicPartition(topic, topic_id, partition, incarnation), from_offset, until_offset, records)
        for topic, topic_id, partition, incarnation, from_offset, until_offset, records in value
    )


def partition_of(row: Any) -> TopicPartition:
    """The partition that a row's columns name."""
    return TopicPartition(row.topic, row.topic_id, row.partition, row.incarnation)


def partition_key(partition: TopicPartition) -> dict[str, Any]:
    """The columns that name a partition, without its incarnation."""
    return {"topic": partition.topic, "topic_id": partition.topic_id, "partition": partition.partition}
