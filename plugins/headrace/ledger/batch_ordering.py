"""Decides whether a batch may run now: checks the order of ordered streams, and the slots (rule 6 of the design)."""

from __future__ import annotations

from sqlalchemy import Connection, select

from headrace.clock import time_text, times_text
from headrace.ledger.attempt_statements import live_attempts
from headrace.ledger.database import LockedStream
from headrace.ledger.errors import NotItsTurnError, SlotBusyError
from headrace.ledger.models import BatchRow, EarlierBatch, batches, unclaimed_times
from headrace.ledger.states import UNFINISHED, BatchState


def earlier_unfinished(
    connection: Connection, stream: str, batch_time_ms: int, now_ms: int, limit: int
) -> list[EarlierBatch]:
    """`Batches.earlier_unfinished` within a transaction."""
    alive = {row.batch_time_ms for row in live_attempts(connection, stream, now_ms) if not row.target}
    found = []
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
            found.append(EarlierBatch(row.batch_time_ms, state, row.error, row.batch_time_ms in alive))
    query = (
        select(unclaimed_times.c.batch_time_ms)
        .where(unclaimed_times.c.stream == stream, unclaimed_times.c.batch_time_ms < batch_time_ms)
        .order_by(unclaimed_times.c.batch_time_ms)
        .limit(limit)
    )
    found += [EarlierBatch(time_ms, None, None, False) for time_ms in connection.execute(query).scalars()]
    return sorted(found, key=lambda batch: batch.batch_time_ms)[:limit]


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
        f"`headrace batches abandon {batch.stream} {time_text(first.batch_time_ms)} --reason WHY`."
    )
    raise NotItsTurnError(
        f"Stream {batch.stream!r} runs its batches in order, and before {time_text(batch.batch_time_ms)} "
        f"there is {times_text(other.batch_time_ms for other in earlier[:3])}.",
        busy=[other.batch_time_ms for other in earlier],
        remedy=way_out,
    )


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
