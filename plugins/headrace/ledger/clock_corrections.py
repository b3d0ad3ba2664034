"""Repairs what a clock that was ahead has left in the ledger.

Batch times and leases come from the database's clock. While it is ahead, blocks get batch times that are still to come
when it is right again, and every later block of their partitions would follow them there. No correct clock gives such
times, so they are recognised by themselves. Allocated batches never change: what was sealed for one stays sealed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, bindparam, delete, func, insert, select, update

from headrace.ledger.batch_tables import batch_attempts, batches
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.events import record
from headrace.ledger.receiving_tables import UNCLAIMED_SUMS, blocks, positions, receivers, segments, unclaimed_times
from headrace.ledger.states import AttemptState, EventKind
from headrace.ledger.tables import receiver_jobs, streams

# Airflow's clock may be ahead of the ledger's by this much, so a batch time is accepted this long before it ends. Times
# further ahead are refused: sealing one would leave every block until then without a batch.
CLOCK_SKEW_MS = 5_000


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Blocks whose batch times lay ahead of the clock, and the open batch time that has them now."""

    batch_time_ms: int
    blocks: int
    records: int


class ClockCorrections(Repository):
    """Makes the corrections of a stream."""

    def apply(self, stream: str) -> TakenBack | None:
        """Correct the stream after its clock was ahead, also what its receivers have reported. Returns what was moved.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream) as (connection, locked):
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
    last_ms = connection.execute(_last_unclaimed, {"stream": stream.name}).scalar_one()
    if last_ms is None or last_ms <= latest_ms:
        return locked, None
    open_ms = stream.batch_time_after(max(now_ms, stream.sealed_until_ms))
    moved = _move(connection, locked, open_ms)
    taken = TakenBack(open_ms, moved["blocks"], moved["records"])
    payload = {"batch_time_ms": open_ms, "until_ms": last_ms, "blocks": taken.blocks, "records": taken.records}
    record(connection, stream.name, now_ms, EventKind.BLOCKS_TAKEN_BACK, payload)
    return locked, taken


_last_unclaimed = select(func.max(unclaimed_times.c.batch_time_ms)).where(
    unclaimed_times.c.stream == bindparam("stream")
)


def _move(connection: Connection, locked: LockedStream, open_ms: int) -> dict[str, int]:
    """Move all blocks after ``open_ms`` into it; none of them is in a batch. Returns the sums of what it then has more.

    Their times of addition are limited too: a block cannot have been added after the time of its batch.
    """
    stream, now_ms = locked.row.name, locked.now_ms
    ahead = (unclaimed_times.c.stream == stream, unclaimed_times.c.batch_time_ms > open_ms)
    sums = [func.sum(unclaimed_times.c[name]).label(name) for name in UNCLAIMED_SUMS]
    moved = {name: int(value) for name, value in connection.execute(select(*sums).where(*ahead)).one()._mapping.items()}
    connection.execute(delete(unclaimed_times).where(*ahead))
    # In any of its parts: they are summed up.
    key = {"stream": stream, "batch_time_ms": open_ms, "part": 0}
    there = [unclaimed_times.c[name] == value for name, value in key.items()]
    added = {name: unclaimed_times.c[name] + value for name, value in moved.items()}
    if not connection.execute(update(unclaimed_times).where(*there).values(added)).rowcount:
        connection.execute(insert(unclaimed_times).values(**key, **moved))
    connection.execute(
        update(blocks)
        .where(blocks.c.stream == stream, blocks.c.batch_time_ms > open_ms)
        .values(batch_time_ms=open_ms, added_at_ms=now_ms)
    )
    for table in (positions, segments):
        column = table.c.last_batch_time_ms
        connection.execute(update(table).where(table.c.stream == stream, column > open_ms).values({column: open_ms}))
    return moved


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
