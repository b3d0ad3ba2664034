"""Keeps the ledger's rows of the log's segments. Adding a block opens its segment and closes the previous one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, ScalarSelect, func, insert, select, update

from headrace.ledger.database import LockedStream, Repository, new_id
from headrace.ledger.errors import BlockConflictError, SegmentRemovedError
from headrace.ledger.receiver_leases import require_receiver
from headrace.ledger.receiving_tables import ReceiverLease, SegmentRow, blocks, closing_values, segments


class Segments(Repository):
    """Opens and closes segments; `cleanup` removes them."""

    def closed(self, lease: ReceiverLease, path: str, size: int | None = None) -> None:
        """Note that the writer has finished a segment of ``size`` bytes: no block will be added to it.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale.
        """
        with self._database.write_stream(lease.receiver_id.stream) as (connection, locked):
            require_receiver(connection, locked, lease)
            connection.execute(
                update(segments)
                .where(
                    segments.c.stream == lease.receiver_id.stream,
                    segments.c.path == path,
                    segments.c.closed_at_ms.is_(None),
                )
                .values(**closing_values(locked.now_ms), bytes=size)
            )

    def get(self, stream: str, path: str) -> SegmentRow | None:
        """Return the segment with this path, or None if the ledger does not have it."""
        query = select(segments).where(segments.c.stream == stream, segments.c.path == path)
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
            return None if row is None else SegmentRow.from_row(row)

    def page(self, stream: str, limit: int = 1000) -> list[SegmentRow]:
        """Return the oldest ``limit`` segments that have not been removed."""
        query = select(segments).where(segments.c.stream == stream, segments.c.removed_at_ms.is_(None))
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(segments.c.segment_id).limit(limit))
            return [SegmentRow.from_row(row) for row in rows]

    def count(self, stream: str) -> int:
        """Return the number of segments that have not been removed."""
        query = select(func.count()).where(segments.c.stream == stream, segments.c.removed_at_ms.is_(None))
        with self._database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def stored_bytes(self, stream: str) -> int:
        """Return the bytes of the segments that have not been removed.

        A segment that is open, or whose size was not reported, counts up to the end of its last block.
        """
        with self._database.read() as connection:
            return int(connection.execute(select(stored_bytes_of(stream))).scalar_one())


def stored_bytes_of(stream: Any) -> ScalarSelect[Any]:
    """Return the query of `Segments.stored_bytes`; ``stream`` is a name, or the column of an enclosing query."""
    end = (
        select(blocks.c.frame_offset + blocks.c.frame_length)
        .where(blocks.c.segment_id == segments.c.segment_id)
        .order_by(blocks.c.frame_offset.desc())
        .limit(1)
        .scalar_subquery()
    )
    return (
        select(func.coalesce(func.sum(func.coalesce(segments.c.bytes, end, 0)), 0))
        .where(segments.c.stream == stream, segments.c.removed_at_ms.is_(None))
        .scalar_subquery()
    )


def segment_for(
    connection: Connection, locked: LockedStream, lease: ReceiverLease, receiver: Row[Any], path: str
) -> int:
    """Return the id of a block's segment, within the caller's transaction. A new segment closes the previous one.

    ``receiver`` is the receiver's row with its current segment. The caller must store the id in that row.
    """
    if receiver.segment_path == path and receiver.segment_removing_at_ms is None:
        return int(receiver.segment_id)
    stream, receiver_id = locked.row.name, lease.receiver_id
    row = connection.execute(select(segments).where(segments.c.stream == stream, segments.c.path == path)).one_or_none()
    if row is not None:
        _check_writer(SegmentRow.from_row(row), lease)
        return int(row.segment_id)
    if receiver.segment_id is not None:
        connection.execute(
            update(segments)
            .where(segments.c.segment_id == receiver.segment_id, segments.c.closed_at_ms.is_(None))
            .values(**closing_values(locked.now_ms))
        )
    inserted = connection.execute(
        insert(segments).values(
            stream=stream,
            path=path,
            input_id=receiver_id.input_id,
            receiver_index=receiver_id.index,
            epoch=lease.epoch,
            opened_at_ms=locked.now_ms,
        )
    )
    return new_id(inserted)


def _check_writer(segment: SegmentRow, lease: ReceiverLease) -> None:
    if (segment.receiver_id, segment.epoch) != (lease.receiver_id, lease.epoch):
        raise BlockConflictError(
            f"Segment {segment.path} was written by {segment.receiver_id} in epoch {segment.epoch}, "
            f"not by {lease.receiver_id} in epoch {lease.epoch}.",
            remedy="Name every segment by its receiver, epoch and open time.",
        )
    if segment.removing_at_ms is not None:
        raise SegmentRemovedError(
            f"Segment {segment.path} is being removed.", remedy="Read the block's offsets again, into a new segment."
        )
