"""Records gaps: offsets lost by Kafka or by a log that is not synced, or abandoned by a person. Each gap is also an
event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import Connection, delete, insert, select

from headrace.blocks import OffsetRange, TopicPartition
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.events import record
from headrace.ledger.states import EventKind
from headrace.ledger.tables import GapRow, gaps, partition_key
from headrace.ledger.totals import add_totals


def add_gap(
    connection: Connection,
    locked: LockedStream,
    input_id: str,
    partition: TopicPartition,
    *,
    from_offset: int,
    until_offset: int,
    reason: str,
    batch_time_ms: int | None = None,
    counted: int = 0,
) -> None:
    """Write a gap and its event, within the caller's transaction. ``counted`` of its offsets are in the total of lost
    offsets already."""
    fields = {
        "input_id": input_id,
        **partition_key(partition),
        "incarnation": partition.incarnation,
        "from_offset": from_offset,
        "until_offset": until_offset,
        "reason": reason,
    }
    connection.execute(
        insert(gaps).values(stream=locked.row.name, **fields, batch_time_ms=batch_time_ms, at_ms=locked.now_ms)
    )
    add_totals(connection, locked.row.name, {"gap_offsets": until_offset - from_offset - counted})
    record(connection, locked.row.name, locked.now_ms, EventKind.GAP, fields, batch_time_ms=batch_time_ms)


VANISHED = "the log lost the block before it reached the disk (delivery at_most_once)"
"""The reason of the gaps of `Gaps.add_vanished`."""


def remove_vanished(connection: Connection, stream: str, batch_time_ms: int) -> Counter[tuple[str, TopicPartition]]:
    """Delete the gaps of a batch's vanished blocks, within the caller's transaction. Returns their offsets by input and
    partition, which stay in the total of lost offsets."""
    offsets: Counter[tuple[str, TopicPartition]] = Counter()
    vanished = (gaps.c.stream == stream, gaps.c.batch_time_ms == batch_time_ms, gaps.c.reason == VANISHED)
    for row in map(GapRow.from_row, connection.execute(select(gaps).where(*vanished))):
        offsets[row.input_id, row.partition] += row.until_offset - row.from_offset
    if offsets:
        connection.execute(delete(gaps).where(*vanished))
    return offsets


class Gaps(Repository):
    """Finds the gaps of streams, and records those of vanished blocks."""

    def add_vanished(self, stream: str, batch_time_ms: int, lost: Iterable[tuple[str, OffsetRange]]) -> None:
        """Record the offset ranges of a batch's blocks that the log lost, each once. ``lost`` has the input's id with
        each range. An abandoned batch is left as it is."""
        with self._database.write_stream(stream) as (connection, locked):
            query = select(gaps).where(gaps.c.stream == stream, gaps.c.batch_time_ms == batch_time_ms)
            rows = [GapRow.from_row(row) for row in connection.execute(query)]
            if any(row.reason != VANISHED for row in rows):
                # The batch is abandoned, so that its gaps contain those of its blocks. It may still be read for the
                # stream's state.
                return
            known = {(row.input_id, row.partition, row.from_offset) for row in rows}
            for input_id, each in lost:
                if each.until_offset > each.from_offset and (input_id, each.partition, each.from_offset) not in known:
                    add_gap(
                        connection,
                        locked,
                        input_id,
                        each.partition,
                        from_offset=each.from_offset,
                        until_offset=each.until_offset,
                        reason=VANISHED,
                        batch_time_ms=batch_time_ms,
                    )

    def page(self, stream: str, limit: int = 1000, *, before_id: int | None = None) -> list[GapRow]:
        """Return the newest ``limit`` gaps, those with ids below ``before_id`` if it is given, newest first."""
        query = select(gaps).where(gaps.c.stream == stream)
        if before_id is not None:
            query = query.where(gaps.c.gap_id < before_id)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(gaps.c.gap_id.desc()).limit(limit))
            return [GapRow.from_row(row) for row in rows]

    def containing(self, stream: str, input_id: str, partition: TopicPartition, offset: int) -> GapRow | None:
        """Return the newest gap that holds the offset, or None."""
        query = select(gaps).where(
            gaps.c.stream == stream,
            gaps.c.input_id == input_id,
            *(gaps.c[name] == value for name, value in partition_key(partition).items()),
            gaps.c.from_offset <= offset,
            gaps.c.until_offset > offset,
        )
        with self._database.read() as connection:
            row = connection.execute(query.order_by(gaps.c.from_offset.desc()).limit(1)).one_or_none()
        return None if row is None else GapRow.from_row(row)
