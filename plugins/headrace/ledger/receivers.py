"""Manages the receivers' leases (who may write blocks) and gives receivers their orders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, insert, select, update

from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger.codec import partition_key, partition_of
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import JobStoppingError, LeaseLostError, LedgerError
from headrace.ledger.events import record
from headrace.ledger.jobs import job_of, require_job
from headrace.ledger.models import (
    AssignedPartition,
    EpochEnd,
    JobLease,
    ReceiverLease,
    ReceiverOrders,
    ReceiverRow,
    closing_values,
    positions,
    receiver_jobs,
    receivers,
    segments,
    streams,
)
from headrace.ledger.states import EventKind, ReceiverState


class Receivers(Repository):
    """Registers receivers, takes their heartbeats and returns their orders."""

    def register(self, job: JobLease, receiver_id: ReceiverId, *, host: str, lease_ms: int) -> ReceiverLease:
        """Begin the receiver's next epoch. Earlier instances are fenced; it keeps the partitions that it owned.

        Raises:
            LeaseLostError: the job's epoch is stale.
            JobStoppingError: the job was asked to stop.
        """
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            current = job_of(connection, locked)
            if current is not None and current.stop_requested_at_ms is not None:
                raise JobStoppingError(
                    f"Receiver {receiver_id} cannot register: its job is stopping ({current.stop_reason}).",
                    remedy="End the receiver.",
                )
            row = find_receiver(connection, receiver_id)
            epoch = 1 if row is None else row.epoch + 1
            lease = ReceiverLease(receiver_id, epoch, job.epoch, lease_ms, locked.now_ms + lease_ms)
            values: dict[str, Any] = {
                "epoch": epoch,
                "job_epoch": job.epoch,
                "state": ReceiverState.STARTING,
                "host": host,
                "registered_at_ms": locked.now_ms,
                "lease_ms": lease_ms,
                "lease_until_ms": lease.lease_until_ms,
                "heartbeat_ms": locked.now_ms,
                "last_accepted_sequence": -1,
                "segment_id": None,
                "stats": {},
                "earlier_totals": {} if row is None else _summed(row),
                "restarts": row.restarts + 1 if row is not None and row.job_epoch == job.epoch else 0,
                "paused_reason": None,
            }
            if row is not None and row.job_epoch != job.epoch:
                # An error of the previous job, such as its end, does not apply to this one.
                values["last_error"] = None
            if row is None:
                connection.execute(insert(receivers).values(**_key(receiver_id), sealed_through_ms=0, **values))
            else:
                connection.execute(_this(receiver_id).values(**values))
                _close_segments(connection, receiver_id, epoch, locked.now_ms)
            payload = {"receiver": str(receiver_id), "epoch": epoch, "host": host, "restarts": values["restarts"]}
            record(connection, job.stream, locked.now_ms, EventKind.RECEIVER_STARTED, payload)
            return lease

    def heartbeat(
        self,
        lease: ReceiverLease,
        *,
        sealed_through_ms: int,
        stats: Mapping[str, Any] | None = None,
        state: ReceiverState | str = ReceiverState.RUNNING,
        error: str | None = None,
        drained: Mapping[TopicPartition, int] | None = None,
        paused_reason: str | None = None,
    ) -> ReceiverOrders:
        """Extend the lease and return the orders.

        Args:
            sealed_through_ms: everything cut up to this time of the ledger's clock is stored.
            stats: replaces the row's stats (JSON values); None leaves them. Numbers in ``totals`` count from the
                instance's beginning; the ledger keeps their sums when the next instance registers.
            error: stored as the last error; None leaves the previous one.
            paused_reason: why the receiver is paused; None: it is not.
            drained: for each partition, a time of the ledger's clock at which everything that Kafka had was stored.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale, or either has ended.
        """
        reported = ReceiverState(state)
        if reported.ended:
            raise LedgerError(f"A receiver ends by release, not by a heartbeat as {reported}.")
        with self._database.write() as connection:
            if drained:
                # Positions are written under the stream's lock, which must be taken before any other.
                self._database.lock_stream(connection, lease.receiver_id.stream)
            row = _current(connection, lease, lock=True)
            now_ms = self._database.now_ms(connection)
            values: dict[str, Any] = {
                "state": reported,
                "heartbeat_ms": now_ms,
                "lease_until_ms": now_ms + lease.lease_ms,
                "sealed_through_ms": max(sealed_through_ms, row.sealed_through_ms),
                "paused_reason": paused_reason,
            }
            if stats is not None:
                values["stats"] = dict(stats)
            if error is not None:
                values["last_error"] = error
            connection.execute(_this(lease.receiver_id).values(**values))
            if drained:
                _drain(connection, lease.receiver_id, drained, now_ms)
            assigned, revoked = _owned(connection, lease.receiver_id)
            stop = row.stop_requested_at_ms is not None
            return ReceiverOrders(assigned, revoked, stop, values["lease_until_ms"], now_ms, row.max_rate)

    def release(
        self,
        lease: ReceiverLease,
        state: ReceiverState | str = ReceiverState.STOPPED,
        error: str | None = None,
        totals: Mapping[str, float] | None = None,
    ) -> None:
        """End this instance: it can add no more blocks. Its partitions stay with its index. A second call is harmless.

        ``totals`` replaces those in the stats of the last heartbeat.

        Raises:
            LeaseLostError: a newer instance has registered.
        """
        ended = ReceiverState(state)
        if not ended.ended:
            raise LedgerError(f"A receiver ends as stopped, failed or lost, not as {ended}.")
        receiver_id = lease.receiver_id
        with self._database.write_stream(receiver_id.stream) as (connection, locked):
            row = find_receiver(connection, receiver_id)
            if row is None or row.epoch != lease.epoch:
                raise lost_receiver(lease)
            if row.state.ended:
                return
            values: dict[str, Any] = {"state": ended, "lease_until_ms": locked.now_ms, "paused_reason": None}
            if error is not None:
                values["last_error"] = error
            if totals is not None:
                values["stats"] = {**row.stats, "totals": dict(totals)}
            connection.execute(_this(receiver_id).values(**values))
            _close_segments(connection, receiver_id, lease.epoch + 1, locked.now_ms)
            kind = EventKind.RECEIVER_STOPPED if ended is ReceiverState.STOPPED else EventKind.RECEIVER_FAILED
            payload = {"receiver": str(receiver_id), "epoch": lease.epoch, "error": error}
            record(connection, receiver_id.stream, locked.now_ms, kind, payload)

    def set_rate(self, job: JobLease, rates: Mapping[ReceiverId, float | None]) -> None:
        """Set the rates of receivers in records per second; None removes a rate. The next heartbeats return them.

        Receivers that have not registered are skipped.

        Raises:
            LeaseLostError: the job's epoch is stale.
            LedgerError: a rate is not above 0, or another stream's receiver is named.
        """
        for receiver_id, rate in rates.items():
            if receiver_id.stream != job.stream or not (rate is None or 0 < rate < math.inf):
                raise LedgerError(f"A job of {job.stream!r} cannot set the rate of {receiver_id} to {rate}.")
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            for receiver_id, rate in rates.items():
                connection.execute(_this(receiver_id).values(max_rate=rate))

    def all(self, stream: str) -> list[ReceiverRow]:
        """Return the stream's receivers, live or not, sorted by input and index."""
        order = (receivers.c.input_id, receivers.c.receiver_index)
        with self._database.read() as connection:
            rows = connection.execute(select(receivers).where(receivers.c.stream == stream).order_by(*order))
            return [ReceiverRow.from_row(row) for row in rows]

    def unsealed(self, stream: str, batch_time_ms: int) -> list[ReceiverRow]:
        """Return the live receivers that may still add blocks cut before ``batch_time_ms``."""
        with self._database.read() as connection:
            now_ms = self._database.now_ms(connection)
            rows = connection.execute(
                select(receivers).where(
                    receivers.c.stream == stream,
                    receivers.c.lease_until_ms > now_ms,
                    receivers.c.sealed_through_ms < batch_time_ms,
                )
            )
            return [receiver for receiver in map(ReceiverRow.from_row, rows) if receiver.alive(now_ms)]


def require_receiver(connection: Connection, locked: LockedStream, lease: ReceiverLease) -> Row[Any]:
    """Check, under the stream's lock, that the epochs of the receiver and its job are current.

    Returns the receiver's row, with its job's stop request and its current segment. Raises LeaseLostError.
    """
    if locked.row.job_epoch != lease.job_epoch:
        raise lost_receiver(lease)
    return _current(connection, lease, lock=False)


def _summed(row: ReceiverRow) -> dict[str, float]:
    """Return the totals of this instance and of those before it."""
    return dict(Counter(row.earlier_totals) + Counter(row.stats.get("totals") or {}))


def lost_receiver(lease: ReceiverLease) -> LeaseLostError:
    return LeaseLostError(
        f"Receiver {lease.receiver_id} (epoch {lease.epoch}, job epoch {lease.job_epoch}) lost its lease.",
        remedy="Stop it: a newer instance has registered, or its job has ended.",
    )


def _current(connection: Connection, lease: ReceiverLease, *, lock: bool) -> Row[Any]:
    query = _CURRENT_LOCKED if lock else _CURRENT
    row = connection.execute(query, _key(lease.receiver_id)).one_or_none()
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


def _owned(connection: Connection, receiver_id: ReceiverId) -> tuple[dict[Any, AssignedPartition], frozenset[Any]]:
    assigned, revoked = {}, set()
    for row in connection.execute(
        select(positions).where(
            positions.c.stream == receiver_id.stream,
            positions.c.input_id == receiver_id.input_id,
            positions.c.receiver_index == receiver_id.index,
        )
    ):
        if row.wanted_receiver_index == receiver_id.index:
            known = None if row.leader_epoch is None else EpochEnd(row.leader_epoch, row.epoch_end_offset)
            assigned[partition_of(row)] = AssignedPartition(
                row.next_offset, row.state, row.error, row.watermark_ms, known, row.source_position
            )
        else:
            revoked.add(partition_of(row))
    return assigned, frozenset(revoked)


def _drain(connection: Connection, receiver_id: ReceiverId, drained: Mapping[TopicPartition, int], now_ms: int) -> None:
    """Note until when partitions are drained. Partitions that the receiver no longer owns are skipped."""
    owner = {"stream": receiver_id.stream, "input_id": receiver_id.input_id, "receiver_index": receiver_id.index}
    connection.execute(
        _DRAIN,
        [
            {
                **{f"key_{name}": value for name, value in (owner | partition_key(partition)).items()},
                "until_ms": min(until_ms, now_ms),
            }
            for partition, until_ms in drained.items()
        ],
    )


_DRAIN = (
    update(positions)
    .where(
        *(
            positions.c[name] == bindparam(f"key_{name}")
            for name in ("stream", "input_id", "receiver_index", "topic", "topic_id", "partition")
        ),
        positions.c.drained_ms < bindparam("until_ms"),
    )
    .values(drained_ms=bindparam("until_ms"))
)


def _key(receiver_id: ReceiverId) -> dict[str, Any]:
    return {"stream": receiver_id.stream, "input_id": receiver_id.input_id, "receiver_index": receiver_id.index}


def _this(receiver_id: ReceiverId) -> Any:
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


def _close_segments(connection: Connection, receiver_id: ReceiverId, before_epoch: int, now_ms: int) -> None:
    """Close the segments of the receiver's epochs below ``before_epoch``: their writers can add nothing more."""
    connection.execute(
        update(segments)
        .where(
            segments.c.stream == receiver_id.stream,
            segments.c.removed_at_ms.is_(None),
            segments.c.closed_at_ms.is_(None),
            segments.c.input_id == receiver_id.input_id,
            segments.c.receiver_index == receiver_id.index,
            segments.c.epoch < before_epoch,
        )
        .values(**closing_values(now_ms))
    )
