"""Ends batches after their attempts: marks them checkpointed and cleaned, or abandons them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, literal, select, update

from headrace.clock import time_text
from headrace.ledger.attempt_statements import fence_attempts
from headrace.ledger.batch_rows import require_batch
from headrace.ledger.database import LockedStream, Role
from headrace.ledger.errors import BatchStateError
from headrace.ledger.events import record
from headrace.ledger.gaps import add_gap
from headrace.ledger.models import BatchInputRow, BatchRow, batch_attempts, batch_inputs, batches, blocks, replays
from headrace.ledger.states import BatchState, EventKind


class BatchEndings(Role):
    """Ends batches."""

    def mark_checkpointed(self, stream: str, batch_time_ms: int, uri: str) -> BatchRow:
        """Note the checkpoint that holds the batch; its log may be deleted from then on. A second call replaces it.

        Raises:
            BatchStateError: the batch has not completed.
        """
        with self._database.write_stream(stream) as (connection, locked):
            batch = require_batch(connection, stream, batch_time_ms)
            if batch.state is not BatchState.COMPLETED:
                raise BatchStateError(
                    f"Batch {time_text(batch_time_ms)} is {batch.state.value}: only a completed one is checkpointed."
                )
            if batch.checkpoint_uri == uri:
                return batch
            connection.execute(
                _this(stream, batch_time_ms).values(checkpointed_at_ms=locked.now_ms, checkpoint_uri=uri, history=0)
            )
            _event(connection, locked, EventKind.BATCH_CHECKPOINTED, batch_time_ms, {"uri": uri})
            return require_batch(connection, stream, batch_time_ms)

    def mark_cleaned(self, stream: str, batch_time_ms: int, details: Mapping[str, Any] | None = None) -> BatchRow:
        """Note that nothing of the batch is left in the log. A second call changes nothing.

        Raises:
            BatchStateError: the batch is neither checkpointed nor abandoned, or blocks of it are left.
        """
        with self._database.write_stream(stream) as (connection, locked):
            batch = require_batch(connection, stream, batch_time_ms)
            if batch.cleaned_at_ms is not None:
                return batch
            _check_cleanable(connection, batch)
            connection.execute(
                _this(stream, batch_time_ms).values(cleaned_at_ms=locked.now_ms, cleanup=dict(details or {}))
            )
            connection.execute(
                update(batches)
                .where(batches.c.stream == stream, batches.c.absorbed_by_ms == batch_time_ms)
                .values(cleaned_at_ms=locked.now_ms)
            )
            _event(connection, locked, EventKind.BATCH_CLEANED, batch_time_ms, details or {})
            return require_batch(connection, stream, batch_time_ms)

    def abandon(self, stream: str, batch_time_ms: int, reason: str) -> BatchRow:
        """Abandon a batch. This is final: its ranges become gaps, its log may be deleted, and its unfinished replays
        are abandoned too. A second call changes nothing.

        Raises:
            BatchNotFoundError: the batch was not allocated.
            BatchStateError: it has completed once, even if it was run again and failed; or it was absorbed.
        """
        with self._database.write_stream(stream) as (connection, locked):
            batch = require_batch(connection, stream, batch_time_ms)
            if batch.state is BatchState.ABANDONED:
                return batch
            if batch.state in (BatchState.COMPLETED, BatchState.ABSORBED):
                raise BatchStateError(
                    f"Batch {time_text(batch_time_ms)} is {batch.state.value} and cannot be abandoned."
                )
            if batch.steps is not None:
                raise BatchStateError(
                    f"Batch {time_text(batch_time_ms)} has completed before, so its records are no gap: it cannot "
                    "be abandoned.",
                    remedy="What it wrote is there: run it again, or leave it. No other batch waits for it.",
                )
            fence_attempts(connection, stream, batch_time_ms, locked.now_ms)
            connection.execute(_this(stream, batch_time_ms).values(state=BatchState.ABANDONED, error=reason, history=0))
            _abandon_replays(connection, stream, batch_time_ms, reason)
            for row in connection.execute(
                select(batch_inputs).where(
                    batch_inputs.c.stream == stream, batch_inputs.c.batch_time_ms == batch_time_ms
                )
            ).all():
                taken = BatchInputRow.from_row(row)
                add_gap(
                    connection,
                    locked,
                    taken.input_id,
                    taken.partition,
                    from_offset=taken.from_offset,
                    until_offset=taken.until_offset,
                    reason=f"batch abandoned: {reason}",
                    batch_time_ms=batch_time_ms,
                )
            payload = {"reason": reason, "records": batch.records}
            _event(connection, locked, EventKind.BATCH_ABANDONED, batch_time_ms, payload)
            return require_batch(connection, stream, batch_time_ms)


def _abandon_replays(connection: Connection, stream: str, batch_time_ms: int, reason: str) -> None:
    of_batch = (batch_attempts.c.stream == stream, batch_attempts.c.batch_time_ms == batch_time_ms)
    query = select(batch_attempts.c.target).where(*of_batch, batch_attempts.c.target != "").distinct()
    # By target: in the index it comes before the batch time.
    targets = connection.execute(query).scalars().all()
    if targets:
        unfinished = (
            replays.c.stream == stream,
            replays.c.target.in_(targets),
            replays.c.batch_time_ms == batch_time_ms,
            replays.c.state != BatchState.COMPLETED,
        )
        connection.execute(update(replays).where(*unfinished).values(state=BatchState.ABANDONED, error=reason))


def _check_cleanable(connection: Connection, batch: BatchRow) -> None:
    done = batch.state is BatchState.COMPLETED and batch.checkpointed_at_ms is not None
    if not done and batch.state is not BatchState.ABANDONED:
        raise BatchStateError(
            f"Batch {time_text(batch.batch_time_ms)} is {batch.state.value}, or not checkpointed: not done with."
        )
    own = select(literal(batch.batch_time_ms))
    absorbed = select(batches.c.batch_time_ms).where(
        batches.c.stream == batch.stream, batches.c.absorbed_by_ms == batch.batch_time_ms
    )
    times = own.union_all(absorbed).subquery()
    left = select(blocks.c.block_id).where(blocks.c.stream == batch.stream, blocks.c.batch_time_ms.in_(select(times)))
    if connection.execute(left.limit(1)).first() is not None:
        raise BatchStateError(
            f"Blocks of batch {time_text(batch.batch_time_ms)} are still in the log.",
            remedy="Remove their segments first (cleanup.removable_segments).",
        )


def _this(stream: str, batch_time_ms: int) -> Any:
    return update(batches).where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms)


def _event(
    connection: Connection, locked: LockedStream, kind: EventKind, batch_time_ms: int, payload: Mapping[str, Any]
) -> None:
    record(connection, locked.row.name, locked.now_ms, kind, payload, batch_time_ms=batch_time_ms)
