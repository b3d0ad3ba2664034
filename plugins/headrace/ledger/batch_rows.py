"""Reads batches within a transaction."""

from __future__ import annotations

from sqlalchemy import Connection, select

from headrace.ledger.errors import BatchNotFoundError
from headrace.ledger.models import BatchRow, batches


def find_batch(connection: Connection, stream: str, batch_time_ms: int) -> BatchRow | None:
    """Return the batch's row, or None if it was not allocated."""
    row = connection.execute(
        select(batches).where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms)
    ).one_or_none()
    return None if row is None else BatchRow.from_row(row)


def require_batch(connection: Connection, stream: str, batch_time_ms: int) -> BatchRow:
    """Return the batch's row.

    Raises:
        BatchNotFoundError: it was not allocated.
    """
    batch = find_batch(connection, stream, batch_time_ms)
    if batch is None:
        raise BatchNotFoundError(stream, batch_time_ms)
    return batch
