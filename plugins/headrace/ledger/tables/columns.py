"""What the tables share: how names, documents, numbers and states stand in columns."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Enum, ForeignKey, ForeignKeyConstraint, Integer, MetaData, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

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


def state_column(kind: type[StrEnum]) -> TypeEngine[Any]:
    """Text of 16 characters, read and written as ``kind``."""
    return Enum(
        kind, native_enum=False, length=16, validate_strings=True, values_callable=lambda e: [m.value for m in e]
    )


def stream_column() -> Column[str]:
    """The column that ties a row to its stream."""
    return Column("stream", Text, ForeignKey("streams.name"), nullable=False)


def batch_columns() -> list[Any]:
    """The columns and the constraint that tie a row to its batch."""
    return [
        Column("stream", Text, nullable=False),
        Column("batch_time_ms", BigInteger, nullable=False),
        ForeignKeyConstraint(["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"]),
    ]
