"""Keeps the partitions' positions, and which receiver owns each.

``wanted_receiver_index`` is the owner that the tracker wants, ``receiver_index`` the actual one. A partition gets a new
owner only when its owner has released it or is dead, never while the owner may still store its records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, update

from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import time_text
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import (
    LeaseHeldError,
    LedgerError,
    PartitionNotAssignedError,
    PositionConflictError,
    PositionNotFoundError,
    StreamNotFoundError,
)
from headrace.ledger.events import add_gap, record
from headrace.ledger.model import partition_key, partition_of
from headrace.ledger.receiving.jobs import require_job
from headrace.ledger.receiving.receivers import find_receiver, require_receiver
from headrace.ledger.receiving.tables import LIVE, PositionRow, ReceiverLease, positions
from headrace.ledger.states import EventKind, PartitionState
from headrace.ledger.tables import JobLease, streams

_NO_EPOCH_END: dict[str, Any] = {"leader_epoch": None, "epoch_end_offset": None}


class Positions(Repository):
    """Keeps positions, and assigns partitions to receivers."""

    def ensure_all(self, job: JobLease, input_id: str, starting_offsets: Mapping[TopicPartition, int]) -> None:
        """Set the starting positions of partitions that have none, in one transaction. Existing ones stay.

        Raises:
            LeaseLostError: the job's epoch is stale.
            LedgerConflictError: the topic was never observed.
        """
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            known = {partition_of(row) for row in connection.execute(_of_input(job.stream, input_id))}
            rows = [
                {
                    "stream": job.stream,
                    "input_id": input_id,
                    **partition_key(partition),
                    "incarnation": partition.incarnation,
                    "next_offset": offset,
                    "starting_offset": offset,
                    "last_batch_time_ms": 0,
                    "watermark_ms": 0,
                    "drained_ms": 0,
                    "state": PartitionState.ACTIVE,
                    "updated_at_ms": locked.now_ms,
                }
                for partition, offset in starting_offsets.items()
                if partition not in known
            ]
            if rows:
                connection.execute(insert(positions), rows)

    def assign(self, job: JobLease, input_id: str, receivers: Mapping[TopicPartition, int]) -> None:
        """Set the receiver index that shall own each partition.

        A free partition is assigned at once. A partition with another owner is revoked in that owner's next heartbeat,
        and is assigned when it is released.

        Raises:
            LeaseLostError: the job's epoch is stale.
            PositionNotFoundError: a partition has no position yet.
        """
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            rows = _rows(connection, job.stream, input_id, receivers)
            for row in rows:
                wanted = receivers[row.partition]
                owner = wanted if row.receiver_index is None else row.receiver_index
                _own(connection, locked, row, owner=owner, wanted=wanted)

    def request_release(self, job: JobLease, input_id: str, partitions: Iterable[TopicPartition]) -> None:
        """Take partitions from their owners: they are revoked in the next heartbeat, and free once released.

        Raises:
            LeaseLostError: the job's epoch is stale.
            PositionNotFoundError: a partition has no position.
        """
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            for row in _rows(connection, job.stream, input_id, partitions):
                _own(connection, locked, row, owner=row.receiver_index, wanted=None)

    def force_release(self, job: JobLease, input_id: str, partitions: Iterable[TopicPartition]) -> None:
        """Take partitions from a dead receiver; they go to the wanted receiver, or become free.

        The dead receiver is fenced from them: if it wakes, its blocks are refused.

        Raises:
            LeaseLostError: the job's epoch is stale.
            LeaseHeldError: the owner is alive.
            PositionNotFoundError: a partition has no position.
        """
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            for row in _rows(connection, job.stream, input_id, partitions):
                if row.receiver_index is None:
                    continue
                _require_dead(connection, locked, ReceiverId(job.stream, input_id, row.receiver_index))
                wanted = None if row.wanted_receiver_index == row.receiver_index else row.wanted_receiver_index
                _own(connection, locked, row, owner=wanted, wanted=wanted)

    def release(self, lease: ReceiverLease, partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Release partitions, after everything read from them is stored. Partitions of other receivers are skipped.

        A partition wanted for another receiver is assigned to it at once.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale.
            PositionNotFoundError: a partition has no position.
        """
        receiver_id = lease.receiver_id
        given = [partitions] if isinstance(partitions, TopicPartition) else list(partitions)
        with self._database.write_stream(receiver_id.stream) as (connection, locked):
            require_receiver(connection, locked, lease)
            for row in _rows(connection, receiver_id.stream, receiver_id.input_id, given):
                if row.receiver_index == receiver_id.index:
                    wanted = None if row.wanted_receiver_index == receiver_id.index else row.wanted_receiver_index
                    _own(connection, locked, row, owner=wanted, wanted=wanted)

    def advance(
        self,
        lease: ReceiverLease,
        partition: TopicPartition,
        from_offset: int,
        until_offset: int,
        *,
        gap: str | None = None,
    ) -> None:
        """Advance a position over offsets without a record to store; with ``gap``, a reason, record them as a gap.

        A gap clears the epoch end: after it, the last record and its leader epoch are unknown.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale.
            PartitionNotAssignedError: the partition is not this receiver's.
            PositionConflictError: the position is not ``from_offset``.
        """
        if until_offset < from_offset:
            raise LedgerError(f"The position of {partition} cannot move back from {from_offset} to {until_offset}.")
        receiver_id = lease.receiver_id
        # A gap is an event, and each event but those of blocks is added under the stream's own lock.
        own = self._database.write_receiver(receiver_id)
        with own if gap is None else self._database.write_stream(receiver_id.stream) as (connection, locked):
            row = _row_of_owner(connection, locked, lease, partition)
            if row.next_offset != from_offset:
                raise PositionConflictError(partition, expected=row.next_offset, got=from_offset)
            moved: dict[str, Any] = {"next_offset": until_offset, "updated_at_ms": locked.now_ms}
            if gap is not None:
                moved |= _NO_EPOCH_END
            connection.execute(_this(receiver_id.stream, receiver_id.input_id, partition).values(moved))
            if gap is not None and until_offset > from_offset:
                add_gap(
                    connection,
                    locked,
                    receiver_id.input_id,
                    partition,
                    from_offset=from_offset,
                    until_offset=until_offset,
                    reason=gap,
                )

    def forget_epoch_end(self, lease: ReceiverLease, partition: TopicPartition) -> None:
        """Clear the epoch end, so that the position is not compared with Kafka's log: the truncation was reported.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale.
            PartitionNotAssignedError: the partition is not this receiver's.
        """
        receiver_id = lease.receiver_id
        with self._database.write_stream(receiver_id.stream) as (connection, locked):
            _row_of_owner(connection, locked, lease, partition)
            values = {**_NO_EPOCH_END, "updated_at_ms": locked.now_ms}
            connection.execute(_this(receiver_id.stream, receiver_id.input_id, partition).values(values))

    def fail(self, lease: ReceiverLease, partition: TopicPartition, error: str) -> None:
        """Mark a partition as stopped by an error. It stays with its receiver until `set_state` or a release.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale.
            PartitionNotAssignedError: the partition is not this receiver's.
        """
        receiver_id = lease.receiver_id
        with self._database.write_stream(receiver_id.stream) as (connection, locked):
            row = _row_of_owner(connection, locked, lease, partition)
            _set_state(connection, locked, row, PartitionState.FAILED, error)

    def set_state(
        self,
        job: JobLease,
        input_id: str,
        partitions: Iterable[TopicPartition],
        state: PartitionState | str,
        error: str | None = None,
    ) -> None:
        """Set the state of partitions: resumed (active), failed, or ended with their topic.

        Raises:
            LeaseLostError: the job's epoch is stale.
            PositionNotFoundError: a partition has no position.
        """
        with self._database.write_stream(job.stream) as (connection, locked):
            require_job(connection, locked, job)
            for row in _rows(connection, job.stream, input_id, partitions):
                _set_state(connection, locked, row, PartitionState(state), error)

    def unpassed(self, stream_name: str, batch_time_ms: int) -> list[PositionRow]:
        """Return the partitions that delay a batch by timestamp, since they may still get records of earlier times.

        A partition has passed the batch time when a stored record has that timestamp or a later one, or when everything
        that Kafka had of it was stored at the batch time plus the stream's allowed lateness, or later. Only active
        partitions delay a batch.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.read() as connection:
            lateness = select(streams.c.allowed_lateness_ms).where(streams.c.name == stream_name)
            lateness_ms = connection.execute(lateness).scalar_one_or_none()
            if lateness_ms is None:
                raise StreamNotFoundError(stream_name)
            query = select(positions).where(
                positions.c.stream == stream_name,
                positions.c.state == PartitionState.ACTIVE,
                positions.c.watermark_ms < batch_time_ms,
                positions.c.drained_ms < batch_time_ms + lateness_ms,
            )
            order = (positions.c.input_id, positions.c.topic, positions.c.incarnation, positions.c.partition)
            return PositionRow.rows(connection, query.order_by(*order))

    def all(self, stream_name: str, input_id: str | None = None, *, live: bool = False) -> list[PositionRow]:
        """Return the positions of a stream, or of one input, sorted by input, topic, incarnation and partition.

        Args:
            live: leave out ended partitions, of which there may be many.
        """
        query = select(positions).where(positions.c.stream == stream_name)
        if live:
            query = query.where(LIVE)
        if input_id is not None:
            query = query.where(positions.c.input_id == input_id)
        order = (positions.c.input_id, positions.c.topic, positions.c.incarnation, positions.c.partition)
        return self._rows(PositionRow, query.order_by(*order))


def _row_of_owner(
    connection: Connection, locked: LockedStream, lease: ReceiverLease, partition: TopicPartition
) -> PositionRow:
    """Return the partition's row. Raises PartitionNotAssignedError if another receiver owns it."""
    require_receiver(connection, locked, lease)
    receiver_id = lease.receiver_id
    (row,) = _rows(connection, receiver_id.stream, receiver_id.input_id, [partition])
    if row.receiver_index != receiver_id.index:
        raise PartitionNotAssignedError(receiver_id, partition, row.receiver_index)
    return row


def _own(
    connection: Connection, locked: LockedStream, row: PositionRow, *, owner: int | None, wanted: int | None
) -> None:
    """Write the actual and the wanted owner of a partition; a change of the owner is an event."""
    if owner == row.receiver_index and wanted == row.wanted_receiver_index:
        return
    stream = locked.row.name
    connection.execute(
        _this(stream, row.input_id, row.partition).values(
            receiver_index=owner, wanted_receiver_index=wanted, updated_at_ms=locked.now_ms
        )
    )
    payload = {"input": row.input_id, **partition_key(row.partition), "next_offset": row.next_offset}
    if row.receiver_index not in (None, owner):
        event = payload | {"receiver": row.receiver_index}
        record(connection, stream, locked.now_ms, EventKind.PARTITION_RELEASED, event)
    if owner not in (None, row.receiver_index):
        record(connection, stream, locked.now_ms, EventKind.PARTITION_ASSIGNED, payload | {"receiver": owner})


def _set_state(
    connection: Connection, locked: LockedStream, row: PositionRow, state: PartitionState, error: str | None
) -> None:
    if row.state is state and row.error == error:
        return
    stream = locked.row.name
    connection.execute(
        _this(stream, row.input_id, row.partition).values(state=state, error=error, updated_at_ms=locked.now_ms)
    )
    payload = {"input": row.input_id, **partition_key(row.partition), "error": error}
    if state is PartitionState.FAILED:
        record(connection, stream, locked.now_ms, EventKind.PARTITION_FAILED, payload)
    elif state is PartitionState.ENDED:
        ended = {"next_offset": row.next_offset, "unread": _last_lag(connection, stream, row)}
        record(connection, stream, locked.now_ms, EventKind.PARTITION_ENDED, payload | ended)


def _last_lag(connection: Connection, stream_name: str, row: PositionRow) -> int | None:
    """Return the lag that its receiver reported last, None if unknown. These records are lost with the topic."""
    if row.receiver_index is None:
        return None
    receiver = find_receiver(connection, ReceiverId(stream_name, row.input_id, row.receiver_index))
    return None if receiver is None else receiver.lag_of(row.partition)


def _require_dead(connection: Connection, locked: LockedStream, receiver_id: ReceiverId) -> None:
    receiver = find_receiver(connection, receiver_id)
    if receiver is None or receiver.job_epoch != locked.row.job_epoch or not receiver.alive(locked.now_ms):
        return
    raise LeaseHeldError(
        f"Receiver {receiver_id} on {receiver.host} is alive until {time_text(receiver.lease_until_ms)}.",
        holder=str(receiver_id),
        since_ms=receiver.registered_at_ms,
        until_ms=receiver.lease_until_ms,
        remedy="Ask it to release its partitions (request_release), or wait until its lease has run out.",
    )


def _rows(
    connection: Connection, stream_name: str, input_id: str, partitions: Iterable[TopicPartition]
) -> list[PositionRow]:
    """Return the rows of these partitions, in the order given. Raises PositionNotFoundError."""
    wanted = list(partitions)
    query = _of_input(stream_name, input_id)
    if len(wanted) == 1:
        query = query.where(*(positions.c[name] == value for name, value in partition_key(wanted[0]).items()))
    known = {_identity(row.partition): row for row in PositionRow.rows(connection, query)}
    for partition in wanted:
        if _identity(partition) not in known:
            raise PositionNotFoundError(stream_name, input_id, partition)
    return [known[_identity(partition)] for partition in wanted]


def _identity(partition: TopicPartition) -> tuple[str, str, int]:
    return partition.topic, partition.topic_id, partition.partition


def _of_input(stream_name: str, input_id: str) -> Any:
    return select(positions).where(positions.c.stream == stream_name, positions.c.input_id == input_id)


def _this(stream_name: str, input_id: str, partition: TopicPartition) -> Any:
    return update(positions).where(
        positions.c.stream == stream_name,
        positions.c.input_id == input_id,
        positions.c.topic == partition.topic,
        positions.c.topic_id == partition.topic_id,
        positions.c.partition == partition.partition,
    )
