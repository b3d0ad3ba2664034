"""Manages the receivers' leases (who may write blocks) and gives receivers their orders.

A lease is valid while the epochs of the receiver and of its job are the current ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, insert, select, update

from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import JobStoppingError, LeaseLostError, LedgerError, ReceiverRefusedError
from headrace.ledger.events import record
from headrace.ledger.model import error_text, partition_key, partition_of
from headrace.ledger.receiving.jobs import job_of, require_job
from headrace.ledger.receiving.tables import (
    AssignedPartition,
    EpochEnd,
    ReceiverLease,
    ReceiverOrders,
    ReceiverRow,
    ScheduledReceiver,
    closing_values,
    positions,
    receivers,
    segments,
)
from headrace.ledger.states import EventKind, ReceiverState
from headrace.ledger.tables import JobLease, receiver_jobs, streams

MAX_STACK_CHARACTERS = 10_000
"""Of a stack, its last characters are kept."""


class Receivers(Repository):
    """The account of a job's receivers: it schedules and registers them, takes their heartbeats and returns their
    orders."""

    def schedule(self, job: JobLease, receiver_id: ReceiverId) -> ScheduledReceiver:
        """Begin the receiver's next epoch, whose instance a task is to register. Earlier instances are fenced; the
        receiver keeps the partitions that it owned.

        Raises:
            LeaseLostError: the job's epoch is stale.
        """
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            row = find_receiver(connection, receiver_id)
            epoch = 1 if row is None else row.epoch + 1
            values: dict[str, Any] = {
                "epoch": epoch,
                "job_epoch": job.epoch,
                "state": ReceiverState.SCHEDULED,
                "host": None,
                "executor_id": None,
                "registered_at_ms": locked.now_ms,
                "lease_until_ms": locked.now_ms,
                "last_accepted_sequence": -1,
                "segment_id": None,
                "stats": {},
                "earlier_totals": {} if row is None else row.totals,
                "restarts": _restarts(row, job),
                "paused_reason": None,
            }
            if row is None:
                never = {"lease_ms": 0, "heartbeat_ms": locked.now_ms, "sealed_through_ms": 0}
                connection.execute(insert(receivers).values(**receiver_key(receiver_id), **never, **values))
            else:
                if row.job_epoch != job.epoch:
                    # An error of the previous job, such as its end, does not apply to this one.
                    values |= _error_values(None, None, None)
                connection.execute(update_receiver(receiver_id).values(**values))
                _close_segments(connection, receiver_id, epoch, locked.now_ms)
            return ScheduledReceiver(receiver_id, epoch, job)

    def register(self, scheduled: ScheduledReceiver, *, host: str, lease_ms: int) -> ReceiverLease:
        """Register the scheduled instance; one task can do so.

        Raises:
            LeaseLostError: the job's epoch is stale.
            JobStoppingError: the job was asked to stop.
            ReceiverRefusedError: the tracker has scheduled a later instance, or another task has registered this one.
                This is recorded as an event.
        """
        job, receiver_id = scheduled.job, scheduled.receiver_id
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            current = job_of(connection, locked)
            if current is not None and current.stop_requested_at_ms is not None:
                raise JobStoppingError(
                    f"Receiver {receiver_id} cannot register: its job is stopping ({current.stop_reason}).",
                    remedy="End the receiver.",
                )
            row = find_receiver(connection, receiver_id)
            payload: dict[str, Any] = {"receiver": str(receiver_id), "epoch": scheduled.epoch, "host": host}
            refused = _refusal(row, scheduled)
            if row is None or refused is not None:
                record(connection, job.stream, locked.now_ms, EventKind.RECEIVER_REFUSED, {**payload, "error": refused})
            else:
                until_ms = locked.now_ms + lease_ms
                connection.execute(
                    update_receiver(receiver_id).values(
                        state=ReceiverState.STARTING,
                        host=host,
                        registered_at_ms=locked.now_ms,
                        lease_ms=lease_ms,
                        lease_until_ms=until_ms,
                        heartbeat_ms=locked.now_ms,
                    )
                )
                payload["restarts"] = row.restarts
                record(connection, job.stream, locked.now_ms, EventKind.RECEIVER_STARTED, payload)
                return ReceiverLease(receiver_id, scheduled.epoch, job.epoch, lease_ms, until_ms)
        raise ReceiverRefusedError(
            f"Receiver {receiver_id} of epoch {scheduled.epoch} on {host} is refused: {refused}.",
            remedy="End it: its job's tracker decides which receivers run.",
        )

    def runs_on(self, scheduled: ScheduledReceiver, executor_id: str) -> None:
        """Note the executor that runs the scheduled instance, unless there is a later one."""
        with self._database.write() as connection:
            connection.execute(
                update_receiver(scheduled.receiver_id)
                .where(receivers.c.epoch == scheduled.epoch)
                .values(executor_id=executor_id)
            )

    def task_ended(self, scheduled: ScheduledReceiver, error: str | None, stack: str | None = None) -> None:
        """Note that the task of an instance has ended. The instance is then ended too, if it has not released itself.

        Raises:
            LeaseLostError: the job's epoch is stale.
        """
        with self._database.write_stream(scheduled.job.stream) as (connection, locked):
            require_job(connection, locked, scheduled.job)
            row = find_receiver(connection, scheduled.receiver_id)
            if row is None or row.epoch != scheduled.epoch or row.state.ended:
                return
            values = _error_values(error or "its task has ended", locked.now_ms, stack)
            _end(connection, row, locked.now_ms, ReceiverState.FAILED, values)

    def report_error(self, lease: ReceiverLease, error: str, stack: str | None) -> None:
        """Record an error of a running receiver as its last one and as an event.

        Raises:
            LeaseLostError: as `heartbeat`.
        """
        with self._database.write_stream(lease.receiver_id.stream) as (connection, locked):
            current_receiver(connection, lease, lock=True)
            connection.execute(update_receiver(lease.receiver_id).values(**_error_values(error, locked.now_ms, stack)))
            payload = {"receiver": str(lease.receiver_id), "error": error, "stack": stack}
            record(connection, lease.receiver_id.stream, locked.now_ms, EventKind.RECEIVER_ERROR, payload)

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
            error: stored as the last error, whose stack stays if it is the same one; None leaves the previous one.
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
                self._database.lock_stream(connection, lease.receiver_id.stream, lease.receiver_id)
            row = current_receiver(connection, lease, lock=True)
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
            error = None if error is None else error_text(error)
            if error is not None and error == row.last_error:
                values["last_error_at_ms"] = now_ms
            elif error is not None:
                values |= _error_values(error, now_ms, None)
            connection.execute(update_receiver(lease.receiver_id).values(**values))
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
        *,
        stack: str | None = None,
    ) -> None:
        """End this instance: it can add no more blocks. Its partitions stay with its index. A second call is harmless.

        ``totals`` replaces those in the stats of the last heartbeat. ``stack`` is the traceback of ``error``.

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
            if totals is not None:
                connection.execute(update_receiver(receiver_id).values(stats={**row.stats, "totals": dict(totals)}))
            values = None if error is None else _error_values(error, locked.now_ms, stack)
            _end(connection, row, locked.now_ms, ended, values)

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
                connection.execute(update_receiver(receiver_id).values(max_rate=rate))

    def all(self, stream_name: str) -> list[ReceiverRow]:
        """Return the stream's receivers, live or not, sorted by input and index."""
        order = (receivers.c.input_id, receivers.c.receiver_index)
        return self._rows(ReceiverRow, select(receivers).where(receivers.c.stream == stream_name).order_by(*order))

    def unsealed(self, stream_name: str, batch_time_ms: int) -> list[ReceiverRow]:
        """Return the live receivers that may still add blocks cut before ``batch_time_ms``."""
        with self._database.read() as connection:
            now_ms = self._database.now_ms(connection)
            query = select(receivers).where(
                receivers.c.stream == stream_name,
                receivers.c.lease_until_ms > now_ms,
                receivers.c.sealed_through_ms < batch_time_ms,
            )
            return [receiver for receiver in ReceiverRow.rows(connection, query) if receiver.alive(now_ms)]


def _restarts(row: ReceiverRow | None, job: JobLease) -> int:
    """How often the receiver has started again in the job. An instance that never registered does not count."""
    if row is None or row.job_epoch != job.epoch:
        return 0
    return row.restarts + (row.host is not None)


def _refusal(row: ReceiverRow | None, scheduled: ScheduledReceiver) -> str | None:
    """Why the instance may not register; None if it may."""
    if row is None:
        return "the tracker has not scheduled it"
    if row.epoch != scheduled.epoch:
        return f"the tracker has scheduled epoch {row.epoch} since"
    if row.state is not ReceiverState.SCHEDULED:
        return f"its epoch has registered already, on {row.host}" if row.host else f"its epoch is {row.state.value}"
    return None


def _error_values(error: str | None, at_ms: int | None, stack: str | None) -> dict[str, Any]:
    return {
        "last_error": error,
        "last_error_at_ms": at_ms,
        "last_error_stack": None if stack is None else error_text(stack)[-MAX_STACK_CHARACTERS:],
    }


def _end(
    connection: Connection, row: ReceiverRow, now_ms: int, state: ReceiverState, error: Mapping[str, Any] | None
) -> None:
    """End the receiver's newest instance, with the values of `_error_values`, or None without an error."""
    receiver_id = row.receiver_id
    values = {"state": state, "lease_until_ms": now_ms, "paused_reason": None, **(error or {})}
    connection.execute(update_receiver(receiver_id).values(**values))
    _close_segments(connection, receiver_id, row.epoch + 1, now_ms)
    kind = EventKind.RECEIVER_STOPPED if state is ReceiverState.STOPPED else EventKind.RECEIVER_FAILED
    payload = {"receiver": str(receiver_id), "epoch": row.epoch, "error": values.get("last_error")}
    record(connection, receiver_id.stream, now_ms, kind, payload)


def _owned(connection: Connection, receiver_id: ReceiverId) -> tuple[dict[Any, AssignedPartition], frozenset[Any]]:
    assigned, revoked = {}, set()
    own = [positions.c[name] == value for name, value in receiver_key(receiver_id).items()]
    for row in connection.execute(select(positions).where(*own)):
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
    owner = receiver_key(receiver_id)
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
    return update(receivers).where(*_this(receiver_id))


def _this(receiver_id: ReceiverId) -> list[Any]:
    return [receivers.c[name] == value for name, value in receiver_key(receiver_id).items()]


def find_receiver(connection: Connection, receiver_id: ReceiverId) -> ReceiverRow | None:
    return ReceiverRow.row(connection, select(receivers).where(*_this(receiver_id)))
