"""Batches, attempts, inputs, outputs and replays: the tables, and what callers get of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, composite, mapped_column

from headrace.blocks import BlockHandle, TopicPartition
from headrace.ledger.states import AttemptState, BatchState
from headrace.ledger.tables import BigInt, Json, Model, StreamName, batch_key, partial_index, table_of


class BatchRow(Model):
    """A batch. ``attempt`` is the number of its newest attempt, 0 before the first; ``code_version`` is that of the
    last attempt that completed.

    ``absorbed`` are the earlier batch times whose blocks it took over (coalescing), ``absorbed_by_ms`` the batch that
    took over this one's. ``built``: it has offset ranges found by timestamps in Kafka, and no blocks; its ``records``
    are then an upper bound. ``late_records`` came too late for the batch of their timestamps.

    ``required``: the stream's steps when the batch was first begun. ``steps``: those with which it completed; None
    before. A repetition changes neither, and adding an output to the stream does not reopen completed batches.
    ``abandoned_steps``: those that a person gave up, with the reasons.
    """

    __tablename__ = "batches"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "batch_time_ms"),
        Index("ix_batches_state", "stream", "state", "batch_time_ms"),
    )

    stream: Mapped[StreamName]
    batch_time_ms: Mapped[BigInt]
    interval_ms: Mapped[BigInt]
    state: Mapped[BatchState]
    revision: Mapped[int]
    manifest_uri: Mapped[str]
    manifest_sha256: Mapped[str]
    code_version: Mapped[str | None]
    blocks: Mapped[int]
    records: Mapped[BigInt]
    payload_bytes: Mapped[BigInt]
    absorbed: Mapped[tuple[int, ...]]
    absorbed_by_ms: Mapped[BigInt | None]
    attempt: Mapped[int]
    allocated_at_ms: Mapped[BigInt]
    started_at_ms: Mapped[BigInt | None]
    completed_at_ms: Mapped[BigInt | None]
    checkpointed_at_ms: Mapped[BigInt | None]
    checkpoint_uri: Mapped[str | None]
    cleaned_at_ms: Mapped[BigInt | None]
    cleanup: Mapped[Json | None]
    error: Mapped[str | None]
    late_records: Mapped[BigInt] = mapped_column(default=0)
    built: Mapped[bool] = mapped_column(default=False)
    required: Mapped[tuple[str, ...] | None] = mapped_column(default=None)
    steps: Mapped[tuple[str, ...] | None] = mapped_column(default=None)
    abandoned_steps: Mapped[Json] = mapped_column(default_factory=dict, insert_default=dict)
    # The number of the history file that holds the batch in its present state. 0: none, so every checkpoint holds it.
    # Below 0: it is being written into that file.
    _history = mapped_column("history", BigInteger, nullable=False, insert_default=0)

    @property
    def first_time_ms(self) -> int:
        """The first of the batch times whose blocks it has: the earliest that it absorbed, else its own."""
        return min((self.batch_time_ms, *self.absorbed))

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
    error: str | None
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

    stream: Mapped[str]
    batch_time_ms: Mapped[BigInt]
    number: Mapped[int]
    holder: Mapped[str]
    way: Mapped[str]
    state: Mapped[AttemptState]
    outputs: Mapped[tuple[str, ...]]
    attributes: Mapped[Json]
    started_at_ms: Mapped[BigInt]
    lease_ms: Mapped[BigInt]
    lease_until_ms: Mapped[BigInt]
    heartbeat_ms: Mapped[BigInt]
    ended_at_ms: Mapped[BigInt | None]
    error: Mapped[str | None]
    source: Mapped[str] = mapped_column(default="log")
    target: Mapped[str] = mapped_column(default="")
    # No column: `select_attempts` reads it from the replay's definitions.
    definition: str | None = None
    code_version: Mapped[str | None] = mapped_column(default=None)
    revision: Mapped[int | None] = mapped_column(default=None)
    _replay_revision = mapped_column("replay_revision", Integer)

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

    stream: Mapped[str]
    batch_time_ms: Mapped[BigInt]
    input_id: Mapped[str]
    _topic = mapped_column("topic", Text, nullable=False)
    _topic_id = mapped_column("topic_id", Text, nullable=False)
    _partition = mapped_column("partition", Integer, nullable=False)
    _incarnation = mapped_column("incarnation", Integer, nullable=False)
    partition: Mapped[TopicPartition] = composite("_topic", "_topic_id", "_partition", "_incarnation")
    from_offset: Mapped[BigInt]
    until_offset: Mapped[BigInt]
    records: Mapped[BigInt]
    blocks: Mapped[int]


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

    stream: Mapped[str]
    batch_time_ms: Mapped[BigInt]
    attempt: Mapped[int]
    output_id: Mapped[str]
    counts: Mapped[Json]
    # Without a value while the output is being written.
    recorded_at_ms: Mapped[BigInt] = mapped_column(nullable=True)
    state: Mapped[AttemptState] = mapped_column(default=AttemptState.COMPLETED)
    error: Mapped[str | None] = mapped_column(default=None)
    code_version: Mapped[str | None] = mapped_column(default=None)
    target: Mapped[str] = mapped_column(default="")


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

    stream: Mapped[StreamName]
    target: Mapped[str]
    batch_time_ms: Mapped[BigInt]
    state: Mapped[BatchState]
    attempt: Mapped[int]
    revision: Mapped[int]
    outputs: Mapped[tuple[str, ...]]
    code_version: Mapped[str | None]
    started_at_ms: Mapped[BigInt]
    completed_at_ms: Mapped[BigInt | None]
    error: Mapped[str | None]


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

    @classmethod
    def of(cls, row: ReplayRow, recorded: Mapping[str, Json]) -> FiledReplay:
        """Return the replay's state in this row, with the counts of its recorded outputs."""
        names = (name for name in cls.__dataclass_fields__ if name != "recorded")
        return cls(**{name: getattr(row, name) for name in names}, recorded=recorded)


class ReplayDefinitionRow(Model):
    """A replay's definition: the stream with other outputs. Revision ``revision`` of the replay named ``target``."""

    __tablename__ = "replay_definitions"
    __table_args__ = (PrimaryKeyConstraint("stream", "target", "revision"),)

    _stream = mapped_column("stream", Text, ForeignKey("streams.name"), nullable=False)
    target: Mapped[str]
    revision: Mapped[int]
    definition: Mapped[str]
    created_at_ms: Mapped[BigInt]


class RunBatchTime(Model):
    """The batch time of an Airflow run that has none of its own (a manual or asset-triggered run), or that takes over
    others. ``repeats``: the run repeats a batch for runs of its backfill whose times that batch took over."""

    __tablename__ = "batch_runs"
    __table_args__ = (
        PrimaryKeyConstraint("stream", "run_id"),
        Index("ix_batch_runs_batch", "stream", "batch_time_ms"),
    )

    stream: Mapped[StreamName]
    run_id: Mapped[str]
    batch_time_ms: Mapped[BigInt]
    at_ms: Mapped[BigInt]
    repeats: Mapped[bool] = mapped_column(default=False)


batches = table_of(BatchRow)
batch_attempts = table_of(AttemptRow)
batch_inputs = table_of(BatchInputRow)
batch_outputs = table_of(BatchOutputRow)
replays = table_of(ReplayRow)
replay_definitions = table_of(ReplayDefinitionRow)
batch_runs = table_of(RunBatchTime)

# Finds uncleaned batches in order, however many were cleaned before them.
partial_index(
    "ix_batches_uncleaned",
    batches.c.stream,
    batches.c.batch_time_ms,
    where=batches.c.cleaned_at_ms.is_(None),
)
partial_index(
    "ix_batches_history",
    batches.c.stream,
    batches.c.batch_time_ms,
    where=batches.c.history <= 0,
)
partial_index(
    "ix_batches_absorbed",
    batches.c.stream,
    batches.c.absorbed_by_ms,
    where=batches.c.absorbed_by_ms.is_not(None),
)

# Only one attempt at a time writes an output of a batch, and each replay's copy of it.
partial_index(
    "uq_batch_outputs_running",
    batch_outputs.c.stream,
    batch_outputs.c.batch_time_ms,
    batch_outputs.c.target,
    batch_outputs.c.output_id,
    unique=True,
    where=batch_outputs.c.state == AttemptState.RUNNING,
)
