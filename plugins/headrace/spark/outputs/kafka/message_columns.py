"""Turns any DataFrame into a Kafka output's messages: value, and if present key, headers and partition.

The columns are built by Spark's own expressions. They are SQL text, which works the same in classic sessions and over
Spark Connect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from headrace.elasticsearch.columns import COORDINATES, HEADERS, KEY, PARTITION, TOPIC, VALUE
from headrace.spark.documents import json_text
from headrace.spark.outputs.errors import OutputRowsError
from headrace.spark.record_columns import own_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

END = "_end"
"""The column that is true only in the row after the last message; that row's other columns are null."""

_ORDER = "_order"
_LAST = 2**63 - 1
_MESSAGE_COLUMNS = frozenset({KEY, VALUE, HEADERS, PARTITION})


def prepare_messages(df: DataFrame, output: str) -> DataFrame:
    """The rows of ``df`` as messages of the output with this id.

    The result has a binary ``value`` and, if ``df`` has them, a binary ``key``, ``headers`` as in the log and an INT
    ``partition``. Values and keys may be bytes, text, or a struct, map or array, which is written as JSON; a null value
    is a tombstone. Rows with topic, partition and offset are records of the log: these columns and the record's own
    columns describe its source and are not written. A partition that replaces the record's own is the message's. Raises
    OutputRowsError for any other column.
    """
    schema = df.schema
    types: dict[str, DataType] = {field.name: field.dataType for field in schema.fields}
    own = own_columns(schema)
    is_record = all(name in types for name in COORDINATES)
    _check_columns(types, output, _MESSAGE_COLUMNS.union(own, COORDINATES) if is_record else _MESSAGE_COLUMNS)
    expressions = [_bytes_expression(name, types[name], output) for name in (VALUE, KEY) if name in types]
    if HEADERS in types:
        _check_headers(types[HEADERS], output)
        expressions.append(f"CAST({HEADERS} AS ARRAY<STRUCT<key: STRING, value: BINARY>>) AS {HEADERS}")
    if PARTITION in types and (not is_record or (TOPIC in own and PARTITION not in own)):
        if not isinstance(types[PARTITION], IntegerType | LongType | ShortType):
            raise OutputRowsError(
                f"The column 'partition' for output {output!r} is {types[PARTITION].simpleString()}, not a number.",
                remedy="Cast it to INT, or drop it: then Kafka's partitioner chooses by the key.",
            )
        expressions.append(f"CAST({PARTITION} AS INT) AS {PARTITION}")
    return df.selectExpr(*expressions)


def in_one_partition(messages: DataFrame) -> DataFrame:
    """The messages in one partition, in their original order, followed by a row whose ``_end`` is true.

    A Python worker cannot distinguish the end of its rows from the end of a JVM that failed, was cancelled or was
    killed: both end the stream. So the JVM marks the end with a row that its sort puts last. Because of the sort, all
    cores compute the transform completely before the first message is sent.
    """
    types = {field.name: field.dataType.simpleString() for field in messages.schema.fields}
    rows = messages.selectExpr("*", f"monotonically_increasing_id() AS {_ORDER}")
    nothing = [f"CAST(NULL AS {kind}) AS {name}" for name, kind in types.items()]
    end = messages.sparkSession.range(1).selectExpr(*nothing, f"{_LAST}L AS {_ORDER}")
    ordered = rows.unionAll(end).repartition(1).sortWithinPartitions(_ORDER)
    return ordered.selectExpr(*types, f"{_ORDER} = {_LAST}L AS {END}")


def _check_columns(types: dict[str, DataType], output: str, known: frozenset[str]) -> None:
    if VALUE not in types:
        raise OutputRowsError(
            f"The rows for output {output!r} have no column 'value'; they have {', '.join(map(repr, types))}.",
            remedy="Select the message in the transform, for example to_json(struct(*)) AS value.",
        )
    surplus = sorted(types.keys() - known)
    if surplus:
        raise OutputRowsError(
            f"The rows for output {output!r} have {', '.join(map(repr, surplus))}, which are not part of a message.",
            remedy="Select only value, and optionally key, headers and partition, in the transform.",
        )


def _bytes_expression(name: str, kind: DataType, output: str) -> str:
    if isinstance(kind, BinaryType):
        return name
    if isinstance(kind, StringType):
        return f"CAST({name} AS BINARY) AS {name}"
    if isinstance(kind, StructType | MapType | ArrayType):
        return f"CAST({json_text(name)} AS BINARY) AS {name}"
    raise OutputRowsError(
        f"The column {name!r} for output {output!r} is {kind.simpleString()}.",
        remedy="Cast it to STRING, or make it a struct that is written as JSON.",
    )


def _check_headers(kind: DataType, output: str) -> None:
    element = kind.elementType if isinstance(kind, ArrayType) else None
    if isinstance(element, StructType) and element.names == ["key", "value"]:
        key, value = (field.dataType for field in element.fields)
        if isinstance(key, StringType) and isinstance(value, BinaryType | StringType):
            return
    raise OutputRowsError(
        f"The column 'headers' for output {output!r} is {kind.simpleString()}.",
        remedy="Make it ARRAY<STRUCT<key: STRING, value: BINARY>>, as the log has it, or drop it.",
    )
