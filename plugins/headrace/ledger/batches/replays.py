"""Begins and ends replays: batches written again to other outputs, without changing the batches themselves.

An output that deletes documents by key is replayed in the order of the batch times (`_check_order`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, insert, select, update

from headrace.clock import time_text
from headrace.ledger.batches.batch_states import (
    fence_attempts,
    identity,
    insert_attempt,
    newest_outputs,
    outcome,
    require_batch,
    running_attempts,
    source_of,
    wrote_output,
)
from headrace.ledger.batches.tables import (
    Attempt,
    ReplayRow,
    batch_attempts,
    batch_outputs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import BatchStateError, LedgerError, NotItsTurnError, ReplayOrderError
from headrace.ledger.events import record
from headrace.ledger.states import AttemptState, BatchState, EventKind
from headrace.ledger.tables import id_of_step

_KINDS = {BatchState.COMPLETED: EventKind.REPLAY_COMPLETED, BatchState.FAILED: EventKind.REPLAY_FAILED}


class Replays(Repository):
    """Begins replays of batches, and finds their states."""

    def begin(
        self,
        stream_name: str,
        batch_time_ms: int,
        *,
        target: str,
        definition: str,
        outputs: Sequence[str],
        ordered: Sequence[str] = (),
        holder: str,
        way: str,
        lease_ms: int,
        attributes: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """Begin an attempt at outputs of the batch in a replay. Attempts that still run one of them are fenced.

        The batch's state and records of success and the stream's slots and order do not change. The batch's segments
        stay in the log while the attempt's lease is live.

        Args:
            target: the replay's name.
            definition: the replayed stream as JSON. The replay completes when every output in it is written. A changed
                definition restarts the replay: outputs written with the previous one do not count.
            outputs: ids of the outputs that this attempt writes.
            ordered: those of them whose batches must be written in the order of their times.

        Raises:
            BatchNotFoundError: the batch was not allocated.
            BatchStateError: it was abandoned, or absorbed into a later batch, which holds its records; or the replay
                has no such output; or a later batch was replayed before it to the same place by an ordered output.
            NotItsTurnError: the batch that an ordered output wrote before this one is not complete.
            LedgerError: no target or no outputs were given, or the definition is not JSON.
        """
        if not target or not outputs:
            raise LedgerError("A replay has a name and at least one output.")
        with self._database.write_stream(stream_name) as (connection, locked):
            batch = require_batch(connection, stream_name, batch_time_ms)
            if batch.state in (BatchState.ABSORBED, BatchState.ABANDONED):
                raise BatchStateError(
                    f"Batch {time_text(batch_time_ms)} of stream {stream_name!r} is {batch.state.value} and cannot be "
                    "replayed.",
                    remedy=f"Replay batch {time_text(batch.absorbed_by_ms)}." if batch.absorbed_by_ms else None,
                )
            required = _output_ids(definition) or list(outputs)
            unknown = [output_id for output_id in outputs if output_id not in required]
            if unknown:
                raise BatchStateError(
                    f"The replay {target!r} has no output {', '.join(unknown)}. Its outputs are {', '.join(required)}."
                )
            for output_id in ordered:
                _check_order(
                    connection, stream_name, batch_time_ms, target=target, output_id=output_id, definition=definition
                )
            fence_attempts(connection, stream_name, batch_time_ms, locked.now_ms, target=target, outputs=outputs)
            attempt = insert_attempt(
                connection,
                locked,
                batch_time_ms,
                outputs=outputs,
                holder=holder,
                way=way,
                lease_ms=lease_ms,
                source=source_of(connection, batch),
                attributes=attributes,
                target=target,
                definition=definition,
                replay_revision=_revision(connection, locked, target, definition),
            )
            _note(connection, locked, attempt, required)
            payload = {"target": target, "attempt": attempt.number, "outputs": list(outputs), "holder": holder}
            record(
                connection, stream_name, locked.now_ms, EventKind.REPLAY_STARTED, payload, batch_time_ms=batch_time_ms
            )
            return attempt

    def between(self, stream_name: str, target: str, from_ms: int, until_ms: int) -> list[ReplayRow]:
        """Return the states of the batches of times ``[from_ms, until_ms)`` in a replay, oldest first."""
        query = select(replays).where(
            replays.c.stream == stream_name,
            replays.c.target == target,
            replays.c.batch_time_ms >= from_ms,
            replays.c.batch_time_ms < until_ms,
        )
        return self._rows(ReplayRow, query.order_by(replays.c.batch_time_ms))

    def written_by(self, stream_name: str, target: str, output: str, from_ms: int, until_ms: int) -> dict[int, str]:
        """Return the replay's definition that last wrote the output, for each batch time of ``[from_ms, until_ms)``."""
        query = (
            select(batch_outputs.c.batch_time_ms, batch_attempts.c.replay_revision)
            .join(batch_attempts, wrote_output())
            .where(
                batch_outputs.c.stream == stream_name,
                batch_outputs.c.batch_time_ms >= from_ms,
                batch_outputs.c.batch_time_ms < until_ms,
                batch_outputs.c.target == target,
                batch_outputs.c.output_id == output,
                batch_outputs.c.state == AttemptState.COMPLETED,
            )
            .order_by(batch_outputs.c.batch_time_ms, batch_outputs.c.attempt)
        )
        named = select(replay_definitions.c.revision, replay_definitions.c.definition).where(
            replay_definitions.c.stream == stream_name, replay_definitions.c.target == target
        )
        with self._database.read() as connection:
            definitions = {row.revision: row.definition for row in connection.execute(named)}
            revisions = {row.batch_time_ms: row.replay_revision for row in connection.execute(query)}
        return {batch_time_ms: definitions[revision] for batch_time_ms, revision in revisions.items()}


def _check_order(
    connection: Connection, stream_name: str, batch_time_ms: int, *, target: str, output_id: str, definition: str
) -> None:
    """Check that the output of the replay is written at the batch times in their order.

    Definitions of the replay that write the output to another place do not count.

    Raises:
        NotItsTurnError: the last batch before this one is not complete.
        ReplayOrderError: a later batch has been begun.
    """
    begun = _begun_in_replay(connection, stream_name, target, output_id, definition).limit(1)
    time_ms = replays.c.batch_time_ms
    later = connection.execute(begun.where(time_ms > batch_time_ms).order_by(time_ms)).one_or_none()
    if later is not None:
        raise ReplayOrderError(
            f"Replay {target!r} of stream {stream_name!r} deletes documents by key with output {output_id!r}, and has "
            f"replayed batch {time_text(later.batch_time_ms)} before {time_text(batch_time_ms)}: an older value that "
            "is written now would restore what that batch has deleted.",
            remedy="Replay into a new index, with a new name of the replay, from the earliest batch on.",
        )
    newest_first = (time_ms.desc(), batch_outputs.c.attempt.desc())
    before = connection.execute(begun.where(time_ms < batch_time_ms).order_by(*newest_first)).one_or_none()
    if before is not None and before.state is not AttemptState.COMPLETED:
        raise NotItsTurnError(
            f"Replay {target!r} of stream {stream_name!r} runs its batches in order, and before "
            f"{time_text(batch_time_ms)} it has to complete {time_text(before.batch_time_ms)}.",
            busy=[before.batch_time_ms],
            remedy="Wait for it, or clear its run.",
        )


def _begun_in_replay(
    connection: Connection, stream_name: str, target: str, output_id: str, definition: str
) -> Select[tuple[int, AttemptState]]:
    """Return the query for the attempts of a replay at an output, into the place where this definition writes it."""
    definitions = connection.execute(
        select(replay_definitions.c.revision, replay_definitions.c.definition).where(
            replay_definitions.c.stream == stream_name, replay_definitions.c.target == target
        )
    )
    place = _place(definition, output_id)
    revisions = [row.revision for row in definitions if _place(row.definition, output_id) == place]
    same_batch = (batch_outputs.c[name] == replays.c[name] for name in ("stream", "batch_time_ms", "target"))
    return (
        select(batch_outputs.c.batch_time_ms, batch_outputs.c.state)
        .select_from(replays)
        .join(batch_outputs, and_(*same_batch, batch_outputs.c.output_id == output_id))
        .join(batch_attempts, wrote_output())
        .where(
            replays.c.stream == stream_name,
            replays.c.target == target,
            replays.c.state != BatchState.ABANDONED,
            batch_attempts.c.replay_revision.in_(revisions),
        )
    )


def _place(definition: str, output_id: str) -> tuple[Any, ...] | None:
    """Where an output of a replay's definition writes; None if it is not there."""
    for output in json.loads(definition).get("outputs") or ():
        if (output.get("renamed_from") or output["id"]) == output_id:
            return tuple(output.get(name) for name in ("connection", "hosts", "index"))
    return None


def settle_replay(
    connection: Connection, locked: LockedStream, attempt: Attempt, *, code_version: str | None = None
) -> None:
    """Update the state of the replay's batch after an attempt at it has ended.

    Does nothing if the batch was begun with another definition since: this attempt wrote to other outputs.
    """
    stream, batch_time_ms, target = attempt.stream, attempt.batch_time_ms, attempt.target
    row = connection.execute(select(replays).where(*_key(attempt))).one()
    if row.revision != _revision_of(connection, attempt):
        return
    newest = newest_outputs(connection, stream, batch_time_ms, target, revision=row.revision)
    others = running_attempts(connection, stream, batch_time_ms, revision=row.revision)
    running = [other for other in others if other.target == target]
    state, error = outcome(connection, row.outputs, newest, running, locked.now_ms)
    values: dict[str, Any] = {"state": state, "error": error}
    if code_version is not None:
        values["code_version"] = code_version
    if state is BatchState.COMPLETED:
        values["completed_at_ms"] = locked.now_ms
    connection.execute(update(replays).where(*_key(attempt)).values(**values))
    _count_change(connection, attempt)
    kind = _KINDS.get(state)
    if kind is not None:
        counts = {output_id: newest[output_id].counts for output_id in row.outputs if output_id in newest}
        payload = {"target": target, "attempt": attempt.number, "outputs": counts, "error": error}
        record(connection, stream, locked.now_ms, kind, payload, batch_time_ms=batch_time_ms)


def present_revision(connection: Connection, stream_name: str, batch_time_ms: int, target: str) -> int | None:
    """Return the revision of the replay's definition that the batch was last begun with; None if it was not begun."""
    query = select(replays.c.revision).where(
        replays.c.stream == stream_name, replays.c.target == target, replays.c.batch_time_ms == batch_time_ms
    )
    return connection.execute(query).scalar_one_or_none()


def _revision_of(connection: Connection, attempt: Attempt) -> int | None:
    """Return the revision of the replay's definition that the attempt began with; None for the batch itself."""
    revision: int | None = connection.execute(
        select(batch_attempts.c.replay_revision).where(*identity(attempt))
    ).scalar_one()
    return revision


def _note(connection: Connection, locked: LockedStream, attempt: Attempt, required: Sequence[str]) -> None:
    """Write the replay's row of the batch, which runs now."""
    _count_change(connection, attempt)
    row = connection.execute(select(replays).where(*_key(attempt))).one_or_none()
    revision = _revision_of(connection, attempt)
    values = {
        "state": BatchState.RUNNING,
        "attempt": attempt.number,
        "revision": revision,
        "outputs": list(required),
        "completed_at_ms": None,
        "error": None,
    }
    if row is None:
        key = {"stream": attempt.stream, "target": attempt.target, "batch_time_ms": attempt.batch_time_ms}
        connection.execute(insert(replays).values(**key, **values, started_at_ms=locked.now_ms))
        return
    if row.state in (BatchState.COMPLETED, BatchState.FAILED) or row.revision != revision:
        values["started_at_ms"] = locked.now_ms
    if row.revision != revision:
        values["code_version"] = None
    connection.execute(update(replays).where(*_key(attempt)).values(**values))


def _count_change(connection: Connection, attempt: Attempt) -> None:
    """Count a change of the batch: its result file holds its replays too."""
    this = (batches.c.stream == attempt.stream, batches.c.batch_time_ms == attempt.batch_time_ms)
    connection.execute(update(batches).where(*this).values(change=batches.c.change + 1))


def _revision(connection: Connection, locked: LockedStream, target: str, definition: str) -> int:
    """Return the revision of this definition of the target; a new definition is stored."""
    stream = locked.row.name
    newest = connection.execute(
        select(replay_definitions)
        .where(replay_definitions.c.stream == stream, replay_definitions.c.target == target)
        .order_by(replay_definitions.c.revision.desc())
        .limit(1)
    ).one_or_none()
    if newest is not None and newest.definition == definition:
        return int(newest.revision)
    revision = 1 if newest is None else newest.revision + 1
    connection.execute(
        insert(replay_definitions).values(
            stream=stream, target=target, revision=revision, definition=definition, created_at_ms=locked.now_ms
        )
    )
    return int(revision)


def _output_ids(definition: str) -> list[str]:
    try:
        fields = json.loads(definition)
    except ValueError:
        raise LedgerError("A replay's definition is JSON text.") from None
    return list(id_of_step(fields))


def _key(attempt: Attempt) -> tuple[Any, ...]:
    return (
        replays.c.stream == attempt.stream,
        replays.c.target == attempt.target,
        replays.c.batch_time_ms == attempt.batch_time_ms,
    )
