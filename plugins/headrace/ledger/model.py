"""What the ledger's tables are made of: `Model`, the types of columns, and how values are stored.

A row's class is its table: a dataclass, from whose fields the table is made, so a column is written down once. There is
no ORM: its session would hand out one object for one row and change it when the row changes, but a row that was handed
out is a value. Also, SQLAlchemy's mapper would take a fifth of the time in which a process opens a ledger, as most of
Airflow's tasks do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, dataclass_transform, get_args, get_origin, get_type_hints

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
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
    Row,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.types import TypeEngine

from headrace.blocks import OffsetRange, TopicPartition
from headrace.secrets import without_secrets

Json = dict[str, Any]

_REPLACEMENT = "\ufffd"
_SURROGATES = re.compile("[\ud800-\udfff]")
# In JSON: after an even number of backslashes, which stand for half as many, the next one begins an escape.
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def storable(text: str) -> str:
    """Return the text with each NUL character and each lone surrogate replaced. Postgres refuses the former, UTF-8 has
    no form of the latter, and texts of errors may quote any data: a value of JSON, the name of a file."""
    text = text.replace("\0", _REPLACEMENT)
    return text if text.isascii() else _SURROGATES.sub(_REPLACEMENT, text)


def dump_json(value: Any) -> str:
    """Return JSON without spaces, whose texts are `storable`."""
    dumped = storable(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
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


class StorableText(TypeDecorator[str]):
    """Text. Bound values are made `storable`."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


def error_text(text: str) -> str:
    """Return the text of an error as it is stored: `storable`, with the secrets in it hidden."""
    return storable(without_secrets(text))


class ForeignText(TypeDecorator[str]):
    """Text of an error, or of a person. Bound values become `error_text`."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        return None if value is None else error_text(value)


class Document(TypeDecorator[Any]):
    """A column of JSON: JSONB on Postgres, whose dialect is imported only there. None is NULL."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name != "postgresql":
            return dialect.type_descriptor(self._json)
        from sqlalchemy.dialects.postgresql import JSONB

        return dialect.type_descriptor(JSONB(none_as_null=True))

    _json = JSON(none_as_null=True)


class TupleDocument(Document):
    """A JSON array, read as a tuple."""

    cache_ok = True

    def process_result_value(self, value: list[Any] | None, _dialect: Dialect) -> tuple[Any, ...] | None:
        return None if value is None else tuple(value)


class RangesDocument(Document):
    """Offset ranges as a JSON array of short arrays (`dump_ranges`)."""

    cache_ok = True

    def process_bind_param(self, value: Iterable[OffsetRange] | None, _dialect: Dialect) -> list[list[Any]] | None:
        return None if value is None else dump_ranges(value)

    def process_result_value(self, value: list[Any] | None, _dialect: Dialect) -> tuple[OffsetRange, ...] | None:
        return None if value is None else load_ranges(value)


BigInt = Annotated[int, BigInteger()]
ErrorText = Annotated[str, ForeignText()]
StreamName = Annotated[str, ForeignKey("streams.name")]
PRIMARY_KEY = "primary key"
"""Annotates a field whose column alone is the table's primary key."""
# SQLite generates row numbers only in a column whose type is exactly INTEGER. The migration declares those of blocks,
# segments, gaps and events AUTOINCREMENT, so that none is used twice. Said here too, it would import SQLite's dialect,
# for a thirtieth of the time of a command that reads a ledger on Postgres.
RowId = Annotated[int, BigInteger().with_variant(Integer(), "sqlite"), PRIMARY_KEY]
NULLABLE = "nullable"
"""Annotates a field whose column may be NULL, although no row that callers get has no value."""
NO_COLUMN = "no column"
"""Annotates a field that is no column. Queries add it."""

_COLUMN_TYPES: dict[Any, TypeEngine[Any]] = {
    bool: Boolean(),
    float: Float(),
    int: Integer(),
    str: StorableText(),
    Json: Document(),
    tuple[str, ...]: TupleDocument(),
    tuple[int, ...]: TupleDocument(),
    tuple[OffsetRange, ...]: RangesDocument(),
}


def composite(*columns: str) -> Any:
    """A field whose value is made of several ``columns``, in the order of its class's fields.

    A column that neither another field nor a `Column` makes has the type of the class's field.
    """
    return field(metadata={_COMPOSITE: columns})


_COMPOSITE = "columns"


@dataclass_transform(field_specifiers=(field, composite))
class Model:
    """A table of the ledger, and the type of its rows. Do not change a row: it is a value.

    A field is a column of its name, with the type and constraints of its annotation. ``| None`` makes it nullable, and
    a default is the column's default too. A `Column` in the class is no field: callers do not see it.
    """

    metadata: ClassVar = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    __table__: ClassVar[Table]
    __tablename__: ClassVar[str]
    __table_args__: ClassVar[tuple[Any, ...]] = ()
    """Constraints and indexes, and at the end options of the table."""

    _names: ClassVar[tuple[str, ...]]
    _composites: ClassVar[tuple[tuple[str, Any, tuple[str, ...]], ...]]
    """The composites: name, class, columns. ``_names`` are the other fields."""

    def __init_subclass__(cls) -> None:
        made: Any = dataclass(cls)
        hints = get_type_hints(made, include_extras=True)
        described = fields(made)
        cls._names = tuple(each.name for each in described if _COMPOSITE not in each.metadata)
        cls._composites = tuple(
            (each.name, hints[each.name], each.metadata[_COMPOSITE])
            for each in described
            if _COMPOSITE in each.metadata
        )
        columns = [value for value in vars(made).values() if isinstance(value, Column)]
        columns += [column for each in described if (column := _column(each, hints[each.name])) is not None]
        made_of = {column.name for column in columns}
        for _, kind, names in cls._composites:
            types = zip(names, get_type_hints(kind).values(), strict=True)
            columns += [Column(name, _type_of(part), nullable=False) for name, part in types if name not in made_of]
        parts = [part for part in cls.__table_args__ if not isinstance(part, dict)]
        (options,) = [part for part in cls.__table_args__ if isinstance(part, dict)] or [{}]
        cls.__table__ = Table(cls.__tablename__, cls.metadata, *columns, *parts, **options)

    @classmethod
    def from_row(cls, row: Row[Any]) -> Self:
        """Return the value of a row that has all columns of the table, and all fields that are not columns."""
        columns = dict(zip(row._fields, row, strict=True))
        values = {name: columns[name] for name in cls._names}
        for name, kind, parts in cls._composites:
            values[name] = kind(*[columns[part] for part in parts])
        return cls(**values)

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
        there = self.__table__.c
        values = {name: getattr(self, name) for name in self._names if name in there}
        for name, kind, parts in self._composites:
            value = getattr(self, name)
            values |= {
                part: getattr(value, field) for part, field in zip(parts, kind.__dataclass_fields__, strict=True)
            }
        return values


def _column(described: Field[Any], hint: Any) -> Column[Any] | None:
    """Return the column of a field with this annotation; None if it has none of its own."""
    kind, notes, nullable = _parts(hint)
    if _COMPOSITE in described.metadata or NO_COLUMN in notes:
        return None
    default = described.default if described.default_factory is MISSING else described.default_factory
    types = [note for note in notes if isinstance(note, TypeEngine)]
    return Column(
        described.name,
        types[0] if types else _type_of(kind),
        # A foreign key belongs to one column, and an annotation is that of several.
        *(ForeignKey(note.target_fullname) for note in notes if isinstance(note, ForeignKey)),
        nullable=nullable or NULLABLE in notes,
        primary_key=PRIMARY_KEY in notes,
        default=None if default is MISSING else default,
    )


def _parts(hint: Any) -> tuple[Any, list[Any], bool]:
    """Return an annotation's type in Python, what `Annotated` adds to it, and whether it may be None."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        kind, inner_notes, nullable = _parts(inner)
        return kind, [*inner_notes, *notes], nullable
    if get_origin(hint) in (Union, UnionType):
        (inner,) = [part for part in get_args(hint) if part is not NoneType]
        kind, notes, _ = _parts(inner)
        return kind, notes, True
    return hint, [], False


def _type_of(kind: Any) -> TypeEngine[Any]:
    """Return the type of a column whose values have this type in Python.

    A state is text of up to 16 characters, read and written as its enumeration.
    """
    if kind in _COLUMN_TYPES:
        return _COLUMN_TYPES[kind]
    return Enum(
        kind, native_enum=False, length=16, validate_strings=True, values_callable=lambda e: [m.value for m in e]
    )


def batch_key() -> ForeignKeyConstraint:
    """Return the foreign key of a row to its batch."""
    return ForeignKeyConstraint(["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"])


def partial_index(name: str, *columns: Column[Any], where: str, unique: bool = False) -> Index:
    """Add an index of the rows for which ``where`` is true, which is here for readers: migrations make the indexes.

    SQLAlchemy's own arguments for it, one for each dialect, would import both dialects.
    """
    return Index(name, *columns, unique=unique, info={"where": where})
