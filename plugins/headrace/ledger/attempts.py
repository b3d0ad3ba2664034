"""Attempts at a batch. Each has a number, and only the newest one's results count."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from headrace.ledger.batch_rows import find_batch, require_batch
from headrace.ledger.database import LockedStream, Role
from headrace.ledger.errors import (
    AlreadyCompletedError,
    AttemptFencedError,
    BatchCleanedError,
    BatchStateError,
    NotItsTurnError,
    OutputsMissingError,
    SlotBusyError,
)
from headrace.ledger.events import record
from headrace.ledger.rows import Attempt, AttemptRow, BatchOutputRow, BatchRow
from headrace.ledger.states import AttemptState, BatchState, EventKind
from headrace.ledger.tables import batch_attempts, batch_outputs, batches, blocks, segments, unclaimed_times

_UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)


class BatchAttempts(Role):
    """Begins attempts, hears their results, and ends them."""

    def begin_attempt(
        self,
        stream: str,
        batch_time_ms: int,
        *,
        holder: str,
        way: str,
        lease_ms: int,
        force: bool = False,
        attributes: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """Take the batch, from whoever is at it: an earlier attempt that still runs is fenced.

        Args:
            holder: names the process.
            way: how the batch is run, "connect" or "submit".
            force: run a completed batch again.

        Raises:
            BatchNotFoundError: it was not allocated.
            AlreadyCompletedError: it has completed, and not ``force``.
            BatchCleanedError: its blocks are gone from the log.
            BatchStateError: it was abandoned, or absorbed into a later batch.
            SlotBusyError: other batches of the stream hold its slots by live leases.
            NotItsTurnError: the stream is ordered, and an earlier batch has not completed or was not claimed.
        """
        with self._database.write_stream(stream) as (connection, locked):
            batch = require_batch(connection, stream, batch_time_ms)
            _check_state(connection, batch, force=force)
            _check_order(connection, locked, batch)
            _check_slots(connection, locked, batch)
            _end_running(connection, batch, AttemptState.FENCED, locked.now_ms, None)
            number = batch.attempt + 1
            lease_until_ms = locked.now_ms + lease_ms
            attempt = Attempt(stream, batch_time_ms, number, holder, way, locked.row.outputs, lease_ms, lease_until_ms)
            connection.execute(
                insert(batch_attempts).values(
                    stream=stream,
                    batch_time_ms=batch_time_ms,
                    number=number,
                    holder=holder,
                    way=way,
                    state=AttemptState.RUNNING,
                    outputs=list(locked.row.outputs),
                    attributes=dict(attributes or {}),
                    started_at_ms=locked.now_ms,
                    lease_ms=lease_ms,
                    lease_until_ms=lease_until_ms,
                    heartbeat_ms=locked.now_ms,
                )
            )
            connection.execute(
                _batch(stream, batch_time_ms).values(
                    state=BatchState.RUNNING,
                    attempt=number,
                    started_at_ms=locked.now_ms,
                    completed_at_ms=None,
                    error=None,
                )
            )
            payload = {"attempt": number, "holder": holder, "way": way}
            record(connection, stream, locked.now_ms, EventKind.BATCH_STARTED, payload, batch_time_ms=batch_time_ms)
            return attempt

    def renew_attempt(self, attempt: Attempt, *, attributes: Mapping[str, Any] | None = None) -> int:
        """Extend the attempt's lease and add to its attributes (application id, UI address); until when it holds.

        Raises:
            AttemptFencedError: a newer attempt took the batch, or this one has ended.
        """
        with self._database.write() as connection:
            row = connection.execute(_select(attempt).with_for_update()).one_or_none()
            if row is None or row.holder != attempt.holder or row.state is not AttemptState.RUNNING:
                raise _fenced(attempt)
            now_ms = self._database.now_ms(connection)
            lease_until_ms = now_ms + attempt.lease_ms
            values: dict[str, Any] = {"heartbeat_ms": now_ms, "lease_until_ms": lease_until_ms}
            if attributes:
                values["attributes"] = {**row.attributes, **attributes}
            connection.execute(_update(attempt).values(**values))
            return lease_until_ms

    def record_output(self, attempt: Attempt, output_id: str, counts: Mapping[str, Any]) -> None:
        """Note what an output did; the same output of the same attempt again replaces it.

        Raises:
            AttemptFencedError: a newer attempt took the batch, or this one has ended.
            BatchStateError: the stream had no such output when the attempt began.
        """
        if output_id not in attempt.outputs:
            raise BatchStateError(
                f"Attempt {attempt.number} of batch {attempt.batch_time_ms} has no output {output_id!r}, "
                f"but {', '.join(attempt.outputs) or 'none'}."
            )
        upsert = (sqlite.insert if self._database.is_sqlite else postgresql.insert)(batch_outputs)
        with self._database.write_stream(attempt.stream) as (connection, locked):
            _require_running(connection, attempt)
            changes = {"counts": dict(counts), "recorded_at_ms": locked.now_ms}
            connection.execute(
                upsert.values(
                    stream=attempt.stream,
                    batch_time_ms=attempt.batch_time_ms,
                    attempt=attempt.number,
                    output_id=output_id,
                    **changes,
                ).on_conflict_do_update(
                    index_elements=["stream", "batch_time_ms", "attempt", "output_id"], set_=changes
                )
            )
            payload = {"attempt": attempt.number, "output": output_id, "counts": dict(counts)}
            self._event(connection, locked, attempt, EventKind.OUTPUT_COMPLETED, payload)

    def complete_attempt(self, attempt: Attempt) -> BatchRow:
        """End the attempt, and the batch, well. The same again by the attempt that completed it changes nothing.

        Raises:
            AttemptFencedError: a newer attempt took the batch, or this one has ended otherwise.
            OutputsMissingError: an output has recorded no result.
        """
        stream, batch_time_ms = attempt.stream, attempt.batch_time_ms
        with self._database.write_stream(stream) as (connection, locked):
            batch = require_batch(connection, stream, batch_time_ms)
            if batch.state is BatchState.COMPLETED and _is_own(connection, attempt, AttemptState.COMPLETED):
                return batch
            _require_running(connection, attempt)
            counts = {row.output_id: row.counts for row in connection.execute(_outputs(attempt))}
            missing = set(attempt.outputs) - counts.keys()
            if missing:
                raise OutputsMissingError(batch_time_ms, missing)
            _end_running(connection, batch, AttemptState.COMPLETED, locked.now_ms, None)
            connection.execute(
                _batch(stream, batch_time_ms).values(state=BatchState.COMPLETED, completed_at_ms=locked.now_ms)
            )
            payload = {"attempt": attempt.number, "records": batch.records, "outputs": counts}
            self._event(connection, locked, attempt, EventKind.BATCH_COMPLETED, payload)
            return require_batch(connection, stream, batch_time_ms)

    def fail_attempt(self, attempt: Attempt, error: str) -> BatchRow:
        """End the attempt with an error; the batch can be begun again.

        Raises:
            AttemptFencedError: a newer attempt took the batch, or this one has ended.
        """
        with self._database.write_stream(attempt.stream) as (connection, locked):
            _require_running(connection, attempt)
            batch = require_batch(connection, attempt.stream, attempt.batch_time_ms)
            _end_running(connection, batch, AttemptState.FAILED, locked.now_ms, error)
            connection.execute(
                _batch(attempt.stream, attempt.batch_time_ms).values(state=BatchState.FAILED, error=error)
            )
            payload = {"attempt": attempt.number, "error": error}
            self._event(connection, locked, attempt, EventKind.BATCH_FAILED, payload)
            return require_batch(connection, attempt.stream, attempt.batch_time_ms)

    def attempts(self, stream: str, batch_time_ms: int) -> builtins.list[AttemptRow]:
        """The batch's attempts, oldest first."""
        query = select(batch_attempts).where(
            batch_attempts.c.stream == stream, batch_attempts.c.batch_time_ms == batch_time_ms
        )
        with self._database.read() as connection:
            return [_attempt_row(row) for row in connection.execute(query.order_by(batch_attempts.c.number))]

    def outputs(self, stream: str, batch_time_ms: int, attempt: int | None = None) -> builtins.list[BatchOutputRow]:
        """What the outputs of an attempt recorded, of the newest one by default."""
        with self._database.read() as connection:
            if attempt is None:
                batch = find_batch(connection, stream, batch_time_ms)
                attempt = 0 if batch is None else batch.attempt
            rows = connection.execute(_outputs_of(stream, batch_time_ms, attempt))
            return [BatchOutputRow(**row._mapping) for row in rows]

    @staticmethod
    def _event(
        connection: Connection, locked: LockedStream, attempt: Attempt, kind: EventKind, payload: Mapping[str, Any]
    ) -> None:
        record(connection, attempt.stream, locked.now_ms, kind, payload, batch_time_ms=attempt.batch_time_ms)


def end_attempts(connection: Connection, batch: BatchRow, now_ms: int) -> None:
    """Fence whatever runs the batch, within the caller's transaction."""
    _end_running(connection, batch, AttemptState.FENCED, now_ms, None)


def _check_state(connection: Connection, batch: BatchRow, *, force: bool) -> None:
    if batch.state is BatchState.COMPLETED and not force:
        raise AlreadyCompletedError(batch)
    if batch.state is BatchState.ABSORBED:
        raise BatchStateError(
            f"Batch {batch.batch_time_ms} was absorbed by batch {batch.absorbed_by_ms}.", remedy="Run that one."
        )
    if batch.state is BatchState.ABANDONED:
        raise BatchStateError(f"Batch {batch.batch_time_ms} was abandoned: {batch.error}.")
    if batch.started_at_ms is not None and _blocks_left(connection, batch) < batch.blocks:
        raise BatchCleanedError(
            f"The log of batch {batch.batch_time_ms} has been removed.",
            remedy="Its offset ranges are in the ledger (batch inputs): read them from Kafka again. "
            "The stream's 'remember' says how long batches can be run again.",
        )


def _blocks_left(connection: Connection, batch: BatchRow) -> int:
    query = (
        select(func.count())
        .select_from(blocks)
        .join(segments, segments.c.segment_id == blocks.c.segment_id)
        .where(
            blocks.c.stream == batch.stream,
            blocks.c.batch_time_ms.in_([batch.batch_time_ms, *batch.absorbed]),
            segments.c.removing_at_ms.is_(None),
        )
    )
    return int(connection.execute(query).scalar_one())


def _check_order(connection: Connection, locked: LockedStream, batch: BatchRow) -> None:
    """In an ordered stream a batch waits for the earlier ones, and for those that nobody has claimed yet."""
    if not locked.row.ordered or batch.state is BatchState.COMPLETED:
        return
    earlier: set[int] = set()
    for state in _UNFINISHED:
        earlier.update(
            connection.execute(
                select(batches.c.batch_time_ms)
                .where(
                    batches.c.stream == batch.stream,
                    batches.c.state == state,
                    batches.c.batch_time_ms < batch.batch_time_ms,
                )
                .order_by(batches.c.batch_time_ms)
                .limit(10)
            ).scalars()
        )
    unclaimed = set(
        connection.execute(
            select(unclaimed_times.c.batch_time_ms)
            .where(unclaimed_times.c.stream == batch.stream, unclaimed_times.c.batch_time_ms < batch.batch_time_ms)
            .order_by(unclaimed_times.c.batch_time_ms)
            .limit(10)
        ).scalars()
    )
    if earlier | unclaimed:
        first = sorted(earlier | unclaimed)
        # Only a batch that was allocated can be given up.
        way_out = (
            "Run it: its blocks are there, and no batch has taken them."
            if first[0] in unclaimed
            else "Wait for it or run it; if it can never succeed, give it up: "
            f"`headrace abandon {batch.stream} {first[0]} --reason WHY`."
        )
        raise NotItsTurnError(
            f"Stream {batch.stream!r} runs its batches in order, and before {batch.batch_time_ms} "
            f"there is {', '.join(map(str, first[:3]))}.",
            busy=first,
            remedy=way_out,
        )


def _check_slots(connection: Connection, locked: LockedStream, batch: BatchRow) -> None:
    running = select(batch_attempts).where(
        batch_attempts.c.stream == batch.stream,
        batch_attempts.c.state == AttemptState.RUNNING,
        batch_attempts.c.batch_time_ms != batch.batch_time_ms,
        batch_attempts.c.lease_until_ms > locked.now_ms,
    )
    others = [_attempt_row(row) for row in connection.execute(running)]
    slots = 1 if locked.row.ordered else locked.row.max_concurrent_batches
    if len(others) >= slots:
        held = ", ".join(f"{other.batch_time_ms} by {other.holder}" for other in others)
        raise SlotBusyError(
            f"Stream {batch.stream!r} runs {slots} batches at a time, and the slots are held: {held}.",
            busy=[other.batch_time_ms for other in others],
            remedy="Wait for them, or raise limits.max_concurrent_batches.",
        )


def _end_running(connection: Connection, batch: BatchRow, state: AttemptState, now_ms: int, error: str | None) -> None:
    connection.execute(
        update(batch_attempts)
        .where(
            batch_attempts.c.stream == batch.stream,
            batch_attempts.c.batch_time_ms == batch.batch_time_ms,
            batch_attempts.c.state == AttemptState.RUNNING,
        )
        .values(state=state, ended_at_ms=now_ms, error=error)
    )


def _require_running(connection: Connection, attempt: Attempt) -> None:
    if not _is_own(connection, attempt, AttemptState.RUNNING):
        raise _fenced(attempt)


def _is_own(connection: Connection, attempt: Attempt, state: AttemptState) -> bool:
    row = connection.execute(_select(attempt)).one_or_none()
    return row is not None and row.holder == attempt.holder and row.state is state


def _fenced(attempt: Attempt) -> AttemptFencedError:
    return AttemptFencedError(
        f"Attempt {attempt.number} of batch {attempt.batch_time_ms} ({attempt.holder}) no longer has it.",
        remedy="Stop it: a newer attempt runs the batch, or this one has ended.",
    )


def _identity(attempt: Attempt) -> tuple[Any, ...]:
    return (
        batch_attempts.c.stream == attempt.stream,
        batch_attempts.c.batch_time_ms == attempt.batch_time_ms,
        batch_attempts.c.number == attempt.number,
    )


def _select(attempt: Attempt) -> Any:
    return select(batch_attempts).where(*_identity(attempt))


def _update(attempt: Attempt) -> Any:
    return update(batch_attempts).where(*_identity(attempt))


def _batch(stream: str, batch_time_ms: int) -> Any:
    return update(batches).where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms)


def _outputs(attempt: Attempt) -> Any:
    return _outputs_of(attempt.stream, attempt.batch_time_ms, attempt.number)


def _outputs_of(stream: str, batch_time_ms: int, attempt: int) -> Any:
    return (
        select(batch_outputs)
        .where(
            batch_outputs.c.stream == stream,
            batch_outputs.c.batch_time_ms == batch_time_ms,
            batch_outputs.c.attempt == attempt,
        )
        .order_by(batch_outputs.c.output_id)
    )


def _attempt_row(row: Row[Any]) -> AttemptRow:
    fields = dict(row._mapping)
    fields["outputs"] = tuple(fields["outputs"])
    return AttemptRow(**fields)
