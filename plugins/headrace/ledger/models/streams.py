"""Streams, their revisions, their receiver jobs, and jobs that streams share: the tables, and the leases of jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import ForeignKey, PrimaryKeyConstraint, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from headrace.ledger.codec import Json, dump_json
from headrace.ledger.models.base import BigInt, Model, StreamName, table_of
from headrace.ledger.states import DesiredState, JobState


class StreamRow(Model):
    """A registered stream. No block joins a batch time up to ``sealed_until_ms`` any more.

    ``ordered`` streams run one batch at a time, in batch-time order. ``job_epoch`` is that of the newest receiver job,
    0 before the first. ``batch_by`` is "arrival" or "timestamp". ``revision`` numbers the definitions that the stream
    has had; ``declared_at_ms`` is the time of this definition's source (its DAG version), 0 if unknown.

    Batch times from ``removed_from_ms`` to ``removed_until_ms`` (0: none) were removed, their files up to
    ``removed_files_ms``. History files from number ``history_from`` on are still needed.
    """

    __tablename__ = "streams"

    name: Mapped[str] = mapped_column(primary_key=True)
    definition: Mapped[str]
    revision: Mapped[int]
    batch_interval_ms: Mapped[BigInt]
    block_interval_ms: Mapped[BigInt]
    outputs: Mapped[tuple[str, ...]]
    max_concurrent_batches: Mapped[int]
    ordered: Mapped[bool]
    zero_time_ms: Mapped[BigInt]
    sealed_until_ms: Mapped[BigInt]
    desired_state: Mapped[DesiredState]
    job_epoch: Mapped[BigInt]
    created_at_ms: Mapped[BigInt]
    updated_at_ms: Mapped[BigInt]
    batch_by: Mapped[str] = mapped_column(default="arrival")
    allowed_lateness_ms: Mapped[BigInt] = mapped_column(default=0)
    declared_at_ms: Mapped[BigInt] = mapped_column(default=0)
    removed_from_ms: Mapped[BigInt] = mapped_column(default=0)
    removed_until_ms: Mapped[BigInt] = mapped_column(default=0)
    removed_files_ms: Mapped[BigInt] = mapped_column(default=0)
    history_from: Mapped[BigInt] = mapped_column(default=0)

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

    _stream = mapped_column("stream", Text, ForeignKey("streams.name"), nullable=False)
    _digest = mapped_column("digest", Text, nullable=False)
    definition: Mapped[str]
    batch_interval_ms: Mapped[BigInt]
    block_interval_ms: Mapped[BigInt]
    outputs: Mapped[tuple[str, ...]]
    max_concurrent_batches: Mapped[int]
    ordered: Mapped[bool]
    batch_by: Mapped[str]
    allowed_lateness_ms: Mapped[BigInt]
    revision: Mapped[int]
    created_at_ms: Mapped[BigInt]


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
    stop_reason: str | None
    lease_until_ms: int
    now_ms: int


class JobRow(Model):
    """One receiver job, live or ended."""

    __tablename__ = "receiver_jobs"
    __table_args__ = (PrimaryKeyConstraint("stream", "epoch"),)

    stream: Mapped[StreamName]
    epoch: Mapped[BigInt]
    holder: Mapped[str]
    state: Mapped[JobState]
    acquired_at_ms: Mapped[BigInt]
    lease_ms: Mapped[BigInt]
    lease_until_ms: Mapped[BigInt]
    heartbeat_ms: Mapped[BigInt]
    versions: Mapped[Json]
    attributes: Mapped[Json]
    stop_requested_at_ms: Mapped[BigInt | None]
    stop_reason: Mapped[str | None]
    ended_at_ms: Mapped[BigInt | None]
    error: Mapped[str | None]

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return not self.state.ended and self.lease_until_ms > now_ms


class SharedJobRow(Model):
    """The process that runs the receiver jobs of several streams, live or ended: the newest one of each name."""

    __tablename__ = "shared_jobs"

    name: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[BigInt]
    holder: Mapped[str]
    acquired_at_ms: Mapped[BigInt]
    lease_ms: Mapped[BigInt]
    lease_until_ms: Mapped[BigInt]
    attributes: Mapped[Json]
    ended_at_ms: Mapped[BigInt | None]

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return self.ended_at_ms is None and self.lease_until_ms > now_ms


streams = table_of(StreamRow)
stream_revisions = table_of(StreamRevision)
receiver_jobs = table_of(JobRow)
shared_jobs = table_of(SharedJobRow)
