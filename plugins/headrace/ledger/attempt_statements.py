"""Reads, begins and ends attempts and their outputs within a transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, insert, select, update

from headrace.clock import time_text
from headrace.ledger.batch_tables import (
    Attempt,
    AttemptRow,
    BatchOutputRow,
    batch_attempts,
    batch_outputs,
    replay_definitions,
)
from headrace.ledger.database import LockedStream
from headrace.ledger.errors import AttemptFencedError
from headrace.ledger.states import AttemptState
from headrace.ledger.totals import add_totals

_COLUMNS = [column for column in batch_attempts.c if column.name != "replay_revision"]


def insert_attempt(
    connection: Connection,
    locked: LockedStream,
    batch_time_ms: int,
    *,
    outputs: Sequence[str],
    holder: str,
    way: str,
    lease_ms: int,
    source: str,
    attributes: Mapping[str, Any] | None,
    target: str = "",
    definition: str | None = None,
    replay_revision: int | None = None,
    revision: int | None = None,
) -> Attempt:
    """Insert the batch's next attempt, at these outputs. Running attempts at them must have been fenced before."""
    stream = locked.row.name
    newest = select(func.max(batch_attempts.c.number)).where(*_of_batch(batch_attempts, stream, batch_time_ms))
    number = (connection.execute(newest).scalar_one() or 0) + 1
    key = {"stream": stream, "batch_time_ms": batch_time_ms}
    until_ms = locked.now_ms + lease_ms
    connection.execute(
        insert(batch_attempts).values(
            **key,
            number=number,
            target=target,
            holder=holder,
            way=way,
            source=source,
            state=AttemptState.RUNNING,
            outputs=list(outputs),
            attributes=dict(attributes or {}),
            replay_revision=replay_revision,
            revision=revision,
            started_at_ms=locked.now_ms,
            lease_ms=lease_ms,
            lease_until_ms=until_ms,
            heartbeat_ms=locked.now_ms,
        )
    )
    running = {**key, "attempt": number, "target": target, "state": AttemptState.RUNNING, "counts": {}}
    if outputs:
        connection.execute(insert(batch_outputs), [{**running, "output_id": output_id} for output_id in outputs])
    claimed = (holder, way, tuple(outputs), lease_ms, until_ms, source, target, definition, revision)
    return Attempt(stream, batch_time_ms, number, *claimed)


def end_attempt(connection: Connection, attempt: Attempt | AttemptRow, state: AttemptState, **values: Any) -> None:
    """End an attempt, and its outputs that are not recorded. ``values``: ended_at_ms, error."""
    connection.execute(update(batch_attempts).where(*identity(attempt)).values(state=state, **values))
    if not attempt.target:
        add_totals(connection, attempt.stream, {f"attempts_{state}": 1})
    connection.execute(
        update(batch_outputs)
        .where(*outputs_of(attempt), batch_outputs.c.state == AttemptState.RUNNING)
        .values(state=state, recorded_at_ms=values["ended_at_ms"], error=values.get("error"))
    )


def fence_attempts(
    connection: Connection,
    stream: str,
    batch_time_ms: int,
    now_ms: int,
    *,
    target: str | None = None,
    outputs: Collection[str] | None = None,
) -> None:
    """Fence the running attempts at a batch: if given, only those of ``target`` that share one of ``outputs``.

    Afterwards none of these outputs is running, even if its attempt had ended otherwise.
    """
    for row in running_attempts(connection, stream, batch_time_ms):
        if target is not None and row.target != target:
            continue
        if outputs is None or not row.outputs or set(row.outputs) & set(outputs):
            end_attempt(connection, row, AttemptState.FENCED, ended_at_ms=now_ms)
    left = [*_of_batch(batch_outputs, stream, batch_time_ms), batch_outputs.c.state == AttemptState.RUNNING]
    if target is not None:
        left.append(batch_outputs.c.target == target)
    if outputs is not None:
        left.append(batch_outputs.c.output_id.in_(outputs))
    connection.execute(update(batch_outputs).where(*left).values(state=AttemptState.FENCED, recorded_at_ms=now_ms))


def running_attempts(
    connection: Connection, stream: str, batch_time_ms: int, *, revision: int | None = None
) -> list[AttemptRow]:
    """Return the attempts at a batch and at its replays that have not ended, whether their leases are live or not.

    ``revision``: only attempts of replays with this revision of their definition.
    """
    query = select_attempts().where(
        batch_attempts.c.stream == stream,
        batch_attempts.c.state == AttemptState.RUNNING,
        batch_attempts.c.batch_time_ms == batch_time_ms,
    )
    if revision is not None:
        query = query.where(batch_attempts.c.replay_revision == revision)
    return [AttemptRow.from_row(row) for row in connection.execute(query)]


def live_attempts(connection: Connection, stream: str, now_ms: int) -> list[AttemptRow]:
    """Return the running attempts of a stream and of its replays whose leases are live, by batch time."""
    query = select_attempts().where(
        batch_attempts.c.stream == stream,
        batch_attempts.c.state == AttemptState.RUNNING,
        batch_attempts.c.lease_until_ms > now_ms,
    )
    return [AttemptRow.from_row(row) for row in connection.execute(query.order_by(batch_attempts.c.batch_time_ms))]


def newest_outputs(
    connection: Connection, stream: str, batch_time_ms: int, target: str = "", *, revision: int | None = None
) -> dict[str, BatchOutputRow]:
    """Return the newest row of each output, by id. ``revision``: only of attempts with this replay definition."""
    query = (
        select(batch_outputs)
        .where(*_of_batch(batch_outputs, stream, batch_time_ms), batch_outputs.c.target == target)
        .order_by(batch_outputs.c.attempt, batch_outputs.c.output_id)
    )
    if revision is not None:
        attempts = select(batch_attempts.c.number).where(
            *_of_batch(batch_attempts, stream, batch_time_ms), batch_attempts.c.replay_revision == revision
        )
        query = query.where(batch_outputs.c.attempt.in_(attempts))
    return {row.output_id: BatchOutputRow.from_row(row) for row in connection.execute(query)}


def wrote_output() -> ColumnElement[bool]:
    """Return the condition that joins a row of ``batch_outputs`` with the attempt that wrote it."""
    return and_(
        batch_attempts.c.stream == batch_outputs.c.stream,
        batch_attempts.c.batch_time_ms == batch_outputs.c.batch_time_ms,
        batch_attempts.c.number == batch_outputs.c.attempt,
    )


def revision_of(connection: Connection, attempt: Attempt) -> int | None:
    """Return the revision of the replay's definition that the attempt began with; None for the batch itself."""
    revision: int | None = connection.execute(
        select(batch_attempts.c.replay_revision).where(*identity(attempt))
    ).scalar_one()
    return revision


def require_running(connection: Connection, attempt: Attempt) -> None:
    """Check that the attempt has neither ended nor been fenced.

    Raises:
        AttemptFencedError: it has.
    """
    if not is_own(connection, attempt, AttemptState.RUNNING):
        raise fenced(attempt)


def is_own(connection: Connection, attempt: Attempt, state: AttemptState) -> bool:
    """Whether the attempt is this holder's, and in this state."""
    query = select(batch_attempts.c.holder, batch_attempts.c.state).where(*identity(attempt))
    row = connection.execute(query).one_or_none()
    return row is not None and row.holder == attempt.holder and row.state is state


def fenced(attempt: Attempt) -> AttemptFencedError:
    """Return the error for an attempt that reports after it has ended."""
    return AttemptFencedError(
        f"Attempt {attempt.number} of batch {time_text(attempt.batch_time_ms)} ({attempt.holder}) has ended, and "
        "may not report.",
        remedy="Stop it. If a newer attempt has fenced it, that one runs the batch.",
    )


def identity(attempt: Attempt | AttemptRow) -> tuple[Any, ...]:
    """Return the conditions that identify an attempt's row."""
    named = _of_batch(batch_attempts, attempt.stream, attempt.batch_time_ms)
    return (*named, batch_attempts.c.number == attempt.number)


def outputs_of(attempt: Attempt | AttemptRow) -> tuple[Any, ...]:
    """Return the conditions that identify the rows of an attempt's outputs."""
    named = _of_batch(batch_outputs, attempt.stream, attempt.batch_time_ms)
    return (*named, batch_outputs.c.attempt == attempt.number)


def select_attempts() -> Select[Any]:
    """Return the query for attempts; attempts of replays have the definition that they began with."""
    return select(*_COLUMNS, replay_definitions.c.definition).outerjoin(
        replay_definitions,
        and_(
            replay_definitions.c.stream == batch_attempts.c.stream,
            replay_definitions.c.target == batch_attempts.c.target,
            replay_definitions.c.revision == batch_attempts.c.replay_revision,
        ),
    )


def _of_batch(table: Any, stream: str, batch_time_ms: int) -> tuple[Any, ...]:
    return table.c.stream == stream, table.c.batch_time_ms == batch_time_ms
