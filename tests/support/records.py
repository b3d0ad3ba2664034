"""Builds blocks for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headrace.blocks import OffsetRange, TopicPartition
from headrace.wal.frame import RECORD_SCHEMA

TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"


def make_block(
    values: Sequence[bytes | None],
    *,
    topic: str = "flights",
    partition: int = 0,
    from_offset: int = 0,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[list[dict[str, Any]] | None] | None = None,
    timestamp_ms: int = 1_700_000_000_000,
    incarnation: int = 1,
) -> tuple[pa.RecordBatch, tuple[OffsetRange, ...]]:
    """A block of one partition (``RECORD_SCHEMA``) with consecutive offsets, and its offset range."""
    count = len(values)
    columns = {
        "key": keys if keys is not None else [None] * count,
        "value": values,
        "topic": [topic] * count,
        "partition": [partition] * count,
        "offset": range(from_offset, from_offset + count),
        "timestamp": range(timestamp_ms, timestamp_ms + count),
        "timestampType": [0] * count,
        "headers": headers if headers is not None else [None] * count,
        "incarnation": [incarnation] * count,
    }
    arrays = [pa.array(list(columns[field.name]), field.type) for field in RECORD_SCHEMA]
    tp = TopicPartition(topic, TOPIC_ID, partition, incarnation)
    return pa.record_batch(arrays, schema=RECORD_SCHEMA), (OffsetRange(tp, from_offset, from_offset + count, count),)
