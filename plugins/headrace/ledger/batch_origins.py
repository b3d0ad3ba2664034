"""Determines where a batch's records are read from: the log, or Kafka after they were deleted from the log."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from headrace.ledger.batch_tables import BatchOrigin, BatchRow, batches
from headrace.ledger.database import chunks
from headrace.ledger.receiving_tables import blocks, segments


def origins_of(connection: Connection, rows: Sequence[BatchRow]) -> dict[int, BatchOrigin]:
    """Return the source of the records of each of the batches, by batch time."""
    left = _blocks_left(connection, rows[0].stream, [row.batch_time_ms for row in rows]) if rows else {}
    return {
        row.batch_time_ms: BatchOrigin(
            row.batch_time_ms,
            row.manifest_uri,
            row.manifest_sha256,
            _source(row, left.get(row.batch_time_ms, 0)),
        )
        for row in rows
    }


def source_of(connection: Connection, batch: BatchRow) -> str:
    """ "log" while every block of the batch is in it, else "kafka"."""
    left = _blocks_left(connection, batch.stream, [batch.batch_time_ms])
    return _source(batch, left.get(batch.batch_time_ms, 0))


def _source(batch: BatchRow, left: int) -> str:
    return "kafka" if batch.built or left < batch.blocks else "log"


def _blocks_left(connection: Connection, stream: str, times: Sequence[int]) -> dict[int, int]:
    """Return the number of blocks in segments that are not being removed, by batch time, including absorbed times."""
    owners = {batch_time_ms: batch_time_ms for batch_time_ms in times}
    for part in chunks(times):
        query = select(batches.c.batch_time_ms, batches.c.absorbed_by_ms).where(
            batches.c.stream == stream, batches.c.absorbed_by_ms.in_(part)
        )
        owners |= {row.batch_time_ms: row.absorbed_by_ms for row in connection.execute(query)}
    found: dict[int, int] = {}
    # Not joined to batches or segments: planners would then begin with all of the stream's blocks or segments. The
    # segments being removed (as many as one cleanup claims) are read in the counting statement: their blocks are
    # deleted with them, and with two statements the second could find neither.
    removing = select(segments.c.segment_id).where(
        segments.c.stream == stream, segments.c.removed_at_ms.is_(None), segments.c.removing_at_ms.is_not(None)
    )
    for part in chunks(list(owners)):
        counts = (
            select(blocks.c.batch_time_ms, func.count())
            .where(
                blocks.c.stream == stream,
                blocks.c.batch_time_ms.in_(part),
                blocks.c.segment_id.not_in(removing),
            )
            .group_by(blocks.c.batch_time_ms)
        )
        for batch_time_ms, count in connection.execute(counts):
            found[owners[batch_time_ms]] = found.get(owners[batch_time_ms], 0) + count
    return found
