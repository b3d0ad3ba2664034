"""The rows of receivers, topics, positions, blocks and segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.ledger.codec import Json
from headrace.ledger.states import PartitionState, ReceiverState


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
    ``epoch_end`` is that of its last stored record, None if unknown.
    """

    next_offset: int
    state: PartitionState
    error: str | None
    watermark_ms: int = 0
    epoch_end: EpochEnd | None = None


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


@dataclass(frozen=True, slots=True)
class ReceiverRow:
    """The newest instance of a receiver. It has stored everything cut up to ``sealed_through_ms``.

    ``paused_reason`` says why a live receiver is paused; None if it is not. ``max_rate`` is the rate control's limit in
    records per second; a later instance keeps it.
    """

    receiver_id: ReceiverId
    epoch: int
    job_epoch: int
    state: ReceiverState
    host: str
    registered_at_ms: int
    lease_until_ms: int
    heartbeat_ms: int
    sealed_through_ms: int
    last_accepted_sequence: int
    stats: Json
    last_error: str | None
    restarts: int
    stop_requested: bool
    paused_reason: str | None = None
    max_rate: float | None = None

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return not self.state.ended and self.lease_until_ms > now_ms


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One incarnation of a topic that an input has seen. ``current``: it was seen last under its name.

    ``first_partitions`` is the number of partitions when it was first seen. ``at_start``: it existed when the input was
    first discovered, so that "latest" means its latest offsets.
    """

    stream: str
    input_id: str
    topic: str
    topic_id: str
    incarnation: int
    partitions: int
    first_partitions: int
    at_start: bool
    current: bool
    first_seen_ms: int
    changed_at_ms: int


@dataclass(frozen=True, slots=True)
class PositionRow:
    """A partition's position. ``receiver_index`` owns it now, ``wanted_receiver_index`` shall own it.

    In a stream by timestamp, ``watermark_ms`` is the latest timestamp of its stored records, and everything that Kafka
    had of it at ``drained_ms`` of the ledger's clock is stored; otherwise both are 0.
    ``leader_epoch`` and ``epoch_end_offset`` are an `EpochEnd`, or both None. Offsets up to ``removed_until_offset``
    belonged to batches that are removed; None: no batch is removed.
    """

    input_id: str
    partition: TopicPartition
    next_offset: int
    starting_offset: int
    receiver_index: int | None
    wanted_receiver_index: int | None
    last_batch_time_ms: int
    state: PartitionState
    error: str | None
    updated_at_ms: int
    watermark_ms: int = 0
    drained_ms: int = 0
    leader_epoch: int | None = None
    epoch_end_offset: int | None = None
    removed_until_offset: int | None = None

    @property
    def kept_from(self) -> int:
        """The first offset that the ledger accounts for."""
        return max(self.starting_offset, self.removed_until_offset or 0)


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
class UnclaimedTime:
    """A batch time that has blocks and no batch."""

    batch_time_ms: int
    blocks: int
    records: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class WaitingTimes:
    """A summary of the batch times that have blocks and no batch: the first, the last, their number and records."""

    first_ms: int
    last_ms: int
    batch_times: int
    records: int


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A file of the log. ``path`` is relative to the log's root. ``last_batch_time_ms`` is the latest batch time of its
    blocks when it was closed, 0 without any.
    """

    segment_id: int
    stream: str
    path: str
    receiver_id: ReceiverId
    epoch: int
    opened_at_ms: int
    closed_at_ms: int | None
    bytes: int | None
    removing_at_ms: int | None
    removed_at_ms: int | None
    last_batch_time_ms: int | None = None
