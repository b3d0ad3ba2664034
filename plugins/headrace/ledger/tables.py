"""The ledger's tables of streams, jobs and history, and what all tables are made of; see also `receiving_tables`,
`batch_tables`.

A row's class is its table (`Model`): a mapped dataclass, so a column is written down once. Times are epoch milliseconds
(``_ms``). The classes define the tables and the values that the ledger hands out. No ORM session loads them: a
session's identity map would hand out one object for one row and change it when the row changes, but a row that was
handed out is a value. `Model.from_row` builds it from a row of a Core statement.

Every unique fact has a unique constraint, in addition to the checks made under the stream's lock. Look-ups use a
primary key or an index named here, never a scan, so a ledger with a million blocks answers as fast as one with ten.

Leases and attempts are tokens: the holder passes them back to the ledger. They can be pickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Self, cast

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Enum,
    Executable,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Row,
    Table,
    Text,
    TextClause,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import ClassManager, DeclarativeBase, Mapped, MappedAsDataclass, composite, mapped_column
from sqlalchemy.types import TypeEngine

from headrace.blocks import OffsetRange, TopicPartition
from headrace.ledger.states import AttemptState, BatchState, DesiredState, JobState, PartitionState, ReceiverState

Json = dict[str, Any]

_REPLACEMENT = "\ufffd"
# In JSON: after an even number of backslashes, which stand for half as many, the next one begins an escape.
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def without_nul(text: str) -> str:
    """Return the text with each NUL character replaced: Postgres refuses them, and texts of errors may quote any
    data."""
    return text.replace("\0", _REPLACEMENT)


def dump_json(value: Any) -> str:
    """Return JSON without spaces, and without NUL characters (`without_nul`)."""
    dumped = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return _ESCAPED_NUL.sub(rf"\1{_REPLACEMENT}", dumped) if r"\u0000" in dumped else dumped


def dump_ranges(ranges: Iterable[OffsetRange]) -> list[list[Any]]:
    """Return each range as [topic, topic id, partition, incarnation, from, until, records, leader epoch if known]."""
    return [
        [
            r.partition.topic,
            r.partition.topic_id,
            r.partition.partition,
            r.partition.incarnation,
            *r.numbers,
        ]
        for r in ranges
    ]


def load_ranges(value: Iterable[list[Any]]) -> tuple[OffsetRange, ...]:
    """The reverse of `dump_ranges`."""
    return tuple(
        OffsetRange(TopicPartition(topic, topic_id, partition, incarnation), *numbers)
        for topic, topic_id, partition, incarnation, *numbers in value
    )


def partition_of(row: Any) -> TopicPartition:
    """Return the partition from a row's columns."""
    return TopicPartition(row.topic, row.topic_id, row.partition, row.incarnation)


def partition_key(partition: TopicPartition) -> dict[str, Any]:
    """Return the columns that identify a partition, without its incarnation."""
    return {"topic": partition.topic, "topic_id": partition.topic_id, "partition": partition.partition}


BigInt = Annotated[int, mapped_column(BigInteger)]
StreamName = Annotated[str, mapped_column(ForeignKey("streams.name"))]
# SQLite generates row numbers only in a column whose type is exactly INTEGER.
RowId = Annotated[int, mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)]

Document = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class StorableText(TypeDecorator[str]):
    """Text. NUL characters in bound values are replaced, so that a text that quotes one is stored on Postgres too."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        return None if value is None else without_nul(value)


class _DocumentType(TypeDecorator[Any]):
    """A column of JSON whose values have another type in Python."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(JSONB(none_as_null=True) if dialect.name == "postgresql" else self._json)

    _json = JSON(none_as_null=True)


class TupleDocument(_DocumentType):
    """A JSON array, read as a tuple."""

    cache_ok = True

    def process_result_value(self, value: list[Any] | None, _dialect: Dialect) -> tuple[Any, ...] | None:
        return None if value is None else tuple(value)


class RangesDocument(_DocumentType):
    """Offset ranges as a JSON array of short arrays (`dump_ranges`)."""

    cache_ok = True

    def process_bind_param(self, value: Iterable[OffsetRange] | None, _dialect: Dialect) -> list[list[Any]] | None:
        return None if value is None else dump_ranges(value)

    def process_result_value(self, value: list[Any] | None, _dialect: Dialect) -> tuple[OffsetRange, ...] | None:
        return None if value is None else load_ranges(value)


def _state_type(kind: type[StrEnum]) -> Enum:
    """Return the type of a column of states: text of up to 16 characters, read and written as ``kind``."""
    return Enum(
        kind, native_enum=False, length=16, validate_strings=True, values_callable=lambda e: [m.value for m in e]
    )


class Model(MappedAsDataclass, DeclarativeBase):
    """A table of the ledger, and the type of its rows. Do not change a row: it is a value.

    A column without ``Mapped`` is no field: callers do not see it.
    """

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: StorableText(),
        float: Float,
        Json: Document,
        tuple[str, ...]: TupleDocument(),
        tuple[int, ...]: TupleDocument(),
        tuple[OffsetRange, ...]: RangesDocument(),
        **{
            kind: _state_type(kind)
            for kind in (AttemptState, BatchState, DesiredState, JobState, PartitionState, ReceiverState)
        },
    }

    @classmethod
    def from_row(cls, row: Row[Any]) -> Self:
        """Return the value of a row that has all columns of the table, and all fields that are not columns."""
        manager, names, composites = _shape(cls)
        columns = dict(zip(row._fields, row, strict=True))
        # As SQLAlchemy's own loader does: the constructor sets each attribute by its descriptor, which is 15 times as
        # slow.
        instance = manager.new_instance()
        values = instance.__dict__
        for name in names:
            values[name] = columns[name]
        for name, kind, parts in composites:
            values[name] = kind(*[columns[part] for part in parts])
        return cast("Self", instance)

    @classmethod
    def rows(cls, connection: Connection, query: Executable) -> list[Self]:
        """Return the values of all rows of the query."""
        return [cls.from_row(row) for row in connection.execute(query)]

    @classmethod
    def row(cls, connection: Connection, query: Executable) -> Self | None:
        """Return the value of the query's only row; None if it has none."""
        row = connection.execute(query).one_or_none()
        return None if row is None else cls.from_row(row)

    def to_columns(self) -> dict[str, Any]:
        """Return the values of the table's columns, except those that are no fields."""
        cls = type(self)
        _, names, composites = _shape(cls)
        there = cls.__table__.c
        values = {name: getattr(self, name) for name in names if name in there}
        for name, kind, parts in composites:
            value = getattr(self, name)
            values |= {
                part: getattr(value, field) for part, field in zip(parts, kind.__dataclass_fields__, strict=True)
            }
        return values


_Composite = tuple[str, Any, tuple[str, ...]]


@cache
def _shape(cls: type[Model]) -> tuple[ClassManager[Any], tuple[str, ...], tuple[_Composite, ...]]:
    """Return the class manager, the fields that a row has by their names, and the composites with their columns."""
    mapper = cls.__mapper__
    composites = tuple(
        (mapped.key, mapped.composite_class, tuple(prop.columns[0].name for prop in mapped.props))
        for mapped in mapper.composites
    )
    left_out = {name for name, _, _ in composites}
    names = tuple(field.name for field in fields(cls) if field.name not in left_out)
    return mapper.class_manager, names, composites


def batch_key() -> ForeignKeyConstraint:
    """Return the foreign key of a row to its batch."""
    return ForeignKeyConstraint(["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"])


def table_of(model: type[Model]) -> Table:
    """Return the table of a model, for Core statements."""
    return cast("Table", model.__table__)


def partial_index(
    name: str, *columns: Column[Any], where: ColumnElement[bool] | TextClause, unique: bool = False
) -> Index:
    """Add an index of the rows for which ``where`` is true, on SQLite and Postgres."""
    return Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


class StreamRow(Model):
    """A registered stream. No block joins a batch time up to ``sealed_until_ms`` any more.

    ``ordered`` streams run one batch at a time, in batch-time order. ``job_epoch`` is that of the newest receiver job,
    0 before the first. ``batch_by`` is "arrival" or "timestamp". ``revision`` numbers the definitions that the stream
    has had; ``declared_at_ms`` is the time of this definition's source (its DAG version), 0 if unknown.

    Batch times from ``removed_from_ms`` to ``removed_until_ms`` (0: none) were removed, their files up to
    ``removed_files_ms``. History files from number ``history_from`` on are still needed.
    """

    __tablename__ = "streams"

    name: Mapped[str] = mapped_column(primary_key=True)
    definition: Mapped[str]
    revision: Mapped[int]
    batch_interval_ms: Mapped[BigInt]
    block_interval_ms: Mapped[BigInt]
    outputs: Mapped[tuple[str, ...]]
    max_concurrent_batches: Mapped[int]
    ordered: Mapped[bool]
    zero_time_ms: Mapped[BigInt]
    sealed_until_ms: Mapped[BigInt]
    desired_state: Mapped[DesiredState]
    job_epoch: Mapped[BigInt]
    created_at_ms: Mapped[BigInt]
    updated_at_ms: Mapped[BigInt]
    batch_by: Mapped[str] = mapped_column(default="arrival")
    allowed_lateness_ms: Mapped[BigInt] = mapped_column(default=0)
    declared_at_ms: Mapped[BigInt] = mapped_column(default=0)
    removed_from_ms: Mapped[BigInt] = mapped_column(default=0)
    removed_until_ms: Mapped[BigInt] = mapped_column(default=0)
    removed_files_ms: Mapped[BigInt] = mapped_column(default=0)
    history_from: Mapped[BigInt] = mapped_column(default=0)

    @property
    def id_of_step(self) -> dict[str, str]:
        """The ids that the definition gives to its outputs, by their steps. They differ if an output was renamed."""
        return id_of_step(json.loads(self.definition))

    def step_of(self, output_id: str) -> str:
        """Return the step of the output with this id; an id that the definition does not have is its own step."""
        return next((step for step, known in self.id_of_step.items() if known == output_id), output_id)

    def has_removed(self, batch_time_ms: int) -> bool:
        """Whether the batch time was removed: its contents are no longer known."""
        return self.removed_from_ms <= batch_time_ms <= self.removed_until_ms

    def batch_time_after(self, time_ms: int) -> int:
        """Return the first interval end after ``time_ms``; interval ends are multiples of the batch interval."""
        return (time_ms // self.batch_interval_ms + 1) * self.batch_interval_ms


def id_of_step(definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the ids of a definition's outputs by their steps: the first id that each output had."""
    outputs = definition.get("outputs") or ()
    return {output.get("renamed_from") or output["id"]: output["id"] for output in outputs}


@dataclass(frozen=True, slots=True)
class Declared:
    """The content of a registration: the definition as JSON text, and the fields that the ledger itself uses."""

    definition: str
    batch_interval_ms: int
    block_interval_ms: int
    outputs: tuple[str, ...]
    max_concurrent_batches: int
    ordered: bool
    batch_by: str
    allowed_lateness_ms: int

    @classmethod
    def of(cls, row: Any) -> Declared:
        """Return the content of a row of ``streams`` or ``stream_revisions``."""
        return Declared(**{field.name: getattr(row, field.name) for field in fields(Declared)})

    def columns(self) -> dict[str, Any]:
        """Return its columns, which both tables have."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """The hash of the content, by which the same content is found again."""
        return hashlib.sha256(dump_json(self.columns()).encode()).hexdigest()


class StreamRevision(Model):
    """A definition that the stream has had, with its revision number, which attempts and jobs refer to.

    The newest definition is also in the columns of ``streams``.
    """

    __tablename__ = "stream_revisions"
    __table_args__ = (PrimaryKeyConstraint("stream", "revision"), UniqueConstraint("stream", "digest"))

    _stream = mapped_column("stream", Text, ForeignKey("streams.name"), nullable=False)
    _digest = mapped_column("digest", Text, nullable=False)
    definition: Mapped[str]
    batch_interval_ms: Mapped[BigInt]
    block_interval_ms: Mapped[BigInt]
    outputs: Mapped[tuple[str, ...]]
    max_concurrent_batches: Mapped[int]
    ordered: Mapped[bool]
    batch_by: Mapped[str]
    allowed_lateness_ms: Mapped[BigInt]
    revision: Mapped[int]
    created_at_ms: Mapped[BigInt]


@dataclass(frozen=True, slots=True)
class JobLease:
    """The receiver job's lease on a stream. ``lease_until_ms`` is its end when created; renewals do not change it."""

    stream: str
    epoch: int
    holder: str
    lease_ms: int
    lease_until_ms: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The answer to a renewal of the job's lease."""

    stop_requested: bool
    stop_reason: str | None
    lease_until_ms: int
    now_ms: int


class JobRow(Model):
    """One receiver job, live or ended."""

    __tablename__ = "receiver_jobs"
    __table_args__ = (PrimaryKeyConstraint("stream", "epoch"),)

    stream: Mapped[StreamName]
    epoch: Mapped[BigInt]
    holder: Mapped[str]
    state: Mapped[JobState]
    acquired_at_ms: Mapped[BigInt]
    lease_ms: Mapped[BigInt]
    lease_until_ms: Mapped[BigInt]
    heartbeat_ms: Mapped[BigInt]
    versions: Mapped[Json]
    attributes: Mapped[Json]
    stop_requested_at_ms: Mapped[BigInt | None]
    stop_reason: Mapped[str | None]
    ended_at_ms: Mapped[BigInt | None]
    error: Mapped[str | None]

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return not self.state.ended and self.lease_until_ms > now_ms


class SharedJobRow(Model):
    """The process that runs the receiver jobs of several streams, live or ended: the newest one of each name."""

    __tablename__ = "shared_jobs"

    name: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[BigInt]
    holder: Mapped[str]
    acquired_at_ms: Mapped[BigInt]
    lease_ms: Mapped[BigInt]
    lease_until_ms: Mapped[BigInt]
    attributes: Mapped[Json]
    ended_at_ms: Mapped[BigInt | None]

    def alive(self, now_ms: int) -> bool:
        """Whether its lease is live at ``now_ms`` and it has not ended."""
        return self.ended_at_ms is None and self.lease_until_ms > now_ms


streams = table_of(StreamRow)
stream_revisions = table_of(StreamRevision)
receiver_jobs = table_of(JobRow)
shared_jobs = table_of(SharedJobRow)


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
    """An event. Ids ascend within a stream, and reading with ``after_id`` never skips one (`Events.page`).

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
