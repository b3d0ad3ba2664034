"""Writes a stream of a lost ledger into a new one (rule 10 of the design); `headrace.batch.recovery` finds its data."""

from __future__ import annotations

from sqlalchemy import Connection, delete, exists, insert, select, update

from headrace.clock import time_text
from headrace.ledger.attempt_statements import live_attempts
from headrace.ledger.batch_tables import (
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import LeaseHeldError, LedgerError, StreamNotFoundError
from headrace.ledger.events import record
from headrace.ledger.jobs import job_of
from headrace.ledger.rebuild_batches import insert_batches
from headrace.ledger.rebuild_data import FoundStream
from headrace.ledger.rebuild_receiving import (
    insert_blocks,
    insert_gaps,
    insert_positions,
    insert_receivers,
    insert_segments,
)
from headrace.ledger.receiving_tables import blocks, positions, receivers, segments, topics, unclaimed_times
from headrace.ledger.revisions import insert_revision
from headrace.ledger.states import EventKind
from headrace.ledger.tables import Declared, gaps, listener_cursors, receiver_jobs, stream_revisions, streams, totals

# In the order in which their rows can be deleted. Events are kept.
_TABLES = (
    batch_runs,
    replays,
    replay_definitions,
    batch_outputs,
    batch_inputs,
    batch_attempts,
    batches,
    unclaimed_times,
    blocks,
    receivers,
    segments,
    positions,
    topics,
    gaps,
    # The gaps are added again: as events, which are old for listeners, and to the totals.
    listener_cursors,
    totals,
    receiver_jobs,
    stream_revisions,
)


class Rebuild(Repository):
    """Rebuilds a lost ledger."""

    def is_new(self, stream: str) -> bool:
        """Return whether the ledger has received nothing for the stream: it is unknown, or has no block and no record.

        A stream that was registered again may have a receiver job, positions and empty batches.
        """
        with self._database.read() as connection:
            return not _has_received(connection, stream)

    def restore(self, stream: str, found: FoundStream, *, force: bool = False) -> None:
        """Write the stream, in one transaction, into a ledger that has received nothing for it.

        What the ledger already has of the stream is deleted: a registration, a receiver job, empty batches.

        Args:
            force: also while a receiver job or an attempt at a batch holds a live lease; both are fenced.

        Raises:
            LedgerError: the ledger has blocks of the stream, or batches with records.
            LeaseHeldError: a job or an attempt has a live lease, and not ``force``.
            LedgerConflictError: ``found`` contradicts itself (a block or a batch time twice).
        """
        with self._database.write() as connection:
            try:
                locked = self._database.lock_stream(connection, stream)
            except StreamNotFoundError:
                pass
            else:
                if _has_received(connection, stream):
                    raise LedgerError(
                        f"The ledger has blocks or batches of stream {stream!r}: it is not lost.",
                        remedy="Rebuild into a new ledger, and keep this one aside.",
                    )
                if not force:
                    _refuse_while_alive(connection, locked)
                for table in _TABLES:
                    connection.execute(delete(table).where(table.c.stream == stream))
            _put_stream(connection, found)
            for known in found.revisions:
                insert_revision(connection, stream, known.revision, Declared.of(known), known.created_at_ms)
            locked = self._database.lock_stream(connection, stream)
            insert_positions(connection, found)
            insert_receivers(connection, locked, found)
            insert_segments(connection, locked, found)
            insert_blocks(connection, locked, found)
            insert_gaps(connection, locked, found)
            insert_batches(connection, locked, found)
            payload = {"blocks": len(found.blocks), "batches": len(found.batches), **found.notes}
            record(connection, stream, locked.now_ms, EventKind.LEDGER_REBUILT, payload)


def _has_received(connection: Connection, stream: str) -> bool:
    has_blocks = exists().where(blocks.c.stream == stream)
    has_records = exists().where(batches.c.stream == stream, batches.c.records > 0)
    return bool(
        connection.execute(select(has_blocks)).scalar_one() or connection.execute(select(has_records)).scalar_one()
    )


def _refuse_while_alive(connection: Connection, locked: LockedStream) -> None:
    job = job_of(connection, locked)
    if job is not None and job.alive(locked.now_ms):
        raise LeaseHeldError(
            f"A receiver job of stream {job.stream!r} is alive: {job.holder} (epoch {job.epoch}), since "
            f"{time_text(job.acquired_at_ms)} until {time_text(job.lease_until_ms)}.",
            holder=job.holder,
            since_ms=job.acquired_at_ms,
            until_ms=job.lease_until_ms,
            remedy="Stop it (`headrace streams stop --wait 60`), or wait until its lease has run out.",
        )
    for attempt in live_attempts(connection, locked.row.name, locked.now_ms)[:1]:
        raise LeaseHeldError(
            f"Batch {time_text(attempt.batch_time_ms)} of stream {attempt.stream!r} is being run by "
            f"{attempt.holder}, since "
            f"{time_text(attempt.started_at_ms)} until {time_text(attempt.lease_until_ms)}.",
            holder=attempt.holder,
            since_ms=attempt.started_at_ms,
            until_ms=attempt.lease_until_ms,
            remedy="Pause the stream's batch DAG, and wait until the attempt's lease has run out.",
        )


def _put_stream(connection: Connection, found: FoundStream) -> None:
    row = found.stream.to_columns()
    name = row.pop("name")
    if not connection.execute(update(streams).where(streams.c.name == name).values(**row)).rowcount:
        connection.execute(insert(streams).values(name=name, **row))
