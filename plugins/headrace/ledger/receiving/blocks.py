"""Adds blocks to the stream, those of one write in one transaction, and finds blocks by batch time or segment.

The rows of the log's segments follow: adding a block opens its segment and closes the previous one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from sqlalchemy import BigInteger, Connection, Integer, Row, ScalarSelect, Text, bindparam, func, insert, select, update

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger.clock_corrections import without_batch
from headrace.ledger.database import Database, LockedStream, Repository, chunks, insert_or_update, new_id
from headrace.ledger.errors import (
    BlockConflictError,
    LeaseLostError,
    PartitionNotAssignedError,
    PositionConflictError,
    PositionNotFoundError,
    SegmentRemovedError,
)
from headrace.ledger.events import record_blocks
from headrace.ledger.receiving.receivers import require_receiver
from headrace.ledger.receiving.tables import (
    UNCLAIMED_SUMS,
    AddedBlock,
    EpochEnd,
    ReceiverLease,
    SegmentRow,
    StoredBlock,
    UnclaimedTime,
    WaitingTimes,
    blocks,
    closing_values,
    positions,
    receivers,
    segments,
    unclaimed_part,
    unclaimed_sums,
    unclaimed_times,
)
from headrace.ledger.tables import StreamRow

# The statements of `add_all` are built once, since they run several times a second for every receiver.
_insert_block = insert(blocks)
_last_block = select(func.max(blocks.c.block_id))
_insert_blocks = insert(blocks).returning(blocks.c.block_id, sort_by_parameter_order=True)
_this_receiver = (
    receivers.c.stream == bindparam("key_stream"),
    receivers.c.input_id == bindparam("key_input_id"),
    receivers.c.receiver_index == bindparam("key_receiver_index"),
)
_accept = (
    update(receivers)
    .where(*_this_receiver)
    .values(
        last_accepted_sequence=bindparam("accepted"),
        segment_id=bindparam("new_segment_id"),
        received_blocks=receivers.c.received_blocks + bindparam("blocks"),
        received_bytes=receivers.c.received_bytes + bindparam("payload_bytes"),
    )
)
# Reads one short range of the owner's index, whatever the number of partitions in the block.
_owned_positions = select(
    positions.c.topic,
    positions.c.topic_id,
    positions.c.partition,
    positions.c.next_offset,
    positions.c.last_batch_time_ms,
    positions.c.watermark_ms,
).where(
    positions.c.stream == bindparam("stream"),
    positions.c.input_id == bindparam("input_id"),
    positions.c.receiver_index == bindparam("receiver_index"),
)
_this_position = (
    positions.c.stream == bindparam("key_stream"),
    positions.c.input_id == bindparam("key_input_id"),
    positions.c.topic == bindparam("key_topic"),
    positions.c.topic_id == bindparam("key_topic_id"),
    positions.c.partition == bindparam("key_partition"),
)
_move_position = (
    update(positions)
    .where(
        *_this_position,
        positions.c.receiver_index == bindparam("key_receiver_index"),
        positions.c.next_offset == bindparam("from_offset"),
    )
    .values(
        next_offset=bindparam("until_offset"),
        last_batch_time_ms=bindparam("batch_time_ms"),
        watermark_ms=bindparam("new_watermark_ms"),
        received_records=positions.c.received_records + bindparam("records"),
        # Without a new epoch end, that of earlier records stays valid.
        leader_epoch=func.coalesce(bindparam("new_leader_epoch", type_=Integer), positions.c.leader_epoch),
        epoch_end_offset=func.coalesce(
            bindparam("new_epoch_end_offset", type_=BigInteger), positions.c.epoch_end_offset
        ),
        # Records without a source position leave the one before them.
        source_position=func.coalesce(bindparam("new_source_position", type_=Text), positions.c.source_position),
        updated_at_ms=bindparam("now_ms"),
    )
)


class Blocks(Repository):
    """Adds blocks, and finds them by batch time or segment."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        claim = insert_or_update(unclaimed_times, database.dialect)
        self._count_unclaimed = claim.on_conflict_do_update(
            index_elements=["stream", "batch_time_ms", "part"],
            set_={name: unclaimed_times.c[name] + claim.excluded[name] for name in UNCLAIMED_SUMS},
        )

    def add(
        self,
        lease: ReceiverLease,
        block: BlockInfo,
        epoch_ends: Mapping[TopicPartition, EpochEnd] = MappingProxyType({}),
    ) -> AddedBlock:
        """Add one durable block, as `add_all` does."""
        return self.add_all(lease, [block], epoch_ends)[0]

    def add_all(
        self,
        lease: ReceiverLease,
        new_blocks: Sequence[BlockInfo],
        epoch_ends: Mapping[TopicPartition, EpochEnd] = MappingProxyType({}),
    ) -> list[AddedBlock]:
        """Add the durable blocks of one write of the log, in the order of their sequences, in one transaction:
        positions, blocks, events. All are added, or none.

        A block's batch time is the first unsealed interval end after its cut time, or after its event time if it has
        one (future times count as now). It is never before that of its partitions' earlier blocks, so a batch's ranges
        of a partition are contiguous. If it is not the event time's own batch time, the block is late. Adding the same
        blocks again returns the first results, with ``duplicate`` set. ``epoch_ends`` are those of the partitions' last
        records in the blocks, if known.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale, or a block was written in another epoch.
            PartitionNotAssignedError: a partition does not belong to this receiver.
            PositionConflictError: a range does not begin at its partition's position, or at the end of the one before.
            BlockConflictError: a sequence was used for another block, or is before an accepted one, or the blocks are
                not in one segment.
            SegmentRemovedError: the blocks' segment is being removed.
        """
        receiver_id, last = lease.receiver_id, new_blocks[-1]
        for block in new_blocks:
            if block.receiver != receiver_id or block.epoch != lease.epoch:
                raise LeaseLostError(
                    f"A block of {block.receiver} in epoch {block.epoch} cannot be added by {receiver_id} "
                    f"in epoch {lease.epoch}.",
                    remedy="Read its offsets again in the current epoch.",
                )
        _require_one_write(new_blocks)
        with self._database.write_receiver(receiver_id) as (connection, locked):
            receiver = require_receiver(connection, locked, lease)
            if new_blocks[0].sequence <= receiver.last_accepted_sequence:
                return [_added_before(connection, locked, block) for block in new_blocks]
            moves = _Moves(connection, receiver_id)
            times = [moves.add(locked, block) for block in new_blocks]
            segment_id = segment_for(connection, locked, lease, receiver, last.handle.segment)
            moves.execute(epoch_ends, locked.now_ms)
            connection.execute(
                _accept,
                {
                    **_receiver_key(receiver_id),
                    "accepted": last.sequence,
                    "new_segment_id": max(segment_id, receiver.segment_id or 0),
                    "blocks": len(new_blocks),
                    "payload_bytes": sum(block.payload_bytes for block in new_blocks),
                },
            )
            block_ids = _insert(
                connection,
                [
                    block_columns(block, batch_time_ms=batch_time_ms, segment_id=segment_id, now_ms=locked.now_ms)
                    for block, batch_time_ms in zip(new_blocks, times, strict=True)
                ],
            )
            self._count(connection, receiver_id, zip(times, new_blocks, strict=True))
            payloads = [
                {
                    "receiver": str(receiver_id),
                    "batch_time_ms": batch_time_ms,
                    "records": block.records,
                    "payload_bytes": block.payload_bytes,
                }
                for block, batch_time_ms in zip(new_blocks, times, strict=True)
            ]
            record_blocks(connection, receiver_id.stream, locked.now_ms, dict(zip(block_ids, payloads, strict=True)))
            return [
                AddedBlock(block_id, batch_time_ms, late=is_late(locked.row, block, batch_time_ms))
                for block_id, batch_time_ms, block in zip(block_ids, times, new_blocks, strict=True)
            ]

    def _count(self, connection: Connection, receiver_id: ReceiverId, added: Iterable[tuple[int, BlockInfo]]) -> None:
        """Count blocks among the unclaimed ones of their batch times."""
        sums: dict[int, list[int]] = {}
        for batch_time_ms, block in added:
            of_time = sums.setdefault(batch_time_ms, [0, 0, 0])
            for place, amount in enumerate((1, block.records, block.payload_bytes)):
                of_time[place] += amount
        key = {"stream": receiver_id.stream, "part": unclaimed_part(receiver_id.index)}
        rows = [
            {**key, "batch_time_ms": batch_time_ms, "blocks": count, "records": records, "payload_bytes": payload_bytes}
            for batch_time_ms, (count, records, payload_bytes) in sums.items()
        ]
        connection.execute(self._count_unclaimed, rows)

    def unclaimed(self, stream_name: str, limit: int = 1000, *, after_ms: int = 0) -> list[UnclaimedTime]:
        """Return the oldest ``limit`` batch times after ``after_ms`` that have blocks and no batch."""
        query = unclaimed_sums(stream_name).where(unclaimed_times.c.batch_time_ms > after_ms)
        return self._rows(UnclaimedTime, query.order_by(unclaimed_times.c.batch_time_ms).limit(limit))

    def waiting(self, stream_name: str, until_ms: int) -> WaitingTimes | None:
        """Summarize the batch times up to ``until_ms`` that have blocks and no batch; None if there are none."""
        time = unclaimed_times.c.batch_time_ms
        records = func.sum(unclaimed_times.c.records)
        query = select(func.min(time), func.max(time), func.count(time.distinct()), records).where(
            unclaimed_times.c.stream == stream_name, time <= until_ms
        )
        with self._database.read() as connection:
            first_ms, last_ms, times, records = connection.execute(query).one()
        return WaitingTimes(first_ms, last_ms, times, int(records)) if times else None

    def of_times(self, stream_name: str, batch_times_ms: list[int]) -> list[StoredBlock]:
        """Return the blocks of these batch times, by time, then in the order of addition.

        Blocks whose segment has been removed are left out: their rows are deleted.
        """
        with self._database.read() as connection:
            return stored_blocks(connection, stream_name, batch_times_ms)

    def of_segment(self, stream_name: str, path: str) -> list[StoredBlock]:
        """Return the blocks of a segment, in the order of addition; none if the ledger does not have the segment."""
        query = (
            select(blocks, segments.c.path)
            .join(segments, segments.c.segment_id == blocks.c.segment_id)
            .where(segments.c.stream == stream_name, segments.c.path == path)
        )
        with self._database.read() as connection:
            return [stored_block(row) for row in connection.execute(query.order_by(blocks.c.block_id))]


def _require_one_write(new_blocks: Sequence[BlockInfo]) -> None:
    """Raises BlockConflictError unless the blocks follow each other in one segment."""
    for before, block in pairwise(new_blocks):
        if block.handle.segment != before.handle.segment or block.sequence <= before.sequence:
            raise BlockConflictError(
                f"Block {block.sequence} in {block.handle.segment} does not follow block {before.sequence} in "
                f"{before.handle.segment}.",
                remedy="Add the blocks of one write of the log, in the order of their sequences.",
            )


@dataclass(slots=True)
class _Move:
    """What blocks do to a partition's position."""

    from_offset: int
    until_offset: int
    batch_time_ms: int
    watermark_ms: int
    records: int = 0
    source_position: str | None = None


class _Moves:
    """The moves of a receiver's positions by blocks that are added one after the other in one transaction."""

    def __init__(self, connection: Connection, receiver_id: ReceiverId) -> None:
        self._connection = connection
        self._receiver_id = receiver_id
        self._owned = {
            (row.topic, row.topic_id, row.partition): row
            for row in connection.execute(
                _owned_positions,
                {"stream": receiver_id.stream, "input_id": receiver_id.input_id, "receiver_index": receiver_id.index},
            )
        }
        self._moves: dict[TopicPartition, _Move] = {}

    def add(self, locked: LockedStream, block: BlockInfo) -> int:
        """Move the block's partitions to its end. Returns its batch time.

        Raises as `Blocks.add_all`, if a range of the block does not begin at its partition's position.
        """
        if len({r.partition for r in block.filled}) < len(block.filled):
            raise BlockConflictError(
                f"Block {block.sequence} names a partition twice.", remedy="One range per partition and block."
            )
        moves = [self._move_of(r) for r in block.filled]
        event_ms = None if block.event_time_ms is None else max(0, min(block.event_time_ms, locked.now_ms))
        cut_ms = min(block.cut_time_ms, locked.now_ms) if event_ms is None else event_ms
        open_ms = locked.row.batch_time_after(max(cut_ms, locked.row.sealed_until_ms))
        latest_ms = max([open_ms, *(move.batch_time_ms for move in moves)])
        batch_time_ms = without_batch(self._connection, locked, latest_ms)
        for r, move in zip(block.filled, moves, strict=True):
            move.until_offset = r.until_offset
            move.batch_time_ms = batch_time_ms
            move.watermark_ms = max(move.watermark_ms, event_ms or 0)
            move.records += r.records
            move.source_position = block.source_position or move.source_position
        return batch_time_ms

    def _move_of(self, r: OffsetRange) -> _Move:
        move = self._moves.get(r.partition)
        if move is None:
            row = self._owned.get((r.partition.topic, r.partition.topic_id, r.partition.partition))
            if row is None:
                raise _not_owned(self._connection, self._receiver_id, r)
            move = _Move(row.next_offset, row.next_offset, row.last_batch_time_ms, row.watermark_ms)
            self._moves[r.partition] = move
        if move.until_offset != r.from_offset:
            raise PositionConflictError(r.partition, expected=move.until_offset, got=r.from_offset)
        return move

    def execute(self, epoch_ends: Mapping[TopicPartition, EpochEnd], now_ms: int) -> None:
        """Write the moves.

        Raises:
            BlockConflictError: a position moved since it was read.
        """
        if not self._moves:
            return
        ends = {partition: epoch_ends.get(partition) for partition in self._moves}
        moved = self._connection.execute(
            _move_position,
            [
                {
                    **_receiver_key(self._receiver_id),
                    "key_topic": partition.topic,
                    "key_topic_id": partition.topic_id,
                    "key_partition": partition.partition,
                    "from_offset": move.from_offset,
                    "until_offset": move.until_offset,
                    "batch_time_ms": move.batch_time_ms,
                    "new_watermark_ms": move.watermark_ms,
                    "records": move.records,
                    "new_leader_epoch": None if end is None else end.leader_epoch,
                    "new_epoch_end_offset": None if end is None else end.end_offset,
                    "new_source_position": move.source_position,
                    "now_ms": now_ms,
                }
                for (partition, move), end in zip(self._moves.items(), ends.values(), strict=True)
            ],
        ).rowcount
        if moved != len(self._moves):
            # They were checked under the lock just before: someone wrote without it.
            raise BlockConflictError(
                f"{len(self._moves)} positions were to move, {moved} did.", remedy="Read them again."
            )


def _not_owned(
    connection: Connection, receiver_id: ReceiverId, r: OffsetRange
) -> PartitionNotAssignedError | PositionNotFoundError:
    row = connection.execute(
        select(positions.c.receiver_index).where(*_this_position),
        {
            "key_stream": receiver_id.stream,
            "key_input_id": receiver_id.input_id,
            "key_topic": r.partition.topic,
            "key_topic_id": r.partition.topic_id,
            "key_partition": r.partition.partition,
        },
    ).one_or_none()
    if row is None:
        return PositionNotFoundError(receiver_id.stream, receiver_id.input_id, r.partition)
    return PartitionNotAssignedError(receiver_id, r.partition, row.receiver_index)


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> list[int]:
    """Insert rows of ``blocks``. Returns their ids, in the order of the rows."""
    if len(rows) == 1:
        return [new_id(connection.execute(_insert_block, rows[0]))]
    if connection.dialect.name == "sqlite":
        # SQLAlchemy would insert one row after the other. There is no other writer, and ids ascend by one.
        connection.execute(_insert_block, rows)
        last = int(connection.execute(_last_block).scalar_one())
        return list(range(last - len(rows) + 1, last + 1))
    return list(connection.execute(_insert_blocks, rows).scalars())


def block_columns(block: BlockInfo, *, batch_time_ms: int, segment_id: int, now_ms: int) -> dict[str, Any]:
    """Return the columns of a block that is added at ``now_ms``."""
    return {
        "stream": block.receiver.stream,
        "batch_time_ms": batch_time_ms,
        "input_id": block.receiver.input_id,
        "receiver_index": block.receiver.index,
        "epoch": block.epoch,
        "sequence": block.sequence,
        "cut_time_ms": block.cut_time_ms,
        "event_time_ms": block.event_time_ms,
        "added_at_ms": now_ms,
        "segment_id": segment_id,
        "frame_offset": block.handle.offset,
        "frame_length": block.handle.length,
        "ranges": block.filled,
        "records": block.records,
        "payload_bytes": block.payload_bytes,
    }


def _added_before(connection: Connection, locked: LockedStream, block: BlockInfo) -> AddedBlock:
    """Return the first result for a sequence that is not new. Raises BlockConflictError if it was another block."""
    row = connection.execute(
        select(blocks, segments.c.path)
        .join(segments, segments.c.segment_id == blocks.c.segment_id)
        .where(
            blocks.c.stream == block.receiver.stream,
            blocks.c.input_id == block.receiver.input_id,
            blocks.c.receiver_index == block.receiver.index,
            blocks.c.epoch == block.epoch,
            blocks.c.sequence == block.sequence,
        )
    ).one_or_none()
    if row is not None:
        stored = stored_block(row)
        if (stored.info.handle, stored.info.records) == (block.handle, block.records):
            late = is_late(locked.row, stored.info, stored.batch_time_ms)
            return AddedBlock(stored.block_id, stored.batch_time_ms, duplicate=True, late=late)
    raise BlockConflictError(
        f"Block {block.sequence} of {block.receiver} in epoch {block.epoch} comes after a later one, "
        "or is not the block that was added under this sequence.",
        remedy="Never use a sequence twice: register again and read from the ledger's positions.",
    )


def _receiver_key(receiver_id: ReceiverId) -> dict[str, Any]:
    return {
        "key_stream": receiver_id.stream,
        "key_input_id": receiver_id.input_id,
        "key_receiver_index": receiver_id.index,
    }


def stored_blocks(connection: Connection, stream_name: str, batch_times_ms: list[int]) -> list[StoredBlock]:
    """Return the blocks of the batch times, by time, then in the order of addition."""
    blocks_found: list[StoredBlock] = []
    for part in chunks(sorted(batch_times_ms)):
        query = (
            select(blocks, segments.c.path)
            .join(segments, segments.c.segment_id == blocks.c.segment_id)
            .where(blocks.c.stream == stream_name, blocks.c.batch_time_ms.in_(part))
            .order_by(blocks.c.batch_time_ms, blocks.c.block_id)
        )
        blocks_found += [stored_block(row) for row in connection.execute(query)]
    return blocks_found


def is_late(stream: StreamRow, block: BlockInfo, batch_time_ms: int) -> bool:
    """Whether the block's batch time is later than that of its event time."""
    return block.event_time_ms is not None and batch_time_ms > stream.batch_time_after(max(0, block.event_time_ms))


def stored_block(row: Row[Any]) -> StoredBlock:
    """A row of ``blocks`` with its segment's path."""
    info = BlockInfo(
        receiver=ReceiverId(row.stream, row.input_id, row.receiver_index),
        epoch=row.epoch,
        sequence=row.sequence,
        cut_time_ms=row.cut_time_ms,
        handle=BlockHandle(row.path, row.frame_offset, row.frame_length),
        ranges=row.ranges,
        records=row.records,
        payload_bytes=row.payload_bytes,
        event_time_ms=row.event_time_ms,
    )
    return StoredBlock(row.block_id, row.batch_time_ms, row.added_at_ms, info)


class Segments(Repository):
    """Opens and closes segments; `cleanup` removes them."""

    def closed(self, lease: ReceiverLease, path: str, size: int | None = None) -> None:
        """Note that the writer has finished a segment of ``size`` bytes: no block will be added to it.

        Raises:
            LeaseLostError: the receiver's or its job's epoch is stale.
        """
        with self._database.write_receiver(lease.receiver_id) as (connection, locked):
            require_receiver(connection, locked, lease)
            connection.execute(
                update(segments)
                .where(
                    segments.c.stream == lease.receiver_id.stream,
                    segments.c.path == path,
                    segments.c.closed_at_ms.is_(None),
                )
                .values(**closing_values(locked.now_ms), bytes=size)
            )

    def get(self, stream_name: str, path: str) -> SegmentRow | None:
        """Return the segment with this path, or None if the ledger does not have it."""
        query = select(segments).where(segments.c.stream == stream_name, segments.c.path == path)
        with self._database.read() as connection:
            return SegmentRow.row(connection, query)

    def page(self, stream_name: str, limit: int = 1000) -> list[SegmentRow]:
        """Return the oldest ``limit`` segments that have not been removed."""
        query = select(segments).where(segments.c.stream == stream_name, segments.c.removed_at_ms.is_(None))
        return self._rows(SegmentRow, query.order_by(segments.c.segment_id).limit(limit))

    def count(self, stream_name: str) -> int:
        """Return the number of segments that have not been removed."""
        query = select(func.count()).where(segments.c.stream == stream_name, segments.c.removed_at_ms.is_(None))
        with self._database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def stored_bytes(self, stream_name: str) -> int:
        """Return the bytes of the segments that have not been removed.

        A segment that is open, or whose size was not reported, counts up to the end of its last block.
        """
        with self._database.read() as connection:
            return int(connection.execute(select(stored_bytes_of(stream_name))).scalar_one())


def stored_bytes_of(stream: Any) -> ScalarSelect[Any]:
    """Return the query of `Segments.stored_bytes`; ``stream`` is a name, or the column of an enclosing query."""
    end = (
        select(blocks.c.frame_offset + blocks.c.frame_length)
        .where(blocks.c.segment_id == segments.c.segment_id)
        .order_by(blocks.c.frame_offset.desc())
        .limit(1)
        .scalar_subquery()
    )
    return (
        select(func.coalesce(func.sum(func.coalesce(segments.c.bytes, end, 0)), 0))
        .where(segments.c.stream == stream, segments.c.removed_at_ms.is_(None))
        .scalar_subquery()
    )


def segment_for(
    connection: Connection, locked: LockedStream, lease: ReceiverLease, receiver: Row[Any], path: str
) -> int:
    """Return the id of a block's segment, within the caller's transaction. A new segment closes the previous one.

    ``receiver`` is the receiver's row with its current segment. The caller must store the id in that row.
    """
    if receiver.segment_path == path and receiver.segment_removing_at_ms is None:
        return int(receiver.segment_id)
    stream, receiver_id = locked.row.name, lease.receiver_id
    row = connection.execute(select(segments).where(segments.c.stream == stream, segments.c.path == path)).one_or_none()
    if row is not None:
        _check_writer(SegmentRow.from_row(row), lease)
        return int(row.segment_id)
    if receiver.segment_id is not None:
        connection.execute(
            update(segments)
            .where(segments.c.segment_id == receiver.segment_id, segments.c.closed_at_ms.is_(None))
            .values(**closing_values(locked.now_ms))
        )
    inserted = connection.execute(
        insert(segments).values(
            stream=stream,
            path=path,
            input_id=receiver_id.input_id,
            receiver_index=receiver_id.index,
            epoch=lease.epoch,
            opened_at_ms=locked.now_ms,
        )
    )
    return new_id(inserted)


def _check_writer(segment: SegmentRow, lease: ReceiverLease) -> None:
    if (segment.receiver_id, segment.epoch) != (lease.receiver_id, lease.epoch):
        raise BlockConflictError(
            f"Segment {segment.path} was written by {segment.receiver_id} in epoch {segment.epoch}, "
            f"not by {lease.receiver_id} in epoch {lease.epoch}.",
            remedy="Name every segment by its receiver, epoch and open time.",
        )
    if segment.removing_at_ms is not None:
        raise SegmentRemovedError(
            f"Segment {segment.path} is being removed.", remedy="Read the block's offsets again, into a new segment."
        )
