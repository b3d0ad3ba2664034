"""Reads batches and attempts within a transaction, computes a batch's state, and decides whether the batch may run now.

The state of a batch, or of its replay, is computed from its outputs. Its records are read from the log, or from Kafka
after they were deleted from the log (`source_of`). A batch of an ordered stream runs in its turn (`check_order`), and
each stream has a number of slots (`check_slots`; rule 6 of the design).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, func, insert, select, update

from headrace.clock import time_text, times_text
from headrace.errors import RANGE
from headrace.ledger.batches.tables import (
    Attempt,
    AttemptRow,
    BatchOrigin,
    BatchOutputRow,
    BatchRow,
    EarlierBatch,
    batch_attempts,
    batch_outputs,
    batches,
    replay_definitions,
)
from headrace.ledger.database import LockedStream, chunks
from headrace.ledger.errors import (
    AttemptFencedError,
    BatchNotFoundError,
    NotItsTurnError,
    SlotBusyError,
    StepsLostError,
)
from headrace.ledger.events import add_totals, batch_delays, record
from headrace.ledger.receiving.tables import blocks, segments, unclaimed_times
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState, EventKind
from headrace.ledger.tables import events


class Run(NamedTuple):
    """One execution of a batch: the attempts from ``first_attempt`` on.

    ``failed``: the event of its failure is recorded.
    """

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


def find_batch(connection: Connection, stream_name: str, batch_time_ms: int) -> BatchRow | None:
    """Return the batch's row, or None if it was not allocated."""
    query = select(batches).where(batches.c.stream == stream_name, batches.c.batch_time_ms == batch_time_ms)
    return BatchRow.row(connection, query)


def require_batch(connection: Connection, stream_name: str, batch_time_ms: int) -> BatchRow:
    """Return the batch's row.

    Raises:
        BatchNotFoundError: it was not allocated.
    """
    batch = find_batch(connection, stream_name, batch_time_ms)
    if batch is None:
        raise BatchNotFoundError(stream_name, batch_time_ms)
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


def present_run(connection: Connection, stream_name: str, batch_time_ms: int) -> Run | None:
    """Return the batch's present run, from its events. None if it has not begun or has completed, or if its events were
    deleted."""
    bounds = (EventKind.BATCH_ALLOCATED, EventKind.BATCH_STARTED, EventKind.BATCH_COMPLETED, EventKind.BATCH_FAILED)
    query = select(events.c.kind, events.c.payload).where(
        events.c.stream == stream_name,
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
    values: dict[str, Any] = {"state": state, "error": error, "change": batches.c.change + 1, **changes}
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
    error: str | None = connection.execute(query).scalar()
    return error or output.error


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


def _blocks_left(connection: Connection, stream_name: str, times: Sequence[int]) -> dict[int, int]:
    """Return the number of blocks in segments that are not being removed, by batch time, including absorbed times."""
    owners = {batch_time_ms: batch_time_ms for batch_time_ms in times}
    for part in chunks(times):
        query = select(batches.c.batch_time_ms, batches.c.absorbed_by_ms).where(
            batches.c.stream == stream_name, batches.c.absorbed_by_ms.in_(part)
        )
        owners |= {row.batch_time_ms: row.absorbed_by_ms for row in connection.execute(query)}
    blocks_left: dict[int, int] = {}
    # Not joined to batches or segments: planners would then begin with all of the stream's blocks or segments. The
    # segments being removed (as many as one cleanup claims) are read in the counting statement: their blocks are
    # deleted with them, and with two statements the second could find neither.
    removing = select(segments.c.segment_id).where(
        segments.c.stream == stream_name, segments.c.removed_at_ms.is_(None), segments.c.removing_at_ms.is_not(None)
    )
    for part in chunks(list(owners)):
        counts = (
            select(blocks.c.batch_time_ms, func.count())
            .where(
                blocks.c.stream == stream_name,
                blocks.c.batch_time_ms.in_(part),
                blocks.c.segment_id.not_in(removing),
            )
            .group_by(blocks.c.batch_time_ms)
        )
        for batch_time_ms, count in connection.execute(counts):
            blocks_left[owners[batch_time_ms]] = blocks_left.get(owners[batch_time_ms], 0) + count
    return blocks_left


COLUMNS = [column for column in batch_attempts.c if column.name != "replay_revision"]
"""Those of an `AttemptRow`, without the definition of its replay."""


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
    stream_name: str,
    batch_time_ms: int,
    now_ms: int,
    *,
    target: str | None = None,
    outputs: Collection[str] | None = None,
) -> None:
    """Fence the running attempts at a batch: if given, only those of ``target`` that share one of ``outputs``.

    Afterwards none of these outputs is running, even if its attempt had ended otherwise.
    """
    for row in running_attempts(connection, stream_name, batch_time_ms):
        if target is not None and row.target != target:
            continue
        if outputs is None or not row.outputs or set(row.outputs) & set(outputs):
            end_attempt(connection, row, AttemptState.FENCED, ended_at_ms=now_ms)
    left = [*_of_batch(batch_outputs, stream_name, batch_time_ms), batch_outputs.c.state == AttemptState.RUNNING]
    if target is not None:
        left.append(batch_outputs.c.target == target)
    if outputs is not None:
        left.append(batch_outputs.c.output_id.in_(outputs))
    connection.execute(update(batch_outputs).where(*left).values(state=AttemptState.FENCED, recorded_at_ms=now_ms))


def running_attempts(
    connection: Connection, stream_name: str, batch_time_ms: int, *, revision: int | None = None
) -> list[AttemptRow]:
    """Return the attempts at a batch and at its replays that have not ended, whether their leases are live or not.

    ``revision``: only attempts of replays with this revision of their definition.
    """
    query = select_attempts().where(
        batch_attempts.c.stream == stream_name,
        batch_attempts.c.state == AttemptState.RUNNING,
        batch_attempts.c.batch_time_ms == batch_time_ms,
    )
    if revision is not None:
        query = query.where(batch_attempts.c.replay_revision == revision)
    return AttemptRow.rows(connection, query)


def live_attempts(connection: Connection, stream_name: str, now_ms: int) -> list[AttemptRow]:
    """Return the running attempts of a stream and of its replays whose leases are live, by batch time."""
    query = select_attempts().where(
        batch_attempts.c.stream == stream_name,
        batch_attempts.c.state == AttemptState.RUNNING,
        batch_attempts.c.lease_until_ms > now_ms,
    )
    return AttemptRow.rows(connection, query.order_by(batch_attempts.c.batch_time_ms))


def newest_outputs(
    connection: Connection, stream_name: str, batch_time_ms: int, target: str = "", *, revision: int | None = None
) -> dict[str, BatchOutputRow]:
    """Return the newest row of each output, by id. ``revision``: only of attempts with this replay definition."""
    query = (
        select(batch_outputs)
        .where(*_of_batch(batch_outputs, stream_name, batch_time_ms), batch_outputs.c.target == target)
        .order_by(batch_outputs.c.attempt, batch_outputs.c.output_id)
    )
    if revision is not None:
        attempts = select(batch_attempts.c.number).where(
            *_of_batch(batch_attempts, stream_name, batch_time_ms), batch_attempts.c.replay_revision == revision
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
    return select(*COLUMNS, replay_definitions.c.definition).outerjoin(
        replay_definitions,
        and_(
            replay_definitions.c.stream == batch_attempts.c.stream,
            replay_definitions.c.target == batch_attempts.c.target,
            replay_definitions.c.revision == batch_attempts.c.replay_revision,
        ),
    )


def _of_batch(table: Any, stream_name: str, batch_time_ms: int) -> tuple[Any, ...]:
    return table.c.stream == stream_name, table.c.batch_time_ms == batch_time_ms


def earlier_unfinished(
    connection: Connection, stream_name: str, batch_time_ms: int, now_ms: int, limit: int, *, after_ms: int = 0
) -> list[EarlierBatch]:
    """`Batches.earlier_unfinished` within a transaction."""
    alive = {row.batch_time_ms for row in live_attempts(connection, stream_name, now_ms) if not row.target}
    earlier = []
    for state in UNFINISHED:
        # One query per state uses the index; one query for all states would read and sort all their rows.
        query = (
            select(batches.c.batch_time_ms, batches.c.error)
            .where(
                batches.c.stream == stream_name,
                batches.c.state == state,
                batches.c.batch_time_ms > after_ms,
                batches.c.batch_time_ms < batch_time_ms,
                batches.c.steps.is_(None),
            )
            .order_by(batches.c.batch_time_ms)
            .limit(limit)
        )
        for row in connection.execute(query):
            earlier.append(EarlierBatch(row.batch_time_ms, state, row.error, row.batch_time_ms in alive))
    query = (
        select(unclaimed_times.c.batch_time_ms)
        .distinct()
        .where(
            unclaimed_times.c.stream == stream_name,
            unclaimed_times.c.batch_time_ms > after_ms,
            unclaimed_times.c.batch_time_ms < batch_time_ms,
        )
        .order_by(unclaimed_times.c.batch_time_ms)
        .limit(limit)
    )
    earlier += [EarlierBatch(time_ms, None, None, False) for time_ms in connection.execute(query).scalars()]
    return sorted(earlier, key=lambda batch: batch.batch_time_ms)[:limit]


def check_order(connection: Connection, locked: LockedStream, batch: BatchRow) -> None:
    """Check that no earlier batch of an ordered stream is unfinished or unclaimed.

    A batch that has completed once does not wait when it is run again.

    Raises:
        NotItsTurnError: there are such batches.
    """
    if not locked.row.ordered or batch.steps is not None or batch.state is BatchState.COMPLETED:
        return
    earlier = earlier_unfinished(connection, batch.stream, batch.batch_time_ms, locked.now_ms, 10)
    if not earlier:
        return
    first = earlier[0]
    # Only an allocated batch can be abandoned.
    way_out = (
        "Run it: its blocks are there, and no batch has taken them."
        if first.state is None
        else "Wait for it or run it; if it can never succeed, abandon it: "
        f"`headrace batches abandon {batch.stream} {time_text(first.batch_time_ms)} --reason WHY` (with `--output ID` "
        "one output of it only)."
    )
    raise NotItsTurnError(
        f"Stream {batch.stream!r} runs its batches in order, and before {time_text(batch.batch_time_ms)} "
        f"there is {times_text(other.batch_time_ms for other in earlier[:3])}.",
        busy=[other.batch_time_ms for other in earlier],
        remedy=way_out,
    )


def takes_slot(locked: LockedStream, attributes: Mapping[str, Any] | None) -> bool:
    """Whether an attempt with these attributes takes a slot for its batch.

    One of a range that is run again (`RANGE`) takes none, unless the stream is ordered: a day of them must not delay
    the batches that are due.
    """
    return locked.row.ordered or RANGE not in (attributes or {})


def check_slots(connection: Connection, locked: LockedStream, batch: BatchRow) -> None:
    """Check that a slot is free. A batch with live attempts holds one slot (`takes_slot`); replays hold none.

    Raises:
        SlotBusyError: other batches hold all slots.
    """
    live = [
        row
        for row in live_attempts(connection, batch.stream, locked.now_ms)
        if not row.target and takes_slot(locked, row.attributes)
    ]
    others = {row.batch_time_ms: row for row in live if row.batch_time_ms != batch.batch_time_ms}
    slots = 1 if locked.row.ordered else locked.row.max_concurrent_batches
    if len(others) >= slots:
        held = ", ".join(f"{time_text(other.batch_time_ms)} by {other.holder}" for other in others.values())
        raise SlotBusyError(
            f"Stream {batch.stream!r} runs {slots} batches at a time, and the slots are held: {held}.",
            busy=list(others),
            remedy="Wait for them, or raise limits.max_concurrent_batches.",
        )
