"""Registers streams: their definitions, the states that people want for them, and the topics that their inputs saw.

Each definition that a stream has had is stored with its revision. An attempt at a batch and a receiver job name the
revision that they began with, so they keep it when another definition is registered. The same content always has the
same revision. A topic deleted and created again is another incarnation.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sqlalchemy import Connection, exists, func, insert, select, update

from headrace.ledger.batches.tables import batches
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import (
    LedgerConflictError,
    LedgerError,
    OutputRenamedError,
    RevisionNotFoundError,
    StreamChangedError,
    StreamNotFoundError,
)
from headrace.ledger.events import record
from headrace.ledger.receiving.jobs import require_job
from headrace.ledger.receiving.tables import TopicRow, blocks, topics, unclaimed_times
from headrace.ledger.states import DesiredState, EventKind
from headrace.ledger.tables import Declared, JobLease, StreamRevision, StreamRow, id_of_step, stream_revisions, streams

# From this difference on, Airflow's clock is or was wrong, not just not quite that of the ledger.
_CLOCKS_DIFFER_MS = 60_000


class Streams(Repository):
    """Registers streams and finds them."""

    def register(
        self,
        name: str,
        definition: str,
        *,
        batch_interval_ms: int,
        block_interval_ms: int,
        outputs: Sequence[str] | None = None,
        max_concurrent_batches: int | None = None,
        ordered: bool = False,
        batch_by: str = "arrival",
        allowed_lateness_ms: int = 0,
        declared_at_ms: int | None = None,
    ) -> StreamRow:
        """Register the stream, or a changed definition of it. Registering the same again changes nothing.

        A definition that the stream has had before keeps its revision.

        Args:
            definition: the stream as JSON text, stored unchanged.
            outputs: the ids of the steps that every batch must record, in their order; by default those of the
                definition's ``outputs``.
            max_concurrent_batches: how many batches run at once; by default the definition's
                ``limits.max_concurrent_batches``, else 1.
            ordered: the stream runs one batch at a time in batch-time order (windows, state, aggregates).
            batch_by: "arrival" or "timestamp".
            allowed_lateness_ms: how long a batch by timestamp waits for a partition without newer records.
            declared_at_ms: the time of the definition's source (its DAG version). A definition with an earlier time
                than the stream's newest one gets a revision but does not replace it, so old code can run beside new.

        Returns:
            The stream's row with this definition and its revision.

        Raises:
            StreamChangedError: the batch interval changed, and blocks or batches of the old one exist.
            OutputRenamedError: the records of a renamed output would not be found (see `_check_renamed`).
        """
        declared = _declared(
            definition,
            batch_interval_ms=batch_interval_ms,
            block_interval_ms=block_interval_ms,
            outputs=outputs,
            max_concurrent_batches=max_concurrent_batches,
            ordered=ordered,
            batch_by=batch_by,
            allowed_lateness_ms=allowed_lateness_ms,
        )
        try:
            return self._register(name, declared, declared_at_ms)
        except LedgerConflictError:
            # Another process registered it between our read and our insert: now it can be locked.
            return self._register(name, declared, declared_at_ms)

    def _register(self, name: str, declared: Declared, declared_at_ms: int | None) -> StreamRow:
        with self._database.write() as connection:
            try:
                locked = self._database.lock_stream(connection, name)
            except StreamNotFoundError:
                return self._create(connection, name, declared, declared_at_ms)
            row, this = locked.row, update(streams).where(streams.c.name == name)
            if row.declared_at_ms > locked.now_ms + _CLOCKS_DIFFER_MS:
                # Airflow's clock was ahead when it read the DAG file: else no definition would replace this one.
                row = dataclasses.replace(row, declared_at_ms=locked.now_ms)
            declared_ms = row.declared_at_ms if declared_at_ms is None else declared_at_ms
            if declared == Declared.of(row):
                if declared_ms > row.declared_at_ms:
                    connection.execute(this.values(declared_at_ms=declared_ms))
                return row
            if declared.batch_interval_ms != row.batch_interval_ms:
                _refuse_if_used(connection, name, row.batch_interval_ms, declared.batch_interval_ms)
            is_newest = declared_ms >= row.declared_at_ms
            if is_newest:
                _check_renamed(connection, row, definition=declared.definition)
            revision, is_new = keep_revision(connection, name, declared, locked.now_ms)
            if is_newest:
                changed = {"revision": revision, "updated_at_ms": locked.now_ms, "declared_at_ms": declared_ms}
                connection.execute(this.values(**declared.columns(), **changed))
            if is_newest or is_new:
                payload = {"revision": revision, "newest": revision if is_newest else row.revision}
                record(connection, name, locked.now_ms, EventKind.STREAM_REGISTERED, payload)
            return as_declared(_get(connection, name), declared, revision)

    def _create(self, connection: Connection, name: str, declared: Declared, declared_at_ms: int | None) -> StreamRow:
        now_ms = self._database.now_ms(connection)
        row = dataclasses.replace(new_stream(name, declared, now_ms), declared_at_ms=declared_at_ms or 0)
        connection.execute(insert(streams).values(**row.to_columns()))
        insert_revision(connection, name, 1, declared, now_ms)
        record(connection, name, now_ms, EventKind.STREAM_REGISTERED, {"revision": 1, "newest": 1})
        return _get(connection, name)

    def check_outputs(self, name: str, definition: str) -> None:
        """Check that the outputs of this definition, as JSON, keep their records; a stream without records passes.

        Raises:
            OutputRenamedError: `register` would refuse it.
        """
        with self._database.read() as connection:
            row = StreamRow.row(connection, select(streams).where(streams.c.name == name))
            if row is not None:
                _check_renamed(connection, row, definition=definition)

    def get(self, name: str) -> StreamRow:
        """Return the stream's row.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.read() as connection:
            return _get(connection, name)

    def at_revision(self, name: str, revision: int) -> StreamRow:
        """Return the stream's row with this revision of its definition.

        Raises:
            StreamNotFoundError: there is no such stream.
            RevisionNotFoundError: it has no such revision.
        """
        with self._database.read() as connection:
            row = _get(connection, name)
            return row if revision == row.revision else require_revision(connection, row, revision)

    def newest_revisions(self, name: str, limit: int) -> list[StreamRevision]:
        """Return the stream's current definition and the newest ones, at most ``limit``, in order."""
        number = stream_revisions.c.revision
        current = select(streams.c.revision).where(streams.c.name == name).scalar_subquery()
        query = select(stream_revisions).where(stream_revisions.c.stream == name)
        rows = self._rows(StreamRevision, query.order_by((number != current), number.desc()).limit(limit))
        return sorted(rows, key=lambda row: row.revision)

    def all(self) -> list[StreamRow]:
        """Return all streams, sorted by name."""
        return self._rows(StreamRow, select(streams).order_by(streams.c.name))

    def set_desired_state(
        self, name: str, state: DesiredState | str, *, by: str | None = None, reason: str | None = None
    ) -> StreamRow:
        """Set the state that a person wants for the stream. It does not stop a live job: see ``jobs.request_stop``.

        ``by`` and ``reason`` are kept in the event.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        wanted = DesiredState(state)
        with self._database.write_stream(name) as (connection, locked):
            if locked.row.desired_state is not wanted:
                connection.execute(
                    update(streams)
                    .where(streams.c.name == name)
                    .values(desired_state=wanted, updated_at_ms=locked.now_ms)
                )
                payload = {"desired_state": wanted.value, **_given(by=by, reason=reason)}
                record(connection, name, locked.now_ms, EventKind.STREAM_STATE_CHANGED, payload)
            return _get(connection, name)


def _given(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def _get(connection: Connection, name: str) -> StreamRow:
    row = StreamRow.row(connection, select(streams).where(streams.c.name == name))
    if row is None:
        raise StreamNotFoundError(name)
    return row


def new_stream(name: str, declared: Declared, now_ms: int) -> StreamRow:
    """Return the row of a stream that is registered for the first time."""
    return StreamRow(
        name=name,
        **declared.columns(),
        revision=1,
        zero_time_ms=now_ms // declared.batch_interval_ms * declared.batch_interval_ms,
        sealed_until_ms=0,
        desired_state=DesiredState.RUNNING,
        job_epoch=0,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
    )


def _declared(
    definition: str,
    *,
    batch_interval_ms: int,
    block_interval_ms: int,
    outputs: Sequence[str] | None,
    max_concurrent_batches: int | None,
    ordered: bool,
    batch_by: str,
    allowed_lateness_ms: int,
) -> Declared:
    if batch_interval_ms <= 0 or block_interval_ms <= 0:
        raise LedgerError("A stream's intervals are at least one millisecond.")
    try:
        document = json.loads(definition)
    except ValueError:
        raise LedgerError("A stream's definition is JSON text.") from None
    fields = document if isinstance(document, dict) else {}
    if outputs is None:
        outputs = list(id_of_step(fields))
    if max_concurrent_batches is None:
        max_concurrent_batches = int((fields.get("limits") or {}).get("max_concurrent_batches", 1))
    if max_concurrent_batches < 1:
        raise LedgerError("A stream runs at least one batch at a time (max_concurrent_batches).")
    if batch_by not in ("arrival", "timestamp") or allowed_lateness_ms < 0:
        raise LedgerError("Batches are by 'arrival' or 'timestamp', and the allowed lateness is not negative.")
    return Declared(
        definition,
        batch_interval_ms,
        block_interval_ms,
        tuple(outputs),
        max_concurrent_batches,
        ordered,
        batch_by,
        allowed_lateness_ms,
    )


def _check_renamed(connection: Connection, row: StreamRow, *, definition: str) -> None:
    """Check that each output of a new definition has the step that it had: its records are kept under that.

    Raises:
        OutputRenamedError: an output was renamed before and is not declared by its first id, or has an unknown one.
    """
    before, after = row.id_of_step, id_of_step(json.loads(definition))
    step_of_id = {output_id: step for step, output_id in before.items()}
    for step, output_id in after.items():
        if step in before:
            continue
        first = step_of_id.get(step)
        if first is not None:
            raise OutputRenamedError(
                f"Output {output_id!r} of stream {row.name!r} would lose its records: those of {step!r} are kept under "
                f"its first id, {first!r}.",
                remedy=f"Give it renamed_from={first!r}. If it is another output, give it an id that none has had.",
            )
        if step != output_id:
            query = select(stream_revisions.c.outputs).where(stream_revisions.c.stream == row.name)
            known = sorted({name for steps in connection.execute(query).scalars() for name in steps})
            if step not in known:
                raise OutputRenamedError(
                    f"Output {output_id!r} of stream {row.name!r} has renamed_from={step!r}, which no output had.",
                    remedy=f"Give the first id of the output, one of {', '.join(known)}; leave it out of a new output.",
                )


def _refuse_if_used(connection: Connection, name: str, old_ms: int, new_ms: int) -> None:
    used = [
        connection.execute(select(exists().where(table.c.stream == name))).scalar_one()
        for table in (batches, unclaimed_times, blocks)
    ]
    if any(used):
        raise StreamChangedError(
            f"The batch interval of stream {name!r} cannot change from {old_ms} to {new_ms} ms: "
            "its blocks and batches have times of the old one.",
            remedy="Register a stream of another name.",
        )


def keep_revision(connection: Connection, stream_name: str, declared: Declared, now_ms: int) -> tuple[int, bool]:
    """Return the revision of this content, and whether it is new. The stream's row must exist and be locked."""
    known = select(stream_revisions.c.revision).where(
        stream_revisions.c.stream == stream_name, stream_revisions.c.digest == declared.digest
    )
    known_revision = connection.execute(known).scalar_one_or_none()
    if known_revision is not None:
        return int(known_revision), False
    newest = select(func.max(stream_revisions.c.revision)).where(stream_revisions.c.stream == stream_name)
    revision = (connection.execute(newest).scalar_one() or 0) + 1
    insert_revision(connection, stream_name, revision, declared, now_ms)
    return revision, True


def insert_revision(connection: Connection, stream_name: str, revision: int, declared: Declared, now_ms: int) -> None:
    """Store a definition with this revision."""
    key = {"stream": stream_name, "revision": revision, "digest": declared.digest, "created_at_ms": now_ms}
    connection.execute(insert(stream_revisions).values(**key, **declared.columns()))


def require_revision(connection: Connection, stream: StreamRow, revision: int) -> StreamRow:
    """Return the stream's row as this revision defines it.

    Raises:
        RevisionNotFoundError: the stream has no such revision.
    """
    query = select(stream_revisions).where(
        stream_revisions.c.stream == stream.name, stream_revisions.c.revision == revision
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise RevisionNotFoundError(
            f"The ledger has no revision {revision} of stream {stream.name!r}.",
            remedy="It was rebuilt since, or is another ledger: run the task again, which registers its definition.",
        )
    return as_declared(stream, Declared.of(row), revision)


def as_declared(stream: StreamRow, declared: Declared, revision: int) -> StreamRow:
    """Return the stream's row with this definition in place of its own."""
    return dataclasses.replace(stream, **declared.columns(), revision=revision)


def at_revision(connection: Connection, locked: LockedStream, revision: int | None) -> LockedStream:
    """Return the locked stream as this revision defines it; None means the newest.

    Order and slots are the stricter of this and the newest definition, since attempts with both run at the same time.

    Raises:
        RevisionNotFoundError: the stream has no such revision.
    """
    now = locked.row
    if revision is None or revision == now.revision:
        return locked
    row = require_revision(connection, now, revision)
    row = dataclasses.replace(
        row,
        ordered=now.ordered or row.ordered,
        max_concurrent_batches=min(now.max_concurrent_batches, row.max_concurrent_batches),
    )
    return dataclasses.replace(locked, row=row)


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
                _observe(connection, job.stream, input_id, topic, at_start=at_start, now_ms=locked.now_ms)
                for topic in wanted
            ]

    def all(self, stream_name: str, input_id: str | None = None) -> list[TopicRow]:
        """Return all topics of the stream, or of one input, including past incarnations."""
        order = (topics.c.input_id, topics.c.topic, topics.c.incarnation)
        query = select(topics).where(topics.c.stream == stream_name)
        if input_id is not None:
            query = query.where(topics.c.input_id == input_id)
        return self._rows(TopicRow, query.order_by(*order))


def _observe(
    connection: Connection, stream_name: str, input_id: str, seen: tuple[str, str, int], *, at_start: bool, now_ms: int
) -> TopicRow:
    topic, topic_id, partitions = seen
    row = _find(connection, stream_name, input_id, topic, topic_id)
    if row is not None and row.current and row.partitions >= partitions:
        return row
    if row is not None:
        return _change(connection, row, partitions, now_ms)
    return _see(
        connection,
        stream_name=stream_name,
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
    stream_name: str,
    input_id: str,
    topic: str,
    topic_id: str,
    partitions: int,
    at_start: bool,
    now_ms: int,
) -> TopicRow:
    """Add a topic id that this input has not seen."""
    named = (topics.c.stream == stream_name, topics.c.topic == topic)
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
        stream_name,
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
    record(connection, stream_name, now_ms, kind, payload)
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


def _any(connection: Connection, stream_name: str, input_id: str) -> bool:
    query = select(exists().where(topics.c.stream == stream_name, topics.c.input_id == input_id))
    return bool(connection.execute(query).scalar_one())


def _find(connection: Connection, stream_name: str, input_id: str, topic: str, topic_id: str) -> TopicRow | None:
    query = select(topics).where(
        topics.c.stream == stream_name,
        topics.c.input_id == input_id,
        topics.c.topic == topic,
        topics.c.topic_id == topic_id,
    )
    return TopicRow.row(connection, query)
