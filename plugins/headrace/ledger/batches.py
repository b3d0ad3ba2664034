"""Finds batches and their inputs; marks them checkpointed and cleaned, or abandons them; assigns batch times to runs.

An Airflow run whose date does not determine a batch time (of a coalescing stream, or without a date) is assigned one
(`RunBatchTimes`). The assignment is stored, so all tasks of a run find the same batch, also after the run is cleared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, and_, bindparam, exists, func, insert, literal, or_, select, update

from headrace.blocks import TopicPartition
from headrace.clock import time_text
from headrace.ledger.batch_states import (
    earlier_unfinished,
    fence_attempts,
    find_batch,
    is_recorded,
    newest_outputs,
    origins_of,
    require_batch,
    settle,
)
from headrace.ledger.batch_tables import (
    BatchInputRow,
    BatchOrigin,
    BatchRow,
    EarlierBatch,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    replays,
)
from headrace.ledger.clock_corrections import CLOCK_SKEW_MS, take_back
from headrace.ledger.database import LockedStream, Repository, chunks
from headrace.ledger.errors import BatchNotFoundError, BatchStateError
from headrace.ledger.events import add_gap, record, record_batches, remove_vanished
from headrace.ledger.model import partition_key
from headrace.ledger.receiving_tables import blocks, unclaimed_sums, unclaimed_times
from headrace.ledger.states import STATE_STEP, AttemptState, BatchState, EventKind

_mark_result = (
    update(batches)
    .where(batches.c.stream == bindparam("of_stream"), batches.c.batch_time_ms == bindparam("time_ms"))
    .values(result=bindparam("held"), checkpointed_at_ms=bindparam("at_ms"), checkpoint_uri=bindparam("uri"))
)


class Batches(Repository):
    """Finds batches, and ends them after their attempts."""

    def get(self, stream_name: str, batch_time_ms: int) -> BatchRow:
        """Return the batch's row.

        Raises:
            BatchNotFoundError: it was not allocated.
        """
        batch = self.find(stream_name, batch_time_ms)
        if batch is None:
            raise BatchNotFoundError(stream_name, batch_time_ms)
        return batch

    def find(self, stream_name: str, batch_time_ms: int) -> BatchRow | None:
        """Return the batch's row, or None if it was not allocated."""
        with self._database.read() as connection:
            return find_batch(connection, stream_name, batch_time_ms)

    def page(
        self,
        stream_name: str,
        limit: int = 100,
        states: Iterable[BatchState | str] | None = None,
        *,
        before_ms: int | None = None,
        oldest_first: bool = False,
    ) -> list[BatchRow]:
        """Return up to ``limit`` batches with times below ``before_ms``, newest first or oldest first."""
        order = batches.c.batch_time_ms.asc() if oldest_first else batches.c.batch_time_ms.desc()
        query = select(batches).where(batches.c.stream == stream_name)
        if before_ms is not None:
            query = query.where(batches.c.batch_time_ms < before_ms)
        # One query per state uses the index; one query for all states would read and sort all their rows.
        parts = [query] if states is None else [query.where(batches.c.state == BatchState(state)) for state in states]
        rows: list[BatchRow] = []
        with self._database.read() as connection:
            for part in parts:
                rows += BatchRow.rows(connection, part.order_by(order).limit(limit))
        return sorted(rows, key=lambda row: row.batch_time_ms, reverse=not oldest_first)[:limit]

    def between(self, stream_name: str, after_ms: int, until_ms: int) -> list[BatchRow]:
        """Return the batches of times ``(after_ms, until_ms]``, oldest first."""
        query = select(batches).where(
            batches.c.stream == stream_name, batches.c.batch_time_ms > after_ms, batches.c.batch_time_ms <= until_ms
        )
        return self._rows(BatchRow, query.order_by(batches.c.batch_time_ms))

    def uncleaned(self, stream_name: str, limit: int | None = None, *, with_built: bool = True) -> list[BatchRow]:
        """Return the oldest ``limit`` batches that cleanup has not marked, without absorbed ones; None means all.

        Args:
            with_built: also those that were built from Kafka, which never have blocks in the log.
        """
        query = select(batches).where(
            batches.c.stream == stream_name, batches.c.cleaned_at_ms.is_(None), batches.c.state != BatchState.ABSORBED
        )
        if not with_built:
            query = query.where(batches.c.built.is_(False))
        return self._rows(BatchRow, query.order_by(batches.c.batch_time_ms).limit(limit))

    def inputs(self, stream_name: str, batch_time_ms: int) -> list[BatchInputRow]:
        """Return the batch's offset range of every partition. They stay when its blocks are deleted."""
        query = select(batch_inputs).where(
            batch_inputs.c.stream == stream_name, batch_inputs.c.batch_time_ms == batch_time_ms
        )
        order = (batch_inputs.c.input_id, batch_inputs.c.topic, batch_inputs.c.incarnation, batch_inputs.c.partition)
        return self._rows(BatchInputRow, query.order_by(*order))

    def containing(
        self, stream_name: str, input_id: str, partition: TopicPartition, offset: int
    ) -> BatchInputRow | None:
        """Return the batch input whose range holds the offset, or None."""
        query = select(batch_inputs).where(
            batch_inputs.c.stream == stream_name,
            batch_inputs.c.input_id == input_id,
            *(batch_inputs.c[name] == value for name, value in partition_key(partition).items()),
            batch_inputs.c.until_offset > offset,
        )
        with self._database.read() as connection:
            row = BatchInputRow.row(connection, query.order_by(batch_inputs.c.until_offset).limit(1))
        return row if row is not None and row.from_offset <= offset else None

    def next_unclaimed(self, stream_name: str) -> int | None:
        """Return the earliest batch time that has blocks and no batch, or None."""
        query = select(unclaimed_times.c.batch_time_ms).where(unclaimed_times.c.stream == stream_name)
        with self._database.read() as connection:
            return connection.execute(query.order_by(unclaimed_times.c.batch_time_ms).limit(1)).scalar_one_or_none()

    def absorbable(self, stream_name: str, batch_time_ms: int) -> list[int]:
        """Return the batch times between the previous batch and this one that have blocks and no batch, oldest first.

        Earlier times are left out: with them the batch would have more than one offset range in a partition.
        """
        before = select(batches.c.batch_time_ms).where(
            batches.c.stream == stream_name,
            batches.c.batch_time_ms < batch_time_ms,
            batches.c.state != BatchState.ABSORBED,
        )
        newest_first = before.order_by(batches.c.batch_time_ms.desc())
        time = unclaimed_times.c.batch_time_ms
        with self._database.read() as connection:
            after_ms = connection.execute(newest_first.limit(1)).scalar_one_or_none() or 0
            query = select(time).where(unclaimed_times.c.stream == stream_name, time > after_ms, time < batch_time_ms)
            return list(connection.execute(query.distinct().order_by(time)).scalars())

    def earlier_unfinished(
        self, stream_name: str, batch_time_ms: int, limit: int = 100, *, after_ms: int = 0
    ) -> list[EarlierBatch]:
        """Return the oldest ``limit`` batch times between ``after_ms`` and this one that are unfinished or unclaimed,
        oldest first.

        A batch that has completed once is finished, even if it is run again and fails.
        """
        with self._database.read() as connection:
            now_ms = self._database.now_ms(connection)
            return earlier_unfinished(connection, stream_name, batch_time_ms, now_ms, limit, after_ms=after_ms)

    def written(self, stream_name: str, output: str, from_ms: int, until_ms: int) -> dict[int, BatchState]:
        """Return the states of the batches of times ``[from_ms, until_ms)`` that the output holds, oldest first.

        These are the completed batches, and batches in any other state for which the output was ever recorded: for
        example, another output failed, or they are being run again, or were abandoned.
        """
        recorded = batch_outputs.c.batch_time_ms.is_not(None)
        of_output = and_(
            batch_outputs.c.stream == batches.c.stream,
            batch_outputs.c.batch_time_ms == batches.c.batch_time_ms,
            batch_outputs.c.output_id == output,
            batch_outputs.c.target == "",
            batch_outputs.c.state == AttemptState.COMPLETED,
        )
        query = (
            select(batches.c.batch_time_ms, batches.c.state)
            .select_from(batches.outerjoin(batch_outputs, of_output))
            .where(
                batches.c.stream == stream_name,
                batches.c.batch_time_ms >= from_ms,
                batches.c.batch_time_ms < until_ms,
                or_(batches.c.state == BatchState.COMPLETED, recorded),
            )
            .order_by(batches.c.batch_time_ms)
        )
        with self._database.read() as connection:
            return {row.batch_time_ms: row.state for row in connection.execute(query)}

    def origins(self, stream_name: str, times: Iterable[int], *, abandoned: bool = False) -> dict[int, BatchOrigin]:
        """Return the source of the records, by batch time, for those of ``times`` that have a batch.

        Absorbed times are left out, since their blocks are in the manifest of the batch that absorbed them. Abandoned
        batches are left out too, unless ``abandoned``.
        """
        left_out = {BatchState.ABSORBED} if abandoned else {BatchState.ABSORBED, BatchState.ABANDONED}
        wanted = sorted(set(times))
        with self._database.read() as connection:
            rows: list[BatchRow] = []
            for part in chunks(wanted):
                query = select(batches).where(batches.c.stream == stream_name, batches.c.batch_time_ms.in_(part))
                rows += BatchRow.rows(connection, query.order_by(batches.c.batch_time_ms))
            rows = [row for row in rows if row.state not in left_out]
            return origins_of(connection, rows)

    def mark_checkpointed(self, stream_name: str, held: Collection[BatchRow]) -> None:
        """Note the result files that hold these rows of batches, in one transaction. A batch that is completed in its
        file, and has not changed since, is checkpointed: its log may be deleted from now on. One that has changed needs
        another file.

        Files of batches that were removed are passed over, and those that are older than the batch's file.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            rows: dict[int, BatchRow] = {}
            for times in chunks([file.batch_time_ms for file in held]):
                query = select(batches).where(batches.c.stream == stream_name, batches.c.batch_time_ms.in_(times))
                rows.update((row.batch_time_ms, row) for row in BatchRow.rows(connection, query))
            values: list[dict[str, Any]] = []
            uris: dict[int, dict[str, Any]] = {}
            for file in held:
                batch = rows.get(file.batch_time_ms)
                if batch is None or batch.result >= file.change:
                    continue
                source = batch
                if batch.change == file.change and batch.state is BatchState.COMPLETED:
                    source, uris[file.batch_time_ms] = file, {"uri": file.checkpoint_uri}
                of_file = {"of_stream": stream_name, "time_ms": file.batch_time_ms, "held": file.change}
                values.append({**of_file, "at_ms": source.checkpointed_at_ms, "uri": source.checkpoint_uri})
            if values:
                connection.execute(_mark_result, values)
            record_batches(connection, stream_name, locked.now_ms, EventKind.BATCH_CHECKPOINTED, uris)

    def mark_cleaned(self, stream_name: str, batch_time_ms: int, details: Mapping[str, Any] | None = None) -> BatchRow:
        """Note that nothing of the batch is left in the log. A second call changes nothing.

        Raises:
            BatchStateError: the batch is neither checkpointed nor abandoned, or blocks of it are left.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            batch = require_batch(connection, stream_name, batch_time_ms)
            if batch.cleaned_at_ms is not None:
                return batch
            _check_cleanable(connection, batch)
            connection.execute(
                _this(stream_name, batch_time_ms).values(cleaned_at_ms=locked.now_ms, cleanup=dict(details or {}))
            )
            connection.execute(
                update(batches)
                .where(batches.c.stream == stream_name, batches.c.absorbed_by_ms == batch_time_ms)
                .values(cleaned_at_ms=locked.now_ms)
            )
            _event(connection, locked, EventKind.BATCH_CLEANED, batch_time_ms, details or {})
            return require_batch(connection, stream_name, batch_time_ms)

    def abandon(self, stream_name: str, batch_time_ms: int, reason: str, *, by: str | None = None) -> BatchRow:
        """Abandon a batch. This is final: its ranges become gaps, its log may be deleted, and its unfinished replays
        are abandoned too. A second call changes nothing. ``by`` is kept in the event.

        Raises:
            BatchNotFoundError: the batch was not allocated.
            BatchStateError: it has completed once, even if it was run again and failed; or it was absorbed.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            batch = require_batch(connection, stream_name, batch_time_ms)
            if batch.state is BatchState.ABANDONED:
                return batch
            if batch.state in (BatchState.COMPLETED, BatchState.ABSORBED):
                raise BatchStateError(
                    f"Batch {time_text(batch_time_ms)} is {batch.state.value} and cannot be abandoned."
                )
            if batch.steps is not None:
                raise BatchStateError(
                    f"Batch {time_text(batch_time_ms)} has completed before, so its records are no gap: it cannot "
                    "be abandoned.",
                    remedy="Its outputs keep what it wrote. Run it again, or leave it: no other batch waits for it.",
                )
            fence_attempts(connection, stream_name, batch_time_ms, locked.now_ms)
            connection.execute(
                _this(stream_name, batch_time_ms).values(
                    state=BatchState.ABANDONED, error=reason, change=batches.c.change + 1
                )
            )
            _abandon_replays(connection, stream_name, batch_time_ms, reason)
            vanished = remove_vanished(connection, stream_name, batch_time_ms)
            for row in connection.execute(
                select(batch_inputs).where(
                    batch_inputs.c.stream == stream_name, batch_inputs.c.batch_time_ms == batch_time_ms
                )
            ).all():
                taken = BatchInputRow.from_row(row)
                add_gap(
                    connection,
                    locked,
                    taken.input_id,
                    taken.partition,
                    from_offset=taken.from_offset,
                    until_offset=taken.until_offset,
                    reason=f"batch abandoned: {reason}",
                    batch_time_ms=batch_time_ms,
                    counted=vanished[taken.input_id, taken.partition],
                )
            payload = {"reason": reason, "records": batch.records, **({} if by is None else {"by": by})}
            _event(connection, locked, EventKind.BATCH_ABANDONED, batch_time_ms, payload)
            return require_batch(connection, stream_name, batch_time_ms)

    def abandon_output(
        self, stream_name: str, batch_time_ms: int, step: str, reason: str, *, by: str | None = None
    ) -> BatchRow:
        """Give up one step of a batch that has not completed: the batch no longer needs it. A second call changes
        nothing. If it needs no other, it needs those that the stream has now. ``by`` is kept in the event.

        Raises:
            BatchNotFoundError: the batch was not allocated.
            BatchStateError: it does not need the step, has it recorded, or needs no other and the stream has none.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            batch = require_batch(connection, stream_name, batch_time_ms)
            if step in batch.abandoned_steps:
                return batch
            _check_step_abandonable(connection, locked, batch, step)
            changed = replace(batch, abandoned_steps={**batch.abandoned_steps, step: reason})
            if batch.steps is None and not changed.needs(locked.steps):
                left = [needed for needed in locked.steps if needed not in changed.abandoned_steps]
                if not left:
                    raise BatchStateError(
                        f"Batch {time_text(batch_time_ms)} needs no other output than {step!r}, and the stream has "
                        "none.",
                        remedy="Abandon the batch: leave out the output.",
                    )
                changed = replace(changed, required=(*(batch.required or ()), *left))
            fence_attempts(connection, stream_name, batch_time_ms, locked.now_ms, target="", outputs=[step])
            payload = {"output": step, "reason": reason, "records": batch.records, **({} if by is None else {"by": by})}
            _event(connection, locked, EventKind.OUTPUT_ABANDONED, batch_time_ms, payload)
            kept = {name: changed.to_columns()[name] for name in ("required", "abandoned_steps")}
            return settle(connection, locked, changed, **kept)


def _check_step_abandonable(connection: Connection, locked: LockedStream, batch: BatchRow, step: str) -> None:
    at = time_text(batch.batch_time_ms)
    if batch.state in (BatchState.COMPLETED, BatchState.ABSORBED, BatchState.ABANDONED):
        raise BatchStateError(f"Batch {at} is {batch.state.value}: none of its outputs can be given up.")
    if step == STATE_STEP and step in locked.steps:
        raise BatchStateError(
            f"The state of stream {batch.stream!r} needs every batch, also {at}.", remedy="Abandon the batch."
        )
    newest = newest_outputs(connection, batch.stream, batch.batch_time_ms)
    left = [needed for needed in batch.needs(locked.steps) if not is_recorded(newest.get(needed))]
    if step not in left:
        raise BatchStateError(
            f"Batch {at} does not wait for an output {step!r}, but for {', '.join(left) or 'none'}.",
            remedy="Name one of these." if left else None,
        )


def _abandon_replays(connection: Connection, stream_name: str, batch_time_ms: int, reason: str) -> None:
    of_batch = (batch_attempts.c.stream == stream_name, batch_attempts.c.batch_time_ms == batch_time_ms)
    query = select(batch_attempts.c.target).where(*of_batch, batch_attempts.c.target != "").distinct()
    # By target: in the index it comes before the batch time.
    targets = connection.execute(query).scalars().all()
    if targets:
        unfinished = (
            replays.c.stream == stream_name,
            replays.c.target.in_(targets),
            replays.c.batch_time_ms == batch_time_ms,
            replays.c.state != BatchState.COMPLETED,
        )
        connection.execute(update(replays).where(*unfinished).values(state=BatchState.ABANDONED, error=reason))


def _check_cleanable(connection: Connection, batch: BatchRow) -> None:
    done = batch.state is BatchState.COMPLETED and batch.checkpointed_at_ms is not None
    if not done and batch.state is not BatchState.ABANDONED:
        raise BatchStateError(
            f"Batch {time_text(batch.batch_time_ms)} is {batch.state.value}: only a batch that has completed and is "
            "checkpointed, or is abandoned, can be marked cleaned."
        )
    own = select(literal(batch.batch_time_ms))
    absorbed = select(batches.c.batch_time_ms).where(
        batches.c.stream == batch.stream, batches.c.absorbed_by_ms == batch.batch_time_ms
    )
    times = own.union_all(absorbed).subquery()
    left = select(blocks.c.block_id).where(blocks.c.stream == batch.stream, blocks.c.batch_time_ms.in_(select(times)))
    if connection.execute(left.limit(1)).first() is not None:
        raise BatchStateError(
            f"Blocks of batch {time_text(batch.batch_time_ms)} are still in the log.",
            remedy="Remove their segments first (cleanup.removable_segments).",
        )


def _this(stream_name: str, batch_time_ms: int) -> Any:
    return update(batches).where(batches.c.stream == stream_name, batches.c.batch_time_ms == batch_time_ms)


def _event(
    connection: Connection, locked: LockedStream, kind: EventKind, batch_time_ms: int, payload: Mapping[str, Any]
) -> None:
    record(connection, locked.row.name, locked.now_ms, kind, payload, batch_time_ms=batch_time_ms)


CLOCKS_DIFFER_MS = 60_000
"""From this difference on, a clock of the two is wrong, and a run takes no time that is ahead of either."""
# The runs of a backfill for the times of one batch follow each other in shorter intervals than this.
_REPEAT_MS = 600_000


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """The most that a batch takes over from unclaimed batch times. It always takes the first of them."""

    records: int
    payload_bytes: int
    times: int = 360
    """Each time has a row, and its blocks are in the manifest: an hour of 10 s intervals is about 20,000 blocks."""


class RunBatchTimes(Repository):
    """Assigns batch times to runs."""

    def assign(self, stream_name: str, run_id: str, *, host_ms: int | None = None) -> int:
        """Return the batch time of a run without date; repeated calls return the same.

        It is the earliest time that has ended and has blocks, no batch and no other run. If there is none, it is the
        end of the latest interval that has ended.

        Args:
            host_ms: as in `take`.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream_name) as (connection, stream_now):
            known = _known(connection, stream_name, run_id)
            if known is not None:
                return known
            locked = _on_time(connection, stream_now, host_ms)
            batch_time_ms = _unassigned(connection, locked)
            return _keep(connection, locked, run_id, _ended(locked) if batch_time_ms is None else batch_time_ms)

    def take(
        self,
        stream_name: str,
        run_id: str,
        *,
        bounds: BatchBounds,
        date_ms: int | None = None,
        keeps_date: bool = False,
        host_ms: int | None = None,
    ) -> int | None:
        """Return the batch time of a run that takes over all pending batch times; repeated calls return the same.

        It is the end of the latest interval that has ended: its batch takes over the earlier times. It is an earlier
        time if one batch cannot take so much (``bounds``), or if there is already a batch in between: a batch has one
        offset range in each partition. Returns None if nothing is left to run: batch times are sealed up to now. A run
        without date then gets the latest interval.

        Args:
            date_ms: the batch time of the run's date. It has ended by Airflow's clock, which may be ahead.
            keeps_date: use the batch of the run's date if it exists, because a person asked for it.
            host_ms: the time by the clock of the run's host, or by Airflow's if that is later. If it differs from the
                ledger's by `CLOCKS_DIFFER_MS` or more, the earlier one counts: a time that is allocated while the
                ledger's clock is ahead stays sealed, and holds up all records until then.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        if (before := self.find(stream_name, run_id)) is not None:
            return before
        with self._database.write_stream(stream_name) as (connection, stream_now):
            known = _known(connection, stream_name, run_id)
            if known is not None:
                return known
            locked = _on_time(connection, stream_now, host_ms)
            if keeps_date and date_ms is not None and find_batch(connection, stream_name, date_ms) is not None:
                return _keep(connection, locked, run_id, date_ms)
            until_ms = _ended(locked)
            if date_ms is not None and until_ms < date_ms <= locked.now_ms + CLOCK_SKEW_MS:
                until_ms = date_ms
            batch_time_ms = _pending(connection, locked, until_ms, bounds)
            if batch_time_ms is None:
                if date_ms is not None:
                    return None
                batch_time_ms = until_ms
            return _keep(connection, locked, run_id, batch_time_ms)

    def repeat(self, stream_name: str, run_id: str, batch_time_ms: int) -> str:
        """Return the run that repeats the batch, of those runs of a backfill that ask for it.

        It is the first one that asks. The others get its id until none has asked, and its attempts have ended, for 10
        minutes: a task does not know its backfill. If the run that repeats it asks again (it was cleared, or its task
        is retried), it repeats it.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            query = select(batch_runs.c.run_id, batch_runs.c.at_ms).where(
                batch_runs.c.stream == stream_name, batch_runs.c.batch_time_ms == batch_time_ms, batch_runs.c.repeats
            )
            newest = connection.execute(query.order_by(batch_runs.c.at_ms.desc()).limit(1)).one_or_none()
            by = run_id
            if newest is not None:
                # The batch may take longer than the runs wait for each other.
                ran_ms = _ran_until(connection, stream_name, batch_time_ms, newest.run_id)
                # A later time is of a clock that was ahead.
                if locked.now_ms - _REPEAT_MS < max(newest.at_ms, ran_ms) <= locked.now_ms:
                    by = newest.run_id
            asked = update(batch_runs).where(batch_runs.c.stream == stream_name, batch_runs.c.run_id == by)
            values = {"batch_time_ms": batch_time_ms, "at_ms": locked.now_ms, "repeats": True}
            if not connection.execute(asked.values(values)).rowcount:
                connection.execute(insert(batch_runs).values(stream=stream_name, run_id=by, **values))
            return by

    def find(self, stream_name: str, run_id: str) -> int | None:
        """Return the batch time assigned to the run, or None."""
        with self._database.read() as connection:
            return _known(connection, stream_name, run_id)

    def of_batch(self, stream_name: str, batch_time_ms: int) -> list[str]:
        """Return the ids of the runs to which this batch time was assigned, the last one first."""
        query = select(batch_runs.c.run_id).where(
            batch_runs.c.stream == stream_name, batch_runs.c.batch_time_ms == batch_time_ms
        )
        with self._database.read() as connection:
            return list(connection.execute(query.order_by(batch_runs.c.at_ms.desc())).scalars())


def _known(connection: Connection, stream_name: str, run_id: str) -> int | None:
    query = select(batch_runs.c.batch_time_ms).where(batch_runs.c.stream == stream_name, batch_runs.c.run_id == run_id)
    return connection.execute(query).scalar_one_or_none()


def _ran_until(connection: Connection, stream_name: str, batch_time_ms: int, run_id: str) -> int:
    """Return when the run's last attempt at the batch ended, or was last heard of; 0 if it has made none."""
    attempts = batch_attempts.c
    last_ms = func.coalesce(attempts.ended_at_ms, attempts.heartbeat_ms)
    query = select(attempts.attributes, last_ms.label("at_ms")).where(
        attempts.stream == stream_name, attempts.batch_time_ms == batch_time_ms, attempts.target == ""
    )
    own = (row.at_ms for row in connection.execute(query) if row.attributes.get("run_id") == run_id)
    return max(own, default=0)


def _keep(connection: Connection, locked: LockedStream, run_id: str, batch_time_ms: int) -> int:
    row = {"stream": locked.row.name, "run_id": run_id, "batch_time_ms": batch_time_ms, "at_ms": locked.now_ms}
    connection.execute(insert(batch_runs).values(row))
    return batch_time_ms


def _on_time(connection: Connection, locked: LockedStream, host_ms: int | None) -> LockedStream:
    """The stream with the time that counts for a run, after a clock that was ahead is corrected."""
    locked, _ = take_back(connection, locked)
    if host_ms is None or abs(locked.now_ms - host_ms) < CLOCKS_DIFFER_MS:
        return locked
    return replace(locked, now_ms=min(locked.now_ms, host_ms))


def _ended(locked: LockedStream) -> int:
    interval_ms = locked.row.batch_interval_ms
    return locked.now_ms // interval_ms * interval_ms


def _unassigned(connection: Connection, locked: LockedStream) -> int | None:
    time = unclaimed_times.c.batch_time_ms
    query = select(time).where(
        unclaimed_times.c.stream == locked.row.name,
        time <= locked.now_ms,
        ~exists().where(batch_runs.c.stream == unclaimed_times.c.stream, batch_runs.c.batch_time_ms == time),
    )
    return connection.execute(query.order_by(time).limit(1)).scalar_one_or_none()


def _pending(connection: Connection, locked: LockedStream, until_ms: int, bounds: BatchBounds) -> int | None:
    """Return the batch time whose batch takes over the unclaimed times up to ``until_ms``, or as many as allowed."""
    stream = locked.row.name
    time = unclaimed_times.c.batch_time_ms
    query = unclaimed_sums(stream).where(time <= until_ms)
    unclaimed = connection.execute(query.order_by(time).limit(bounds.times + 1)).all()
    if not unclaimed:
        return until_ms if until_ms > locked.row.sealed_until_ms else None
    between = select(batches.c.batch_time_ms).where(
        batches.c.stream == stream,
        batches.c.batch_time_ms > unclaimed[0].batch_time_ms,
        batches.c.batch_time_ms <= until_ms,
        batches.c.state != BatchState.ABSORBED,
    )
    barrier_ms = connection.execute(between.order_by(batches.c.batch_time_ms).limit(1)).scalar_one_or_none()
    records = payload_bytes = taken = 0
    for row in unclaimed:
        records += row.records
        payload_bytes += row.payload_bytes
        beyond = records > bounds.records or payload_bytes > bounds.payload_bytes or taken == bounds.times
        if (taken and beyond) or (barrier_ms is not None and row.batch_time_ms > barrier_ms):
            break
        taken += 1
    if taken == len(unclaimed) and barrier_ms is None:
        return until_ms
    last_ms: int = unclaimed[taken - 1].batch_time_ms
    return last_ms
