"""Cleanup by reference: a segment is deleted when none of its blocks is needed any more, never because of its age.

Three steps, each of which can be repeated after a crash: claim (from then on no block is added to the segment, and new
readers of its batches read from Kafka), delete the file, fold (the rows are deleted, the batches' offset ranges stay).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, or_, select, update

from headrace.ledger.attempt_statements import live_attempts
from headrace.ledger.batch_tables import BatchRow, batch_attempts, batches
from headrace.ledger.database import Repository
from headrace.ledger.errors import BatchStateError, StreamNotFoundError
from headrace.ledger.events import record
from headrace.ledger.receiving_tables import SegmentRow, blocks, receivers, segments, unclaimed_times
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState, EventKind
from headrace.ledger.tables import events, streams

# Rows deleted in one transaction; few enough that receivers wait only milliseconds for the lock.
FOLD_CHUNK = 2_000


class Cleanup(Repository):
    """Finds segments and batches that are no longer needed, and deletes their rows."""

    def needed_from(self, stream: str) -> int:
        """Return the oldest batch time that is still to run, or is running. The log that its windows need must stay.

        This is the earliest of: the oldest unclaimed time, the oldest batch that has never completed, the oldest live
        attempt's batch, the time after the newest batch, and now. A batch that completed once and failed when it was
        run again does not count unless it is running: otherwise one such batch would keep the whole log after it.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.read() as connection:
            row = connection.execute(select(streams).where(streams.c.name == stream)).one_or_none()
            if row is None:
                raise StreamNotFoundError(stream)
            return _needed_from(connection, stream, row.batch_interval_ms, self._database.now_ms(connection))

    def removable_segments(self, stream: str, before_ms: int, limit: int = 100) -> list[SegmentRow]:
        """Return the oldest closed segments without needed blocks, and those whose removal was interrupted.

        A block is not needed if its batch time is below ``before_ms``, its batch has completed and is checkpointed, or
        was abandoned, and no live attempt reads it (such as a replay of a completed batch).
        """
        with self._database.read() as connection:
            now_ms = self._database.now_ms(connection)
            # Each query uses its index: segments within the remember window, most of the log, are not read.
            begun = select(segments).where(segments.c.stream == stream, *_REMOVING).order_by(segments.c.segment_id)
            rows = [SegmentRow.from_row(row) for row in connection.execute(begun.limit(limit))]
            done = (
                select(segments)
                .where(
                    segments.c.stream == stream,
                    segments.c.removed_at_ms.is_(None),
                    segments.c.removing_at_ms.is_(None),
                    # An open segment has no last batch time.
                    segments.c.last_batch_time_ms < before_ms,
                    ~_needed(before_ms, now_ms),
                )
                .order_by(segments.c.last_batch_time_ms, segments.c.segment_id)
                .limit(limit)
            )
            rows += [SegmentRow.from_row(row) for row in connection.execute(done)]
            return rows[:limit]

    def claim_removal(
        self, stream: str, paths: Iterable[str], before_ms: int, *, window_reach_ms: int | None = None
    ) -> list[SegmentRow]:
        """Claim those of the segments that are still removable. Only the files of the returned ones may be deleted.

        Args:
            window_reach_ms: how far before a batch the stream's windows need the log. If given, `needed_from` is
                evaluated again now: an attempt begun since ``before_ms`` was computed can still read what it planned.
        """
        wanted = list(paths)
        with self._database.write_stream(stream) as (connection, locked):
            if window_reach_ms is not None:
                needed_ms = _needed_from(connection, stream, locked.row.batch_interval_ms, locked.now_ms)
                before_ms = min(before_ms, needed_ms - window_reach_ms)
            query = select(segments).where(
                segments.c.stream == stream,
                segments.c.path.in_(wanted),
                segments.c.removed_at_ms.is_(None),
                segments.c.closed_at_ms.is_not(None),
                or_(segments.c.removing_at_ms.is_not(None), ~_needed(before_ms, locked.now_ms)),
            )
            claimed = [SegmentRow.from_row(row) for row in connection.execute(query.order_by(segments.c.segment_id))]
            connection.execute(
                update(segments)
                .where(
                    segments.c.segment_id.in_([segment.segment_id for segment in claimed]),
                    segments.c.removing_at_ms.is_(None),
                )
                .values(removing_at_ms=locked.now_ms)
            )
            return claimed

    def fold_blocks(self, stream: str, path: str) -> int:
        """Delete the blocks of a segment whose file is deleted, and their events. Returns the number of blocks.

        Raises:
            BatchStateError: the removal was not claimed.
        """
        folded = 0
        while True:
            with self._database.write_stream(stream) as (connection, locked):
                segment = _claimed(connection, stream, path)
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
                    record(connection, stream, locked.now_ms, EventKind.SEGMENT_REMOVED, {"path": path})
                    return folded

    def cleanable_batches(self, stream: str, before_ms: int, limit: int = 100) -> list[BatchRow]:
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
                batches.c.stream == stream,
                batches.c.cleaned_at_ms.is_(None),
                batches.c.batch_time_ms < before_ms,
                _done(batches),
                ~own,
                ~taken_over,
            )
            .order_by(batches.c.batch_time_ms)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [BatchRow.from_row(row) for row in connection.execute(query)]


def _needed_from(connection: Connection, stream: str, interval_ms: int, now_ms: int) -> int:
    """`Cleanup.needed_from` within a transaction."""
    newest = select(batches.c.batch_time_ms).where(batches.c.stream == stream).order_by(batches.c.batch_time_ms.desc())
    unclaimed = select(unclaimed_times.c.batch_time_ms).where(unclaimed_times.c.stream == stream)
    # One query per state uses the index; one query for all states would read and sort all their rows.
    oldest = [unclaimed.order_by(unclaimed_times.c.batch_time_ms)] + [
        select(batches.c.batch_time_ms)
        .where(batches.c.stream == stream, batches.c.state == state, batches.c.steps.is_(None))
        .order_by(batches.c.batch_time_ms)
        for state in UNFINISHED
    ]
    times = [now_ms, *(attempt.batch_time_ms for attempt in live_attempts(connection, stream, now_ms)[:1])]
    last_ms = connection.execute(newest.limit(1)).scalar_one_or_none()
    if last_ms is not None:
        times.append(last_ms + interval_ms)
    for query in oldest:
        times += connection.execute(query.limit(1)).scalars()
    return min(times)


def _done(table: Any) -> ColumnElement[bool]:
    completed = and_(table.c.state == BatchState.COMPLETED, table.c.checkpointed_at_ms.is_not(None))
    return or_(completed, table.c.state == BatchState.ABANDONED)


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


def _claimed(connection: Connection, stream: str, path: str) -> SegmentRow | None:
    """Return the segment, or None if it has been folded already."""
    row = connection.execute(select(segments).where(segments.c.stream == stream, segments.c.path == path)).one_or_none()
    if row is None or row.removing_at_ms is None:
        raise BatchStateError(
            f"The removal of segment {path!r} of stream {stream!r} was never claimed.",
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
