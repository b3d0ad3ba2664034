"""Batches, attempts, inputs, outputs and replays: the tables, and what callers get of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated

from sqlalchemy import (
    Column,
    ForeignKey,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
)

from headrace.blocks import BlockHandle, TopicPartition
from headrace.ledger.model import (
    NO_COLUMN,
    NULLABLE,
    BigInt,
    ErrorText,
    Json,
    Model,
    StreamName,
    batch_key,
    composite,
    partial_index,
)
from headrace.ledger.states import AttemptState, BatchState


class BatchRow(Model):
    """A batch. ``attempt`` is the number of its newest attempt, 0 before the first; ``code_version`` is that of the
    last attempt that completed.

    ``absorbed`` are the earlier batch times whose blocks it took over (coalescing), ``absorbed_by_ms`` the batch that
    took over this one's. ``built``: it has offset ranges found by timestamps in Kafka, and no blocks; its ``records``
    are then an upper bound. ``late_records`` came too late for the batch of their timestamps.

    ``required``: the stream's steps when the batch was first begun. ``steps``: those with which it completed; None
    before. A repetition changes neither, and adding an output to the stream does not reopen completed batches.
    ``abandoned_steps``: those that a person gave up, with the reasons.

    ``change`` counts the changes of the batch, its outputs and its replays. ``result`` is the change that its newest
    result file holds (``headrace.batch.results``), 0 if it has none. An absorbed time has no file of its own.
    """

    __tablename__ = "batches"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "batch_time_ms"),
        Index("ix_batches_state", "stream", "state", "batch_time_ms"),
    )

    stream: StreamName
    batch_time_ms: BigInt
    interval_ms: BigInt
    state: BatchState
    revision: int
    manifest_uri: str
    manifest_sha256: str
    _: KW_ONLY
    code_version: str | None = None
    blocks: int = 0
    records: BigInt = 0
    payload_bytes: BigInt = 0
    absorbed: tuple[int, ...] = ()
    absorbed_by_ms: BigInt | None = None
    attempt: int = 0
    allocated_at_ms: BigInt
    started_at_ms: BigInt | None = None
    completed_at_ms: BigInt | None = None
    checkpointed_at_ms: BigInt | None = None
    checkpoint_uri: str | None = None
    cleaned_at_ms: BigInt | None = None
    cleanup: Json | None = None
    error: ErrorText | None = None
    late_records: BigInt = 0
    built: bool = False
    required: tuple[str, ...] | None = None
    steps: tuple[str, ...] | None = None
    abandoned_steps: Json = field(default_factory=dict)
    change: int = 1
    result: int = 0

    @property
    def first_time_ms(self) -> int:
        """The first of the batch times whose blocks it has: the earliest that it absorbed, else its own."""
        return min((self.batch_time_ms, *self.absorbed))

    def filed(self, uri: str, now_ms: int) -> BatchRow:
        """The row as its result file at ``uri`` holds it: checkpointed, if the batch has completed."""
        if self.state is not BatchState.COMPLETED:
            return replace(self, result=self.change)
        return replace(self, result=self.change, checkpointed_at_ms=now_ms, checkpoint_uri=uri)

    def absorbs(self, batch_time_ms: int) -> BatchRow:
        """Return the row of a time that it absorbed, so that the time is not claimed again. The batch counts its
        blocks."""
        return BatchRow(
            stream=self.stream,
            batch_time_ms=batch_time_ms,
            interval_ms=self.interval_ms,
            state=BatchState.ABSORBED,
            revision=self.revision,
            manifest_uri=self.manifest_uri,
            manifest_sha256=self.manifest_sha256,
            allocated_at_ms=self.allocated_at_ms,
            absorbed_by_ms=self.batch_time_ms,
            cleaned_at_ms=self.cleaned_at_ms,
            change=0,
        )

    def needs(self, steps: Sequence[str]) -> tuple[str, ...]:
        """Return the steps that the batch needs to complete, in a stream that has ``steps`` now.

        These are the steps with which it completed before; otherwise those that the stream had when the batch was first
        begun, and those that it was begun with since. A step stays required if the stream loses it: nothing has written
        the batch there. Only a person can give it up.
        """
        fixed = self.required if self.steps is None else self.steps
        return tuple(step for step in (steps if fixed is None else fixed) if step not in self.abandoned_steps)


@dataclass(frozen=True, slots=True)
class EarlierBatch:
    """A batch time that an ordered stream must finish first. ``state`` None: it has blocks, and no batch.

    ``alive``: an attempt at it has a live lease.
    """

    batch_time_ms: int
    state: BatchState | None
    error: ErrorText | None
    alive: bool


@dataclass(frozen=True, slots=True)
class BatchOrigin:
    """The source of a batch's records: its manifest's blocks in the "log", or its ranges in "kafka".

    ``vanished`` are blocks of the manifest that the log has lost and that are not to be read (`Stream.delivery`).
    """

    batch_time_ms: int
    manifest_uri: str
    manifest_sha256: str
    source: str
    vanished: frozenset[BlockHandle] = frozenset()


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


class AttemptRow(Model):
    """One attempt at a batch, or at its replay (``target`` is not ""), running or ended.

    The attempts at a batch and at its replays share one number sequence. ``definition`` is that of the replay.
    """

    __tablename__ = "batch_attempts"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "batch_time_ms", "number"),
        batch_key(),
        Index("ix_batch_attempts_state", "stream", "state", "batch_time_ms"),
    )

    stream: str
    batch_time_ms: BigInt
    number: int
    holder: str
    way: str
    state: AttemptState
    outputs: tuple[str, ...]
    attributes: Json
    started_at_ms: BigInt
    lease_ms: BigInt
    lease_until_ms: BigInt
    heartbeat_ms: BigInt
    ended_at_ms: BigInt | None
    error: ErrorText | None
    source: str = "log"
    target: str = ""
    # `select_attempts` reads it from the replay's definitions.
    definition: Annotated[str | None, NO_COLUMN] = None
    code_version: str | None = None
    revision: int | None = None
    _replay_revision = Column("replay_revision", Integer)

    def alive(self, now_ms: int) -> bool:
        """Whether it runs and its lease is live at ``now_ms``."""
        return self.state is AttemptState.RUNNING and self.lease_until_ms > now_ms

    @property
    def run_id(self) -> str | None:
        """The Airflow run that made it; None if no run did."""
        run_id: str | None = self.attributes.get("run_id")
        return run_id

    def claim(self) -> Attempt:
        """Return the attempt's token, for another process of the same holder."""
        return Attempt(**{name: getattr(self, name) for name in Attempt.__dataclass_fields__})


class BatchInputRow(Model):
    """A batch's input from one partition: offsets ``[from_offset, until_offset)``, in ``blocks`` blocks."""

    __tablename__ = "batch_inputs"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "batch_time_ms", "input_id", "topic", "topic_id", "partition"),
        batch_key(),
        # An offset range ends in only one batch. The constraint's index also finds the batch of an offset.
        UniqueConstraint(
            "stream", "input_id", "topic", "topic_id", "partition", "until_offset", name="uq_batch_inputs_range"
        ),
    )

    stream: str
    batch_time_ms: BigInt
    input_id: str
    partition: TopicPartition = composite("topic", "topic_id", "partition", "incarnation")
    from_offset: BigInt
    until_offset: BigInt
    records: BigInt
    blocks: int


class BatchOutputRow(Model):
    """An output of an attempt, from the attempt's beginning. The newest row of an output and target counts.

    Callers get the results: ``state`` completed with ``counts`` (the output chooses their names), or failed with
    ``error``, at ``recorded_at_ms``.
    """

    __tablename__ = "batch_outputs"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "batch_time_ms", "attempt", "output_id"),
        batch_key(),
    )

    stream: str
    batch_time_ms: BigInt
    attempt: int
    output_id: str
    counts: Json
    # Without a value while the output is being written.
    recorded_at_ms: Annotated[BigInt, NULLABLE]
    state: AttemptState = AttemptState.COMPLETED
    error: ErrorText | None = None
    code_version: str | None = None
    target: str = ""


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """An output's record of success, and the ``revision`` of the definition that wrote it; None if that is lost."""

    counts: Json
    revision: int | None


class ReplayRow(Model):
    """The state of a batch in a replay: running, completed (each of ``outputs`` has a record of success), failed,
    allocated while some of ``outputs`` are still to be begun, or abandoned with the batch.

    ``revision`` is the replay definition's revision that the batch was last begun with. Outputs written with another
    revision do not count.
    """

    __tablename__ = "replays"
    # A range of batch times of a replay is one short read.
    __table_args__ = (
        PrimaryKeyConstraint("stream", "target", "batch_time_ms"),
        batch_key(),
    )

    stream: StreamName
    target: str
    batch_time_ms: BigInt
    state: BatchState
    attempt: int
    revision: int
    outputs: tuple[str, ...]
    code_version: str | None
    started_at_ms: BigInt
    completed_at_ms: BigInt | None
    error: ErrorText | None


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
    error: ErrorText | None
    recorded: Mapping[str, Json]

    @classmethod
    def of(cls, row: ReplayRow, recorded: Mapping[str, Json]) -> FiledReplay:
        """Return the replay's state in this row, with the counts of its recorded outputs."""
        names = (name for name in cls.__dataclass_fields__ if name != "recorded")
        return cls(**{name: getattr(row, name) for name in names}, recorded=recorded)


class ReplayDefinitionRow(Model):
    """A replay's definition: the stream with other outputs. Revision ``revision`` of the replay named ``target``."""

    __tablename__ = "replay_definitions"
    __table_args__ = (PrimaryKeyConstraint("stream", "target", "revision"),)

    _stream = Column("stream", Text, ForeignKey("streams.name"), nullable=False)
    target: str
    revision: int
    definition: str
    created_at_ms: BigInt


class RunBatchTime(Model):
    """The batch time of an Airflow run that has none of its own (a manual or asset-triggered run), or that takes over
    others. ``repeats``: the run repeats a batch for runs of its backfill whose times that batch took over."""

    __tablename__ = "batch_runs"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "run_id"),
        Index("ix_batch_runs_batch", "stream", "batch_time_ms"),
    )

    stream: StreamName
    run_id: str
    batch_time_ms: BigInt
    at_ms: BigInt
    repeats: bool = False


batches = BatchRow.__table__
batch_attempts = AttemptRow.__table__
batch_inputs = BatchInputRow.__table__
batch_outputs = BatchOutputRow.__table__
replays = ReplayRow.__table__
replay_definitions = ReplayDefinitionRow.__table__
batch_runs = RunBatchTime.__table__

# Finds uncleaned batches in order, however many were cleaned before them.
partial_index(
    "ix_batches_uncleaned",
    batches.c.stream,
    batches.c.batch_time_ms,
    where="cleaned_at_ms IS NULL",
)
partial_index(
    "ix_batches_changed",
    batches.c.stream,
    batches.c.batch_time_ms,
    where="result < change",
)
partial_index(
    "ix_batches_absorbed",
    batches.c.stream,
    batches.c.absorbed_by_ms,
    where="absorbed_by_ms IS NOT NULL",
)

# Only one attempt at a time writes an output of a batch, and each replay's copy of it.
partial_index(
    "uq_batch_outputs_running",
    batch_outputs.c.stream,
    batch_outputs.c.batch_time_ms,
    batch_outputs.c.target,
    batch_outputs.c.output_id,
    unique=True,
    where="state = 'running'",
)
