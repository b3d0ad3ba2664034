"""Decides whether a batch may run now: checks the order of ordered streams, and the slots (rule 6 of the design)."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Select, and_, select

from headrace.clock import time_text, times_text
from headrace.ledger.batch_states import live_attempts, wrote_output
from headrace.ledger.batch_tables import (
    BatchRow,
    EarlierBatch,
    batch_attempts,
    batch_outputs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.database import LockedStream
from headrace.ledger.errors import NotItsTurnError, ReplayOrderError, SlotBusyError
from headrace.ledger.receiving_tables import unclaimed_times
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState


def earlier_unfinished(
    connection: Connection, stream: str, batch_time_ms: int, now_ms: int, limit: int
) -> list[EarlierBatch]:
    """`Batches.earlier_unfinished` within a transaction."""
    alive = {row.batch_time_ms for row in live_attempts(connection, stream, now_ms) if not row.target}
    earlier = []
    for state in UNFINISHED:
        # One query per state uses the index; one query for all states would read and sort all their rows.
        query = (
            select(batches.c.batch_time_ms, batches.c.error)
            .where(
                batches.c.stream == stream,
                batches.c.state == state,
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
        .where(unclaimed_times.c.stream == stream, unclaimed_times.c.batch_time_ms < batch_time_ms)
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


def check_replay_order(
    connection: Connection, stream: str, batch_time_ms: int, *, target: str, output_id: str, definition: str
) -> None:
    """Check that the output of the replay is written at the batch times in their order.

    Definitions of the replay that write the output to another place do not count.

    Raises:
        NotItsTurnError: the last batch before this one is not complete.
        ReplayOrderError: a later batch has been begun.
    """
    begun = _begun_in_replay(connection, stream, target, output_id, definition).limit(1)
    time_ms = replays.c.batch_time_ms
    later = connection.execute(begun.where(time_ms > batch_time_ms).order_by(time_ms)).one_or_none()
    if later is not None:
        raise ReplayOrderError(
            f"Replay {target!r} of stream {stream!r} deletes documents by key with output {output_id!r}, and has "
            f"replayed batch {time_text(later.batch_time_ms)} before {time_text(batch_time_ms)}: an older value that "
            "is written now would restore what that batch has deleted.",
            remedy="Replay into a new index, with a new name of the replay, from the earliest batch on.",
        )
    newest_first = (time_ms.desc(), batch_outputs.c.attempt.desc())
    before = connection.execute(begun.where(time_ms < batch_time_ms).order_by(*newest_first)).one_or_none()
    if before is not None and before.state is not AttemptState.COMPLETED:
        raise NotItsTurnError(
            f"Replay {target!r} of stream {stream!r} runs its batches in order, and before "
            f"{time_text(batch_time_ms)} it has to complete {time_text(before.batch_time_ms)}.",
            busy=[before.batch_time_ms],
            remedy="Wait for it, or clear its run.",
        )


def _begun_in_replay(
    connection: Connection, stream: str, target: str, output_id: str, definition: str
) -> Select[tuple[int, AttemptState]]:
    """Return the query for the attempts of a replay at an output, into the place where this definition writes it."""
    definitions = connection.execute(
        select(replay_definitions.c.revision, replay_definitions.c.definition).where(
            replay_definitions.c.stream == stream, replay_definitions.c.target == target
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
            replays.c.stream == stream,
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


def check_slots(connection: Connection, locked: LockedStream, batch: BatchRow) -> None:
    """Check that a slot is free. A batch with live attempts holds one slot; replays hold none.

    Raises:
        SlotBusyError: other batches hold all slots.
    """
    live = [row for row in live_attempts(connection, batch.stream, locked.now_ms) if not row.target]
    others = {row.batch_time_ms: row for row in live if row.batch_time_ms != batch.batch_time_ms}
    slots = 1 if locked.row.ordered else locked.row.max_concurrent_batches
    if len(others) >= slots:
        held = ", ".join(f"{time_text(other.batch_time_ms)} by {other.holder}" for other in others.values())
        raise SlotBusyError(
            f"Stream {batch.stream!r} runs {slots} batches at a time, and the slots are held: {held}.",
            busy=list(others),
            remedy="Wait for them, or raise limits.max_concurrent_batches.",
        )
