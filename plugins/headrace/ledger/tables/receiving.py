"""The tables of receiving: topics, positions, receivers, segments, blocks and unclaimed batch times."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    and_,
    literal,
    text,
)

from headrace.ledger.states import PartitionState, ReceiverState
from headrace.ledger.tables.columns import Document, RowId, metadata, state_column, stream_column

segments = Table(
    "segments",
    metadata,
    Column("segment_id", RowId, primary_key=True),
    stream_column(),
    Column("path", Text, nullable=False),
    Column("input_id", Text, nullable=False),
    Column("receiver_index", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("opened_at_ms", BigInteger, nullable=False),
    Column("closed_at_ms", BigInteger),
    Column("bytes", BigInteger),
    Column("removing_at_ms", BigInteger),
    Column("removed_at_ms", BigInteger),
    # The latest batch time of its blocks when it was closed. Cleanup skips segments that are too new by it.
    Column("last_batch_time_ms", BigInteger),
    UniqueConstraint("stream", "path"),
    # A segment's row outlives its file, so that its name is never used again; this index finds the few that exist.
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
    stream_column(),
    Column("input_id", Text, nullable=False),
    Column("receiver_index", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("job_epoch", BigInteger, nullable=False),
    Column("state", state_column(ReceiverState), nullable=False),
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
    Column("paused_reason", Text),
    Column("max_rate", Float),
    PrimaryKeyConstraint("stream", "input_id", "receiver_index"),
)

topics = Table(
    "topics",
    metadata,
    stream_column(),
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
    stream_column(),
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
    Column("leader_epoch", Integer),
    Column("epoch_end_offset", BigInteger),
    # Offsets up to this one belonged to batches that are removed.
    Column("removed_until_offset", BigInteger),
    Column("state", state_column(PartitionState), nullable=False),
    Column("error", Text),
    Column("updated_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "input_id", "topic", "topic_id", "partition"),
    ForeignKeyConstraint(
        ["stream", "input_id", "topic", "topic_id"],
        ["topics.stream", "topics.input_id", "topics.topic", "topics.topic_id"],
    ),
    Index("ix_positions_owner", "stream", "input_id", "receiver_index"),
)

# The tracker reads live positions twice a second; the index skips ended topics, of which there may be many.
LIVE = positions.c.state != literal(PartitionState.ENDED, positions.c.state.type, literal_execute=True)
Index(
    "ix_positions_live",
    positions.c.stream,
    positions.c.input_id,
    positions.c.topic,
    positions.c.incarnation,
    positions.c.partition,
    sqlite_where=text("state != 'ended'"),
    postgresql_where=text("state != 'ended'"),
)

blocks = Table(
    "blocks",
    metadata,
    Column("block_id", RowId, primary_key=True),
    stream_column(),
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

# Sums of the blocks that no batch has claimed, so that nobody searches a million blocks. Adding a block updates them;
# allocation deletes them.
unclaimed_times = Table(
    "unclaimed_times",
    metadata,
    stream_column(),
    Column("batch_time_ms", BigInteger, nullable=False),
    Column("blocks", Integer, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "batch_time_ms"),
)
