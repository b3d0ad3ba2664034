"""Registers streams, their definitions, and the states that people want for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from sqlalchemy import Connection, exists, insert, select, update

from headrace.ledger.batch_tables import batches
from headrace.ledger.database import Repository
from headrace.ledger.errors import (
    LedgerConflictError,
    LedgerError,
    OutputRenamedError,
    StreamChangedError,
    StreamNotFoundError,
)
from headrace.ledger.events import record
from headrace.ledger.receiving_tables import blocks, unclaimed_times
from headrace.ledger.revisions import as_declared, insert_revision, keep_revision, require_revision
from headrace.ledger.states import DesiredState, EventKind
from headrace.ledger.tables import Declared, StreamRevision, StreamRow, id_of_step, stream_revisions, streams


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
        connection.execute(
            insert(streams).values(
                name=name,
                **declared.columns(),
                revision=1,
                zero_time_ms=now_ms // declared.batch_interval_ms * declared.batch_interval_ms,
                sealed_until_ms=0,
                desired_state=DesiredState.RUNNING,
                job_epoch=0,
                created_at_ms=now_ms,
                updated_at_ms=now_ms,
                declared_at_ms=declared_at_ms or 0,
            )
        )
        insert_revision(connection, name, 1, declared, now_ms)
        record(connection, name, now_ms, EventKind.STREAM_REGISTERED, {"revision": 1, "newest": 1})
        return _get(connection, name)

    def check_outputs(self, name: str, definition: str) -> None:
        """Check that the outputs of this definition, as JSON, keep their records; a stream without records passes.

        Raises:
            OutputRenamedError: `register` would refuse it.
        """
        with self._database.read() as connection:
            row = connection.execute(select(streams).where(streams.c.name == name)).one_or_none()
            if row is not None:
                _check_renamed(connection, StreamRow.from_row(row), definition=definition)

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

    def revisions(self, name: str, numbers: Collection[int]) -> list[StreamRevision]:
        """Return the definitions of these revisions, in order; revisions that the ledger does not have are left out."""
        query = select(stream_revisions).where(
            stream_revisions.c.stream == name, stream_revisions.c.revision.in_(numbers)
        )
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(stream_revisions.c.revision))
            return [StreamRevision.from_row(row) for row in rows]

    def all(self) -> list[StreamRow]:
        """Return all streams, sorted by name."""
        with self._database.read() as connection:
            return [StreamRow.from_row(row) for row in connection.execute(select(streams).order_by(streams.c.name))]

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
    row = connection.execute(select(streams).where(streams.c.name == name)).one_or_none()
    if row is None:
        raise StreamNotFoundError(name)
    return StreamRow.from_row(row)


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
