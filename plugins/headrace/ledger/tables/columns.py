"""Column types and helpers that the tables share: constraint names, documents, row ids and states."""

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

# SQLite generates row numbers only in a column whose type is exactly INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")


def state_column(kind: type[StrEnum]) -> TypeEngine[Any]:
    """Return a column type of text with 16 characters, read and written as ``kind``."""
    return Enum(
        kind, native_enum=False, length=16, validate_strings=True, values_callable=lambda e: [m.value for m in e]
    )


def stream_column() -> Column[str]:
    """Return the column that refers to the row's stream."""
    return Column("stream", Text, ForeignKey("streams.name"), nullable=False)


def batch_columns() -> list[Any]:
    """Return the columns and the foreign key that refer to the row's batch."""
    return [
        Column("stream", Text, nullable=False),
        Column("batch_time_ms", BigInteger, nullable=False),
        ForeignKeyConstraint(["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"]),
    ]
