"""Finds a receiver's row and checks its lease: the epochs of the receiver and of its job must be current."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, select, update

from headrace.blocks import ReceiverId
from headrace.ledger.database import LockedStream
from headrace.ledger.errors import LeaseLostError
from headrace.ledger.receiving_tables import ReceiverLease, ReceiverRow, receivers, segments
from headrace.ledger.tables import receiver_jobs, streams


def require_receiver(connection: Connection, locked: LockedStream, lease: ReceiverLease) -> Row[Any]:
    """Check, under the stream's lock, that the epochs of the receiver and its job are current.

    Returns the receiver's row, with its job's stop request and its current segment. Raises LeaseLostError.
    """
    if locked.row.job_epoch != lease.job_epoch:
        raise lost_receiver(lease)
    return current_receiver(connection, lease, lock=False)


def lost_receiver(lease: ReceiverLease) -> LeaseLostError:
    """The error of a receiver whose lease is not current."""
    return LeaseLostError(
        f"Receiver {lease.receiver_id} (epoch {lease.epoch}, job epoch {lease.job_epoch}) lost its lease.",
        remedy="Stop it: a newer instance is scheduled, or its job has ended.",
    )


def current_receiver(connection: Connection, lease: ReceiverLease, *, lock: bool) -> Row[Any]:
    """As `require_receiver`, by the receiver's row alone, which ``lock`` locks. Raises LeaseLostError."""
    query = _CURRENT_LOCKED if lock else _CURRENT
    row = connection.execute(query, receiver_key(lease.receiver_id)).one_or_none()
    if (
        row is None
        or row.epoch != lease.epoch
        or row.job_epoch != lease.job_epoch
        or row.stream_job_epoch != lease.job_epoch
        or row.state.ended
        or row.job_state.ended
    ):
        raise lost_receiver(lease)
    return row


def _current_query(*, lock: bool) -> Any:
    query = (
        select(
            receivers,
            receiver_jobs.c.stop_requested_at_ms,
            receiver_jobs.c.state.label("job_state"),
            streams.c.job_epoch.label("stream_job_epoch"),
            segments.c.path.label("segment_path"),
            segments.c.removing_at_ms.label("segment_removing_at_ms"),
        )
        .join(
            receiver_jobs,
            and_(receiver_jobs.c.stream == receivers.c.stream, receiver_jobs.c.epoch == receivers.c.job_epoch),
        )
        .join(streams, streams.c.name == receivers.c.stream)
        .outerjoin(segments, segments.c.segment_id == receivers.c.segment_id)
        .where(
            receivers.c.stream == bindparam("stream"),
            receivers.c.input_id == bindparam("input_id"),
            receivers.c.receiver_index == bindparam("receiver_index"),
        )
    )
    return query.with_for_update(of=receivers) if lock else query


_CURRENT = _current_query(lock=False)
_CURRENT_LOCKED = _current_query(lock=True)


def receiver_key(receiver_id: ReceiverId) -> dict[str, Any]:
    """The columns of a receiver's key, with their values."""
    return {"stream": receiver_id.stream, "input_id": receiver_id.input_id, "receiver_index": receiver_id.index}


def update_receiver(receiver_id: ReceiverId) -> Any:
    """An update of the receiver's row, without its values."""
    return update(receivers).where(
        receivers.c.stream == receiver_id.stream,
        receivers.c.input_id == receiver_id.input_id,
        receivers.c.receiver_index == receiver_id.index,
    )


def find_receiver(connection: Connection, receiver_id: ReceiverId) -> ReceiverRow | None:
    row = connection.execute(
        select(receivers).where(
            receivers.c.stream == receiver_id.stream,
            receivers.c.input_id == receiver_id.input_id,
            receivers.c.receiver_index == receiver_id.index,
        )
    ).one_or_none()
    return None if row is None else ReceiverRow.from_row(row)
