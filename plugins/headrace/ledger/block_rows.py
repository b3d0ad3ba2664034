"""Reads blocks within a transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from headrace.blocks import BlockHandle, BlockInfo, ReceiverId
from headrace.ledger.chunks import chunks
from headrace.ledger.models import StoredBlock, StreamRow, blocks, segments


def stored_blocks(connection: Connection, stream: str, batch_times_ms: list[int]) -> list[StoredBlock]:
    """Return the blocks of the batch times, by time, then in the order of addition."""
    found: list[StoredBlock] = []
    for part in chunks(sorted(batch_times_ms)):
        query = (
            select(blocks, segments.c.path)
            .join(segments, segments.c.segment_id == blocks.c.segment_id)
            .where(blocks.c.stream == stream, blocks.c.batch_time_ms.in_(part))
            .order_by(blocks.c.batch_time_ms, blocks.c.block_id)
        )
        found += [stored_block(row) for row in connection.execute(query)]
    return found


def is_late(stream: StreamRow, block: BlockInfo, batch_time_ms: int) -> bool:
    """Whether the block's batch time is later than that of its event time."""
    return block.event_time_ms is not None and batch_time_ms > stream.batch_time_after(max(0, block.event_time_ms))


def stored_block(row: Row[Any]) -> StoredBlock:
    """A row of ``blocks`` with its segment's path."""
    info = BlockInfo(
        receiver=ReceiverId(row.stream, row.input_id, row.receiver_index),
        epoch=row.epoch,
        sequence=row.sequence,
        cut_time_ms=row.cut_time_ms,
        handle=BlockHandle(row.path, row.frame_offset, row.frame_length),
        ranges=row.ranges,
        records=row.records,
        payload_bytes=row.payload_bytes,
        event_time_ms=row.event_time_ms,
    )
    return StoredBlock(row.block_id, row.batch_time_ms, row.added_at_ms, info)
