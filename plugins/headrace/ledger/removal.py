"""Removes a stream's oldest batches: those that are finished, filed and older than the stream's history limit.

They are removed so that one range of batch times describes them. No block can join a time in this range and it cannot
be allocated again, so its documents cannot be written a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from sqlalchemy import Connection, Select, and_, delete, false, func, or_, select, update

from headrace.ledger.attempt_statements import live_attempts
from headrace.ledger.batch_tables import batch_attempts, batch_inputs, batch_outputs, batch_runs, batches, replays
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.receiving_tables import positions, segments, unclaimed_times
from headrace.ledger.states import BatchState
from headrace.ledger.tables import StreamRow, streams

# Batches per transaction. With a hundred partitions each has a hundred rows, and receivers wait for the lock.
CHUNK = 20

# In the order in which their rows can be deleted.
_TABLES = (batch_runs, replays, batch_outputs, batch_inputs, batch_attempts, batches)


class Removal(Repository):
    """Removes the oldest batches of a stream."""

    def oldest(self, stream: str) -> int | None:
        """Return the time from which the history counts for the oldest batch that is next to remove; None without one.

        See `remove_batches`: this is the next one above the removed times, or the next one below them.
        """
        with self._database.read() as connection:
            row = StreamRow.from_row(connection.execute(select(streams).where(streams.c.name == stream)).one())
            queries = (_above(connection, row), _below(row))
            times = [_counts_from(row, each) for query in queries for each in connection.execute(query.limit(1))]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def remove_batches(self, stream: str, before_ms: int) -> int:
        """Remove some of the batches older than ``before_ms``, in one transaction. Returns their number; 0: no more.

        A batch may be removed only if a history file holds it in its present state and nothing of it is left in the
        log. A batch is removed together with all that it absorbed.

        The removed times are one range without a gap, because no time in it can be allocated again. The range begins
        with the first batch that was received, and grows at both ends. Upwards it takes the oldest batches first, and
        stops at the first batch that may not be removed, or before an unclaimed time or a live attempt. Downwards it
        takes the newest batches first, in the same way. These are built from Kafka, or empty. They count from the time
        when they completed, since their batch times are old from the start; and the times below them can still be
        built.
        """
        with self._database.write_stream(stream) as (connection, locked):
            taken = _removable(connection, locked, before_ms) or _removable_below(connection, locked, before_ms)
            if not taken:
                return 0
            first_ms, last_ms = taken[0].batch_time_ms, taken[-1].batch_time_ms
            _note_offsets(connection, stream, first_ms, last_ms)
            for table in _TABLES:
                connection.execute(
                    delete(table).where(table.c.stream == stream, table.c.batch_time_ms.between(first_ms, last_ms))
                )
            row = locked.row
            connection.execute(
                update(streams)
                .where(streams.c.name == stream)
                .values(
                    removed_from_ms=min(first_ms, row.removed_from_ms) if row.removed_until_ms else first_ms,
                    removed_until_ms=max(last_ms, row.removed_until_ms),
                )
            )
            return len(taken)

    def note_history(self, stream: str) -> int:
        """Find the oldest history file that still holds a batch, and note its number, which is returned."""
        with self._database.write_stream(stream) as (connection, locked):
            of_stream = batches.c.stream == stream
            # Below 0: the batch is being written into that file, which is needed as soon as it is there. The condition
            # "<= 0" is that of the index.
            queries = (
                select(func.min(batches.c.history)).where(of_stream, batches.c.history > 0),
                select(-func.max(batches.c.history)).where(of_stream, batches.c.history <= 0, batches.c.history < 0),
            )
            numbers = [number for query in queries if (number := connection.execute(query).scalar_one()) is not None]
            # If no file holds a batch, none is needed: later files do not have lower numbers.
            number = min(numbers, default=locked.now_ms)
            connection.execute(update(streams).where(streams.c.name == stream).values(history_from=number))
            return int(number)

    def note_files(self, stream: str, until_ms: int) -> None:
        """Note that the files of the removed batches up to this time are deleted."""
        with self._database.write_stream(stream) as (connection, _):
            connection.execute(update(streams).where(streams.c.name == stream).values(removed_files_ms=until_ms))

    def remove_segments(self, stream: str, before_ms: int, limit: int = 1_000) -> int:
        """Delete the rows of segments whose files were deleted before ``before_ms``. Returns their number.

        A segment's name contains its writer's epoch, so no name is used again.
        """
        old = select(segments.c.segment_id).where(segments.c.stream == stream, segments.c.removed_at_ms < before_ms)
        with self._database.read() as connection:
            # Nothing changes a removed segment, so only the deletion needs the lock, and mostly there is none.
            ids = connection.execute(old.order_by(segments.c.removed_at_ms).limit(limit)).scalars().all()
        if not ids:
            return 0
        with self._database.write_stream(stream) as (connection, _):
            return connection.execute(delete(segments).where(segments.c.segment_id.in_(ids))).rowcount


def _removable(connection: Connection, locked: LockedStream, before_ms: int) -> Sequence[Any]:
    """Return the oldest batches above the removed times that may be removed together, each with all it absorbed."""
    stream = locked.row.name
    query = _above(connection, locked.row)
    first = connection.execute(query.limit(1)).one_or_none()
    if first is None:
        return []
    waiting = select(unclaimed_times.c.batch_time_ms).where(unclaimed_times.c.stream == stream)
    times = [before_ms, *connection.execute(waiting.order_by(unclaimed_times.c.batch_time_ms).limit(1)).scalars()]
    live = [attempt.batch_time_ms for attempt in live_attempts(connection, stream, locked.now_ms)]
    times += [time_ms for time_ms in live if time_ms >= first.batch_time_ms][:1]
    query = query.where(batches.c.batch_time_ms < min(times))
    rows = connection.execute(query.limit(CHUNK)).all()
    owner_ms = next((row.absorbed_by_ms for row in rows[:1]), None)
    if owner_ms is not None and owner_ms > rows[-1].batch_time_ms:
        # One batch absorbed more times than CHUNK.
        rows = connection.execute(query.where(batches.c.batch_time_ms <= owner_ms)).all()
    over = list(takewhile(lambda row: _is_over(locked.row, row, before_ms), rows))
    there = {row.batch_time_ms for row in over}
    for place, row in enumerate(over):
        if row.absorbed_by_ms is not None and row.absorbed_by_ms not in there:
            return over[:place]
    return over


def _removable_below(connection: Connection, locked: LockedStream, before_ms: int) -> Sequence[Any]:
    """Return the newest batches below the removed times that may be removed, oldest first. None of them absorbed any:
    a batch that absorbed others was received."""
    rows = connection.execute(_below(locked.row).limit(CHUNK)).all()
    live = {attempt.batch_time_ms for attempt in live_attempts(connection, locked.row.name, locked.now_ms)}
    over = takewhile(lambda row: _is_over(locked.row, row, before_ms) and row.batch_time_ms not in live, rows)
    return list(over)[::-1]


def _above(connection: Connection, stream: StreamRow) -> Select[Any]:
    """Return the query for the batches above the removed times, oldest first."""
    query = select(batches).where(batches.c.stream == stream.name).order_by(batches.c.batch_time_ms)
    if stream.removed_until_ms:
        return query.where(batches.c.batch_time_ms > stream.removed_until_ms)
    # Nothing was removed yet. An absorbed time has no blocks of its own: its owner counts them.
    received = or_(
        batches.c.batch_time_ms > stream.zero_time_ms, batches.c.blocks > 0, batches.c.absorbed_by_ms.is_not(None)
    )
    first_ms = connection.execute(query.with_only_columns(batches.c.batch_time_ms).where(received).limit(1)).scalar()
    return query.where(false() if first_ms is None else batches.c.batch_time_ms >= first_ms)


def _below(stream: StreamRow) -> Select[Any]:
    """Return the query for the batches below the removed times, newest first."""
    below = batches.c.batch_time_ms < stream.removed_from_ms if stream.removed_until_ms else false()
    return select(batches).where(batches.c.stream == stream.name, below).order_by(batches.c.batch_time_ms.desc())


def _is_over(stream: StreamRow, row: Any, before_ms: int) -> bool:
    if row.history <= 0 or (row.state is not BatchState.ABSORBED and row.cleaned_at_ms is None):
        return False
    counts_from_ms = _counts_from(stream, row)
    return counts_from_ms is not None and counts_from_ms < before_ms


def _counts_from(stream: StreamRow, row: Any) -> int | None:
    """Return the time from which the history counts for a batch; None if that time is still to come."""
    if row.built or row.batch_time_ms < stream.removed_from_ms:
        # An abandoned batch has not completed.
        ended_ms: int | None = row.completed_at_ms or row.cleaned_at_ms
        return ended_ms
    return int(row.batch_time_ms)


def _note_offsets(connection: Connection, stream: str, first_ms: int, last_ms: int) -> None:
    """Note for each partition up to which offset its batches are removed now."""
    key = ("input_id", "topic", "topic_id", "partition")
    query = (
        select(*(batch_inputs.c[name] for name in key), func.max(batch_inputs.c.until_offset).label("until_offset"))
        .join(
            batches,
            and_(batches.c.stream == batch_inputs.c.stream, batches.c.batch_time_ms == batch_inputs.c.batch_time_ms),
        )
        # Built batches have offsets before those where the stream began.
        .where(
            batch_inputs.c.stream == stream,
            batch_inputs.c.batch_time_ms.between(first_ms, last_ms),
            batches.c.built.is_(False),
        )
        .group_by(*(batch_inputs.c[name] for name in key))
    )
    for row in connection.execute(query).all():
        connection.execute(
            update(positions)
            .where(
                positions.c.stream == stream,
                *(positions.c[name] == getattr(row, name) for name in key),
                func.coalesce(positions.c.removed_until_offset, 0) < row.until_offset,
            )
            .values(removed_until_offset=row.until_offset)
        )
