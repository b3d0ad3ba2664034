"""Begins, renews and ends attempts at batches, and records what their outputs have done, with totals and events.

Each attempt has a number and some of the batch's outputs. Only the newest attempt's results count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Text, cast, func, literal, or_, select, update

from headrace.clock import time_text
from headrace.ledger.batches.batch_states import (
    COLUMNS,
    are_lost,
    check_order,
    check_slots,
    end_attempt,
    fence_attempts,
    fenced,
    figures,
    identity,
    insert_attempt,
    is_own,
    is_recorded,
    live_attempts,
    newest_outputs,
    outputs_of,
    present_run,
    record_end,
    require_batch,
    require_running,
    running_attempts,
    select_attempts,
    settle,
    source_of,
    takes_slot,
    wrote_output,
)
from headrace.ledger.batches.replays import present_revision, settle_replay
from headrace.ledger.batches.tables import (
    Attempt,
    AttemptRow,
    BatchOutputRow,
    BatchRow,
    RecordedOutput,
    batch_attempts,
    batch_outputs,
)
from headrace.ledger.database import LockedStream, Repository, chunks
from headrace.ledger.errors import (
    AlreadyCompletedError,
    BatchRunningError,
    BatchStateError,
    NotItsTurnError,
    OutputsMissingError,
    StepsLostError,
)
from headrace.ledger.events import add_totals, output_totals, record, record_all
from headrace.ledger.states import STATE_STEP, AttemptState, BatchState, EventKind
from headrace.ledger.streams import at_revision

_UNDECODABLE = "undecodable"
_BATCHES = "batches"
_ENDED = (AttemptState.COMPLETED, AttemptState.FAILED)


class Attempts(Repository):
    """Begins attempts, records their results, and ends them."""

    def begin(
        self,
        stream_name: str,
        batch_time_ms: int,
        *,
        holder: str,
        way: str,
        lease_ms: int,
        outputs: Sequence[str] | None = None,
        force: bool = False,
        unless_running: bool = False,
        attributes: Mapping[str, Any] | None = None,
        revision: int | None = None,
    ) -> Attempt:
        """Begin an attempt at outputs of the batch. Earlier attempts that still run one of them are fenced.

        Attempts at other outputs of the batch continue.

        Args:
            holder: names the process.
            way: how the batch is run, "connect" or "submit".
            outputs: ids of the stream's steps; None means all. Steps with a record of success are left out.
            force: also run completed steps again. They have no record of success until they complete again.
            unless_running: begin only if no live attempt runs one of the outputs.
            revision: the definition's revision; by default the stream's newest. The attempt keeps it and uses that
                definition's steps, even if the stream gets another definition.

        Raises:
            BatchNotFoundError: the batch was not allocated.
            AlreadyCompletedError: none of the outputs is left to run, and not ``force``.
            StepsLostError: none is left to run, and what the batch still needs is no longer in the definition.
            BatchRunningError: ``unless_running``, and a live attempt runs one of the outputs.
            BatchStateError: the batch was abandoned or absorbed into a later one, or the stream has no such output.
            SlotBusyError: other batches hold all the stream's slots with live leases.
            NotItsTurnError: the stream is ordered, and an earlier batch has not completed or was not claimed; or the
                batch's state step must run first.
        """
        with self._database.write_stream(stream_name) as (connection, now):
            locked = at_revision(connection, now, revision)
            batch = require_batch(connection, stream_name, batch_time_ms)
            check_runnable(batch)
            asked = _asked(locked, outputs)
            recorded = {
                output_id
                for output_id, row in newest_outputs(connection, stream_name, batch_time_ms).items()
                if is_recorded(row)
            }
            if not force and outputs is None and batch.state is BatchState.COMPLETED:
                # Even if the stream has a new output since: that one is run only when it is named.
                raise AlreadyCompletedError(batch)
            taken = [step for step in asked if force or step not in recorded]
            if taken or not asked:
                if unless_running:
                    _check_not_running(connection, locked, batch, taken)
                _check_state_step(locked, batch, taken, recorded)
                check_order(connection, locked, batch)
                if takes_slot(locked, attributes):
                    check_slots(connection, locked, batch)
                begun = {"holder": holder, "way": way, "lease_ms": lease_ms, "attributes": attributes}
                return _begin(connection, locked, batch, taken, **begun)
            # The attempt that recorded the last output may have died before it completed the batch.
            batch = settle(connection, locked, batch, by_records=True)
            missing = [step for step in batch.needs(locked.row.outputs) if step not in recorded]
        if are_lost(locked, missing) and batch.state is BatchState.FAILED:
            raise StepsLostError(batch, missing)
        raise AlreadyCompletedError(batch, asked)

    def settle(self, stream_name: str, batch_time_ms: int) -> BatchRow:
        """Compute the batch's state again, as after an attempt. Returns its row.

        This is for a batch whose steps the definition has lost: no attempt at them can begin. A batch that was given up
        meanwhile stays so.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            batch = require_batch(connection, stream_name, batch_time_ms)
            if batch.state in (BatchState.ABANDONED, BatchState.ABSORBED):
                return batch
            return settle(connection, locked, batch)

    def end_run(self, stream_name: str, batch_time_ms: int) -> None:
        """Add the event of a failed batch whose run waits for outputs that none of its tasks has begun, and none will.

        This is for the end of an Airflow run: it may not have asked for them, or their tasks may have ended before.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            batch = require_batch(connection, stream_name, batch_time_ms)
            run = present_run(connection, stream_name, batch_time_ms)
            if batch.state is BatchState.FAILED and run is not None and not run.failed:
                newest = newest_outputs(connection, stream_name, batch_time_ms)
                record_end(connection, locked, batch, newest, None)

    def renew(self, attempt: Attempt, *, attributes: Mapping[str, Any] | None = None) -> int:
        """Extend the attempt's lease and add to its attributes (application id, UI address).

        Returns the end of the lease.

        Raises:
            AttemptFencedError: the attempt was fenced or has ended.
        """
        with self._database.write() as connection:
            row = connection.execute(select(batch_attempts).where(*identity(attempt)).with_for_update()).one_or_none()
            if row is None or row.holder != attempt.holder or row.state is not AttemptState.RUNNING:
                raise fenced(attempt)
            now_ms = self._database.now_ms(connection)
            lease_until_ms = now_ms + attempt.lease_ms
            values: dict[str, Any] = {"heartbeat_ms": now_ms, "lease_until_ms": lease_until_ms}
            if attributes:
                values["attributes"] = {**row.attributes, **attributes}
            connection.execute(update(batch_attempts).where(*identity(attempt)).values(**values))
            return lease_until_ms

    def pin(
        self,
        attempt: Attempt,
        name: str,
        facts: Mapping[str, Any],
        *,
        changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Record facts that hold for all attempts at the batch, such as the schemas that its records are read by.

        A fact that is known already stays. Returns those that hold, by their names.

        Args:
            name: the name of the attribute that has them, and of the count, by which a rebuilt ledger knows them.
            changes: the payloads of events SCHEMA_CHANGED by facts; they are added with those that were not known.

        Raises:
            AttemptFencedError: a newer attempt took an output of this one, or this one has ended.
        """
        with self._database.write_stream(attempt.stream) as (connection, locked):
            require_running(connection, attempt)
            known = _facts(connection, attempt.stream, attempt.batch_time_ms, attempt.target, name)
            held = {**facts, **{key: value for key, value in known.items() if key in facts}}
            new = [payload for key, payload in changes.items() if key not in known]
            kind, batch_time_ms = EventKind.SCHEMA_CHANGED, attempt.batch_time_ms
            record_all(connection, attempt.stream, locked.now_ms, kind, new, batch_time_ms=batch_time_ms)
            query = select(batch_attempts.c.attributes).where(*identity(attempt))
            own = connection.execute(query).scalar_one()
            attributes = {**own, name: {**(own.get(name) or {}), **held}}
            connection.execute(update(batch_attempts).where(*identity(attempt)).values(attributes=attributes))
            return held

    def pinned(self, stream_name: str, batch_time_ms: int, name: str, *, target: str = "") -> dict[str, Any]:
        """Return the facts of the batch that `pin` has recorded. ``target``: those of a replay, or else the batch's."""
        with self._database.read() as connection:
            return _facts(connection, stream_name, batch_time_ms, target, name)

    def decoded_by(
        self,
        stream_name: str,
        batch_times: Sequence[int],
        name: str,
        *,
        target: str = "",
        by_state: bool = False,
    ) -> dict[int, tuple[dict[str, Any], int]]:
        """Return the facts by which the records of these batches were decoded, and how many batches were, the last of
        which is this one, by batch time.

        The facts are those of the newest result that counts its undecodable records, as all do that have decoded every
        input to its end. A batch without such a result is left out; a later window may have decoded it.

        Args:
            name: the name of the count that has the facts.
            target: the name of a replay, whose results count for a batch that has none of its own.
            by_state: of results of the state, which has decoded what entered it.
        """
        found: dict[int, tuple[dict[str, Any], int]] = {}
        of_batch = (batch_outputs.c.stream == stream_name, batch_outputs.c.state == AttemptState.COMPLETED)
        with self._database.read() as connection:
            for part in chunks(batch_times):
                query = select(batch_outputs.c.batch_time_ms, batch_outputs.c.output_id, batch_outputs.c.counts).where(
                    *of_batch, batch_outputs.c.batch_time_ms.in_(part), batch_outputs.c.target.in_({"", target})
                )
                for row in connection.execute(query.order_by(batch_outputs.c.target.desc(), batch_outputs.c.attempt)):
                    of_state = row.output_id == STATE_STEP
                    if name in row.counts and of_state == by_state and (of_state or _UNDECODABLE in row.counts):
                        known = found.get(row.batch_time_ms)
                        batches = max(row.counts.get(_BATCHES, 1), 1 if known is None else known[1])
                        found[row.batch_time_ms] = row.counts[name], batches
        return found

    def record_output(
        self, attempt: Attempt, output_id: str, counts: Mapping[str, Any], *, code_version: str | None = None
    ) -> None:
        """Record an output's success and counts. The record stays, even if the attempt fails later.

        A second record of the same output by the same attempt replaces the first.

        Raises:
            AttemptFencedError: a newer attempt took an output of this one, or this one has ended.
            BatchStateError: the attempt has no such output.
        """
        if output_id not in attempt.outputs:
            raise BatchStateError(
                f"Attempt {attempt.number} of batch {time_text(attempt.batch_time_ms)} has no output {output_id!r}. "
                f"Its outputs are {', '.join(attempt.outputs) or 'none'}."
            )
        with self._database.write_stream(attempt.stream) as (connection, locked):
            require_running(connection, attempt)
            record_success(connection, locked, attempt, output_id, counts=counts, code_version=code_version)

    def complete(self, attempt: Attempt, *, code_version: str | None = None) -> BatchRow:
        """End the attempt as completed. Returns the batch's row after that. A second call changes nothing.

        The batch is COMPLETED when every step that it needs has a record of success (`BatchRow.needs`); otherwise its
        state follows from the steps that are left (see `outcome`). An attempt at everything that is missing adds the
        steps that the stream got since the batch was first begun.

        Args:
            code_version: the version of the transforms that it ran.

        Raises:
            AttemptFencedError: a newer attempt took an output of this one, or this one has ended otherwise.
            OutputsMissingError: an output has recorded no result.
        """
        stream, batch_time_ms = attempt.stream, attempt.batch_time_ms
        with self._database.write_stream(stream) as (connection, now):
            batch = require_batch(connection, stream, batch_time_ms)
            if is_own(connection, attempt, AttemptState.COMPLETED):
                return batch
            require_running(connection, attempt)
            locked = at_revision(connection, now, attempt.revision)
            rows = connection.execute(select(batch_outputs).where(*outputs_of(attempt))).all()
            missing = [row.output_id for row in rows if row.state is not AttemptState.COMPLETED]
            if missing:
                raise OutputsMissingError(batch_time_ms, missing)
            end_attempt(connection, attempt, AttemptState.COMPLETED, ended_at_ms=locked.now_ms)
            if code_version is not None:
                version = {"code_version": code_version}
                connection.execute(update(batch_attempts).where(*identity(attempt)).values(**version))
                connection.execute(update(batch_outputs).where(*outputs_of(attempt)).values(**version))
            if attempt.target:
                settle_replay(connection, locked, attempt, code_version=code_version)
                return batch
            return settle(connection, locked, batch, ended=attempt.number, code_version=code_version)

    def fail(
        self,
        attempt: Attempt,
        error: str,
        failures: Mapping[str, str] = MappingProxyType({}),
        counts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> BatchRow:
        """End the attempt with an error. The outputs that it has not recorded have failed, and can be begun again.

        Args:
            failures: the reasons of single outputs, by their ids. For the others it is ``error``.
            counts: of failed outputs that have written dead letters, by their ids.

        Raises:
            AttemptFencedError: a newer attempt took an output of this one, or this one has ended.
        """
        with self._database.write_stream(attempt.stream) as (connection, now):
            require_running(connection, attempt)
            locked = at_revision(connection, now, attempt.revision)
            batch = require_batch(connection, attempt.stream, attempt.batch_time_ms)
            record_failures(connection, locked, attempt, error, failures=failures, counts=counts)
            end_attempt(connection, attempt, AttemptState.FAILED, ended_at_ms=locked.now_ms, error=error)
            if attempt.target:
                settle_replay(connection, locked, attempt)
                return batch
            return settle(connection, locked, batch, ended=attempt.number)

    def of_batch(self, stream_name: str, batch_time_ms: int) -> list[AttemptRow]:
        """Return the attempts at the batch and at its replays, oldest first."""
        query = select_attempts().where(
            batch_attempts.c.stream == stream_name, batch_attempts.c.batch_time_ms == batch_time_ms
        )
        return self._rows(AttemptRow, query.order_by(batch_attempts.c.number))

    def between(self, stream_name: str, after_ms: int, until_ms: int, *, target: str = "") -> list[AttemptRow]:
        """Return the attempts at the batches of times ``(after_ms, until_ms]``, or at their replays in ``target``, by
        batch time, oldest first. They come without the replay's definition."""
        query = select(*COLUMNS, literal(None).label("definition")).where(
            batch_attempts.c.stream == stream_name,
            batch_attempts.c.batch_time_ms > after_ms,
            batch_attempts.c.batch_time_ms <= until_ms,
            batch_attempts.c.target == target,
        )
        return self._rows(AttemptRow, query.order_by(batch_attempts.c.batch_time_ms, batch_attempts.c.number))

    def outputs(self, stream_name: str, batch_time_ms: int, *, target: str = "") -> list[BatchOutputRow]:
        """Return the newest record or failure of each output, sorted by id. An output being written has neither.

        For a replay, only results of the definition that the batch was last begun with count.

        Args:
            target: the name of a replay, "" for the batch itself.
        """
        with self._database.read() as connection:
            revision = present_revision(connection, stream_name, batch_time_ms, target) if target else None
            rows = newest_outputs(connection, stream_name, batch_time_ms, target, revision=revision).values()
        return sorted((row for row in rows if row.state in _ENDED), key=lambda row: row.output_id)

    def running(self, stream_name: str) -> list[AttemptRow]:
        """Return the attempts that have not ended, those without a live lease too."""
        query = select_attempts().where(
            batch_attempts.c.stream == stream_name, batch_attempts.c.state == AttemptState.RUNNING
        )
        return self._rows(AttemptRow, query)

    def output_history(self, stream_name: str, batch_time_ms: int) -> list[BatchOutputRow]:
        """Return what each attempt at the batch itself made of its outputs, the oldest attempt first; of one that still
        runs too."""
        query = select(batch_outputs).where(
            batch_outputs.c.stream == stream_name,
            batch_outputs.c.batch_time_ms == batch_time_ms,
            batch_outputs.c.target == "",
        )
        return self._rows(BatchOutputRow, query.order_by(batch_outputs.c.attempt))

    def newest_outputs(self, stream_name: str, limit: int) -> list[BatchOutputRow]:
        """Return the ``limit`` rows of outputs that have the latest batch times, the latest first; also of attempts
        that still run, and without those of replays."""
        query = (
            select(batch_outputs)
            .where(batch_outputs.c.stream == stream_name, batch_outputs.c.target == "")
            .order_by(batch_outputs.c.batch_time_ms.desc(), batch_outputs.c.attempt.desc())
            .limit(limit)
        )
        return self._rows(BatchOutputRow, query)

    def newest_with(
        self,
        stream_name: str,
        texts: Sequence[str],
        limit: int,
        *,
        any_of: Sequence[str] = (),
        target: str | None = "",
        output_id: str | None = None,
        from_ms: int = 0,
        until_ms: int,
    ) -> list[BatchOutputRow]:
        """Return the ``limit`` results of the latest batch times whose counts, as JSON, contain all of these texts.

        A stream may have had no records for days, so that thousands of later results do not have them.

        Args:
            stream: the stream's name.
            texts: of ASCII characters that JSON does not escape.
            limit: how many.
            any_of: such texts of which they contain one at least, if any are given.
            target: the name of a replay, "" for the batches themselves, None for both.
            output_id: only results of this output.
            from_ms: the earliest batch time.
            until_ms: the latest batch time.
        """
        query = select(batch_outputs).where(
            *_results_with(stream_name, texts, target, until_ms),
            batch_outputs.c.batch_time_ms >= from_ms,
            *([] if output_id is None else [batch_outputs.c.output_id == output_id]),
            *([or_(*map(_contains, any_of))] if any_of else []),
        )
        newest_first = (batch_outputs.c.batch_time_ms.desc(), batch_outputs.c.attempt.desc())
        return self._rows(BatchOutputRow, query.order_by(*newest_first).limit(limit))

    def repeated_with(
        self, stream_name: str, name: str, texts: Sequence[str], *, target: str | None = "", until_ms: int
    ) -> list[Any]:
        """Return the distinct values of ``name`` in the counts of results that are not of a batch's first attempt.

        Batches of later times may have been written before such a result, without knowing it. The key tells which
        results these are, so in most streams few counts are read: those of a month took a second.

        Args:
            stream: the stream's name.
            name: a name in the counts.
            texts: as in `newest_with`.
            target: the name of a replay, "" for the batches themselves, None for both.
            until_ms: the latest batch time.
        """
        value = cast(batch_outputs.c.counts[name], Text)
        repeated = (batch_outputs.c.attempt > 1, *_results_with(stream_name, texts, target, until_ms))
        with self._database.read() as connection:
            found = connection.execute(select(value).where(*repeated).distinct()).scalars().all()
        return [json.loads(text) for text in found if text is not None]

    def highest(self, stream_name: str) -> int:
        """Return the highest number of an attempt at any batch, 0 without any. Reads all attempts of the stream."""
        query = select(func.max(batch_attempts.c.number)).where(batch_attempts.c.stream == stream_name)
        with self._database.read() as connection:
            return connection.execute(query).scalar_one() or 0

    def recorded(self, stream_name: str, times: Sequence[int]) -> dict[int, dict[str, RecordedOutput]]:
        """Return the records of successful outputs of many batches, by batch time and output id."""
        newest: dict[tuple[int, str], Row[Any]] = {}
        with self._database.read() as connection:
            for part in chunks(times):
                query = (
                    select(batch_outputs, batch_attempts.c.revision)
                    .join(batch_attempts, wrote_output())
                    .where(
                        batch_outputs.c.stream == stream_name,
                        batch_outputs.c.batch_time_ms.in_(part),
                        batch_outputs.c.target == "",
                    )
                )
                for row in connection.execute(query.order_by(batch_outputs.c.batch_time_ms, batch_outputs.c.attempt)):
                    newest[row.batch_time_ms, row.output_id] = row
        recorded: dict[int, dict[str, RecordedOutput]] = {time_ms: {} for time_ms in times}
        for (time_ms, output_id), row in newest.items():
            if row.state is AttemptState.COMPLETED:
                recorded[time_ms][output_id] = RecordedOutput(row.counts, row.revision)
        return recorded


def _results_with(
    stream_name: str, texts: Sequence[str], target: str | None, until_ms: int
) -> Iterator[ColumnElement[bool]]:
    yield batch_outputs.c.stream == stream_name
    if target is not None:
        yield batch_outputs.c.target == target
    yield batch_outputs.c.state == AttemptState.COMPLETED
    yield batch_outputs.c.batch_time_ms <= until_ms
    yield from map(_contains, texts)


def _contains(text: str) -> ColumnElement[bool]:
    return cast(batch_outputs.c.counts, Text).contains(text, autoescape=True)


def check_runnable(batch: BatchRow) -> None:
    """Refuse batches in a final state that cannot run.

    Raises:
        BatchStateError: the batch was absorbed or abandoned.
    """
    if batch.state is BatchState.ABSORBED:
        raise BatchStateError(
            f"Batch {time_text(batch.batch_time_ms)} was absorbed by batch {time_text(batch.absorbed_by_ms)}.",
            remedy="Run that one.",
        )
    if batch.state is BatchState.ABANDONED:
        raise BatchStateError(f"Batch {time_text(batch.batch_time_ms)} was abandoned: {batch.error}.")


def _asked(locked: LockedStream, outputs: Sequence[str] | None) -> tuple[str, ...]:
    steps = locked.row.outputs
    if outputs is None:
        return steps
    unknown = [output_id for output_id in outputs if output_id not in steps]
    if not outputs:
        raise BatchStateError("An attempt needs at least one output.", remedy="Name some outputs, or None for all.")
    if unknown:
        raise BatchStateError(
            f"Stream {locked.row.name!r} has no output {', '.join(map(repr, unknown))}. "
            f"Its outputs are {', '.join(steps) or 'none'}.",
            remedy="Name some of them, or None for all.",
        )
    return tuple(step for step in steps if step in outputs)


def _check_not_running(connection: Connection, locked: LockedStream, batch: BatchRow, taken: Sequence[str]) -> None:
    for row in live_attempts(connection, batch.stream, locked.now_ms):
        if row.batch_time_ms == batch.batch_time_ms and not row.target and not set(taken).isdisjoint(row.outputs):
            raise BatchRunningError(
                f"Batch {time_text(batch.batch_time_ms)} is being run by {row.holder}, attempt {row.number}."
            )


def _check_state_step(locked: LockedStream, batch: BatchRow, taken: Sequence[str], recorded: set[str]) -> None:
    if STATE_STEP not in locked.row.outputs or STATE_STEP in taken or STATE_STEP in recorded:
        return
    raise NotItsTurnError(
        f"The state of stream {batch.stream!r} has not been updated by batch {time_text(batch.batch_time_ms)}, "
        f"and {', '.join(taken)} may read it.",
        busy=[batch.batch_time_ms],
        remedy=f"Run the step {STATE_STEP!r} first (the task update_state).",
    )


def _facts(connection: Connection, stream_name: str, batch_time_ms: int, target: str, name: str) -> dict[str, Any]:
    """The facts that attempts or outputs of the batch have recorded, the oldest ones; a replay's own come first."""
    facts: dict[str, Any] = {}
    for table, column in ((batch_attempts, "attributes"), (batch_outputs, "counts")):
        number = batch_attempts.c.number if table is batch_attempts else batch_outputs.c.attempt
        query = (
            select(table.c[column])
            .where(
                table.c.stream == stream_name,
                table.c.batch_time_ms == batch_time_ms,
                table.c.target.in_({"", target}),
            )
            .order_by(table.c.target.desc(), number)
        )
        for recorded in connection.execute(query).scalars():
            facts = {**((recorded or {}).get(name) or {}), **facts}
    return facts


def _begin(
    connection: Connection, locked: LockedStream, batch: BatchRow, taken: Sequence[str], **begun: Any
) -> Attempt:
    stream, batch_time_ms = batch.stream, batch.batch_time_ms
    fence_attempts(connection, stream, batch_time_ms, locked.now_ms, target="", outputs=taken)
    beside = any(
        not row.target and row.alive(locked.now_ms) for row in running_attempts(connection, stream, batch_time_ms)
    )
    source = source_of(connection, batch)
    newest = newest_outputs(connection, stream, batch_time_ms)
    recorded = {step for step, row in newest.items() if is_recorded(row)}
    if batch.required is None or recorded.union(taken).issuperset(locked.row.outputs):
        # Includes outputs that the stream got since, since this attempt writes them.
        batch = replace(batch, required=tuple(dict.fromkeys([*locked.row.outputs, *(batch.required or ())])))
    attempt = insert_attempt(
        connection, locked, batch_time_ms, outputs=taken, source=source, revision=locked.row.revision, **begun
    )
    tried = any(step in newest for step in taken)
    add_totals(connection, stream, {"attempts": 1, "retries": int(tried)})
    run = present_run(connection, stream, batch_time_ms)
    unrecorded = [newest[step] for step in taken if step in newest and step not in recorded]
    goes_on = run is not None and run.goes_on(unrecorded, beside=beside)
    if run is not None and not run.failed and not goes_on and batch.state is BatchState.FAILED:
        # The run waited for outputs that no task of it has begun. It ends here.
        record_end(connection, locked, batch, newest, None)
    settled = settle(connection, locked, batch, attempt=attempt.number, required=list(batch.required or ()))
    if settled.state is BatchState.RUNNING and not goes_on:
        settled = settle(connection, locked, settled, started_at_ms=locked.now_ms)
    of_attempt = {"holder": attempt.holder, "way": attempt.way, "outputs": list(taken), "revision": attempt.revision}
    # An attempt only at outputs that the batch does not need to complete does not start the batch.
    continues = goes_on or settled.state is not BatchState.RUNNING
    payload = {**figures(settled), "attempt": attempt.number, **of_attempt, "continues": continues}
    of_batch = {"batch_time_ms": batch_time_ms}
    record(connection, stream, locked.now_ms, EventKind.BATCH_STARTED, payload, **of_batch)
    started = [{"attempt": attempt.number, "output": output_id} for output_id in taken]
    record_all(connection, stream, locked.now_ms, EventKind.OUTPUT_STARTED, started, **of_batch)
    return attempt


LIMIT_EXCEEDED = "dead_letter_limit_exceeded"
"""The count of an output, as text, that names the limit that its dead letters exceed. The output has failed."""


def record_success(
    connection: Connection,
    locked: LockedStream,
    attempt: Attempt,
    output_id: str,
    *,
    counts: Mapping[str, Any],
    code_version: str | None,
) -> None:
    """Record an output's success. A second record by the same attempt replaces the first."""
    this = (*outputs_of(attempt), batch_outputs.c.output_id == output_id)
    first = connection.execute(select(batch_outputs.c.recorded_at_ms).where(*this)).scalar_one() is None
    values = {"counts": dict(counts), "recorded_at_ms": locked.now_ms, "code_version": code_version}
    connection.execute(update(batch_outputs).where(*this).values(state=AttemptState.COMPLETED, **values))
    if not attempt.target:
        amounts = {"writes": 1, **output_totals(counts)} if first else {}
        add_totals(connection, attempt.stream, amounts, output_id=output_id)
        payload = {"attempt": attempt.number, "output": output_id, "counts": dict(counts)}
        of_batch = {"batch_time_ms": attempt.batch_time_ms}
        record(connection, attempt.stream, locked.now_ms, EventKind.OUTPUT_COMPLETED, payload, **of_batch)
        _report_dead_letters(connection, locked, attempt, output_id, counts)


def record_failures(
    connection: Connection,
    locked: LockedStream,
    attempt: Attempt,
    error: str,
    *,
    failures: Mapping[str, str],
    counts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Record the failure of each output of the attempt that has no record.

    ``failures`` are the reasons of single outputs; of the others it is ``error``. ``counts`` are those of outputs that
    have written dead letters, although they failed.
    """
    left = [*outputs_of(attempt), batch_outputs.c.state == AttemptState.RUNNING]
    failed = connection.execute(select(batch_outputs.c.output_id).where(*left)).scalars().all()
    reasons = {output_id: failures.get(output_id, error) for output_id in failed}
    for output_id, reason in reasons.items():
        values = {"error": reason, "counts": dict(counts.get(output_id, {})), "recorded_at_ms": locked.now_ms}
        this = (*left, batch_outputs.c.output_id == output_id)
        connection.execute(update(batch_outputs).where(*this).values(state=AttemptState.FAILED, **values))
    if attempt.target:
        return
    payloads = [{"attempt": attempt.number, "output": output, "error": text} for output, text in reasons.items()]
    of_batch = {"batch_time_ms": attempt.batch_time_ms}
    record_all(connection, attempt.stream, locked.now_ms, EventKind.OUTPUT_FAILED, payloads, **of_batch)
    for output_id in reasons.keys() & counts.keys():
        letters = counts[output_id]
        amounts = {"dead_lettered": letters.get("dead_lettered", 0), LIMIT_EXCEEDED: int(LIMIT_EXCEEDED in letters)}
        add_totals(connection, attempt.stream, amounts, output_id=output_id)
        _report_dead_letters(connection, locked, attempt, output_id, letters)


def _report_dead_letters(
    connection: Connection, locked: LockedStream, attempt: Attempt, output_id: str, counts: Mapping[str, Any]
) -> None:
    records = counts.get("dead_lettered")
    if records:
        payload = {"attempt": attempt.number, "output": output_id, "records": records}
        payload["reasons"] = dict(counts.get("dead_letter_reasons") or {})
        payload["exceeded"] = counts.get(LIMIT_EXCEEDED)
        of_batch = {"batch_time_ms": attempt.batch_time_ms}
        record(connection, attempt.stream, locked.now_ms, EventKind.DEAD_LETTERS, payload, **of_batch)
