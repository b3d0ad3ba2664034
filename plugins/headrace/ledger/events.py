"""Records a stream's events in order and reads them, for listeners and the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from headrace.ledger.database import Repository
from headrace.ledger.states import EventKind
from headrace.ledger.tables import EventRow, events, listener_cursors

_insert_event = insert(events)


def record(
    connection: Connection,
    stream: str,
    now_ms: int,
    kind: EventKind,
    payload: Mapping[str, Any],
    *,
    batch_time_ms: int | None = None,
) -> None:
    """Add an event within the caller's transaction, which holds the stream's lock."""
    record_all(connection, stream, now_ms, kind, [payload], batch_time_ms=batch_time_ms)


def record_all(
    connection: Connection,
    stream: str,
    now_ms: int,
    kind: EventKind,
    payloads: Collection[Mapping[str, Any]],
    *,
    batch_time_ms: int | None = None,
) -> None:
    """Add events of one kind within the caller's transaction, which holds the stream's lock."""
    if payloads:
        connection.execute(
            _insert_event,
            [
                {
                    "stream": stream,
                    "at_ms": now_ms,
                    "kind": kind.value,
                    "batch_time_ms": batch_time_ms,
                    "block_id": None,
                    "payload": dict(payload),
                }
                for payload in payloads
            ],
        )


def record_block(connection: Connection, stream: str, now_ms: int, block_id: int, payload: Mapping[str, Any]) -> None:
    """Add a block's event. It is deleted with the block's row, and is not in the batches' timelines."""
    connection.execute(
        _insert_event,
        {
            "stream": stream,
            "at_ms": now_ms,
            "kind": EventKind.BLOCK_ADDED.value,
            "batch_time_ms": None,
            "block_id": block_id,
            "payload": dict(payload),
        },
    )


class Events(Repository):
    """The append-only events of the streams."""

    def append(
        self,
        stream: str,
        kind: EventKind,
        payload: Mapping[str, Any] | None = None,
        *,
        batch_time_ms: int | None = None,
    ) -> None:
        """Add an event; the payload must be JSON values.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream) as (connection, locked):
            record(connection, stream, locked.now_ms, kind, payload or {}, batch_time_ms=batch_time_ms)

    def page(
        self,
        stream: str,
        after_id: int = 0,
        kinds: Collection[EventKind] | None = None,
        limit: int = 1000,
        *,
        blocks: bool = True,
    ) -> list[EventRow]:
        """Return up to ``limit`` events with ids above ``after_id``, oldest first; without those of blocks if not
        ``blocks``."""
        query = _selected().where(events.c.stream == stream, events.c.event_id > after_id)
        if not blocks:
            query = query.where(events.c.block_id.is_(None))
        return self._limited(query, kinds, limit, newest_first=False)

    def latest(
        self,
        stream: str,
        kinds: Collection[EventKind] | None = None,
        limit: int = 100,
        *,
        before_id: int | None = None,
    ) -> list[EventRow]:
        """Return the newest ``limit`` events, those with ids below ``before_id`` if it is given, newest first."""
        query = _selected().where(events.c.stream == stream)
        if before_id is not None:
            query = query.where(events.c.event_id < before_id)
        return self._limited(query, kinds, limit, newest_first=True)

    def newest_id(self, stream: str) -> int:
        """Return the id of the newest event; 0 if there is none."""
        query = select(events.c.event_id).where(events.c.stream == stream).order_by(events.c.event_id.desc())
        with self._database.read() as connection:
            return connection.execute(query.limit(1)).scalar_one_or_none() or 0

    def of_batch(self, stream: str, batch_time_ms: int) -> list[EventRow]:
        """Return the events of one batch, oldest first."""
        query = _selected().where(events.c.stream == stream, events.c.batch_time_ms == batch_time_ms)
        with self._database.read() as connection:
            return [EventRow.from_row(row) for row in connection.execute(query.order_by(events.c.event_id))]

    def prune(self, stream: str, before_ms: int, limit: int = 5000) -> int:
        """Delete up to ``limit`` of the oldest events, if older than ``before_ms``. Returns the number deleted.

        Listeners that have not got them yet have missed them (see `ListenerCursors`).
        """
        # What says that Kafka's offsets have other records stays: a batch that is read again there must know of it.
        these = (events.c.stream == stream, events.c.kind != EventKind.OFFSETS_REUSED)
        oldest = select(events.c.event_id, events.c.at_ms, events.c.block_id).where(*these)
        with self._database.write_stream(stream) as (connection, _):
            rows = connection.execute(oldest.order_by(events.c.event_id).limit(limit)).all()
            old = [row.event_id for row in takewhile(lambda row: row.at_ms < before_ms, rows)]
            if old:
                _count_missed(connection, stream, [row.event_id for row in rows[: len(old)] if row.block_id is None])
                connection.execute(delete(events).where(*these, events.c.event_id <= old[-1]))
            return len(old)

    def _limited(
        self, query: Any, kinds: Collection[EventKind] | None, limit: int, *, newest_first: bool
    ) -> list[EventRow]:
        order = events.c.event_id.desc() if newest_first else events.c.event_id.asc()
        # One query per kind uses the index; one query for all kinds would search or sort all events.
        parts = [query] if kinds is None else [query.where(events.c.kind == kind.value) for kind in kinds]
        with self._database.read() as connection:
            rows = [
                EventRow.from_row(row)
                for part in parts
                for row in connection.execute(part.order_by(order).limit(limit))
            ]
        return sorted(rows, key=lambda row: row.event_id, reverse=newest_first)[:limit]


def _selected() -> Any:
    return select(
        events.c.event_id, events.c.stream, events.c.at_ms, events.c.kind, events.c.batch_time_ms, events.c.payload
    )


def _count_missed(connection: Connection, stream: str, event_ids: Sequence[int]) -> None:
    """Add those of ``event_ids``, which ascend and are deleted now, to the missed events of listeners that have not got
    them."""
    if not event_ids:
        return
    behind = select(listener_cursors.c.listener, listener_cursors.c.event_id).where(
        listener_cursors.c.stream == stream, listener_cursors.c.event_id < event_ids[-1]
    )
    for name, cursor in connection.execute(behind).all():
        missed = sum(event_id > cursor for event_id in event_ids)
        this = (listener_cursors.c.stream == stream, listener_cursors.c.listener == name)
        values = {"missed": listener_cursors.c.missed + missed, "event_id": event_ids[-1]}
        connection.execute(update(listener_cursors).where(*this).values(**values))
