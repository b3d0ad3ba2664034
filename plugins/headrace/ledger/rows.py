"""The ledger's rows as others see them. Times are epoch milliseconds (``_ms``) of the ledger's clock.

Leases and attempts are tokens: whoever holds one passes it back, and it pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.ledger.states import (
    AttemptState,
    BatchState,
    DesiredState,
    JobState,
    PartitionState,
    ReceiverState,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A registered stream. ``sealed_until_ms``: no block joins a batch time up to it any more.

    ``ordered`` streams run one batch at a time, in batch-time order. ``job_epoch`` is the newest receiver job's, 0
    before the first. ``batch_by`` is "arrival" or "timestamp".
    """

    name: str
    definition: str
    revision: int
    batch_interval_ms: int
    block_interval_ms: int
    outputs: tuple[str, ...]
    max_concurrent_batches: int
    ordered: bool
    zero_time_ms: int
    sealed_until_ms: int
    desired_state: DesiredState
    job_epoch: int
    created_at_ms: int
    updated_at_ms: int
    batch_by: str = "arrival"
    allowed_lateness_ms: int = 0

    def batch_time_after(self, time_ms: int) -> int:
        """The first interval end strictly after ``time_ms``; interval ends are multiples of the batch interval."""
        return (time_ms // self.batch_interval_ms + 1) * self.batch_interval_ms


@dataclass(frozen=True, slots=True)
class JobLease:
    """The receiver job's claim on a stream. ``lease_until_ms`` is as of its creation."""

    stream: str
    epoch: int
    holder: str
    lease_ms: int
    lease_until_ms: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a renewal tells the job."""

    stop_requested: bool
    stop_reason: str | None
    lease_until_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class JobRow:
    """One receiver job, present or past."""

    stream: str
    epoch: int
    holder: str
    state: JobState
    acquired_at_ms: int
    lease_ms: int
    lease_until_ms: int
    heartbeat_ms: int
    versions: Json
    attributes: Json
    stop_requested_at_ms: int | None
    stop_reason: str | None
    ended_at_ms: int | None
    error: str | None

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return not self.state.ended and self.lease_until_ms > now_ms


@dataclass(frozen=True, slots=True)
class ReceiverLease:
    """A receiver's claim; ``last_accepted_sequence`` is -1 at the start of every epoch."""

    receiver_id: ReceiverId
    epoch: int
    job_epoch: int
    lease_ms: int
    lease_until_ms: int
    last_accepted_sequence: int = -1


@dataclass(frozen=True, slots=True)
class AssignedPartition:
    """A partition that the receiver is to read from ``next_offset`` on.

    ``watermark_ms`` is the latest timestamp of its stored records in a stream by timestamp, 0 before the first.
    """

    next_offset: int
    state: PartitionState
    error: str | None
    watermark_ms: int = 0


@dataclass(frozen=True, slots=True)
class ReceiverOrders:
    """The answer to a heartbeat. ``revoked``: store what was read of them, then release them."""

    assigned: Mapping[TopicPartition, AssignedPartition]
    revoked: frozenset[TopicPartition]
    stop: bool
    lease_until_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class ReceiverRow:
    """The newest instance of a receiver. It has stored everything up to ``sealed_through_ms``."""

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

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return not self.state.ended and self.lease_until_ms > now_ms


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One incarnation of a topic that an input has seen. ``current``: the one seen last under its name.

    ``first_partitions``: how many partitions it had when it was first seen. ``at_start``: it was there when the input
    was first looked at, so that "latest" means its latest.
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
    """A partition's position. ``receiver_index`` owns it now, ``wanted_receiver_index`` is to own it.

    In a stream by timestamp its stored records reach up to the timestamp ``watermark_ms``, and at ``drained_ms`` of the
    ledger's clock everything that Kafka had of it was stored; else both are 0.
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


@dataclass(frozen=True, slots=True)
class AddedBlock:
    """Where a block went. ``duplicate``: it had been added before, nothing changed.

    ``late``: its batch time is a later one than that of its records' timestamps.
    """

    block_id: int
    batch_time_ms: int
    duplicate: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a batch time; ids ascend in the order of addition, so also along each partition."""

    block_id: int
    batch_time_ms: int
    added_at_ms: int
    info: BlockInfo


@dataclass(frozen=True, slots=True)
class UnclaimedTime:
    """A batch time that has blocks and no batch."""

    batch_time_ms: int
    blocks: int
    records: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A file of the log. ``path`` is relative to the log's root. ``last_batch_time_ms`` is the latest of its blocks as
    of when it was closed, 0 without any.
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


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch. ``attempt`` is the number of the newest attempt at it, 0 before the first; ``code_version`` is that of
    the last attempt that completed.

    ``absorbed`` are the earlier batch times whose blocks it took over (coalescing), ``absorbed_by_ms`` the batch that
    took this one's. ``built``: it has offset ranges found by timestamps in Kafka, and no blocks; its ``records`` are
    then an upper bound. ``late_records`` came too late for the batch of their timestamps. ``steps`` are those by which
    it completed, None before: an output that the stream got later does not make it unfinished.
    """

    stream: str
    batch_time_ms: int
    interval_ms: int
    state: BatchState
    revision: int
    manifest_uri: str
    manifest_sha256: str
    code_version: str | None
    blocks: int
    records: int
    payload_bytes: int
    absorbed: tuple[int, ...]
    absorbed_by_ms: int | None
    attempt: int
    allocated_at_ms: int
    started_at_ms: int | None
    completed_at_ms: int | None
    checkpointed_at_ms: int | None
    checkpoint_uri: str | None
    cleaned_at_ms: int | None
    cleanup: Json | None
    error: str | None
    late_records: int = 0
    built: bool = False
    steps: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class EarlierBatch:
    """A batch time that an ordered stream has to finish first. ``state`` None: it has blocks, and nobody claimed it.

    ``alive``: an attempt at it has a live lease.
    """

    batch_time_ms: int
    state: BatchState | None
    error: str | None
    alive: bool


@dataclass(frozen=True, slots=True)
class BatchOrigin:
    """Where a batch's records are read from: its manifest's blocks in the "log", or its ranges in "kafka"."""

    batch_time_ms: int
    manifest_uri: str
    manifest_sha256: str
    source: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """The claim of one run of a batch; ``number`` is its epoch. ``outputs`` are the steps to run: each must be recorded
    before it can complete.

    ``source`` is "log", or "kafka" when blocks of the batch are gone from the log or it was built from Kafka. A
    replay's attempt has its name as ``target``, and the replay's stream as JSON in ``definition``.
    """

    stream: str
    batch_time_ms: int
    number: int
    holder: str
    way: str
    outputs: tuple[str, ...]
    lease_ms: int
    lease_until_ms: int
    source: str = "log"
    target: str = ""
    definition: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt at a batch, or at its replay (``target`` is not ""), present or past."""

    stream: str
    batch_time_ms: int
    number: int
    holder: str
    way: str
    state: AttemptState
    outputs: tuple[str, ...]
    attributes: Json
    started_at_ms: int
    lease_ms: int
    lease_until_ms: int
    heartbeat_ms: int
    ended_at_ms: int | None
    error: str | None
    source: str = "log"
    target: str = ""
    definition: str | None = None
    code_version: str | None = None

    def alive(self, now_ms: int) -> bool:
        """Whether it runs and its lease is live at ``now_ms``."""
        return self.state is AttemptState.RUNNING and self.lease_until_ms > now_ms

    def claim(self) -> Attempt:
        """The attempt's token, for another process of the same holder."""
        return Attempt(**{name: getattr(self, name) for name in Attempt.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class BatchInputRow:
    """What a batch takes of one partition: offsets ``[from_offset, until_offset)``, in ``blocks`` blocks."""

    stream: str
    batch_time_ms: int
    input_id: str
    partition: TopicPartition
    from_offset: int
    until_offset: int
    records: int
    blocks: int


@dataclass(frozen=True, slots=True)
class BatchOutputRow:
    """What became of an output in an attempt: ``state`` completed with ``counts``, its own names and numbers, or failed
    with ``error``. ``recorded_at_ms`` is when.
    """

    stream: str
    batch_time_ms: int
    attempt: int
    output_id: str
    counts: Json
    recorded_at_ms: int
    state: AttemptState = AttemptState.COMPLETED
    error: str | None = None
    code_version: str | None = None
    target: str = ""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What became of a batch in a replay: running, completed (each of ``outputs`` has a record of success), failed, or
    allocated while some of them are still to be begun.
    """

    stream: str
    target: str
    batch_time_ms: int
    state: BatchState
    attempt: int
    outputs: tuple[str, ...]
    code_version: str | None
    started_at_ms: int
    completed_at_ms: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class GapRow:
    """Offsets that were given up, and why. ``batch_time_ms`` is set when a batch was abandoned."""

    gap_id: int
    stream: str
    input_id: str
    partition: TopicPartition
    from_offset: int
    until_offset: int
    reason: str
    batch_time_ms: int | None
    at_ms: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened. Ids ascend in commit order within a stream, so ``after_id`` never skips one.

    ``kind`` is an `EventKind`, or text that a newer version wrote.
    """

    event_id: int
    stream: str
    at_ms: int
    kind: str
    batch_time_ms: int | None
    payload: Json = field(default_factory=dict)
