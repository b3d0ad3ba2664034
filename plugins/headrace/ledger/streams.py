"""The streams that were registered, and what people want of them."""

from __future__ import annotations

import builtins
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, exists, insert, select, update

from headrace.ledger.database import Role, stream_row
from headrace.ledger.errors import LedgerConflictError, LedgerError, StreamChangedError, StreamNotFoundError
from headrace.ledger.events import record
from headrace.ledger.rows import StreamRow
from headrace.ledger.states import DesiredState, EventKind
from headrace.ledger.tables import batches, blocks, streams, unclaimed_times


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a registration asks for, as columns."""

    definition: str
    batch_interval_ms: int
    block_interval_ms: int
    outputs: tuple[str, ...]
    max_concurrent_batches: int
    ordered: bool
    batch_by: str
    allowed_lateness_ms: int

    def same(self, row: StreamRow) -> bool:
        return self == _Declared(
            row.definition,
            row.batch_interval_ms,
            row.block_interval_ms,
            row.outputs,
            row.max_concurrent_batches,
            row.ordered,
            row.batch_by,
            row.allowed_lateness_ms,
        )

    def columns(self) -> dict[str, Any]:
        return {
            "definition": self.definition,
            "batch_interval_ms": self.batch_interval_ms,
            "block_interval_ms": self.block_interval_ms,
            "outputs": list(self.outputs),
            "max_concurrent_batches": self.max_concurrent_batches,
            "ordered": self.ordered,
            "batch_by": self.batch_by,
            "allowed_lateness_ms": self.allowed_lateness_ms,
        }


class Streams(Role):
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
    ) -> StreamRow:
        """Make the stream known, or its changed definition its next revision; the same again changes nothing.

        Args:
            definition: the stream as JSON text, kept as it is.
            outputs: the ids of the steps that every batch must record, in their order; by default those of the
                definition's ``outputs``.
            max_concurrent_batches: how many batches run at once; by default the definition's
                ``limits.max_concurrent_batches``, else 1.
            ordered: the stream runs one batch at a time in batch-time order (windows, state, aggregates).
            batch_by: "arrival" or "timestamp".
            allowed_lateness_ms: how long a batch by timestamp waits for a partition without newer records.

        Raises:
            StreamChangedError: the batch interval changed, and blocks or batches of the old one exist.
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
            return self._register(name, declared)
        except LedgerConflictError:
            # Someone else registered it between our look and our insert: now it can be locked.
            return self._register(name, declared)

    def _register(self, name: str, declared: _Declared) -> StreamRow:
        with self._database.write() as connection:
            try:
                locked = self._database.lock_stream(connection, name)
            except StreamNotFoundError:
                return self._create(connection, name, declared)
            if declared.same(locked.row):
                return locked.row
            if declared.batch_interval_ms != locked.row.batch_interval_ms:
                _refuse_if_used(connection, name, locked.row.batch_interval_ms, declared.batch_interval_ms)
            revision = locked.row.revision + 1
            connection.execute(
                update(streams)
                .where(streams.c.name == name)
                .values(**declared.columns(), revision=revision, updated_at_ms=locked.now_ms)
            )
            record(connection, name, locked.now_ms, EventKind.STREAM_REGISTERED, {"revision": revision})
            return _get(connection, name)

    def _create(self, connection: Connection, name: str, declared: _Declared) -> StreamRow:
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
            )
        )
        record(connection, name, now_ms, EventKind.STREAM_REGISTERED, {"revision": 1})
        return _get(connection, name)

    def get(self, name: str) -> StreamRow:
        """The stream's row.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.read() as connection:
            return _get(connection, name)

    def list(self) -> builtins.list[StreamRow]:
        """All streams by name."""
        with self._database.read() as connection:
            return [stream_row(row) for row in connection.execute(select(streams).order_by(streams.c.name))]

    def set_desired_state(self, name: str, state: DesiredState | str) -> StreamRow:
        """Say what a person wants of the stream. It is a wish: a live job is stopped by ``jobs.request_stop``.

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
                record(connection, name, locked.now_ms, EventKind.STREAM_STATE_CHANGED, {"desired_state": wanted.value})
            return _get(connection, name)


def _get(connection: Connection, name: str) -> StreamRow:
    row = connection.execute(select(streams).where(streams.c.name == name)).one_or_none()
    if row is None:
        raise StreamNotFoundError(name)
    return stream_row(row)


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
) -> _Declared:
    if batch_interval_ms <= 0 or block_interval_ms <= 0:
        raise LedgerError("A stream's intervals are at least one millisecond.")
    try:
        document = json.loads(definition)
    except ValueError:
        raise LedgerError("A stream's definition is JSON text.") from None
    fields = document if isinstance(document, dict) else {}
    if outputs is None:
        outputs = [output["id"] for output in fields.get("outputs") or ()]
    if max_concurrent_batches is None:
        max_concurrent_batches = int((fields.get("limits") or {}).get("max_concurrent_batches", 1))
    if max_concurrent_batches < 1:
        raise LedgerError("A stream runs at least one batch at a time (max_concurrent_batches).")
    if batch_by not in ("arrival", "timestamp") or allowed_lateness_ms < 0:
        raise LedgerError("Batches are by 'arrival' or 'timestamp', and the allowed lateness is not negative.")
    return _Declared(
        definition,
        batch_interval_ms,
        block_interval_ms,
        tuple(outputs),
        max_concurrent_batches,
        ordered,
        batch_by,
        allowed_lateness_ms,
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
