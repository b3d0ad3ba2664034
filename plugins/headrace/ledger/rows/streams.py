"""The rows of streams, their revisions and their receiver jobs."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from headrace.ledger.codec import Json, dump_json
from headrace.ledger.states import DesiredState, JobState


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A registered stream. No block joins a batch time up to ``sealed_until_ms`` any more.

    ``ordered`` streams run one batch at a time, in batch-time order. ``job_epoch`` is that of the newest receiver job,
    0 before the first. ``batch_by`` is "arrival" or "timestamp". ``revision`` numbers the definitions that the stream
    has had; ``declared_at_ms`` is the time of this definition's source (its DAG version), 0 if unknown.

    Batch times from ``removed_from_ms`` to ``removed_until_ms`` (0: none) were removed, their files up to
    ``removed_files_ms``. History files from number ``history_from`` on are still needed.
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
    declared_at_ms: int = 0
    removed_from_ms: int = 0
    removed_until_ms: int = 0
    removed_files_ms: int = 0
    history_from: int = 0

    def has_removed(self, batch_time_ms: int) -> bool:
        """Whether the batch time was removed: its contents are no longer known."""
        return self.removed_from_ms <= batch_time_ms <= self.removed_until_ms

    def batch_time_after(self, time_ms: int) -> int:
        """Return the first interval end after ``time_ms``; interval ends are multiples of the batch interval."""
        return (time_ms // self.batch_interval_ms + 1) * self.batch_interval_ms


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
        values = {field.name: getattr(row, field.name) for field in fields(Declared)}
        return Declared(**{**values, "outputs": tuple(values["outputs"])})

    def columns(self) -> dict[str, Any]:
        """Return its columns, which both tables have."""
        return {**asdict(Declared.of(self)), "outputs": list(self.outputs)}

    @property
    def digest(self) -> str:
        """The hash of the content, by which the same content is found again."""
        return hashlib.sha256(dump_json(self.columns()).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class StreamRevision(Declared):
    """A definition with its revision number, which attempts and jobs refer to."""

    revision: int
    created_at_ms: int


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


@dataclass(frozen=True, slots=True)
class JobRow:
    """One receiver job, live or ended."""

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
