"""Records the topics that inputs have seen. A topic deleted and created again is another incarnation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy import Connection, exists, func, insert, select, update

from headrace.ledger.database import Repository
from headrace.ledger.events import record
from headrace.ledger.jobs import require_job
from headrace.ledger.receiving_tables import TopicRow, topics
from headrace.ledger.states import EventKind
from headrace.ledger.tables import JobLease


class Topics(Repository):
    """Records topics and counts their incarnations."""

    def observe(
        self, job: JobLease, input_id: str, seen: Iterable[tuple[str, str, int]], *, appeared: bool = False
    ) -> list[TopicRow]:
        """Note that the input sees these topics (name, id, partitions) now, in one transaction; cheap if unchanged.

        Returns the rows, in the order given. The incarnation counts the topic ids that the stream has seen under the
        name, so two inputs that read topics of the same name in two clusters also get different document ids. A new
        topic, or one with more partitions, is an event. An input's first topics are marked ``at_start``, unless they
        ``appeared`` after the input was first discovered.

        Raises:
            LeaseLostError: the job's epoch is stale.
        """
        wanted = list(seen)
        known = {(row.topic, row.topic_id): row for row in self.all(job.stream, input_id)}
        rows = [known.get((topic, topic_id)) for topic, topic_id, _ in wanted]
        unchanged = [
            row
            for row, (_, _, partitions) in zip(rows, wanted, strict=True)
            if row is not None and row.current and row.partitions >= partitions
        ]
        if len(unchanged) == len(wanted):
            return unchanged
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            at_start = not appeared and not _any(connection, job.stream, input_id)
            return [
                _observe(connection, job.stream, input_id, each, at_start=at_start, now_ms=locked.now_ms)
                for each in wanted
            ]

    def all(self, stream: str, input_id: str | None = None) -> list[TopicRow]:
        """Return all topics of the stream, or of one input, including past incarnations."""
        order = (topics.c.input_id, topics.c.topic, topics.c.incarnation)
        query = select(topics).where(topics.c.stream == stream)
        if input_id is not None:
            query = query.where(topics.c.input_id == input_id)
        with self._database.read() as connection:
            return [TopicRow.from_row(row) for row in connection.execute(query.order_by(*order))]


def _observe(
    connection: Connection, stream: str, input_id: str, seen: tuple[str, str, int], *, at_start: bool, now_ms: int
) -> TopicRow:
    topic, topic_id, partitions = seen
    row = _find(connection, stream, input_id, topic, topic_id)
    if row is not None and row.current and row.partitions >= partitions:
        return row
    if row is not None:
        return _change(connection, row, partitions, now_ms)
    return _see(
        connection,
        stream=stream,
        input_id=input_id,
        topic=topic,
        topic_id=topic_id,
        partitions=partitions,
        at_start=at_start,
        now_ms=now_ms,
    )


def _see(
    connection: Connection,
    *,
    stream: str,
    input_id: str,
    topic: str,
    topic_id: str,
    partitions: int,
    at_start: bool,
    now_ms: int,
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
    row = TopicRow(
        stream,
        input_id,
        topic,
        topic_id,
        incarnation,
        partitions,
        first_partitions=partitions,
        at_start=at_start,
        current=True,
        first_seen_ms=now_ms,
        changed_at_ms=now_ms,
    )
    connection.execute(insert(topics).values(row.to_columns()))
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
    """Note a changed number of partitions, or that an id seen before is current again."""
    this = (
        topics.c.stream == row.stream,
        topics.c.input_id == row.input_id,
        topics.c.topic == row.topic,
    )
    connection.execute(update(topics).where(*this, topics.c.topic_id != row.topic_id).values(current=False))
    changed = replace(row, partitions=max(partitions, row.partitions), current=True, changed_at_ms=now_ms)
    connection.execute(update(topics).where(*this, topics.c.topic_id == row.topic_id).values(changed.to_columns()))
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


def _any(connection: Connection, stream: str, input_id: str) -> bool:
    query = select(exists().where(topics.c.stream == stream, topics.c.input_id == input_id))
    return bool(connection.execute(query).scalar_one())


def _find(connection: Connection, stream: str, input_id: str, topic: str, topic_id: str) -> TopicRow | None:
    row = connection.execute(
        select(topics).where(
            topics.c.stream == stream,
            topics.c.input_id == input_id,
            topics.c.topic == topic,
            topics.c.topic_id == topic_id,
        )
    ).one_or_none()
    return None if row is None else TopicRow.from_row(row)
