"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Frozen here: a migration does not change when the package's types do.
Document = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
RowId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "streams",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("batch_interval_ms", sa.BigInteger(), nullable=False),
        sa.Column("block_interval_ms", sa.BigInteger(), nullable=False),
        sa.Column("outputs", Document, nullable=False),
        sa.Column("max_concurrent_batches", sa.Integer(), nullable=False),
        sa.Column("ordered", sa.Boolean(), nullable=False),
        sa.Column("zero_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("sealed_until_ms", sa.BigInteger(), nullable=False),
        sa.Column("desired_state", sa.String(16), nullable=False),
        sa.Column("job_epoch", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_streams"),
    )
    op.create_table(
        "batches",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("interval_ms", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("manifest_uri", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.Text(), nullable=False),
        sa.Column("code_version", sa.Text(), nullable=True),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("absorbed", Document, nullable=False),
        sa.Column("absorbed_by_ms", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("allocated_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("completed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("checkpointed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_uri", sa.Text(), nullable=True),
        sa.Column("cleaned_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("cleanup", Document, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_batches_streams"),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", name="pk_batches"),
    )
    op.create_index(
        "ix_batches_absorbed",
        "batches",
        ["stream", "absorbed_by_ms"],
        sqlite_where=sa.text("absorbed_by_ms IS NOT NULL"),
        postgresql_where=sa.text("absorbed_by_ms IS NOT NULL"),
    )
    op.create_index("ix_batches_cleaned", "batches", ["stream", "cleaned_at_ms", "batch_time_ms"])
    op.create_index("ix_batches_state", "batches", ["stream", "state", "batch_time_ms"])
    op.create_table(
        "events",
        sa.Column("event_id", RowId, nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=True),
        sa.Column("block_id", sa.BigInteger(), nullable=True),
        sa.Column("payload", Document, nullable=False),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_events_streams"),
        sa.PrimaryKeyConstraint("event_id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_events_batch",
        "events",
        ["stream", "batch_time_ms"],
        sqlite_where=sa.text("batch_time_ms IS NOT NULL"),
        postgresql_where=sa.text("batch_time_ms IS NOT NULL"),
    )
    op.create_index("ix_events_kind", "events", ["stream", "kind", "event_id"])
    op.create_index("ix_events_stream", "events", ["stream", "event_id"])
    op.create_index(
        "uq_events_block",
        "events",
        ["block_id"],
        unique=True,
        sqlite_where=sa.text("block_id IS NOT NULL"),
        postgresql_where=sa.text("block_id IS NOT NULL"),
    )
    op.create_table(
        "gaps",
        sa.Column("gap_id", RowId, nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("input_id", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("from_offset", sa.BigInteger(), nullable=False),
        sa.Column("until_offset", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_gaps_streams"),
        sa.PrimaryKeyConstraint("gap_id", name="pk_gaps"),
        sa.UniqueConstraint(
            "stream", "input_id", "topic", "topic_id", "partition", "from_offset", name="uq_gaps_range"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_gaps_stream", "gaps", ["stream", "gap_id"])
    op.create_table(
        "receiver_jobs",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("acquired_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("lease_ms", sa.BigInteger(), nullable=False),
        sa.Column("lease_until_ms", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_ms", sa.BigInteger(), nullable=False),
        sa.Column("versions", Document, nullable=False),
        sa.Column("attributes", Document, nullable=False),
        sa.Column("stop_requested_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_receiver_jobs_streams"),
        sa.PrimaryKeyConstraint("stream", "epoch", name="pk_receiver_jobs"),
    )
    op.create_table(
        "segments",
        sa.Column("segment_id", RowId, nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("input_id", sa.Text(), nullable=False),
        sa.Column("receiver_index", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("opened_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("closed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=True),
        sa.Column("removing_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("removed_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_segments_streams"),
        sa.PrimaryKeyConstraint("segment_id", name="pk_segments"),
        sa.UniqueConstraint("stream", "path", name="uq_segments_stream_path"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_segments_present", "segments", ["stream", "removed_at_ms", "segment_id"])
    op.create_table(
        "topics",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("input_id", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("partitions", sa.Integer(), nullable=False),
        sa.Column("first_partitions", sa.Integer(), nullable=False),
        sa.Column("at_start", sa.Boolean(), nullable=False),
        sa.Column("current", sa.Boolean(), nullable=False),
        sa.Column("first_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("changed_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_topics_streams"),
        sa.PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id", name="pk_topics"),
        sa.UniqueConstraint(
            "stream",
            "input_id",
            "topic",
            "incarnation",
            name="uq_topics_stream_input_id_topic_incarnation",
        ),
    )
    op.create_table(
        "unclaimed_times",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_unclaimed_times_streams"),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", name="pk_unclaimed_times"),
    )
    op.create_table(
        "batch_attempts",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("way", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outputs", Document, nullable=False),
        sa.Column("attributes", Document, nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("lease_ms", sa.BigInteger(), nullable=False),
        sa.Column("lease_until_ms", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["stream", "batch_time_ms"],
            ["batches.stream", "batches.batch_time_ms"],
            name="fk_batch_attempts_batches",
        ),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", "number", name="pk_batch_attempts"),
    )
    op.create_index("ix_batch_attempts_state", "batch_attempts", ["stream", "state", "batch_time_ms"])
    op.create_index(
        "uq_batch_attempts_running",
        "batch_attempts",
        ["stream", "batch_time_ms"],
        unique=True,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_table(
        "batch_inputs",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("input_id", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("from_offset", sa.BigInteger(), nullable=False),
        sa.Column("until_offset", sa.BigInteger(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["stream", "batch_time_ms"],
            ["batches.stream", "batches.batch_time_ms"],
            name="fk_batch_inputs_batches",
        ),
        sa.PrimaryKeyConstraint(
            "stream",
            "batch_time_ms",
            "input_id",
            "topic",
            "topic_id",
            "partition",
            name="pk_batch_inputs",
        ),
        sa.UniqueConstraint(
            "stream",
            "input_id",
            "topic",
            "topic_id",
            "partition",
            "until_offset",
            name="uq_batch_inputs_range",
        ),
    )
    op.create_table(
        "batch_outputs",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("output_id", sa.Text(), nullable=False),
        sa.Column("counts", Document, nullable=False),
        sa.Column("recorded_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["stream", "batch_time_ms"],
            ["batches.stream", "batches.batch_time_ms"],
            name="fk_batch_outputs_batches",
        ),
        sa.PrimaryKeyConstraint("stream", "batch_time_ms", "attempt", "output_id", name="pk_batch_outputs"),
    )
    op.create_table(
        "blocks",
        sa.Column("block_id", RowId, nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("input_id", sa.Text(), nullable=False),
        sa.Column("receiver_index", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("cut_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("added_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("segment_id", sa.BigInteger(), nullable=False),
        sa.Column("frame_offset", sa.BigInteger(), nullable=False),
        sa.Column("frame_length", sa.BigInteger(), nullable=False),
        sa.Column("ranges", Document, nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["segment_id"], ["segments.segment_id"], name="fk_blocks_segments"),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_blocks_streams"),
        sa.PrimaryKeyConstraint("block_id", name="pk_blocks"),
        sa.UniqueConstraint("segment_id", "frame_offset", name="uq_blocks_segment_id_frame_offset"),
        sa.UniqueConstraint(
            "stream",
            "input_id",
            "receiver_index",
            "epoch",
            "sequence",
            name="uq_blocks_stream_input_id_receiver_index_epoch_sequence",
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_blocks_batch", "blocks", ["stream", "batch_time_ms", "block_id"])
    op.create_table(
        "positions",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("input_id", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("next_offset", sa.BigInteger(), nullable=False),
        sa.Column("starting_offset", sa.BigInteger(), nullable=False),
        sa.Column("receiver_index", sa.Integer(), nullable=True),
        sa.Column("wanted_receiver_index", sa.Integer(), nullable=True),
        sa.Column("last_batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["stream", "input_id", "topic", "topic_id"],
            ["topics.stream", "topics.input_id", "topics.topic", "topics.topic_id"],
            name="fk_positions_topics",
        ),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_positions_streams"),
        sa.PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id", "partition", name="pk_positions"),
    )
    op.create_index("ix_positions_owner", "positions", ["stream", "input_id", "receiver_index"])
    op.create_table(
        "receivers",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("input_id", sa.Text(), nullable=False),
        sa.Column("receiver_index", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("job_epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("registered_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("lease_ms", sa.BigInteger(), nullable=False),
        sa.Column("lease_until_ms", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_ms", sa.BigInteger(), nullable=False),
        sa.Column("sealed_through_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_accepted_sequence", sa.BigInteger(), nullable=False),
        sa.Column("segment_id", sa.BigInteger(), nullable=True),
        sa.Column("stats", Document, nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("stop_requested", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["segment_id"], ["segments.segment_id"], name="fk_receivers_segments"),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_receivers_streams"),
        sa.PrimaryKeyConstraint("stream", "input_id", "receiver_index", name="pk_receivers"),
    )


def downgrade() -> None:
    for table in (
        "receivers",
        "positions",
        "blocks",
        "batch_outputs",
        "batch_inputs",
        "batch_attempts",
        "unclaimed_times",
        "topics",
        "segments",
        "receiver_jobs",
        "gaps",
        "events",
        "batches",
        "streams",
    ):
        op.drop_table(table)
