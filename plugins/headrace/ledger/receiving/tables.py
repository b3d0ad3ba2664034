"""Receivers, topics, positions, segments and blocks: the tables, and the leases and orders of receivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Select,
    Text,
    UniqueConstraint,
    cast,
    func,
    literal,
    select,
)

from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger.model import BigInt, ErrorText, Json, Model, RowId, StreamName, composite, partial_index
from headrace.ledger.states import PartitionState, ReceiverState
from headrace.ledger.tables import JobLease


@dataclass(frozen=True, slots=True)
class ScheduledReceiver:
    """An instance of a receiver that its job's tracker has scheduled. One task may register it."""

    receiver_id: ReceiverId
    epoch: int
    job: JobLease


@dataclass(frozen=True, slots=True)
class ReceiverLease:
    """A receiver's lease. ``last_accepted_sequence`` is -1 at the start of every epoch."""

    receiver_id: ReceiverId
    epoch: int
    job_epoch: int
    lease_ms: int
    lease_until_ms: int
    last_accepted_sequence: int = -1


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The last record read from a partition has ``leader_epoch``; ``end_offset`` is the offset after it.

    If Kafka reports an earlier end of this epoch, its log was truncated: other records have the offsets above that end.
    """

    leader_epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class AssignedPartition:
    """A partition that the receiver must read, starting at ``next_offset``.

    ``watermark_ms`` is the latest timestamp of its stored records in a stream by timestamp, 0 before the first.
    ``epoch_end`` is that of its last stored record, None if unknown. ``source_position`` is as in `PositionRow`.
    """

    next_offset: int
    state: PartitionState
    error: ErrorText | None
    watermark_ms: int = 0
    epoch_end: EpochEnd | None = None
    source_position: str | None = None


@dataclass(frozen=True, slots=True)
class ReceiverOrders:
    """The answer to a heartbeat. The receiver must store what it read from ``revoked`` partitions, then release them.

    ``max_rate`` is the rate control's limit in records per second, None without one.
    """

    assigned: Mapping[TopicPartition, AssignedPartition]
    revoked: frozenset[TopicPartition]
    stop: bool
    lease_until_ms: int
    now_ms: int
    max_rate: float | None = None


class ReceiverRow(Model):
    """The newest instance of a receiver. It has stored everything cut up to ``sealed_through_ms``.

    ``paused_reason`` says why a live receiver is paused; None if it is not. ``max_rate`` is the rate control's limit in
    records per second; a later instance keeps it. ``received_blocks`` and ``received_bytes`` count what all instances
    have added. ``earlier_totals`` has the sums of ``stats["totals"]`` of the instances before this one.

    While it is scheduled it has no host, and ``registered_at_ms`` and ``heartbeat_ms`` are the time of that.
    ``executor_id`` is Spark's name of the executor that runs it, None while that is unknown. The last error, with its
    time and stack, is kept when the receiver starts again in the same job.
    """

    __tablename__ = "receivers"
    __table_args__ = (PrimaryKeyConstraint("stream", "input_id", "receiver_index"),)

    _stream = Column("stream", Text, ForeignKey("streams.name"), nullable=False)
    receiver_id: ReceiverId = composite("stream", "input_id", "receiver_index")
    epoch: BigInt
    job_epoch: BigInt
    state: ReceiverState
    host: str | None
    registered_at_ms: BigInt
    _lease_ms = Column("lease_ms", BigInteger, nullable=False, default=0)
    lease_until_ms: BigInt
    heartbeat_ms: BigInt
    sealed_through_ms: BigInt
    last_accepted_sequence: BigInt
    # The segment that its instance writes now.
    _segment_id = Column("segment_id", BigInteger, ForeignKey("segments.segment_id"))
    stats: Json
    last_error: ErrorText | None
    restarts: int
    paused_reason: ErrorText | None = None
    max_rate: float | None = None
    received_blocks: BigInt = 0
    received_bytes: BigInt = 0
    earlier_totals: Json = field(default_factory=dict)
    executor_id: str | None = None
    last_error_at_ms: BigInt | None = None
    last_error_stack: ErrorText | None = None

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return not self.state.ended and self.lease_until_ms > now_ms

    @property
    def totals(self) -> dict[str, float]:
        """The totals of this instance and of those before it."""
        return dict(Counter(self.earlier_totals) + Counter(self.stats.get("totals") or {}))

    def lag_of(self, partition: TopicPartition) -> int | None:
        """The lag of a partition in offsets, in the last report; None if it is unknown."""
        known: int | None
        known, _ = self.stats.get("lag", {}).get(partition.topic, {}).get(str(partition.partition), (None, None))
        return known


class TopicRow(Model):
    """One incarnation of a topic that an input has seen. ``current``: it was seen last under its name.

    ``first_partitions`` is the number of partitions when it was first seen. ``at_start``: it existed when the input was
    first discovered, so that "latest" means its latest offsets.
    """

    __tablename__ = "topics"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id"),
        UniqueConstraint("stream", "input_id", "topic", "incarnation"),
    )

    stream: StreamName
    input_id: str
    topic: str
    topic_id: str
    incarnation: int
    partitions: int
    first_partitions: int
    at_start: bool
    current: bool
    first_seen_ms: BigInt
    changed_at_ms: BigInt


class PositionRow(Model):
    """A partition's position. ``receiver_index`` owns it now, ``wanted_receiver_index`` shall own it.

    In a stream by timestamp, ``watermark_ms`` is the latest timestamp of its stored records, and everything that Kafka
    had of it at ``drained_ms`` of the ledger's clock is stored; otherwise both are 0.
    ``leader_epoch`` and ``epoch_end_offset`` are an `EpochEnd`, or both None. Offsets up to ``removed_until_offset``
    belonged to batches that are removed; None: no batch is removed. ``received_records`` counts the records of its
    blocks. ``source_position`` is where a custom receiver's source stands after the stored records, as JSON; None if it
    never said so.
    """

    __tablename__ = "positions"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id", "partition"),
        ForeignKeyConstraint(
            ["stream", "input_id", "topic", "topic_id"],
            ["topics.stream", "topics.input_id", "topics.topic", "topics.topic_id"],
        ),
        Index("ix_positions_owner", "stream", "input_id", "receiver_index"),
    )

    _stream = Column("stream", Text, ForeignKey("streams.name"), nullable=False)
    input_id: str
    partition: TopicPartition = composite("topic", "topic_id", "partition", "incarnation")
    next_offset: BigInt
    starting_offset: BigInt
    receiver_index: int | None
    wanted_receiver_index: int | None
    last_batch_time_ms: BigInt
    state: PartitionState
    error: ErrorText | None
    updated_at_ms: BigInt
    watermark_ms: BigInt = 0
    drained_ms: BigInt = 0
    leader_epoch: int | None = None
    epoch_end_offset: BigInt | None = None
    removed_until_offset: BigInt | None = None
    received_records: BigInt = 0
    source_position: str | None = None

    @property
    def kept_from(self) -> int:
        """The first offset that the ledger accounts for."""
        return max(self.starting_offset, self.removed_until_offset or 0)


class SegmentRow(Model):
    """A file of the log. ``path`` is relative to the log's root.

    ``last_batch_time_ms`` is the latest batch time of its blocks when it was closed, 0 without any; None while it is
    open. Cleanup skips segments that are too new by it.
    """

    __tablename__ = "segments"
    __table_args__ = (
        UniqueConstraint("stream", "path"),
        # A segment's row outlives its file, so that its name is never used again; this index finds the few that exist.
        Index("ix_segments_present", "stream", "removed_at_ms", "segment_id"),
    )

    segment_id: RowId
    stream: StreamName
    path: str
    receiver_id: ReceiverId = composite("stream", "input_id", "receiver_index")
    epoch: BigInt
    opened_at_ms: BigInt
    closed_at_ms: BigInt | None
    bytes: BigInt | None
    removing_at_ms: BigInt | None
    removed_at_ms: BigInt | None
    last_batch_time_ms: BigInt | None = None


class BlockRow(Model):
    """A stored block as the table has it. Callers get a `StoredBlock`, which has the path of its segment."""

    __tablename__ = "blocks"
    __table_args__ = (
        UniqueConstraint("stream", "input_id", "receiver_index", "epoch", "sequence"),
        UniqueConstraint("segment_id", "frame_offset"),
        Index("ix_blocks_batch", "stream", "batch_time_ms", "block_id"),
    )

    block_id: RowId
    stream: StreamName
    batch_time_ms: BigInt
    input_id: str
    receiver_index: int
    epoch: BigInt
    sequence: BigInt
    cut_time_ms: BigInt
    event_time_ms: BigInt | None
    added_at_ms: BigInt
    segment_id: Annotated[BigInt, ForeignKey("segments.segment_id")]
    frame_offset: BigInt
    frame_length: BigInt
    ranges: tuple[OffsetRange, ...]
    records: BigInt
    payload_bytes: BigInt


class UnclaimedTime(Model):
    """A batch time that has blocks and no batch, with the sums of its blocks. So no query reads a million blocks.

    Adding a block updates a row; allocation deletes all rows of the time. A receiver adds to the row of its ``part``
    (`unclaimed_part`), since it would wait for the commit of another one that adds to the same row. `unclaimed_sums`
    are those of all parts.
    """

    __tablename__ = "unclaimed_times"
    __table_args__ = (PrimaryKeyConstraint("stream", "batch_time_ms", "part"),)

    _stream = Column("stream", Text, ForeignKey("streams.name"), nullable=False)
    batch_time_ms: BigInt
    blocks: int
    records: BigInt
    payload_bytes: BigInt
    _part = Column("part", Integer, nullable=False)


@dataclass(frozen=True, slots=True)
class AddedBlock:
    """The result of adding a block. ``duplicate``: it had been added before, and nothing changed.

    ``late``: its batch time is later than that of its records' timestamps.
    """

    block_id: int
    batch_time_ms: int
    duplicate: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a batch time. Ids ascend in the order of addition, so also in each partition."""

    block_id: int
    batch_time_ms: int
    added_at_ms: int
    info: BlockInfo


@dataclass(frozen=True, slots=True)
class MovedBlock:
    """A block, identified by its writer's epoch and sequence, that got a later batch time since its own was sealed."""

    input_id: str
    receiver_index: int
    epoch: int
    sequence: int
    batch_time_ms: int


@dataclass(frozen=True, slots=True)
class WaitingTimes:
    """A summary of the batch times that have blocks and no batch: the first, the last, their number and records."""

    first_ms: int
    last_ms: int
    batch_times: int
    records: int


receivers = ReceiverRow.__table__
topics = TopicRow.__table__
positions = PositionRow.__table__
segments = SegmentRow.__table__
blocks = BlockRow.__table__
unclaimed_times = UnclaimedTime.__table__

# Bounds the rows of a batch time, whatever the number of receivers.
_PARTS = 16


def unclaimed_part(receiver_index: int) -> int:
    """Return the part of a receiver's sums of unclaimed batch times."""
    return receiver_index % _PARTS


def unclaimed_sums(stream_name: str) -> Select[Any]:
    """Return the query of a stream's unclaimed times, one row for each: the columns of `UnclaimedTime`."""
    time = unclaimed_times.c.batch_time_ms
    sums = [cast(func.sum(unclaimed_times.c[name]), BigInteger).label(name) for name in UNCLAIMED_SUMS]
    return select(time, *sums).where(unclaimed_times.c.stream == stream_name).group_by(time)


UNCLAIMED_SUMS = ("blocks", "records", "payload_bytes")
"""The columns of an unclaimed time that are sums over its blocks."""

partial_index(
    "ix_segments_closed",
    segments.c.stream,
    segments.c.last_batch_time_ms,
    segments.c.segment_id,
    where="removed_at_ms IS NULL",
)

partial_index(
    "ix_segments_removing",
    segments.c.stream,
    segments.c.segment_id,
    where="removed_at_ms IS NULL AND removing_at_ms IS NOT NULL",
)

# The tracker reads live positions twice a second; the index skips ended topics, of which there may be many.
LIVE = positions.c.state != literal(PartitionState.ENDED, positions.c.state.type, literal_execute=True)
partial_index(
    "ix_positions_live",
    positions.c.stream,
    positions.c.input_id,
    positions.c.topic,
    positions.c.incarnation,
    positions.c.partition,
    where="state != 'ended'",
)


def closing_values(now_ms: int) -> dict[str, Any]:
    """Return the values with which an update of ``segments`` closes segments. Only this reads all of their blocks."""
    latest = select(func.coalesce(func.max(blocks.c.batch_time_ms), 0)).where(
        blocks.c.segment_id == segments.c.segment_id
    )
    return {"closed_at_ms": now_ms, "last_batch_time_ms": latest.scalar_subquery()}
