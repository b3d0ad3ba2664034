"""Reads batches within a transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from headrace.ledger.codec import partition_of
from headrace.ledger.errors import BatchNotFoundError
from headrace.ledger.rows import BatchInputRow, BatchRow
from headrace.ledger.tables import batches


def find_batch(connection: Connection, stream: str, batch_time_ms: int) -> BatchRow | None:
    """Return the batch's row, or None if it was not allocated."""
    row = connection.execute(
        select(batches).where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms)
    ).one_or_none()
    return None if row is None else batch_row(row)


def require_batch(connection: Connection, stream: str, batch_time_ms: int) -> BatchRow:
    """Return the batch's row.

    Raises:
        BatchNotFoundError: it was not allocated.
    """
    batch = find_batch(connection, stream, batch_time_ms)
    if batch is None:
        raise BatchNotFoundError(stream, batch_time_ms)
    return batch


def batch_row(row: Row[Any]) -> BatchRow:
    """A row of ``batches``."""
    fields = dict(row._mapping)
    fields.pop("history")
    fields["absorbed"] = tuple(fields["absorbed"])
    for name in ("required", "steps"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    return BatchRow(**fields)


def batch_input_row(row: Row[Any]) -> BatchInputRow:
    """A row of ``batch_inputs``."""
    return BatchInputRow(
        stream=row.stream,
        batch_time_ms=row.batch_time_ms,
        input_id=row.input_id,
        partition=partition_of(row),
        from_offset=row.from_offset,
        until_offset=row.until_offset,
        records=row.records,
        blocks=row.blocks,
    )
