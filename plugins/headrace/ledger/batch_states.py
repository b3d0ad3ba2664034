"""Reads a batch within a transaction, and computes its state, or its state in a replay, from its outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, select, update

from headrace.ledger.attempt_statements import newest_outputs, running_attempts
from headrace.ledger.batch_tables import AttemptRow, BatchOutputRow, BatchRow, batch_attempts, batches
from headrace.ledger.database import LockedStream
from headrace.ledger.errors import BatchNotFoundError, StepsLostError
from headrace.ledger.events import record
from headrace.ledger.states import AttemptState, BatchState, EventKind
from headrace.ledger.tables import events
from headrace.ledger.totals import add_totals, batch_delays


class Run(NamedTuple):
    """A run of a batch: the attempts from ``first_attempt`` on. ``failed``: the event of its failure is recorded."""

    first_attempt: int
    failed: bool

    def goes_on(self, tried: Collection[BatchOutputRow], *, beside: bool) -> bool:
        """Whether the next attempt continues this run: tasks of several outputs may run one after another.

        It does, before the run has failed, if it repeats none of the run's outputs that have no record, or runs
        ``beside`` another attempt. ``tried`` are the newest rows of the attempt's outputs that have no record.
        """
        repeats = any(row.attempt >= self.first_attempt for row in tried)
        return not self.failed and (beside or not repeats)

    def waits_for(self, missing: Collection[str], newest: Mapping[str, BatchOutputRow], steps: Collection[str]) -> bool:
        """Whether one of the ``missing`` outputs that the stream has (``steps``) was not begun in this run: an attempt
        at it continues the run, and may add to its failures."""
        rows = [newest.get(step) for step in missing if step in steps]
        return any(row is None or row.attempt < self.first_attempt for row in rows)


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
    connection: Connection,
    required: Collection[str],
    newest: Mapping[str, BatchOutputRow],
    running: Collection[AttemptRow],
    now_ms: int,
) -> tuple[BatchState, str | None]:
    """Return the state, and the error of the newest attempt that failed if it is failed.

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
        return BatchState.FAILED, _attempt_error(connection, max(failed, key=lambda row: row.attempt))
    return BatchState.RUNNING if running else BatchState.ALLOCATED, None


def is_recorded(row: BatchOutputRow | None) -> bool:
    """Whether the output's newest attempt has recorded its success."""
    return row is not None and row.state is AttemptState.COMPLETED


def are_lost(locked: LockedStream, missing: Collection[str]) -> bool:
    """Whether all that a batch misses is lost: neither the newest definition nor the attempt's has one of these steps,
    so no attempt at them can begin."""
    return bool(missing) and set(missing).isdisjoint((*locked.steps, *locked.row.outputs))


def present_run(connection: Connection, stream: str, batch_time_ms: int) -> Run | None:
    """Return the batch's present run, from its events. None if it has not begun or has completed, or if its events were
    deleted."""
    bounds = (EventKind.BATCH_ALLOCATED, EventKind.BATCH_STARTED, EventKind.BATCH_COMPLETED, EventKind.BATCH_FAILED)
    query = select(events.c.kind, events.c.payload).where(
        events.c.stream == stream,
        events.c.batch_time_ms == batch_time_ms,
        events.c.kind.in_([kind.value for kind in bounds]),
    )
    failed = False
    for row in connection.execute(query.order_by(events.c.event_id.desc())):
        if row.kind == EventKind.BATCH_FAILED:
            failed = True
        elif row.kind != EventKind.BATCH_STARTED:
            return None
        elif not row.payload["continues"]:
            return Run(row.payload["attempt"], failed)
    return None


def settle(
    connection: Connection,
    locked: LockedStream,
    batch: BatchRow,
    *,
    by_records: bool = False,
    ended: int | None = None,
    **changes: Any,
) -> BatchRow:
    """Write the state that follows from the batch's outputs, and ``changes``; add an event when it completes.

    Returns the batch's new row. Also adds an event when it fails: when an output has failed, and each that is missing
    was begun in this run and has ended. A run has one such event, at the latest when the next run begins.

    ``by_records``: an attempt that has recorded all its outputs counts as ended. ``ended`` is the number of the attempt
    that ends now, for the event.
    """
    stream, batch_time_ms = batch.stream, batch.batch_time_ms
    newest = newest_outputs(connection, stream, batch_time_ms)
    running = [row for row in running_attempts(connection, stream, batch_time_ms) if not row.target]
    if by_records:
        running = [row for row in running if not all(is_recorded(newest.get(output)) for output in row.outputs)]
    required = batch.needs(locked.row.outputs)
    missing = [step for step in required if not is_recorded(newest.get(step))]
    state, error = outcome(connection, required, newest, running, locked.now_ms)
    if are_lost(locked, missing) and not any(row.alive(locked.now_ms) for row in running):
        state, error = BatchState.FAILED, str(StepsLostError(batch, missing))
    values: dict[str, Any] = {"state": state, "error": error, "history": 0, **changes}
    completes = state is BatchState.COMPLETED and batch.state is not BatchState.COMPLETED
    if state is BatchState.COMPLETED:
        recorded = [step for step in (*locked.row.outputs, *required) if is_recorded(newest.get(step))]
        known = batch.steps or ()
        # Completed steps stay even if the stream no longer has the output: it may get it again.
        values["steps"] = list(dict.fromkeys([*known, *recorded]))
        if completes:
            values["completed_at_ms"] = locked.now_ms
    else:
        values["completed_at_ms"] = None
    connection.execute(
        update(batches).where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms).values(**values)
    )
    settled = require_batch(connection, stream, batch_time_ms)
    fails = state is BatchState.FAILED and batch.state is not BatchState.FAILED
    if fails:
        run = present_run(connection, stream, batch_time_ms)
        fails = run is None or not (run.failed or run.waits_for(missing, newest, locked.steps))
    if completes or fails:
        record_end(connection, locked, settled, newest, ended)
    if completes and batch.steps is None:
        # The first time only: a batch that is run again a year later is not a year late.
        amounts: dict[str, float] = {
            "batches_completed": 1,
            "batch_records": settled.records,
            "batch_bytes": settled.payload_bytes,
        }
        if batch_time_ms > locked.row.zero_time_ms:
            # Neither is one from before the stream began, such as those that are built from Kafka.
            amounts |= batch_delays(batch_time_ms, settled.started_at_ms, locked.now_ms)
        add_totals(connection, stream, amounts)
    return settled


def _attempt_error(connection: Connection, output: BatchOutputRow) -> str | None:
    """Return the error of the output's attempt: it names all the outputs that failed, and the reason if the attempt was
    ended from outside. The output's own error if the attempt has none."""
    table = batch_attempts.c
    query = select(table.error).where(
        table.stream == output.stream,
        table.batch_time_ms == output.batch_time_ms,
        table.number == output.attempt,
    )
    found: str | None = connection.execute(query).scalar()
    return found or output.error


def record_end(
    connection: Connection,
    locked: LockedStream,
    batch: BatchRow,
    newest: Mapping[str, BatchOutputRow],
    ended: int | None,
) -> None:
    """Add the event of a batch that has completed or failed."""
    completed = batch.state is BatchState.COMPLETED
    needed = {*locked.row.outputs, *batch.needs(locked.row.outputs)}
    done = {step: row.counts for step, row in newest.items() if step in needed and is_recorded(row)}
    failed = {step: row.error for step, row in newest.items() if row.state is AttemptState.FAILED}
    payload = {**figures(batch), "error": batch.error, "outputs": done, "failures": {} if completed else failed}
    payload["ended_attempt"] = ended
    kind = EventKind.BATCH_COMPLETED if completed else EventKind.BATCH_FAILED
    record(connection, batch.stream, locked.now_ms, kind, payload, batch_time_ms=batch.batch_time_ms)


def figures(batch: BatchRow) -> dict[str, Any]:
    """Return the batch's size and times, for its events."""
    return {
        "attempt": batch.attempt,
        "records": batch.records,
        "blocks": batch.blocks,
        "payload_bytes": batch.payload_bytes,
        "late_records": batch.late_records,
        "interval_ms": batch.interval_ms,
        "absorbed": list(batch.absorbed),
        "allocated_at_ms": batch.allocated_at_ms,
        "started_at_ms": batch.started_at_ms,
    }
