"""Cleanup by reference: a segment is deleted when none of its blocks is needed any more, never because of its age.

Three steps, each of which can be repeated after a crash: claim (from then on no block is added to the segment, and new
readers of its batches read from Kafka), delete the file, fold (the rows are deleted, the batches' offset ranges stay).

`Removal` removes a stream's oldest batches: those that are finished, in a result file and older than the stream's
history limit. They are removed so that one range of batch times describes them. No block can join a time in this range
and it cannot be allocated again, so its documents cannot be written a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, exists, false, func, or_, select, update

from headrace.ledger.batches.batch_states import live_attempts
from headrace.ledger.batches.tables import (
    BatchRow,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    replays,
)
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import BatchStateError, StreamNotFoundError
from headrace.ledger.events import record
from headrace.ledger.receiving.tables import SegmentRow, blocks, positions, receivers, segments, unclaimed_times
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState, EventKind
from headrace.ledger.tables import StreamRow, events, samples, streams

# Rows deleted in one transaction; few enough that receivers wait only milliseconds for the lock.
FOLD_CHUNK = 2_000


class Cleanup(Repository):
    """Finds segments and batches that are no longer needed, and deletes their rows."""

    def needed_from(self, stream_name: str, *, in_log: bool = True) -> int:
        """Return the oldest batch time that is still to run, or is running. The log that its windows need must stay.

        This is the earliest of: the oldest unclaimed time, the oldest batch that has never completed, the oldest batch
        with a live attempt that reads the log, the time after the newest batch, and now. A batch that completed once
        and failed when it was run again does not count unless it is running: otherwise one such batch would keep the
        whole log after it. Nor does one that is read again from Kafka: what is older has left the log before it, and a
        range of such batches takes hours. With ``in_log=False`` it counts: the batches of its windows must stay.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.read() as connection:
            row = connection.execute(select(streams).where(streams.c.name == stream_name)).one_or_none()
            if row is None:
                raise StreamNotFoundError(stream_name)
            now_ms = self._database.now_ms(connection)
            return _needed_from(connection, stream_name, row.batch_interval_ms, now_ms, in_log=in_log)

    def removable_segments(self, stream_name: str, before_ms: int, limit: int = 100) -> list[SegmentRow]:
        """Return the oldest closed segments without needed blocks, and those whose removal was interrupted.

        A block is not needed if its batch time is below ``before_ms``, its batch has completed and is checkpointed, or
        was abandoned, and no live attempt reads it (such as a replay of a completed batch).
        """
        with self._database.read() as connection:
            now_ms = self._database.now_ms(connection)
            # Each query uses its index: segments within the remember window, most of the log, are not read.
            begun = select(segments).where(segments.c.stream == stream_name, *_REMOVING).order_by(segments.c.segment_id)
            rows = SegmentRow.rows(connection, begun.limit(limit))
            done = (
                select(segments)
                .where(
                    segments.c.stream == stream_name,
                    segments.c.removed_at_ms.is_(None),
                    segments.c.removing_at_ms.is_(None),
                    # An open segment has no last batch time.
                    segments.c.last_batch_time_ms < before_ms,
                    ~_needed(before_ms, now_ms),
                )
                .order_by(segments.c.last_batch_time_ms, segments.c.segment_id)
                .limit(limit)
            )
            rows += SegmentRow.rows(connection, done)
            return rows[:limit]

    def claim_removal(
        self, stream_name: str, paths: Iterable[str], before_ms: int, *, window_reach_ms: int | None = None
    ) -> list[SegmentRow]:
        """Claim those of the segments that are still removable. Only the files of the returned ones may be deleted.

        Args:
            window_reach_ms: how far before a batch the stream's windows need the log. If given, `needed_from` is
                evaluated again now: an attempt begun since ``before_ms`` was computed can still read what it planned.
        """
        wanted = list(paths)
        with self._database.write_stream(stream_name) as (connection, locked):
            if window_reach_ms is not None:
                needed_ms = _needed_from(connection, stream_name, locked.row.batch_interval_ms, locked.now_ms)
                before_ms = min(before_ms, needed_ms - window_reach_ms)
            query = select(segments).where(
                segments.c.stream == stream_name,
                segments.c.path.in_(wanted),
                segments.c.removed_at_ms.is_(None),
                segments.c.closed_at_ms.is_not(None),
                or_(segments.c.removing_at_ms.is_not(None), ~_needed(before_ms, locked.now_ms)),
            )
            claimed = SegmentRow.rows(connection, query.order_by(segments.c.segment_id))
            connection.execute(
                update(segments)
                .where(
                    segments.c.segment_id.in_([segment.segment_id for segment in claimed]),
                    segments.c.removing_at_ms.is_(None),
                )
                .values(removing_at_ms=locked.now_ms)
            )
            return claimed

    def fold_blocks(self, stream_name: str, path: str) -> int:
        """Delete the blocks of a segment whose file is deleted, and their events. Returns the number of blocks.

        Raises:
            BatchStateError: the removal was not claimed.
        """
        folded = 0
        while True:
            with self._database.write_stream(stream_name) as (connection, locked):
                segment = _claimed(connection, stream_name, path)
                if segment is None:
                    return folded
                ids = list(
                    connection.execute(
                        select(blocks.c.block_id).where(blocks.c.segment_id == segment.segment_id).limit(FOLD_CHUNK)
                    ).scalars()
                )
                connection.execute(delete(events).where(events.c.block_id.in_(ids)))
                connection.execute(delete(blocks).where(blocks.c.block_id.in_(ids)))
                folded += len(ids)
                if len(ids) < FOLD_CHUNK:
                    _forget(connection, segment, locked.now_ms)
                    record(connection, stream_name, locked.now_ms, EventKind.SEGMENT_REMOVED, {"path": path})
                    return folded

    def cleanable_batches(self, stream_name: str, before_ms: int, limit: int = 100) -> list[BatchRow]:
        """Return the oldest batches below ``before_ms`` that are checkpointed or abandoned and have no blocks left.

        `mark_cleaned` is to be called for each. Their manifests stay: they name the ranges to read again from Kafka.
        """
        absorbed = batches.alias("absorbed")
        own = exists().where(blocks.c.stream == batches.c.stream, blocks.c.batch_time_ms == batches.c.batch_time_ms)
        taken_over = exists().where(
            absorbed.c.stream == batches.c.stream,
            absorbed.c.absorbed_by_ms == batches.c.batch_time_ms,
            exists().where(blocks.c.stream == absorbed.c.stream, blocks.c.batch_time_ms == absorbed.c.batch_time_ms),
        )
        query = (
            select(batches)
            .where(
                batches.c.stream == stream_name,
                batches.c.cleaned_at_ms.is_(None),
                batches.c.batch_time_ms < before_ms,
                _done(batches),
                ~own,
                ~taken_over,
            )
            .order_by(batches.c.batch_time_ms)
            .limit(limit)
        )
        return self._rows(BatchRow, query)

    def prune_samples(self, stream_name: str, before_ms: int, limit: int = 5000) -> int:
        """Delete up to ``limit`` of the oldest samples before ``before_ms``. Returns the number deleted."""
        oldest = select(samples.c.at_ms).where(samples.c.stream == stream_name, samples.c.at_ms < before_ms)
        with self._database.write() as connection:
            times = connection.execute(oldest.order_by(samples.c.at_ms).limit(limit)).scalars().all()
            if times:
                connection.execute(delete(samples).where(samples.c.stream == stream_name, samples.c.at_ms <= times[-1]))
            return len(times)


def _needed_from(
    connection: Connection, stream_name: str, interval_ms: int, now_ms: int, *, in_log: bool = True
) -> int:
    """`Cleanup.needed_from` within a transaction."""
    newest = (
        select(batches.c.batch_time_ms).where(batches.c.stream == stream_name).order_by(batches.c.batch_time_ms.desc())
    )
    unclaimed = select(unclaimed_times.c.batch_time_ms).where(unclaimed_times.c.stream == stream_name)
    # One query per state uses the index; one query for all states would read and sort all their rows.
    oldest = [unclaimed.order_by(unclaimed_times.c.batch_time_ms)] + [
        select(batches.c.batch_time_ms)
        .where(batches.c.stream == stream_name, batches.c.state == state, batches.c.steps.is_(None))
        .order_by(batches.c.batch_time_ms)
        for state in UNFINISHED
    ]
    live = live_attempts(connection, stream_name, now_ms)
    reading = (row.batch_time_ms for row in live if not in_log or row.source != "kafka")
    times = [now_ms, *islice(reading, 1)]
    last_ms = connection.execute(newest.limit(1)).scalar_one_or_none()
    if last_ms is not None:
        times.append(last_ms + interval_ms)
    for query in oldest:
        times += connection.execute(query.limit(1)).scalars()
    return min(times)


def _done(table: Any) -> ColumnElement[bool]:
    completed = and_(table.c.state == BatchState.COMPLETED, table.c.checkpointed_at_ms.is_not(None))
    # A rebuild of a lost ledger reads in the result that the batch was abandoned.
    return or_(completed, and_(table.c.state == BatchState.ABANDONED, table.c.result == table.c.change))


_REMOVING = (segments.c.removed_at_ms.is_(None), segments.c.removing_at_ms.is_not(None))


def _needed(before_ms: int, now_ms: int) -> ColumnElement[bool]:
    """Whether a segment holds a block that is still needed; the search ends at the first one."""
    allocated, owner = batches.alias("allocated"), batches.alias("owner")
    # The batch that owns a block is that of its time, or the one that absorbed it.
    done = exists().where(
        allocated.c.stream == blocks.c.stream,
        allocated.c.batch_time_ms == blocks.c.batch_time_ms,
        owner.c.stream == allocated.c.stream,
        owner.c.batch_time_ms == func.coalesce(allocated.c.absorbed_by_ms, allocated.c.batch_time_ms),
        owner.c.batch_time_ms < before_ms,
        _done(owner),
        ~exists().where(
            batch_attempts.c.stream == owner.c.stream,
            batch_attempts.c.state == AttemptState.RUNNING,
            batch_attempts.c.batch_time_ms == owner.c.batch_time_ms,
            batch_attempts.c.lease_until_ms > now_ms,
        ),
    )
    return exists().where(blocks.c.segment_id == segments.c.segment_id, ~done)


def _claimed(connection: Connection, stream_name: str, path: str) -> SegmentRow | None:
    """Return the segment, or None if it has been folded already."""
    row = connection.execute(
        select(segments).where(segments.c.stream == stream_name, segments.c.path == path)
    ).one_or_none()
    if row is None or row.removing_at_ms is None:
        raise BatchStateError(
            f"The removal of segment {path!r} of stream {stream_name!r} was never claimed.",
            remedy="Call cleanup.claim_removal, delete the file, then fold.",
        )
    return None if row.removed_at_ms is not None else SegmentRow.from_row(row)


def _forget(connection: Connection, segment: SegmentRow, now_ms: int) -> None:
    connection.execute(
        update(receivers)
        .where(receivers.c.stream == segment.stream, receivers.c.segment_id == segment.segment_id)
        .values(segment_id=None)
    )
    connection.execute(update(segments).where(segments.c.segment_id == segment.segment_id).values(removed_at_ms=now_ms))


# Batches per transaction. With a hundred partitions each has a hundred rows, and receivers wait for the lock.
CHUNK = 20

# In the order in which their rows can be deleted.
_TABLES = (batch_runs, replays, batch_outputs, batch_inputs, batch_attempts, batches)


class Removal(Repository):
    """Removes the oldest batches of a stream."""

    def oldest(self, stream_name: str) -> int | None:
        """Return the time from which the history counts for the oldest batch that is next to remove; None without one.

        See `remove_batches`: this is the next one above the removed times, or the next one below them.
        """
        with self._database.read() as connection:
            row = StreamRow.from_row(connection.execute(select(streams).where(streams.c.name == stream_name)).one())
            queries = (_above(connection, row), _below(row))
            times = [_counts_from(row, edge) for query in queries for edge in connection.execute(query.limit(1))]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def remove_batches(self, stream_name: str, before_ms: int) -> int:
        """Remove some of the batches older than ``before_ms``, in one transaction. Returns their number; 0: no more.

        A batch may be removed only if its result file holds its present state and nothing of it is left in the
        log. A batch is removed together with all that it absorbed.

        The removed times are one range without a gap, because no time in it can be allocated again. The range begins
        with the first batch that was received, and grows at both ends. Upwards it takes the oldest batches first, and
        stops at the first batch that may not be removed, or before an unclaimed time or a live attempt. Downwards it
        takes the newest batches first, in the same way. These are built from Kafka, or empty. They count from the time
        when they completed, since their batch times are old from the start; and the times below them can still be
        built.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            taken = _removable(connection, locked, before_ms) or _removable_below(connection, locked, before_ms)
            if not taken:
                return 0
            first_ms, last_ms = taken[0].batch_time_ms, taken[-1].batch_time_ms
            _note_offsets(connection, stream_name, first_ms, last_ms)
            for table in _TABLES:
                connection.execute(
                    delete(table).where(table.c.stream == stream_name, table.c.batch_time_ms.between(first_ms, last_ms))
                )
            row = locked.row
            connection.execute(
                update(streams)
                .where(streams.c.name == stream_name)
                .values(
                    removed_from_ms=min(first_ms, row.removed_from_ms) if row.removed_until_ms else first_ms,
                    removed_until_ms=max(last_ms, row.removed_until_ms),
                )
            )
            return len(taken)

    def note_files(self, stream_name: str, until_ms: int) -> None:
        """Note that the files of the removed batches up to this time are deleted."""
        with self._database.write_stream(stream_name) as (connection, _):
            connection.execute(update(streams).where(streams.c.name == stream_name).values(removed_files_ms=until_ms))

    def remove_segments(self, stream_name: str, before_ms: int, limit: int = 1_000) -> int:
        """Delete the rows of segments whose files were deleted before ``before_ms``. Returns their number.

        A segment's name contains its writer's epoch, so no name is used again.
        """
        old = select(segments.c.segment_id).where(
            segments.c.stream == stream_name, segments.c.removed_at_ms < before_ms
        )
        with self._database.read() as connection:
            # Nothing changes a removed segment, so only the deletion needs the lock, and mostly there is none.
            ids = connection.execute(old.order_by(segments.c.removed_at_ms).limit(limit)).scalars().all()
        if not ids:
            return 0
        with self._database.write_stream(stream_name) as (connection, _):
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
    if row.state is not BatchState.ABSORBED and (row.cleaned_at_ms is None or row.result < row.change):
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


def _note_offsets(connection: Connection, stream_name: str, first_ms: int, last_ms: int) -> None:
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
            batch_inputs.c.stream == stream_name,
            batch_inputs.c.batch_time_ms.between(first_ms, last_ms),
            batches.c.built.is_(False),
        )
        .group_by(*(batch_inputs.c[name] for name in key))
    )
    for row in connection.execute(query).all():
        connection.execute(
            update(positions)
            .where(
                positions.c.stream == stream_name,
                *(positions.c[name] == getattr(row, name) for name in key),
                func.coalesce(positions.c.removed_until_offset, 0) < row.until_offset,
            )
            .values(removed_until_offset=row.until_offset)
        )
