"""The schema of the first release."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import BigInteger, Boolean, Float, Integer, Text
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# The types are repeated here, since a migration does not change when the package's types do.
Document = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
RowId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
State = sa.String(16)


def column(name: str, kind: Any, *, nullable: bool = False, server_default: Any = None) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=nullable, server_default=server_default)


def columns(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [column(name, kind) for name in names]


def stream_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["stream"], ["streams.name"], name=f"fk_{table}_streams")


def batch_key(table: str) -> sa.ForeignKeyConstraint:
    there = ["batches.stream", "batches.batch_time_ms"]
    return sa.ForeignKeyConstraint(["stream", "batch_time_ms"], there, name=f"fk_{table}_batches")


def partial_index(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    rows = sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=rows, postgresql_where=rows)


def upgrade() -> None:
    op.create_table(
        "streams",
        *columns(Text, "name", "definition"),
        column("revision", Integer),
        *columns(BigInteger, "batch_interval_ms", "block_interval_ms"),
        column("outputs", Document),
        column("max_concurrent_batches", Integer),
        column("ordered", Boolean),
        *columns(BigInteger, "zero_time_ms", "sealed_until_ms"),
        column("desired_state", State),
        *columns(BigInteger, "job_epoch", "created_at_ms", "updated_at_ms"),
        column("batch_by", Text, server_default="arrival"),
        column("allowed_lateness_ms", BigInteger, server_default="0"),
        column("declared_at_ms", BigInteger, server_default="0"),
        column("removed_from_ms", BigInteger, server_default="0"),
        column("removed_until_ms", BigInteger, server_default="0"),
        column("removed_files_ms", BigInteger, server_default="0"),
        sa.PrimaryKeyConstraint("name", name="pk_streams"),
    )
    op.create_table(
        "stream_revisions",
        column("stream", Text),
        column("revision", Integer),
        *columns(Text, "digest", "definition"),
        *columns(BigInteger, "batch_interval_ms", "block_interval_ms"),
        column("outputs", Document),
        column("max_concurrent_batches", Integer),
        column("ordered", Boolean),
        column("batch_by", Text),
        *columns(BigInteger, "allowed_lateness_ms", "created_at_ms"),
        sa.PrimaryKeyConstraint("stream", "revision", name="pk_stream_revisions"),
        stream_key("stream_revisions"),
        sa.UniqueConstraint("stream", "digest", name="uq_stream_revisions_stream_digest"),
    )
    op.create_table(
        "receiver_jobs",
        column("stream", Text),
        column("epoch", BigInteger),
        column("holder", Text),
        column("state", State),
        *columns(BigInteger, "acquired_at_ms", "lease_ms", "lease_until_ms", "heartbeat_ms"),
        *columns(Document, "versions", "attributes"),
        column("stop_requested_at_ms", BigInteger, nullable=True),
        column("stop_reason", Text, nullable=True),
        column("ended_at_ms", BigInteger, nullable=True),
        column("error", Text, nullable=True),
        sa.PrimaryKeyConstraint("stream", "epoch", name="pk_receiver_jobs"),
        stream_key("receiver_jobs"),
    )
    op.create_table(
        "shared_jobs",
        column("name", Text),
        column("epoch", BigInteger),
        column("holder", Text),
        *columns(BigInteger, "acquired_at_ms", "lease_ms", "lease_until_ms"),
        column("attributes", Document),
        column("ended_at_ms", BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_shared_jobs"),
    )
    op.create_table(
        "segments",
        column("segment_id", RowId),
        *columns(Text, "stream", "path", "input_id"),
        column("receiver_index", Integer),
        *columns(BigInteger, "epoch", "opened_at_ms"),
        column("closed_at_ms", BigInteger, nullable=True),
        column("bytes", BigInteger, nullable=True),
        column("removing_at_ms", BigInteger, nullable=True),
        column("removed_at_ms", BigInteger, nullable=True),
        column("last_batch_time_ms", BigInteger, nullable=True),
        stream_key("segments"),
        sa.UniqueConstraint("stream", "path", name="uq_segments_stream_path"),
        sa.PrimaryKeyConstraint("segment_id", name="pk_segments"),
        sqlite_autoincrement=True,
    )
    partial_index(
        "ix_segments_closed", "segments", ["stream", "last_batch_time_ms", "segment_id"], "removed_at_ms IS NULL"
    )
    op.create_index("ix_segments_present", "segments", ["stream", "removed_at_ms", "segment_id"])
    partial_index(
        "ix_segments_removing",
        "segments",
        ["stream", "segment_id"],
        "removed_at_ms IS NULL AND removing_at_ms IS NOT NULL",
    )
    op.create_table(
        "receivers",
        *columns(Text, "stream", "input_id"),
        column("receiver_index", Integer),
        *columns(BigInteger, "epoch", "job_epoch"),
        column("state", State),
        column("host", Text, nullable=True),
        *columns(
            BigInteger,
            "registered_at_ms",
            "lease_ms",
            "lease_until_ms",
            "heartbeat_ms",
            "sealed_through_ms",
            "last_accepted_sequence",
        ),
        column("segment_id", BigInteger, nullable=True),
        column("stats", Document),
        column("last_error", Text, nullable=True),
        column("restarts", Integer),
        column("paused_reason", Text, nullable=True),
        column("max_rate", Float, nullable=True),
        column("received_blocks", BigInteger, server_default="0"),
        column("received_bytes", BigInteger, server_default="0"),
        column("earlier_totals", Document, server_default="{}"),
        column("executor_id", Text, nullable=True),
        column("last_error_at_ms", BigInteger, nullable=True),
        column("last_error_stack", Text, nullable=True),
        sa.PrimaryKeyConstraint("stream", "input_id", "receiver_index", name="pk_receivers"),
        sa.ForeignKeyConstraint(["segment_id"], ["segments.segment_id"], name="fk_receivers_segments"),
        stream_key("receivers"),
    )
    op.create_table(
        "topics",
        *columns(Text, "stream", "input_id", "topic", "topic_id"),
        *columns(Integer, "incarnation", "partitions", "first_partitions"),
        *columns(Boolean, "at_start", "current"),
        *columns(BigInteger, "first_seen_ms", "changed_at_ms"),
        sa.PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id", name="pk_topics"),
        stream_key("topics"),
        sa.UniqueConstraint(
            "stream", "input_id", "topic", "incarnation", name="uq_topics_stream_input_id_topic_incarnation"
        ),
    )
    op.create_table(
        "positions",
        *columns(Text, "stream", "input_id", "topic", "topic_id"),
        *columns(Integer, "partition", "incarnation"),
        *columns(BigInteger, "next_offset", "starting_offset"),
        column("receiver_index", Integer, nullable=True),
        column("wanted_receiver_index", Integer, nullable=True),
        column("last_batch_time_ms", BigInteger),
        column("state", State),
        column("error", Text, nullable=True),
        column("updated_at_ms", BigInteger),
        column("watermark_ms", BigInteger, server_default="0"),
        column("drained_ms", BigInteger, server_default="0"),
        column("leader_epoch", Integer, nullable=True),
        column("epoch_end_offset", BigInteger, nullable=True),
        column("removed_until_offset", BigInteger, nullable=True),
        column("received_records", BigInteger, server_default="0"),
        column("source_position", Text, nullable=True),
        sa.PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id", "partition", name="pk_positions"),
        sa.ForeignKeyConstraint(
            ["stream", "input_id", "topic", "topic_id"],
            ["topics.stream", "topics.input_id", "topics.topic", "topics.topic_id"],
            name="fk_positions_topics",
        ),
        stream_key("positions"),
    )
    partial_index(
        "ix_positions_live",
        "positions",
        ["stream", "input_id", "topic", "incarnation", "partition"],
        "state != 'ended'",
    )
    op.create_index("ix_positions_owner", "positions", ["stream", "input_id", "receiver_index"])
    op.create_table(
        "blocks",
        column("block_id", RowId),
        column("stream", Text),
        column("batch_time_ms", BigInteger),
        column("input_id", Text),
        column("receiver_index", Integer),
        *columns(
            BigInteger, "epoch", "sequence", "cut_time_ms", "added_at_ms", "segment_id", "frame_offset", "frame_length"
        ),
        column("ranges", Document),
        *columns(BigInteger, "records", "payload_bytes"),
        column("event_time_ms", BigInteger, nullable=True),
        sa.ForeignKeyConstraint(["segment_id"], ["segments.segment_id"], name="fk_blocks_segments"),
        stream_key("blocks"),
        sa.UniqueConstraint("segment_id", "frame_offset", name="uq_blocks_segment_id_frame_offset"),
        sa.UniqueConstraint(
            "stream",
            "input_id",
            "receiver_index",
            "epoch",
            "sequence",
            name="uq_blocks_stream_input_id_receiver_index_epoch_sequence",
        ),
        sa.PrimaryKeyConstraint("block_id", name="pk_blocks"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_blocks_batch", "blocks", ["stream", "batch_time_ms", "block_id"])
    op.create_table(
        "unclaimed_times",
        column("stream", Text),
        column("batch_time_ms", BigInteger),
        column("blocks", Integer),
        *columns(BigInteger, "records", "payload_bytes"),
        column("part", Integer),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", "part", name="pk_unclaimed_times"),
        stream_key("unclaimed_times"),
    )
    op.create_table(
        "batches",
        column("stream", Text),
        *columns(BigInteger, "batch_time_ms", "interval_ms"),
        column("state", State),
        column("revision", Integer),
        *columns(Text, "manifest_uri", "manifest_sha256"),
        column("code_version", Text, nullable=True),
        column("blocks", Integer),
        *columns(BigInteger, "records", "payload_bytes"),
        column("absorbed", Document),
        column("absorbed_by_ms", BigInteger, nullable=True),
        column("attempt", Integer),
        column("allocated_at_ms", BigInteger),
        column("started_at_ms", BigInteger, nullable=True),
        column("completed_at_ms", BigInteger, nullable=True),
        column("checkpointed_at_ms", BigInteger, nullable=True),
        column("checkpoint_uri", Text, nullable=True),
        column("cleaned_at_ms", BigInteger, nullable=True),
        column("cleanup", Document, nullable=True),
        column("error", Text, nullable=True),
        column("late_records", BigInteger, server_default="0"),
        column("built", Boolean, server_default=sa.false()),
        column("required", Document, nullable=True),
        column("steps", Document, nullable=True),
        column("abandoned_steps", Document),
        column("change", Integer, server_default="1"),
        column("result", Integer, server_default="0"),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", name="pk_batches"),
        stream_key("batches"),
    )
    partial_index("ix_batches_absorbed", "batches", ["stream", "absorbed_by_ms"], "absorbed_by_ms IS NOT NULL")
    partial_index("ix_batches_changed", "batches", ["stream", "batch_time_ms"], "result < change")
    op.create_index("ix_batches_state", "batches", ["stream", "state", "batch_time_ms"])
    partial_index("ix_batches_uncleaned", "batches", ["stream", "batch_time_ms"], "cleaned_at_ms IS NULL")
    op.create_table(
        "batch_attempts",
        column("stream", Text),
        column("batch_time_ms", BigInteger),
        column("number", Integer),
        *columns(Text, "holder", "way"),
        column("state", State),
        *columns(Document, "outputs", "attributes"),
        *columns(BigInteger, "started_at_ms", "lease_ms", "lease_until_ms", "heartbeat_ms"),
        column("ended_at_ms", BigInteger, nullable=True),
        column("error", Text, nullable=True),
        column("target", Text, server_default=""),
        column("source", Text, server_default="log"),
        column("replay_revision", Integer, nullable=True),
        column("code_version", Text, nullable=True),
        column("revision", Integer, nullable=True),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", "number", name="pk_batch_attempts"),
        batch_key("batch_attempts"),
    )
    op.create_index("ix_batch_attempts_state", "batch_attempts", ["stream", "state", "batch_time_ms"])
    op.create_table(
        "batch_inputs",
        column("stream", Text),
        column("batch_time_ms", BigInteger),
        *columns(Text, "input_id", "topic", "topic_id"),
        *columns(Integer, "partition", "incarnation"),
        *columns(BigInteger, "from_offset", "until_offset", "records"),
        column("blocks", Integer),
        sa.PrimaryKeyConstraint(
            "stream", "batch_time_ms", "input_id", "topic", "topic_id", "partition", name="pk_batch_inputs"
        ),
        batch_key("batch_inputs"),
        sa.UniqueConstraint(
            "stream", "input_id", "topic", "topic_id", "partition", "until_offset", name="uq_batch_inputs_range"
        ),
    )
    op.create_table(
        "batch_outputs",
        column("stream", Text),
        column("batch_time_ms", BigInteger),
        column("attempt", Integer),
        column("output_id", Text),
        column("counts", Document),
        column("recorded_at_ms", BigInteger, nullable=True),
        column("target", Text, server_default=""),
        column("state", State, server_default="completed"),
        column("error", Text, nullable=True),
        column("code_version", Text, nullable=True),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", "attempt", "output_id", name="pk_batch_outputs"),
        batch_key("batch_outputs"),
    )
    partial_index(
        "uq_batch_outputs_running",
        "batch_outputs",
        ["stream", "batch_time_ms", "target", "output_id"],
        "state = 'running'",
        unique=True,
    )
    op.create_table(
        "replay_definitions",
        *columns(Text, "stream", "target"),
        column("revision", Integer),
        column("definition", Text),
        column("created_at_ms", BigInteger),
        sa.PrimaryKeyConstraint("stream", "target", "revision", name="pk_replay_definitions"),
        stream_key("replay_definitions"),
    )
    op.create_table(
        "replays",
        *columns(Text, "stream", "target"),
        column("batch_time_ms", BigInteger),
        column("state", State),
        *columns(Integer, "attempt", "revision"),
        column("outputs", Document),
        column("code_version", Text, nullable=True),
        column("started_at_ms", BigInteger),
        column("completed_at_ms", BigInteger, nullable=True),
        column("error", Text, nullable=True),
        sa.PrimaryKeyConstraint("stream", "target", "batch_time_ms", name="pk_replays"),
        stream_key("replays"),
        batch_key("replays"),
    )
    op.create_table(
        "batch_runs",
        *columns(Text, "stream", "run_id"),
        *columns(BigInteger, "batch_time_ms", "at_ms"),
        column("repeats", Boolean, server_default=sa.false()),
        sa.PrimaryKeyConstraint("stream", "run_id", name="pk_batch_runs"),
        stream_key("batch_runs"),
    )
    op.create_index("ix_batch_runs_batch", "batch_runs", ["stream", "batch_time_ms"])
    op.create_table(
        "gaps",
        column("gap_id", RowId),
        *columns(Text, "stream", "input_id", "topic", "topic_id"),
        *columns(Integer, "partition", "incarnation"),
        *columns(BigInteger, "from_offset", "until_offset"),
        column("reason", Text),
        column("batch_time_ms", BigInteger, nullable=True),
        column("at_ms", BigInteger),
        stream_key("gaps"),
        sa.UniqueConstraint(
            "stream", "input_id", "topic", "topic_id", "partition", "from_offset", name="uq_gaps_range"
        ),
        sa.PrimaryKeyConstraint("gap_id", name="pk_gaps"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_gaps_stream", "gaps", ["stream", "gap_id"])
    op.create_table(
        "events",
        column("event_id", RowId),
        column("stream", Text),
        column("at_ms", BigInteger),
        column("kind", Text),
        column("batch_time_ms", BigInteger, nullable=True),
        column("block_id", BigInteger, nullable=True),
        column("payload", Document),
        stream_key("events"),
        sa.PrimaryKeyConstraint("event_id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    partial_index("ix_events_batch", "events", ["stream", "batch_time_ms"], "batch_time_ms IS NOT NULL")
    op.create_index("ix_events_kind", "events", ["stream", "kind", "event_id"])
    op.create_index("ix_events_stream", "events", ["stream", "event_id"])
    partial_index("uq_events_block", "events", ["block_id"], "block_id IS NOT NULL", unique=True)
    op.create_table(
        "samples",
        column("stream", Text),
        column("at_ms", BigInteger),
        column("input_rate", Float),
        column("lag", BigInteger, nullable=True),
        column("lag_seconds", Float, nullable=True),
        column("queue_bytes", BigInteger),
        column("paused", Boolean),
        column("log_bytes", BigInteger),
        sa.PrimaryKeyConstraint("stream", "at_ms", name="pk_samples"),
        stream_key("samples"),
    )
    op.create_table(
        "totals",
        *columns(Text, "stream", "output_id", "name"),
        column("value", Float),
        stream_key("totals"),
        sa.PrimaryKeyConstraint("stream", "output_id", "name", name="pk_totals"),
    )
    partial_index("ix_events_without_blocks", "events", ["stream", "event_id"], "block_id IS NULL")
    op.create_table(
        "listener_cursors",
        *columns(Text, "stream", "listener"),
        *columns(BigInteger, "event_id", "missed", "updated_at_ms"),
        sa.PrimaryKeyConstraint("stream", "listener", name="pk_listener_cursors"),
        stream_key("listener_cursors"),
    )
