"""The tables of gaps, events, samples, totals, and how far listeners have got the events."""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, Integer, PrimaryKeyConstraint, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, composite, mapped_column

from headrace.blocks import TopicPartition
from headrace.ledger.codec import Json
from headrace.ledger.models.base import BigInt, Model, RowId, StreamName, partial_index, table_of


class GapRow(Model):
    """Offsets that were given up, and why. ``batch_time_ms`` is set when a batch was abandoned."""

    __tablename__ = "gaps"
    __table_args__ = (
        UniqueConstraint("stream", "input_id", "topic", "topic_id", "partition", "from_offset", name="uq_gaps_range"),
        Index("ix_gaps_stream", "stream", "gap_id"),
        {"sqlite_autoincrement": True},
    )

    gap_id: Mapped[RowId]
    stream: Mapped[StreamName]
    input_id: Mapped[str]
    _topic = mapped_column("topic", Text, nullable=False)
    _topic_id = mapped_column("topic_id", Text, nullable=False)
    _partition = mapped_column("partition", Integer, nullable=False)
    _incarnation = mapped_column("incarnation", Integer, nullable=False)
    partition: Mapped[TopicPartition] = composite("_topic", "_topic_id", "_partition", "_incarnation")
    from_offset: Mapped[BigInt]
    until_offset: Mapped[BigInt]
    reason: Mapped[str]
    batch_time_ms: Mapped[BigInt | None]
    at_ms: Mapped[BigInt]


class EventRow(Model):
    """An event. Ids ascend in commit order within a stream, so reading with ``after_id`` never skips one.

    ``kind`` is an `EventKind`, or text written by a newer version.
    """

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_stream", "stream", "event_id"),
        Index("ix_events_kind", "stream", "kind", "event_id"),
        {"sqlite_autoincrement": True},
    )

    event_id: Mapped[RowId]
    stream: Mapped[StreamName]
    at_ms: Mapped[BigInt]
    kind: Mapped[str]
    batch_time_ms: Mapped[BigInt | None]
    # The block that the event reports, with whose row it is deleted.
    _block_id = mapped_column("block_id", BigInteger)
    payload: Mapped[Json] = mapped_column(default_factory=dict)


class SampleRow(Model):
    """What the receiver job saw of a stream at a moment. ``lag`` and ``lag_seconds`` are None if they are unknown."""

    __tablename__ = "samples"
    __table_args__ = (PrimaryKeyConstraint("stream", "at_ms"),)

    stream: Mapped[StreamName]
    at_ms: Mapped[BigInt]
    input_rate: Mapped[float]
    lag: Mapped[BigInt | None]
    lag_seconds: Mapped[float | None]
    queue_bytes: Mapped[BigInt]
    paused: Mapped[bool]
    log_bytes: Mapped[BigInt]


class TotalRow(Model):
    """A sum that only grows: what the stream, or one of its outputs (``output_id`` is not ""), has counted so far."""

    __tablename__ = "totals"
    __table_args__ = (PrimaryKeyConstraint("stream", "output_id", "name"),)

    stream: Mapped[StreamName]
    output_id: Mapped[str]
    name: Mapped[str]
    value: Mapped[float]


class ListenerCursorRow(Model):
    """A listener of a stream. It has got all events up to ``event_id``, except ``missed`` ones: these were deleted
    before. Events of blocks, which are deleted with their blocks, do not count as missed."""

    __tablename__ = "listener_cursors"
    __table_args__ = (PrimaryKeyConstraint("stream", "listener"),)

    stream: Mapped[StreamName]
    listener: Mapped[str]
    event_id: Mapped[BigInt]
    missed: Mapped[BigInt]
    updated_at_ms: Mapped[BigInt]


gaps = table_of(GapRow)
events = table_of(EventRow)
samples = table_of(SampleRow)
totals = table_of(TotalRow)
listener_cursors = table_of(ListenerCursorRow)

partial_index(
    "ix_events_batch",
    events.c.stream,
    events.c.batch_time_ms,
    where=events.c.batch_time_ms.is_not(None),
)
partial_index(
    "uq_events_block",
    events.c.block_id,
    unique=True,
    where=events.c.block_id.is_not(None),
)
# Events of blocks are far more than the others; most listeners do not read them.
partial_index(
    "ix_events_without_blocks",
    events.c.stream,
    events.c.event_id,
    where=events.c.block_id.is_(None),
)
