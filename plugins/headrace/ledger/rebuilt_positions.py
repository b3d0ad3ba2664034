"""The topics and positions of a ledger that is rebuilt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, insert

from headrace.blocks import TopicPartition
from headrace.ledger.codec import partition_key
from headrace.ledger.database import LockedStream
from headrace.ledger.found import FoundStream
from headrace.ledger.states import PartitionState
from headrace.ledger.tables import positions, topics


def insert_positions(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    """The partitions, and their topics, each where it is and where it began."""
    latest: dict[tuple[str, TopicPartition], int] = defaultdict(int)
    watermarks: dict[tuple[str, TopicPartition], int] = defaultdict(int, found.watermarks)
    for block in found.blocks:
        for r in block.info.ranges:
            key = (block.info.receiver.input_id, r.partition)
            latest[key] = max(latest[key], block.batch_time_ms)
            watermarks[key] = max(watermarks[key], min(block.info.event_time_ms or 0, locked.now_ms))
    sizes: dict[tuple[str, str, str, int], int] = defaultdict(int)
    current: dict[tuple[str, str], int] = defaultdict(int)
    for input_id, tp in found.positions:
        topic = (input_id, tp.topic, tp.topic_id, tp.incarnation)
        sizes[topic] = max(sizes[topic], tp.partition + 1)
        current[input_id, tp.topic] = max(current[input_id, tp.topic], tp.incarnation)
    stream, now_ms = locked.row.name, locked.now_ms
    starting = _starting_offsets(found)
    insert_all(
        connection,
        topics,
        (
            {
                "stream": stream,
                "input_id": input_id,
                "topic": topic,
                "topic_id": topic_id,
                "incarnation": incarnation,
                "partitions": size,
                "first_partitions": size,
                "at_start": False,
                "current": incarnation == current[input_id, topic],
                "first_seen_ms": now_ms,
                "changed_at_ms": now_ms,
            }
            for (input_id, topic, topic_id, incarnation), size in sizes.items()
        ),
    )
    insert_all(
        connection,
        positions,
        (
            {
                "stream": stream,
                "input_id": input_id,
                **partition_key(tp),
                "incarnation": tp.incarnation,
                "next_offset": offset,
                "starting_offset": starting[input_id, tp],
                "last_batch_time_ms": latest[input_id, tp],
                "watermark_ms": watermarks[input_id, tp],
                "drained_ms": 0,
                "state": PartitionState.ACTIVE,
                "updated_at_ms": now_ms,
            }
            for (input_id, tp), offset in found.positions.items()
        ),
    )


def _starting_offsets(found: FoundStream) -> dict[tuple[str, TopicPartition], int]:
    received = [
        ((block.info.receiver.input_id, r.partition), r.from_offset)
        for block in found.blocks
        for r in block.info.ranges
    ]
    received += [
        ((row.input_id, row.partition), row.from_offset)
        for batch in found.batches
        if not batch.built
        for row in batch.inputs
    ]
    starting = dict(found.positions)
    for key, offset in received:
        starting[key] = min(starting.get(key, offset), offset)
    return starting | dict(found.starting_offsets)


def insert_all(connection: Connection, table: Any, rows: Iterable[dict[str, Any]]) -> None:
    """Insert the rows, if there are any."""
    values = list(rows)
    if values:
        connection.execute(insert(table), values)
