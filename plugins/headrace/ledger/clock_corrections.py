"""Repairs what a clock that was ahead has left in the ledger.

Batch times and leases come from the database's clock. While it is ahead, blocks get batch times that are still to come
when it is right again, and every later block of their partitions would follow them there. No correct clock gives such
times, so they are recognised by themselves. Allocated batches never change: what was sealed for one stays sealed, until
a person has these times opened again (`ClockCorrections.reopen`). Then the batches stay where they are, and no block
joins a time that has one (`without_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, bindparam, delete, exists, func, insert, select, update

from headrace.clock import time_text
from headrace.ledger.batches.tables import BatchRow, batch_attempts, batches
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import BatchStateError
from headrace.ledger.events import record
from headrace.ledger.receiving.tables import UNCLAIMED_SUMS, blocks, positions, receivers, segments, unclaimed_times
from headrace.ledger.states import STATE_STEP, UNFINISHED, AttemptState, EventKind
from headrace.ledger.tables import StreamRow, receiver_jobs, streams

# Airflow's clock may be ahead of the ledger's by this much, so a batch time is accepted this long before it ends. Times
# further ahead are refused: sealing one would leave every block until then without a batch.
CLOCK_SKEW_MS = 5_000


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Blocks whose batch times lay ahead of the clock, and the open batch time that has them now."""

    batch_time_ms: int
    blocks: int
    records: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """A stream whose batch times were sealed ahead of the clock, until ``sealed_until_ms``, for the ``batches`` of
    these times. New blocks now get ``batch_time_ms``, which also has the blocks that were ``taken`` back."""

    now_ms: int
    sealed_until_ms: int
    batches: tuple[int, ...]
    batch_time_ms: int
    taken: TakenBack


class ClockCorrections(Repository):
    """Makes the corrections of a stream."""

    def reopen(self, stream_name: str, *, dry_run: bool = False) -> Reopened | None:
        """Take the seal back that batches ahead of the clock need. None if the stream is not sealed ahead of the clock.

        These batches keep their times, blocks and results. Their outputs are written as those of other batches. What is
        stored of the stream with a later time is limited to the clock too.

        Raises:
            StreamNotFoundError: there is no such stream.
            BatchStateError: the stream has state, or runs its batches in order and one of these has not completed.
        """
        with self._database.write_stream(stream_name) as (connection, before):
            locked = before if dry_run else _open_again(connection, before)
            row, ahead_ms = locked.row, locked.now_ms + CLOCK_SKEW_MS
            if row.sealed_until_ms <= ahead_ms:
                if not dry_run:
                    _limit_marks(connection, locked)
                    take_back(connection, locked)
                return None
            ahead = _ahead(connection, row, ahead_ms)
            _check_reopenable(row, ahead)
            newest = select(func.max(batches.c.batch_time_ms)).where(
                batches.c.stream == stream_name, batches.c.batch_time_ms <= ahead_ms
            )
            sealed_ms = max(connection.execute(newest).scalar_one() or 0, row.removed_until_ms)
            opened = replace(row, sealed_until_ms=sealed_ms)
            first_ms = min((batch.batch_time_ms for batch in ahead), default=None)
            locked = replace(locked, row=opened, claimed_ms=first_ms)
            open_ms = without_batch(connection, locked, opened.batch_time_after(max(locked.now_ms, sealed_ms)))
            times = tuple(batch.batch_time_ms for batch in ahead)
            if dry_run:
                return Reopened(locked.now_ms, row.sealed_until_ms, times, open_ms, TakenBack(open_ms, 0, 0))
            moved = _move(connection, locked, open_ms)
            _shorten_leases(connection, locked)
            _limit_marks(connection, locked)
            values = {
                "sealed_until_ms": sealed_ms,
                "zero_time_ms": min(row.zero_time_ms, locked.now_ms // row.batch_interval_ms * row.batch_interval_ms),
                "declared_at_ms": min(row.declared_at_ms, locked.now_ms),
            }
            connection.execute(update(streams).where(streams.c.name == stream_name).values(values))
            taken = TakenBack(open_ms, moved["blocks"], moved["records"])
            _report(connection, locked, taken, until_ms=row.sealed_until_ms, batches=list(times))
            return Reopened(locked.now_ms, row.sealed_until_ms, times, open_ms, taken)

    def apply(self, stream_name: str) -> TakenBack | None:
        """Correct the stream after its clock was ahead, also what its receivers have reported. Returns what was moved.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            _limit_marks(connection, locked)
            return take_back(connection, locked)[1]


def take_back(connection: Connection, locked: LockedStream) -> tuple[LockedStream, TakenBack | None]:
    """Move unallocated blocks whose batch times lie ahead of the clock to the next open batch time, and shorten leases.

    All later blocks of a partition are in such times too, and move with them: its order across batches stays. Returns
    the stream's row as it is then, and what was moved.
    """
    _shorten_leases(connection, locked)
    locked = _open_again(connection, locked)
    stream, now_ms = locked.row, locked.now_ms
    latest_ms = stream.batch_time_after(max(now_ms + CLOCK_SKEW_MS, stream.sealed_until_ms))
    latest_ms = without_batch(connection, locked, latest_ms)
    last_ms = connection.execute(_last_unclaimed, {"stream": stream.name}).scalar_one()
    if last_ms is None or last_ms <= latest_ms:
        return locked, None
    open_ms = without_batch(connection, locked, stream.batch_time_after(max(now_ms, stream.sealed_until_ms)))
    moved = _move(connection, locked, open_ms)
    taken = TakenBack(open_ms, moved["blocks"], moved["records"])
    _report(connection, locked, taken, until_ms=last_ms)
    return locked, taken


def _report(connection: Connection, locked: LockedStream, taken: TakenBack, **more: Any) -> None:
    payload = {"batch_time_ms": taken.batch_time_ms, "blocks": taken.blocks, "records": taken.records, **more}
    record(connection, locked.row.name, locked.now_ms, EventKind.BLOCKS_TAKEN_BACK, payload)


def _ahead(connection: Connection, row: StreamRow, ahead_ms: int) -> list[BatchRow]:
    query = select(batches).where(batches.c.stream == row.name, batches.c.batch_time_ms > ahead_ms)
    return BatchRow.rows(connection, query.order_by(batches.c.batch_time_ms))


def _check_reopenable(row: StreamRow, ahead: Sequence[BatchRow]) -> None:
    """Refuse what would change the order in which batches are computed from each other."""
    if STATE_STEP in row.outputs and ahead:
        raise BatchStateError(
            f"Stream {row.name!r} has state, and batch {time_text(ahead[-1].batch_time_ms)} has updated it: an earlier "
            "batch time would not start from that state.",
            remedy="Declare a stream of another name, which reads the topic from where this one ends; or wait until "
            "that time.",
        )
    left = [batch for batch in ahead if batch.state in UNFINISHED and batch.steps is None]
    if row.ordered and left:
        raise BatchStateError(
            f"Stream {row.name!r} runs its batches in order, and batch {time_text(left[0].batch_time_ms)} has not "
            "completed. Its records come before those that wait.",
            remedy="Wait until the stream's repair has run it, or trigger a run of it; then repeat the command.",
        )


def without_batch(connection: Connection, locked: LockedStream, batch_time_ms: int) -> int:
    """Return the first batch time from this one on that has no batch: one was allocated while a clock was ahead."""
    if locked.claimed_ms is None or batch_time_ms < locked.claimed_ms:
        return batch_time_ms
    of_time = select(batches.c.state).where(
        batches.c.stream == locked.row.name, batches.c.batch_time_ms == bindparam("time_ms")
    )
    while connection.execute(of_time, {"time_ms": batch_time_ms}).first() is not None:
        batch_time_ms += locked.row.batch_interval_ms
    return batch_time_ms


_last_unclaimed = select(func.max(unclaimed_times.c.batch_time_ms)).where(
    unclaimed_times.c.stream == bindparam("stream")
)


def _move(connection: Connection, locked: LockedStream, open_ms: int) -> dict[str, int]:
    """Move all blocks after ``open_ms`` that are in no batch into it. Returns the sums of what it then has more.

    Their times of addition are limited too: a block cannot have been added after the time of its batch.
    """
    stream, now_ms = locked.row.name, locked.now_ms
    ahead = (unclaimed_times.c.stream == stream, unclaimed_times.c.batch_time_ms > open_ms)
    sums = [func.sum(unclaimed_times.c[name]).label(name) for name in UNCLAIMED_SUMS]
    moved = {
        name: int(value or 0) for name, value in connection.execute(select(*sums).where(*ahead)).one()._mapping.items()
    }
    connection.execute(delete(unclaimed_times).where(*ahead))
    if moved["blocks"]:
        _count_moved(connection, stream, open_ms, moved)
    in_batch = exists().where(batches.c.stream == blocks.c.stream, batches.c.batch_time_ms == blocks.c.batch_time_ms)
    connection.execute(
        update(blocks)
        .where(blocks.c.stream == stream, blocks.c.batch_time_ms > open_ms, ~in_batch)
        .values(batch_time_ms=open_ms, added_at_ms=now_ms)
    )
    # What is still later is in a batch, and its segment needed for that.
    later = exists().where(blocks.c.segment_id == segments.c.segment_id, blocks.c.batch_time_ms > open_ms)
    for table, but in ((positions, ()), (segments, (~later,))):
        column = table.c.last_batch_time_ms
        limited = update(table).where(table.c.stream == stream, column > open_ms, *but)
        connection.execute(limited.values({column: open_ms}))
    return moved


def _count_moved(connection: Connection, stream_name: str, open_ms: int, moved: dict[str, int]) -> None:
    # In any of its parts: they are summed up.
    key = {"stream": stream_name, "batch_time_ms": open_ms, "part": 0}
    there = [unclaimed_times.c[name] == value for name, value in key.items()]
    added = {name: unclaimed_times.c[name] + value for name, value in moved.items()}
    if not connection.execute(update(unclaimed_times).where(*there).values(added)).rowcount:
        connection.execute(insert(unclaimed_times).values(**key, **moved))


def _open_again(connection: Connection, locked: LockedStream) -> LockedStream:
    """Take back a seal that lies ahead of the clock, as far as no batch needs it."""
    stream = locked.row
    if stream.sealed_until_ms <= locked.now_ms + CLOCK_SKEW_MS:
        return locked
    newest = select(func.max(batches.c.batch_time_ms)).where(batches.c.stream == stream.name)
    sealed_ms = max(connection.execute(newest).scalar_one() or 0, stream.removed_until_ms)
    if sealed_ms >= stream.sealed_until_ms:
        return locked
    connection.execute(update(streams).where(streams.c.name == stream.name).values(sealed_until_ms=sealed_ms))
    return replace(locked, row=replace(stream, sealed_until_ms=sealed_ms))


def shorten_leases(connection: Connection, table: Any, now_ms: int, *which: ColumnElement[bool]) -> None:
    """Let no lease last longer from now than its own length: its holder may have died while the clock was ahead."""
    until = now_ms + table.c.lease_ms
    too_long = table.c.lease_until_ms > until + CLOCK_SKEW_MS
    connection.execute(update(table).where(*which, too_long).values(lease_until_ms=until))


def _shorten_leases(connection: Connection, locked: LockedStream) -> None:
    stream, epoch = locked.row.name, locked.row.job_epoch
    of_job = (receiver_jobs.c.stream == stream, receiver_jobs.c.epoch == epoch)
    shorten_leases(connection, receiver_jobs, locked.now_ms, *of_job)
    shorten_leases(connection, receivers, locked.now_ms, receivers.c.stream == stream)
    running = (batch_attempts.c.stream == stream, batch_attempts.c.state == AttemptState.RUNNING)
    shorten_leases(connection, batch_attempts, locked.now_ms, *running)


def _limit_marks(connection: Connection, locked: LockedStream) -> None:
    """Limit what receivers have reported to the clock: else batches would not wait for records until it is reached."""
    now = bindparam("now_ms", type_=BigInteger)
    for column in (
        positions.c.watermark_ms,
        positions.c.drained_ms,
        receivers.c.sealed_through_ms,
        receivers.c.registered_at_ms,
    ):
        limited = update(column.table).where(column.table.c.stream == locked.row.name, column > now)
        connection.execute(limited.values({column: now}), {"now_ms": locked.now_ms})
