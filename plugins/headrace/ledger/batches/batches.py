"""Finds batches and their inputs; marks them checkpointed and cleaned, or abandons them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, and_, bindparam, literal, or_, select, update

from headrace.blocks import TopicPartition
from headrace.clock import time_text
from headrace.ledger.batches.batch_states import (
    earlier_unfinished,
    fence_attempts,
    find_batch,
    is_recorded,
    newest_outputs,
    origins_of,
    require_batch,
    settle,
)
from headrace.ledger.batches.tables import (
    BatchInputRow,
    BatchOrigin,
    BatchRow,
    EarlierBatch,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batches,
    replays,
)
from headrace.ledger.database import LockedStream, Repository, chunks
from headrace.ledger.errors import BatchNotFoundError, BatchStateError
from headrace.ledger.events import add_gap, record, record_batches, remove_vanished
from headrace.ledger.model import partition_key
from headrace.ledger.receiving.tables import blocks, unclaimed_times
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
