"""Records gaps: offsets lost by Kafka or abandoned by a person. Each gap is also an event."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from headrace.blocks import TopicPartition
from headrace.ledger.codec import partition_key
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.events import record
from headrace.ledger.models import GapRow, gaps
from headrace.ledger.states import EventKind


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
) -> None:
    """Write a gap and its event, within the caller's transaction."""
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
    record(connection, locked.row.name, locked.now_ms, EventKind.GAP, fields, batch_time_ms=batch_time_ms)


class Gaps(Repository):
    """Finds the gaps of streams."""

    def page(self, stream: str, limit: int = 1000) -> list[GapRow]:
        """Return the newest ``limit`` gaps, newest first."""
        query = select(gaps).where(gaps.c.stream == stream).order_by(gaps.c.gap_id.desc()).limit(limit)
        with self._database.read() as connection:
            return [GapRow.from_row(row) for row in connection.execute(query)]
