"""The columns of a record as Spark has them, with marks by which they are recognised in the rows of a transform.

A mark is the metadata of a column. Spark keeps it where a transform passes the column on (also filtered, joined or
persisted, and over Spark Connect), and drops it where the transform computes another column of the same name.
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_RECORD = "headrace.record"
_FIELD = "headrace.field"


def record_mark(name: str) -> dict[str, str]:
    """The metadata of the record's own column of this name."""
    return {_RECORD: name}


def _own(name: str, kind: DataType) -> StructField:
    return StructField(name, kind, metadata=record_mark(name))


RECORD_SCHEMA = StructType(
    [
        _own("key", BinaryType()),
        _own("value", BinaryType()),
        _own("topic", StringType()),
        _own("partition", IntegerType()),
        _own("offset", LongType()),
        _own("timestamp", TimestampType()),
        _own("timestampType", IntegerType()),
        _own("headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))),
        _own("incarnation", IntegerType()),
    ]
)


def with_marked_fields(kind: DataType) -> DataType:
    """The type of a decoded value, nullable throughout, whose fields are marked as fields of a value."""
    if isinstance(kind, StructType):
        return StructType(
            [
                StructField(field.name, with_marked_fields(field.dataType), metadata={_FIELD: field.name})
                for field in kind.fields
            ]
        )
    if isinstance(kind, ArrayType):
        return ArrayType(with_marked_fields(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(kind.keyType, with_marked_fields(kind.valueType))
    return kind


def own_columns(schema: StructType) -> frozenset[str]:
    """The columns of these rows that are the record's own, under their own names and unchanged."""
    return frozenset(field.name for field in schema.fields if field.metadata.get(_RECORD) == field.name)


def decoded_fields(schema: StructType) -> frozenset[str]:
    """The columns of these rows that are fields of a decoded key or value, under their own names and unchanged."""
    return frozenset(field.name for field in schema.fields if field.metadata.get(_FIELD) == field.name)
