"""Batches, attempts, outputs and replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.blocks import TopicPartition
from headrace.ledger.codec import Json
from headrace.ledger.states import AttemptState, BatchState


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch. ``attempt`` is the number of the newest attempt at it, 0 before the first; ``code_version`` is that of
    the last attempt that completed.

    ``absorbed`` are the earlier batch times whose blocks it took over (coalescing), ``absorbed_by_ms`` the batch that
    took this one's. ``built``: it has offset ranges found by timestamps in Kafka, and no blocks; its ``records`` are
    then an upper bound. ``late_records`` came too late for the batch of their timestamps. ``required`` are the
    steps that the stream had when the batch was first begun, ``steps`` those by which it completed, None before; they
    stay when it is run again. An output that the stream got later makes it unfinished by neither.
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
    required: tuple[str, ...] | None = None
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
    replay's attempt has its name as ``target``, and the replay's stream as JSON in ``definition``; one at the batch
    itself has the ``revision`` of the stream's definition that it began with.
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
    revision: int | None = None


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
    revision: int | None = None

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
class RecordedOutput:
    """An output's record of success, and the ``revision`` of the definition that it was written with; None: lost."""

    counts: Json
    revision: int | None


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What became of a batch in a replay: running, completed (each of ``outputs`` has a record of success), failed, or
    allocated while some of them are still to be begun; abandoned with the batch.

    ``revision`` is that of the replay's definition that the batch was last begun with, and what another one wrote does
    not count.
    """

    stream: str
    target: str
    batch_time_ms: int
    state: BatchState
    attempt: int
    revision: int
    outputs: tuple[str, ...]
    code_version: str | None
    started_at_ms: int
    completed_at_ms: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class FiledReplay:
    """What became of one batch in a replay (`ReplayRow`), and the counts of the outputs that it has recorded."""

    target: str
    state: BatchState
    attempt: int
    revision: int
    outputs: tuple[str, ...]
    code_version: str | None
    started_at_ms: int
    completed_at_ms: int | None
    error: str | None
    recorded: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ReplayDefinitionRow:
    """A stream as a replay wrote it: the ``revision``-th of the replay of this name."""

    target: str
    revision: int
    definition: str
    created_at_ms: int
