"""Checks and writes batches that are built from Kafka by timestamps, for times before the stream's zero time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace as changed
from typing import Any

from sqlalchemy import Connection, delete, exists, select, update

from headrace.clock import time_text
from headrace.ledger.attempt_statements import fence_attempts
from headrace.ledger.batch_tables import (
    BatchInputRow,
    BatchRow,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batches,
    replays,
)
from headrace.ledger.database import LockedStream
from headrace.ledger.errors import AllocationConflictError, BatchTimeError
from headrace.ledger.receiving_tables import positions, unclaimed_times
from headrace.ledger.states import BatchState
from headrace.ledger.tables import partition_key


def is_empty(connection: Connection, batch: BatchRow) -> bool:
    """Whether the batch has neither blocks nor ranges, and is neither absorbed nor abandoned."""
    if batch.blocks or batch.built or batch.state in (BatchState.ABSORBED, BatchState.ABANDONED):
        return False
    has_inputs = exists().where(
        batch_inputs.c.stream == batch.stream, batch_inputs.c.batch_time_ms == batch.batch_time_ms
    )
    return not connection.execute(select(has_inputs)).scalar_one()


def replace(connection: Connection, batch: BatchRow, now_ms: int, values: Mapping[str, Any]) -> None:
    """Replace an empty batch with one that has ranges. Its earlier outputs and replays no longer count."""
    stream, batch_time_ms = batch.stream, batch.batch_time_ms
    fence_attempts(connection, stream, batch_time_ms, now_ms)
    of_batch = (batch_attempts.c.stream == stream, batch_attempts.c.batch_time_ms == batch_time_ms)
    targets = connection.execute(select(batch_attempts.c.target).where(*of_batch).distinct()).scalars().all()
    if targets:
        key = (replays.c.stream == stream, replays.c.batch_time_ms == batch_time_ms)
        connection.execute(delete(replays).where(*key, replays.c.target.in_(targets)))
    connection.execute(
        delete(batch_outputs).where(batch_outputs.c.stream == stream, batch_outputs.c.batch_time_ms == batch_time_ms)
    )
    cleared = (
        "code_version",
        "required",
        "steps",
        "started_at_ms",
        "completed_at_ms",
        "checkpointed_at_ms",
        "checkpoint_uri",
    )
    connection.execute(
        update(batches)
        .where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms)
        .values(
            **{name: value for name, value in values.items() if name != "stream"},
            state=BatchState.ALLOCATED,
            error=None,
            history=0,
            cleaned_at_ms=None,
            cleanup=None,
            **dict.fromkeys(cleared),
        )
    )


def check_ranges(
    connection: Connection, locked: LockedStream, batch_time_ms: int, inputs: Iterable[BatchInputRow]
) -> list[BatchInputRow]:
    """Check the ranges and return the non-empty ones as the batch's inputs; each offset counts as a record.

    Raises:
        BatchTimeError: the batch time is after the stream's zero time.
        AllocationConflictError: the time has blocks, or a range holds offsets that another batch has, or that the
            stream's receivers have read or will read.
    """
    stream = locked.row
    if batch_time_ms > stream.zero_time_ms:
        raise BatchTimeError(
            f"Batch {time_text(batch_time_ms)} of stream {stream.name!r} cannot be built from Kafka: "
            f"it comes after the stream's zero time, {time_text(stream.zero_time_ms)}.",
            remedy="Its records are in the log: run it as any other.",
        )
    taken = [
        changed(
            row,
            stream=stream.name,
            batch_time_ms=batch_time_ms,
            records=row.until_offset - row.from_offset,
            blocks=0,
        )
        for row in inputs
        if row.until_offset > row.from_offset
    ]
    claimed = exists().where(unclaimed_times.c.stream == stream.name, unclaimed_times.c.batch_time_ms == batch_time_ms)
    if connection.execute(select(claimed)).scalar_one():
        raise AllocationConflictError(
            f"Batch {time_text(batch_time_ms)} of stream {stream.name!r} has blocks in the log, so it cannot be "
            "built from Kafka.",
            remedy="Run it without from_kafka.",
        )
    for row in taken:
        _check_range(connection, row)
    return taken


def _check_range(connection: Connection, row: BatchInputRow) -> None:
    what = f"{row.partition.topic}-{row.partition.partition}: offsets [{row.from_offset}, {row.until_offset})"
    named = {"input_id": row.input_id, **partition_key(row.partition)}
    starting = connection.execute(
        select(positions.c.starting_offset).where(
            positions.c.stream == row.stream, *(positions.c[name] == value for name, value in named.items())
        )
    ).scalar_one_or_none()
    if starting is not None and row.until_offset > starting:
        raise AllocationConflictError(
            f"{what} reach beyond {starting}, where the stream began to receive.",
            remedy="What the stream receives belongs to its own batches; build only from the offsets before.",
        )
    other = connection.execute(
        select(batch_inputs)
        .where(
            batch_inputs.c.stream == row.stream,
            *(batch_inputs.c[name] == value for name, value in named.items()),
            batch_inputs.c.until_offset > row.from_offset,
        )
        .order_by(batch_inputs.c.until_offset)
        .limit(1)
    ).one_or_none()
    if other is not None and other.from_offset < row.until_offset:
        found = BatchInputRow.from_row(other)
        raise AllocationConflictError(
            f"{what} overlap [{found.from_offset}, {found.until_offset}) of batch {time_text(found.batch_time_ms)}.",
            remedy="A record belongs to one batch: leave out the offsets that have one.",
        )
