"""The rows of batches, attempts, outputs and replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.blocks import TopicPartition
from headrace.ledger.codec import Json
from headrace.ledger.states import AttemptState, BatchState


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch. ``attempt`` is the number of its newest attempt, 0 before the first; ``code_version`` is that of the
    last attempt that completed.

    ``absorbed`` are the earlier batch times whose blocks it took over (coalescing), ``absorbed_by_ms`` the batch that
    took over this one's. ``built``: it has offset ranges found by timestamps in Kafka, and no blocks; its ``records``
    are then an upper bound. ``late_records`` came too late for the batch of their timestamps. ``required`` are the
    steps that the stream had when the batch was first begun, ``steps`` those with which it completed, None before; they
    stay when it is run again. Adding an output to the stream does not reopen completed batches.
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
    """A batch time that an ordered stream must finish first. ``state`` None: it has blocks, and no batch.

    ``alive``: an attempt at it has a live lease.
    """

    batch_time_ms: int
    state: BatchState | None
    error: str | None
    alive: bool


@dataclass(frozen=True, slots=True)
class BatchOrigin:
    """The source of a batch's records: its manifest's blocks in the "log", or its ranges in "kafka"."""

    batch_time_ms: int
    manifest_uri: str
    manifest_sha256: str
    source: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """The token of one run of a batch; ``number`` is its epoch. ``outputs`` are the steps to run: each must be recorded
    before the attempt can complete.

    ``source`` is "log", or "kafka" if blocks of the batch are gone from the log or it was built from Kafka. An attempt
    of a replay has the replay's name as ``target`` and the replay's stream as JSON in ``definition``. An attempt at the
    batch itself has the ``revision`` of the stream's definition that it began with.
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
    """One attempt at a batch, or at its replay (``target`` is not ""), running or ended."""

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
        """Return the attempt's token, for another process of the same holder."""
        return Attempt(**{name: getattr(self, name) for name in Attempt.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class BatchInputRow:
    """A batch's input from one partition: offsets ``[from_offset, until_offset)``, in ``blocks`` blocks."""

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
    """The result of an output in an attempt: ``state`` completed with ``counts`` (the output chooses their names), or
    failed with ``error``, at ``recorded_at_ms``.
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
    """An output's record of success, and the ``revision`` of the definition that wrote it; None if that is lost."""

    counts: Json
    revision: int | None


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """The state of a batch in a replay: running, completed (each of ``outputs`` has a record of success), failed,
    allocated while some of ``outputs`` are still to be begun, or abandoned with the batch.

    ``revision`` is the replay definition's revision that the batch was last begun with. Outputs written with another
    revision do not count.
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
    """The state of one batch in a replay (`ReplayRow`), and the counts of its recorded outputs."""

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
    """A replay's stream definition: revision ``revision`` of the replay named ``target``."""

    target: str
    revision: int
    definition: str
    created_at_ms: int
