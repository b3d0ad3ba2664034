"""The base class of the ledger's tables: each is a mapped dataclass, so a column is written down once.

The classes define the tables and the values that the ledger hands out. No ORM session loads them: a session's identity
map would hand out one object for one row and change it when the row changes, but a row that was handed out is a value.
`Model.from_row` builds it from a row of a Core statement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Self, cast

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Dialect,
    Enum,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Row,
    Table,
    Text,
    TextClause,
    TypeDecorator,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import ClassManager, DeclarativeBase, MappedAsDataclass, mapped_column
from sqlalchemy.types import TypeEngine

from headrace.blocks import OffsetRange
from headrace.ledger.codec import Json, dump_ranges, load_ranges, without_nul
from headrace.ledger.states import AttemptState, BatchState, DesiredState, JobState, PartitionState, ReceiverState

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
        (each.key, each.composite_class, tuple(prop.columns[0].name for prop in each.props))
        for each in mapper.composites
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
