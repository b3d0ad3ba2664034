"""The topics that inputs have seen. A topic deleted and created again is another incarnation."""

from __future__ import annotations

import builtins
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from headrace.ledger.database import Role
from headrace.ledger.events import record
from headrace.ledger.jobs import require_job
from headrace.ledger.rows import JobLease, TopicRow
from headrace.ledger.states import EventKind
from headrace.ledger.tables import topics


class Topics(Role):
    """Counts the incarnations of topics."""

    def observe(self, job: JobLease, input_id: str, topic: str, topic_id: str, partitions: int) -> TopicRow:
        """Note that the input sees this topic now; cheap when nothing changed.

        The incarnation counts the topic ids that the stream has seen under the name, so that two inputs which read
        topics of one name in two clusters get different document ids too. A new one, or one with more partitions, is an
        event.

        Raises:
            LeaseLostError: the job's epoch is stale.
        """
        known = self._get(job.stream, input_id, topic, topic_id)
        if known is not None and known.current and known.partitions == partitions:
            return known
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            row = _find(connection, job.stream, input_id, topic, topic_id)
            if row is None:
                return _see(
                    connection,
                    stream=job.stream,
                    input_id=input_id,
                    topic=topic,
                    topic_id=topic_id,
                    partitions=partitions,
                    now_ms=locked.now_ms,
                )
            return _change(connection, row, partitions, locked.now_ms)

    def list(self, stream: str) -> builtins.list[TopicRow]:
        """All topics of the stream, past incarnations among them."""
        order = (topics.c.input_id, topics.c.topic, topics.c.incarnation)
        with self._database.read() as connection:
            return [
                _topic_row(row)
                for row in connection.execute(select(topics).where(topics.c.stream == stream).order_by(*order))
            ]

    def _get(self, stream: str, input_id: str, topic: str, topic_id: str) -> TopicRow | None:
        with self._database.read() as connection:
            return _find(connection, stream, input_id, topic, topic_id)


def _see(
    connection: Connection, *, stream: str, input_id: str, topic: str, topic_id: str, partitions: int, now_ms: int
) -> TopicRow:
    """Add a topic id that this input has not seen."""
    named = (topics.c.stream == stream, topics.c.topic == topic)
    # Another input may know the id already.
    incarnation = connection.execute(
        select(topics.c.incarnation).where(*named, topics.c.topic_id == topic_id).limit(1)
    ).scalar()
    if incarnation is None:
        incarnation = (
            1 + connection.execute(select(func.coalesce(func.max(topics.c.incarnation), 0)).where(*named)).scalar_one()
        )
    earlier = connection.execute(
        update(topics).where(*named, topics.c.input_id == input_id, topics.c.current).values(current=False)
    ).rowcount
    row = TopicRow(stream, input_id, topic, topic_id, incarnation, partitions, True, now_ms, now_ms)
    connection.execute(insert(topics).values(**asdict(row)))
    payload = {
        "input": input_id,
        "topic": topic,
        "topic_id": topic_id,
        "incarnation": incarnation,
        "partitions": partitions,
    }
    kind = EventKind.TOPIC_RECREATED if earlier else EventKind.TOPIC_SEEN
    record(connection, stream, now_ms, kind, payload)
    return row


def _change(connection: Connection, row: TopicRow, partitions: int, now_ms: int) -> TopicRow:
    """Note another number of partitions, or that an id seen before is the current one again."""
    this = (
        topics.c.stream == row.stream,
        topics.c.input_id == row.input_id,
        topics.c.topic == row.topic,
    )
    connection.execute(update(topics).where(*this, topics.c.topic_id != row.topic_id).values(current=False))
    changed = replace(row, partitions=max(partitions, row.partitions), current=True, changed_at_ms=now_ms)
    connection.execute(update(topics).where(*this, topics.c.topic_id == row.topic_id).values(**asdict(changed)))
    if partitions > row.partitions:
        payload = {
            "input": row.input_id,
            "topic": row.topic,
            "topic_id": row.topic_id,
            "from": row.partitions,
            "to": partitions,
        }
        record(connection, row.stream, now_ms, EventKind.PARTITIONS_GREW, payload)
    return changed


def _find(connection: Connection, stream: str, input_id: str, topic: str, topic_id: str) -> TopicRow | None:
    row = connection.execute(
        select(topics).where(
            topics.c.stream == stream,
            topics.c.input_id == input_id,
            topics.c.topic == topic,
            topics.c.topic_id == topic_id,
        )
    ).one_or_none()
    return None if row is None else _topic_row(row)


def _topic_row(row: Row[Any]) -> TopicRow:
    return TopicRow(**row._mapping)
