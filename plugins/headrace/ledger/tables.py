"""The ledger's tables. Migrations build them; a test compares the two.

Every unique fact has a unique constraint, as the last line behind the checks made under the stream's lock. Times are
epoch milliseconds. Look-ups go by a primary key or an index named here, never by a scan: a ledger of a million
blocks answers like one of ten.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    and_,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

from headrace.ledger.states import (
    AttemptState,
    BatchState,
    DesiredState,
    JobState,
    PartitionState,
    ReceiverState,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Document = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
# SQLite numbers rows by itself only in a column that is exactly INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")


def _state(kind: type[StrEnum]) -> TypeEngine[Any]:
    """Text of 16 characters, read and written as ``kind``."""
    return Enum(
        kind, native_enum=False, length=16, validate_strings=True, values_callable=lambda e: [m.value for m in e]
    )


def _stream() -> Column[str]:
    return Column("stream", Text, ForeignKey("streams.name"), nullable=False)


streams = Table(
    "streams",
    metadata,
    Column("name", Text, primary_key=True),
    Column("definition", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("batch_interval_ms", BigInteger, nullable=False),
    Column("block_interval_ms", BigInteger, nullable=False),
    Column("outputs", Document, nullable=False),
    Column("max_concurrent_batches", Integer, nullable=False),
    Column("ordered", Boolean, nullable=False),
    Column("batch_by", Text, nullable=False),
    Column("allowed_lateness_ms", BigInteger, nullable=False),
    Column("zero_time_ms", BigInteger, nullable=False),
    Column("sealed_until_ms", BigInteger, nullable=False),
    Column("desired_state", _state(DesiredState), nullable=False),
    Column("job_epoch", BigInteger, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
)

receiver_jobs = Table(
    "receiver_jobs",
    metadata,
    _stream(),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("state", _state(JobState), nullable=False),
    Column("acquired_at_ms", BigInteger, nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
    Column("lease_until_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
    Column("versions", Document, nullable=False),
    Column("attributes", Document, nullable=False),
    Column("stop_requested_at_ms", BigInteger),
    Column("stop_reason", Text),
    Column("ended_at_ms", BigInteger),
    Column("error", Text),
    PrimaryKeyConstraint("stream", "epoch"),
)

segments = Table(
    "segments",
    metadata,
    Column("segment_id", RowId, primary_key=True),
    _stream(),
    Column("path", Text, nullable=False),
    Column("input_id", Text, nullable=False),
    Column("receiver_index", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("opened_at_ms", BigInteger, nullable=False),
    Column("closed_at_ms", BigInteger),
    Column("bytes", BigInteger),
    Column("removing_at_ms", BigInteger),
    Column("removed_at_ms", BigInteger),
    # Of its blocks when it was closed: what is newer than what may go need not be looked into.
    Column("last_batch_time_ms", BigInteger),
    UniqueConstraint("stream", "path"),
    # A segment's row outlives its file, so that its name is never used again; the files that exist are few.
    Index("ix_segments_present", "stream", "removed_at_ms", "segment_id"),
    sqlite_autoincrement=True,
)
Index(
    "ix_segments_closed",
    segments.c.stream,
    segments.c.last_batch_time_ms,
    segments.c.segment_id,
    sqlite_where=segments.c.removed_at_ms.is_(None),
    postgresql_where=segments.c.removed_at_ms.is_(None),
)
Index(
    "ix_segments_removing",
    segments.c.stream,
    segments.c.segment_id,
    sqlite_where=and_(segments.c.removed_at_ms.is_(None), segments.c.removing_at_ms.is_not(None)),
    postgresql_where=and_(segments.c.removed_at_ms.is_(None), segments.c.removing_at_ms.is_not(None)),
)

receivers = Table(
    "receivers",
    metadata,
    _stream(),
    Column("input_id", Text, nullable=False),
    Column("receiver_index", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("job_epoch", BigInteger, nullable=False),
    Column("state", _state(ReceiverState), nullable=False),
    Column("host", Text, nullable=False),
    Column("registered_at_ms", BigInteger, nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
    Column("lease_until_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
    Column("sealed_through_ms", BigInteger, nullable=False),
    Column("last_accepted_sequence", BigInteger, nullable=False),
    Column("segment_id", BigInteger, ForeignKey("segments.segment_id")),
    Column("stats", Document, nullable=False),
    Column("last_error", Text),
    Column("restarts", Integer, nullable=False),
    Column("stop_requested", Boolean, nullable=False),
    PrimaryKeyConstraint("stream", "input_id", "receiver_index"),
)

topics = Table(
    "topics",
    metadata,
    _stream(),
    Column("input_id", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("topic_id", Text, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("partitions", Integer, nullable=False),
    Column("first_partitions", Integer, nullable=False),
    Column("at_start", Boolean, nullable=False),
    Column("current", Boolean, nullable=False),
    Column("first_seen_ms", BigInteger, nullable=False),
    Column("changed_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id"),
    UniqueConstraint("stream", "input_id", "topic", "incarnation"),
)

positions = Table(
    "positions",
    metadata,
    _stream(),
    Column("input_id", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("topic_id", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("starting_offset", BigInteger, nullable=False),
    Column("receiver_index", Integer),
    Column("wanted_receiver_index", Integer),
    Column("last_batch_time_ms", BigInteger, nullable=False),
    Column("watermark_ms", BigInteger, nullable=False),
    Column("drained_ms", BigInteger, nullable=False),
    Column("state", _state(PartitionState), nullable=False),
    Column("error", Text),
    Column("updated_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id", "partition"),
    ForeignKeyConstraint(
        ["stream", "input_id", "topic", "topic_id"],
        ["topics.stream", "topics.input_id", "topics.topic", "topics.topic_id"],
    ),
    Index("ix_positions_owner", "stream", "input_id", "receiver_index"),
)

blocks = Table(
    "blocks",
    metadata,
    Column("block_id", RowId, primary_key=True),
    _stream(),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("input_id", Text, nullable=False),
    Column("receiver_index", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("cut_time_ms", BigInteger, nullable=False),
    Column("event_time_ms", BigInteger),
    Column("added_at_ms", BigInteger, nullable=False),
    Column("segment_id", BigInteger, ForeignKey("segments.segment_id"), nullable=False),
    Column("frame_offset", BigInteger, nullable=False),
    Column("frame_length", BigInteger, nullable=False),
    Column("ranges", Document, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    UniqueConstraint("stream", "input_id", "receiver_index", "epoch", "sequence"),
    UniqueConstraint("segment_id", "frame_offset"),
    Index("ix_blocks_batch", "stream", "batch_time_ms", "block_id"),
    sqlite_autoincrement=True,
)

# What no batch has claimed yet, so that nobody searches a million blocks for it: adds count here, allocation removes.
unclaimed_times = Table(
    "unclaimed_times",
    metadata,
    _stream(),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("blocks", Integer, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "batch_time_ms"),
)

batches = Table(
    "batches",
    metadata,
    _stream(),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("interval_ms", BigInteger, nullable=False),
    Column("state", _state(BatchState), nullable=False),
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
    Column("steps", Document),
    Column("allocated_at_ms", BigInteger, nullable=False),
    Column("started_at_ms", BigInteger),
    Column("completed_at_ms", BigInteger),
    Column("checkpointed_at_ms", BigInteger),
    Column("checkpoint_uri", Text),
    Column("cleaned_at_ms", BigInteger),
    Column("cleanup", Document),
    Column("error", Text),
    PrimaryKeyConstraint("stream", "batch_time_ms"),
    Index("ix_batches_state", "stream", "state", "batch_time_ms"),
    Index("ix_batches_cleaned", "stream", "cleaned_at_ms", "batch_time_ms"),
)
Index(
    "ix_batches_absorbed",
    batches.c.stream,
    batches.c.absorbed_by_ms,
    sqlite_where=batches.c.absorbed_by_ms.is_not(None),
    postgresql_where=batches.c.absorbed_by_ms.is_not(None),
)


def _batch() -> list[Any]:
    """The columns and the constraint that tie a row to its batch."""
    return [
        Column("stream", Text, nullable=False),
        Column("batch_time_ms", BigInteger, nullable=False),
        ForeignKeyConstraint(["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"]),
    ]


# Attempts at the batch itself have the target "", those of a replay the replay's name. They share their numbers.
batch_attempts = Table(
    "batch_attempts",
    metadata,
    *_batch(),
    Column("number", Integer, nullable=False),
    Column("target", Text, nullable=False),
    Column("holder", Text, nullable=False),
    Column("way", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("state", _state(AttemptState), nullable=False),
    Column("outputs", Document, nullable=False),
    Column("attributes", Document, nullable=False),
    Column("replay_revision", Integer),
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
    *_batch(),
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
    # An offset range ends in one batch only; also finds the batch of an offset.
    UniqueConstraint(
        "stream", "input_id", "topic", "topic_id", "partition", "until_offset", name="uq_batch_inputs_range"
    ),
)

# A row for every output that an attempt takes, from its beginning on; the newest of an output and target counts.
batch_outputs = Table(
    "batch_outputs",
    metadata,
    *_batch(),
    Column("attempt", Integer, nullable=False),
    Column("output_id", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("state", _state(AttemptState), nullable=False),
    Column("counts", Document, nullable=False),
    Column("recorded_at_ms", BigInteger),
    Column("error", Text),
    Column("code_version", Text),
    PrimaryKeyConstraint("stream", "batch_time_ms", "attempt", "output_id"),
)
# An output of a batch is written by one attempt at a time, and so is each replay's copy of it.
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

# What a replay's batches are run by: the stream's definition with other outputs, once for all of them.
replay_definitions = Table(
    "replay_definitions",
    metadata,
    _stream(),
    Column("target", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("definition", Text, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "target", "revision"),
)

# What became of each batch in a replay, so that a range of them is one short read.
replays = Table(
    "replays",
    metadata,
    _stream(),
    Column("target", Text, nullable=False),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("state", _state(BatchState), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outputs", Document, nullable=False),
    Column("code_version", Text),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("completed_at_ms", BigInteger),
    Column("error", Text),
    PrimaryKeyConstraint("stream", "target", "batch_time_ms"),
    ForeignKeyConstraint(["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"]),
)

# Which batch time a run of Airflow's is for that has none of its own (manual and asset-triggered runs).
batch_runs = Table(
    "batch_runs",
    metadata,
    _stream(),
    Column("run_id", Text, nullable=False),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "run_id"),
    Index("ix_batch_runs_batch", "stream", "batch_time_ms"),
)

gaps = Table(
    "gaps",
    metadata,
    Column("gap_id", RowId, primary_key=True),
    _stream(),
    Column("input_id", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("topic_id", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("from_offset", BigInteger, nullable=False),
    Column("until_offset", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("batch_time_ms", BigInteger),
    Column("at_ms", BigInteger, nullable=False),
    UniqueConstraint("stream", "input_id", "topic", "topic_id", "partition", "from_offset", name="uq_gaps_range"),
    Index("ix_gaps_stream", "stream", "gap_id"),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    Column("event_id", RowId, primary_key=True),
    _stream(),
    Column("at_ms", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("batch_time_ms", BigInteger),
    Column("block_id", BigInteger),
    Column("payload", Document, nullable=False),
    Index("ix_events_stream", "stream", "event_id"),
    Index("ix_events_kind", "stream", "kind", "event_id"),
    sqlite_autoincrement=True,
)
Index(
    "ix_events_batch",
    events.c.stream,
    events.c.batch_time_ms,
    sqlite_where=events.c.batch_time_ms.is_not(None),
    postgresql_where=events.c.batch_time_ms.is_not(None),
)
Index(
    "uq_events_block",
    events.c.block_id,
    unique=True,
    sqlite_where=events.c.block_id.is_not(None),
    postgresql_where=events.c.block_id.is_not(None),
)
