"""Checks and converts schemas, so that Spark, pandas and DuckDB can all read the Parquet files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.spark.outputs.errors import OutputRowsError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

PARTITION_COLUMN = "batch_time"

# Spark's names of types that Parquet does not have, or that Spark itself does not read back.
_WITHOUT_TYPE = ("void", "interval", "variant", "geometry", "geography")


def check_columns(schema: StructType, output: str) -> None:
    """Raise OutputRowsError for columns that cannot be in the files of the output with this id."""
    names = Counter(name.lower() for name in schema.names)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise OutputRowsError(
            f"The rows for output {output!r} have several columns named {', '.join(map(repr, twice))} (Spark "
            "ignores upper and lower case).",
            remedy="Give each column its own name in the transform.",
        )
    if PARTITION_COLUMN in names:
        raise OutputRowsError(
            f"The rows for output {output!r} have a column {PARTITION_COLUMN!r}, which is the name of the batch's "
            "folder: readers of the files get it as a column.",
            remedy="Drop or rename it.",
        )
    if not names:
        raise OutputRowsError(f"The rows for output {output!r} have no columns.")
    for field in schema.fields:
        for kind in _types(field.dataType):
            if kind.simpleString().startswith(_WITHOUT_TYPE):
                raise OutputRowsError(
                    f"The column {field.name!r} for output {output!r} has the type {kind.simpleString()}, for which "
                    "Parquet has no type that other programs read.",
                    remedy="Cast it, for example to a string, or drop it.",
                )


def file_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of the files for rows with this schema.

    Times with a zone are in UTC, whatever the session's zone is, and every column is nullable, so the files of all
    batches have the same types.
    """
    return pa.schema([pa.field(field.name, _file_type(field.type)) for field in schema])


def _file_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=None if kind.tz is None else "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _file_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_file_type(kind.key_type), _file_type(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", _file_type(kind.value_type)))
    return kind


def _types(kind: DataType) -> Iterator[DataType]:
    """Yield the type and all types nested in it."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    yield kind
    inner: list[DataType] = []
    if isinstance(kind, StructType):
        inner = [field.dataType for field in kind.fields]
    elif isinstance(kind, ArrayType):
        inner = [kind.elementType]
    elif isinstance(kind, MapType):
        inner = [kind.keyType, kind.valueType]
    for each in inner:
        yield from _types(each)
