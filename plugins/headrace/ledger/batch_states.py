"""Reads a batch within a transaction, and computes its state, or its state in a replay, from its outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, select, update

from headrace.ledger.attempt_statements import newest_outputs, running_attempts
from headrace.ledger.database import LockedStream
from headrace.ledger.errors import BatchNotFoundError
from headrace.ledger.events import record
from headrace.ledger.models import AttemptRow, BatchOutputRow, BatchRow, batches
from headrace.ledger.states import AttemptState, BatchState, EventKind


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


def outcome(
    required: Collection[str], newest: Mapping[str, BatchOutputRow], running: Collection[AttemptRow], now_ms: int
) -> tuple[BatchState, str | None]:
    """Return the state, and the newest error if it is failed.

    Running while an attempt at a required output is live, so that the last attempt to end gets the final state. Then:
    completed if the newest attempt at every required output has recorded it; failed if one of these failed; running if
    an attempt did not end; allocated if the outputs left were not begun.
    """
    missing = [output_id for output_id in required if not is_recorded(newest.get(output_id))]
    if any(row.alive(now_ms) and (not row.outputs or set(row.outputs) & set(required)) for row in running):
        return BatchState.RUNNING, None
    if not missing:
        return BatchState.COMPLETED, None
    left = [newest[output_id] for output_id in missing if output_id in newest]
    failed = [row for row in left if row.state is AttemptState.FAILED]
    if failed:
        return BatchState.FAILED, max(failed, key=lambda row: row.attempt).error
    return BatchState.RUNNING if running else BatchState.ALLOCATED, None


def is_recorded(row: BatchOutputRow | None) -> bool:
    """Whether the output's newest attempt has recorded its success."""
    return row is not None and row.state is AttemptState.COMPLETED


def required_steps(locked: LockedStream, batch: BatchRow) -> list[str]:
    """Return the stream's steps that the batch needs to complete.

    These are the steps with which it completed before; otherwise those that the stream had when the batch was first
    begun. So outputs added to the stream meanwhile do not prevent its attempts from completing it.
    """
    fixed = batch.required if batch.steps is None else batch.steps
    return [step for step in locked.row.outputs if fixed is None or step in fixed]


def settle(
    connection: Connection, locked: LockedStream, batch: BatchRow, *, by_records: bool = False, **changes: Any
) -> BatchRow:
    """Write the state that follows from the batch's outputs, and ``changes``; add an event when it completes.

    Returns the batch's new row.

    ``by_records``: an attempt that has recorded all its outputs counts as ended.
    """
    stream, batch_time_ms = batch.stream, batch.batch_time_ms
    newest = newest_outputs(connection, stream, batch_time_ms)
    running = [row for row in running_attempts(connection, stream, batch_time_ms) if not row.target]
    if by_records:
        running = [row for row in running if not all(is_recorded(newest.get(output)) for output in row.outputs)]
    state, error = outcome(required_steps(locked, batch), newest, running, locked.now_ms)
    values: dict[str, Any] = {"state": state, "error": error, "history": 0, **changes}
    completes = state is BatchState.COMPLETED and batch.state is not BatchState.COMPLETED
    if state is BatchState.COMPLETED:
        recorded = [step for step in locked.row.outputs if is_recorded(newest.get(step))]
        known = batch.steps or ()
        # Completed steps stay even if the stream no longer has the output: it may get it again.
        values["steps"] = [*known, *(step for step in recorded if step not in known)]
        if completes:
            values["completed_at_ms"] = locked.now_ms
    else:
        values["completed_at_ms"] = None
    connection.execute(
        update(batches).where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms).values(**values)
    )
    settled = require_batch(connection, stream, batch_time_ms)
    if completes:
        payload = {
            "attempt": settled.attempt,
            "records": settled.records,
            "outputs": {step: newest[step].counts for step in recorded},
        }
        record(connection, stream, locked.now_ms, EventKind.BATCH_COMPLETED, payload, batch_time_ms=batch_time_ms)
    return settled
