"""The tables of gaps and events."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, Table, Text, UniqueConstraint

from headrace.ledger.tables.columns import Document, RowId, metadata, stream_column

gaps = Table(
    "gaps",
    metadata,
    Column("gap_id", RowId, primary_key=True),
    stream_column(),
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
    stream_column(),
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
