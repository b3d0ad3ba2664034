"""The tables of batches: attempts, inputs, outputs, replays, and the runs that batch times were assigned to."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

from headrace.ledger.states import AttemptState, BatchState
from headrace.ledger.tables.columns import Document, batch_columns, metadata, state_column, stream_column

batches = Table(
    "batches",
    metadata,
    stream_column(),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("interval_ms", BigInteger, nullable=False),
    Column("state", state_column(BatchState), nullable=False),
    Column("revision", Integer, nullable=False),
    Column("manifest_uri", Text, nullable=False),
    Column("manifest_sha256", Text, nullable=False),
    Column("code_version", Text),
    Column("blocks", Integer, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("late_records", BigInteger, nullable=False),
    Column("built", Boolean, nullable=False),
    Column("absorbed", Document, nullable=False),
    Column("absorbed_by_ms", BigInteger),
    Column("attempt", Integer, nullable=False),
    Column("required", Document),
    Column("steps", Document),
    Column("allocated_at_ms", BigInteger, nullable=False),
    Column("started_at_ms", BigInteger),
    Column("completed_at_ms", BigInteger),
    Column("checkpointed_at_ms", BigInteger),
    Column("checkpoint_uri", Text),
    Column("cleaned_at_ms", BigInteger),
    Column("cleanup", Document),
    Column("error", Text),
    # The number of the history file that holds the batch in its present state. 0: none, so every checkpoint holds it.
    # Below 0: it is being written into that file.
    Column("history", BigInteger, nullable=False, default=0),
    PrimaryKeyConstraint("stream", "batch_time_ms"),
    Index("ix_batches_state", "stream", "state", "batch_time_ms"),
)

# Finds uncleaned batches in order, however many were cleaned before them.
Index(
    "ix_batches_uncleaned",
    batches.c.stream,
    batches.c.batch_time_ms,
    sqlite_where=batches.c.cleaned_at_ms.is_(None),
    postgresql_where=batches.c.cleaned_at_ms.is_(None),
)
Index(
    "ix_batches_history",
    batches.c.stream,
    batches.c.batch_time_ms,
    sqlite_where=batches.c.history <= 0,
    postgresql_where=batches.c.history <= 0,
)
Index(
    "ix_batches_absorbed",
    batches.c.stream,
    batches.c.absorbed_by_ms,
    sqlite_where=batches.c.absorbed_by_ms.is_not(None),
    postgresql_where=batches.c.absorbed_by_ms.is_not(None),
)

# Attempts at the batch itself have the target "", those of a replay the replay's name. They share one number sequence.
batch_attempts = Table(
    "batch_attempts",
    metadata,
    *batch_columns(),
    Column("number", Integer, nullable=False),
    Column("target", Text, nullable=False),
    Column("holder", Text, nullable=False),
    Column("way", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("state", state_column(AttemptState), nullable=False),
    Column("outputs", Document, nullable=False),
    Column("attributes", Document, nullable=False),
    Column("replay_revision", Integer),
    Column("revision", Integer),
    Column("code_version", Text),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
    Column("lease_until_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
    Column("ended_at_ms", BigInteger),
    Column("error", Text),
    PrimaryKeyConstraint("stream", "batch_time_ms", "number"),
    Index("ix_batch_attempts_state", "stream", "state", "batch_time_ms"),
)

batch_inputs = Table(
    "batch_inputs",
    metadata,
    *batch_columns(),
    Column("input_id", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("topic_id", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("from_offset", BigInteger, nullable=False),
    Column("until_offset", BigInteger, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("blocks", Integer, nullable=False),
    PrimaryKeyConstraint("stream", "batch_time_ms", "input_id", "topic", "topic_id", "partition"),
    # An offset range ends in only one batch. The constraint's index also finds the batch of an offset.
    UniqueConstraint(
        "stream", "input_id", "topic", "topic_id", "partition", "until_offset", name="uq_batch_inputs_range"
    ),
)

# One row for every output of an attempt, from its beginning. The newest row of an output and target counts.
batch_outputs = Table(
    "batch_outputs",
    metadata,
    *batch_columns(),
    Column("attempt", Integer, nullable=False),
    Column("output_id", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("state", state_column(AttemptState), nullable=False),
    Column("counts", Document, nullable=False),
    Column("recorded_at_ms", BigInteger),
    Column("error", Text),
    Column("code_version", Text),
    PrimaryKeyConstraint("stream", "batch_time_ms", "attempt", "output_id"),
)

# Only one attempt at a time writes an output of a batch, and each replay's copy of it.
Index(
    "uq_batch_outputs_running",
    batch_outputs.c.stream,
    batch_outputs.c.batch_time_ms,
    batch_outputs.c.target,
    batch_outputs.c.output_id,
    unique=True,
    sqlite_where=batch_outputs.c.state == AttemptState.RUNNING,
    postgresql_where=batch_outputs.c.state == AttemptState.RUNNING,
)

# The definitions of replays: the stream's definition with other outputs, stored once for all batches.
replay_definitions = Table(
    "replay_definitions",
    metadata,
    stream_column(),
    Column("target", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("definition", Text, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "target", "revision"),
)

# The state of each batch in a replay, by the definition that it was last begun with. A range of them is one short read.
replays = Table(
    "replays",
    metadata,
    stream_column(),
    Column("target", Text, nullable=False),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("state", state_column(BatchState), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("outputs", Document, nullable=False),
    Column("code_version", Text),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("completed_at_ms", BigInteger),
    Column("error", Text),
    PrimaryKeyConstraint("stream", "target", "batch_time_ms"),
    ForeignKeyConstraint(["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"]),
)

# The batch times of Airflow runs that have none of their own (manual and asset-triggered runs).
batch_runs = Table(
    "batch_runs",
    metadata,
    stream_column(),
    Column("run_id", Text, nullable=False),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "run_id"),
    Index("ix_batch_runs_batch", "stream", "batch_time_ms"),
)
