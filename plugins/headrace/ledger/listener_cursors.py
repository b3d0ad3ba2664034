"""Remembers how far each listener of a stream has got the events, so that it continues there after a restart."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import insert, select, update

from headrace.ledger.database import Repository
from headrace.ledger.jobs import require_job
from headrace.ledger.tables import JobLease, ListenerCursorRow, events, listener_cursors


class ListenerCursors(Repository):
    """A cursor for each listener, by its name. Only the stream's present receiver job moves them."""

    def open(
        self, lease: JobLease, listeners: Collection[str], new_after_id: int | None = None
    ) -> dict[str, ListenerCursorRow]:
        """Return the cursors of these listeners. A new listener begins after the event ``new_after_id``, by default
        after the newest.

        The returned ``missed`` are those since the last call.

        Raises:
            LeaseLostError: another job has begun, or this one has ended.
        """
        with self._database.write_stream(lease.stream) as (connection, locked):
            require_job(connection, locked, lease)
            event_id = new_after_id
            if event_id is None:
                newest = select(events.c.event_id).where(events.c.stream == lease.stream)
                newest = newest.order_by(events.c.event_id.desc()).limit(1)
                event_id = connection.execute(newest).scalar_one_or_none() or 0
            query = select(listener_cursors).where(listener_cursors.c.stream == lease.stream)
            found = {row.listener: ListenerCursorRow.from_row(row) for row in connection.execute(query)}
            for name in listeners:
                if name not in found:
                    found[name] = ListenerCursorRow(lease.stream, name, event_id, 0, locked.now_ms)
                    connection.execute(insert(listener_cursors).values(**found[name].to_columns()))
            seen = (listener_cursors.c.stream == lease.stream, listener_cursors.c.listener.in_(listeners))
            connection.execute(update(listener_cursors).where(*seen).values(missed=0))
            return {name: found[name] for name in listeners}

    def save(self, lease: JobLease, event_ids: Mapping[str, int]) -> None:
        """Move the cursors of these listeners to the last event that each has got.

        Raises:
            LeaseLostError: another job has begun, or this one has ended.
        """
        with self._database.write_stream(lease.stream) as (connection, locked):
            require_job(connection, locked, lease)
            for name, event_id in event_ids.items():
                this = (listener_cursors.c.stream == lease.stream, listener_cursors.c.listener == name)
                values = {"event_id": event_id, "updated_at_ms": locked.now_ms}
                connection.execute(update(listener_cursors).where(*this).values(**values))
