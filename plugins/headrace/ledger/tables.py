"""The ledger's tables of streams, jobs and history; see also `receiving.tables`, `batches.tables`.

Times are epoch milliseconds (``_ms``).

Every unique fact has a unique constraint, in addition to the checks made under the stream's lock. Look-ups use a
primary key or an index named here, never a scan, so a ledger with a million blocks answers as fast as one with ten.

Leases and attempts are tokens: the holder passes them back to the ledger. They can be pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

from sqlalchemy import BigInteger, Column, ForeignKey, Index, PrimaryKeyConstraint, Text, UniqueConstraint

from headrace.blocks import TopicPartition
from headrace.ledger.model import (
    PRIMARY_KEY,
    BigInt,
    ErrorText,
    Json,
    Model,
    RowId,
    StreamName,
    composite,
    dump_json,
    partial_index,
)
from headrace.ledger.states import DesiredState, JobState

if TYPE_CHECKING:
    from headrace.stream import Stream


class StreamRow(Model):
    """A registered stream. No block joins a batch time up to ``sealed_until_ms`` any more.

    ``ordered`` streams run one batch at a time, in batch-time order. ``job_epoch`` is that of the newest receiver job,
    0 before the first. ``batch_by`` is "arrival" or "timestamp". ``revision`` numbers the definitions that the stream
    has had; ``declared_at_ms`` is the time of this definition's source (its DAG version), 0 if unknown.

    Batch times from ``removed_from_ms`` to ``removed_until_ms`` (0: none) were removed, their files up to
    ``removed_files_ms``.
    """

    __tablename__ = "streams"

    name: Annotated[str, PRIMARY_KEY]
    definition: str
    revision: int
    batch_interval_ms: BigInt
    block_interval_ms: BigInt
    outputs: tuple[str, ...]
    max_concurrent_batches: int
    ordered: bool
    zero_time_ms: BigInt
    sealed_until_ms: BigInt
    desired_state: DesiredState
    job_epoch: BigInt
    created_at_ms: BigInt
    updated_at_ms: BigInt
    batch_by: str = "arrival"
    allowed_lateness_ms: BigInt = 0
    declared_at_ms: BigInt = 0
    removed_from_ms: BigInt = 0
    removed_until_ms: BigInt = 0
    removed_files_ms: BigInt = 0

    @property
    def id_of_step(self) -> dict[str, str]:
        """The ids that the definition gives to its outputs, by their steps. They differ if an output was renamed."""
        return id_of_step(json.loads(self.definition))

    def step_of(self, output_id: str) -> str:
        """Return the step of the output with this id; an id that the definition does not have is its own step."""
        return next((step for step, known in self.id_of_step.items() if known == output_id), output_id)

    def has_removed(self, batch_time_ms: int) -> bool:
        """Whether the batch time was removed: its contents are no longer known."""
        return self.removed_from_ms <= batch_time_ms <= self.removed_until_ms

    def batch_time_after(self, time_ms: int) -> int:
        """Return the first interval end after ``time_ms``; interval ends are multiples of the batch interval."""
        return (time_ms // self.batch_interval_ms + 1) * self.batch_interval_ms


def id_of_step(definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the ids of a definition's outputs by their steps: the first id that each output had."""
    outputs = definition.get("outputs") or ()
    return {output.get("renamed_from") or output["id"]: output["id"] for output in outputs}


@dataclass(frozen=True, slots=True)
class Declared:
    """The content of a registration: the definition as JSON text, and the fields that the ledger itself uses."""

    definition: str
    batch_interval_ms: int
    block_interval_ms: int
    outputs: tuple[str, ...]
    max_concurrent_batches: int
    ordered: bool
    batch_by: str
    allowed_lateness_ms: int

    @classmethod
    def by(cls, stream: Stream) -> Declared:
        """Return what a registration of the stream declares."""
        return Declared(
            definition=stream.to_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
            outputs=stream.steps,
            max_concurrent_batches=stream.limits.max_concurrent_batches,
            ordered=stream.is_ordered,
            batch_by=stream.batch_by,
            allowed_lateness_ms=stream.allowed_lateness_ms,
        )

    @classmethod
    def of(cls, row: Any) -> Declared:
        """Return the content of a row of ``streams`` or ``stream_revisions``."""
        return Declared(**{field.name: getattr(row, field.name) for field in fields(Declared)})

    def columns(self) -> dict[str, Any]:
        """Return its columns, which both tables have."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """The hash of the content, by which the same content is found again."""
        return hashlib.sha256(dump_json(self.columns()).encode()).hexdigest()


class StreamRevision(Model):
    """A definition that the stream has had, with its revision number, which attempts and jobs refer to.

    The newest definition is also in the columns of ``streams``.
    """

    __tablename__ = "stream_revisions"
    __table_args__ = (PrimaryKeyConstraint("stream", "revision"), UniqueConstraint("stream", "digest"))

    _stream = Column("stream", Text, ForeignKey("streams.name"), nullable=False)
    _digest = Column("digest", Text, nullable=False)
    definition: str
    batch_interval_ms: BigInt
    block_interval_ms: BigInt
    outputs: tuple[str, ...]
    max_concurrent_batches: int
    ordered: bool
    batch_by: str
    allowed_lateness_ms: BigInt
    revision: int
    created_at_ms: BigInt


@dataclass(frozen=True, slots=True)
class JobLease:
    """The receiver job's lease on a stream. ``lease_until_ms`` is its end when created; renewals do not change it."""

    stream: str
    epoch: int
    holder: str
    lease_ms: int
    lease_until_ms: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The answer to a renewal of the job's lease."""

    stop_requested: bool
    stop_reason: ErrorText | None
    lease_until_ms: int
    now_ms: int


class JobRow(Model):
    """One receiver job, live or ended."""

    __tablename__ = "receiver_jobs"
    __table_args__ = (PrimaryKeyConstraint("stream", "epoch"),)

    stream: StreamName
    epoch: BigInt
    holder: str
    state: JobState
    acquired_at_ms: BigInt
    lease_ms: BigInt
    lease_until_ms: BigInt
    heartbeat_ms: BigInt
    versions: Json
    attributes: Json
    stop_requested_at_ms: BigInt | None
    stop_reason: ErrorText | None
    ended_at_ms: BigInt | None
    error: ErrorText | None

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return not self.state.ended and self.lease_until_ms > now_ms


class SharedJobRow(Model):
    """The process that runs the receiver jobs of several streams, live or ended: the newest one of each name."""

    __tablename__ = "shared_jobs"

    name: Annotated[str, PRIMARY_KEY]
    epoch: BigInt
    holder: str
    acquired_at_ms: BigInt
    lease_ms: BigInt
    lease_until_ms: BigInt
    attributes: Json
    ended_at_ms: BigInt | None

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return self.ended_at_ms is None and self.lease_until_ms > now_ms


streams = StreamRow.__table__
stream_revisions = StreamRevision.__table__
receiver_jobs = JobRow.__table__
shared_jobs = SharedJobRow.__table__


class GapRow(Model):
    """Offsets that were given up, and why. ``batch_time_ms`` is set when a batch was abandoned."""

    __tablename__ = "gaps"
    __table_args__ = (
        UniqueConstraint("stream", "input_id", "topic", "topic_id", "partition", "from_offset", name="uq_gaps_range"),
        Index("ix_gaps_stream", "stream", "gap_id"),
    )

    gap_id: RowId
    stream: StreamName
    input_id: str
    partition: TopicPartition = composite("topic", "topic_id", "partition", "incarnation")
    from_offset: BigInt
    until_offset: BigInt
    reason: ErrorText
    batch_time_ms: BigInt | None
    at_ms: BigInt


class EventRow(Model):
    """An event. Ids ascend within a stream, and reading with ``after_id`` never skips one (`Events.page`).

    ``kind`` is an `EventKind`, or text written by a newer version.
    """

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_stream", "stream", "event_id"),
        Index("ix_events_kind", "stream", "kind", "event_id"),
    )

    event_id: RowId
    stream: StreamName
    at_ms: BigInt
    kind: str
    batch_time_ms: BigInt | None
    # The block that the event reports, with whose row it is deleted.
    _block_id = Column("block_id", BigInteger)
    payload: Json = field(default_factory=dict)


class SampleRow(Model):
    """What the receiver job saw of a stream at a moment. ``lag`` and ``lag_seconds`` are None if they are unknown."""

    __tablename__ = "samples"
    __table_args__ = (PrimaryKeyConstraint("stream", "at_ms"),)

    stream: StreamName
    at_ms: BigInt
    input_rate: float
    lag: BigInt | None
    lag_seconds: float | None
    queue_bytes: BigInt
    paused: bool
    log_bytes: BigInt


class TotalRow(Model):
    """A sum that only grows: what the stream, or one of its outputs (``output_id`` is not ""), has counted so far."""

    __tablename__ = "totals"
    __table_args__ = (PrimaryKeyConstraint("stream", "output_id", "name"),)

    stream: StreamName
    output_id: str
    name: str
    value: float


class ListenerCursorRow(Model):
    """A listener of a stream. It has got all events up to ``event_id``, except ``missed`` ones: these were deleted
    before. Events of blocks, which are deleted with their blocks, do not count as missed."""

    __tablename__ = "listener_cursors"
    __table_args__ = (PrimaryKeyConstraint("stream", "listener"),)

    stream: StreamName
    listener: str
    event_id: BigInt
    missed: BigInt
    updated_at_ms: BigInt


gaps = GapRow.__table__
events = EventRow.__table__
samples = SampleRow.__table__
totals = TotalRow.__table__
listener_cursors = ListenerCursorRow.__table__

partial_index(
    "ix_events_batch",
    events.c.stream,
    events.c.batch_time_ms,
    where="batch_time_ms IS NOT NULL",
)
partial_index(
    "uq_events_block",
    events.c.block_id,
    unique=True,
    where="block_id IS NOT NULL",
)
# Events of blocks are far more than the others; most listeners do not read them.
partial_index(
    "ix_events_without_blocks",
    events.c.stream,
    events.c.event_id,
    where="block_id IS NULL",
)
