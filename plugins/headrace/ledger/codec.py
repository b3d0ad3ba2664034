"""Encodes values for the ledger's columns: compact JSON, and offset ranges as short arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from headrace.blocks import OffsetRange, TopicPartition

Json = dict[str, Any]

_REPLACEMENT = "\ufffd"
# In JSON: after an even number of backslashes, which stand for half as many, the next one begins an escape.
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def without_nul(text: str) -> str:
    """Return the text with each NUL character replaced: Postgres refuses them, and texts of errors may quote any
    data."""
    return text.replace("\0", _REPLACEMENT)


def dump_json(value: Any) -> str:
    """Return JSON without spaces, and without NUL characters (`without_nul`)."""
    dumped = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return _ESCAPED_NUL.sub(rf"\1{_REPLACEMENT}", dumped) if r"\u0000" in dumped else dumped


def dump_ranges(ranges: Iterable[OffsetRange]) -> list[list[Any]]:
    """Return each range as [topic, topic id, partition, incarnation, from, until, records, leader epoch if known]."""
    return [
        [
            r.partition.topic,
            r.partition.topic_id,
            r.partition.partition,
            r.partition.incarnation,
            *r.numbers,
        ]
        for r in ranges
    ]


def load_ranges(value: Iterable[list[Any]]) -> tuple[OffsetRange, ...]:
    """The reverse of `dump_ranges`."""
    return tuple(
        OffsetRange(TopicPartition(topic, topic_id, partition, incarnation), *numbers)
        for topic, topic_id, partition, incarnation, *numbers in value
    )


def partition_of(row: Any) -> TopicPartition:
    """Return the partition from a row's columns."""
    return TopicPartition(row.topic, row.topic_id, row.partition, row.incarnation)


def partition_key(partition: TopicPartition) -> dict[str, Any]:
    """Return the columns that identify a partition, without its incarnation."""
    return {"topic": partition.topic, "topic_id": partition.topic_id, "partition": partition.partition}
