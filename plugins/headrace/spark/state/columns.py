"""Checks the columns of a state's table: as declared, as stored, and as returned by an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructField,
    StructType,
)

from headrace.clock import time_text
from headrace.spark.state.errors import StateDefinitionError, StateRowsError
from headrace.spark.state.version import CHANGED_MS, REMOVED
from headrace.stream.state import REMOVED_FLAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from headrace.spark.state.version import Version
    from headrace.stream.state import State

HIDDEN = (StructField(CHANGED_MS, LongType()), StructField(REMOVED, BooleanType()))

_WIDER: dict[type[DataType], tuple[type[DataType], ...]] = {
    ByteType: (ShortType, IntegerType, LongType),
    ShortType: (IntegerType, LongType),
    IntegerType: (LongType,),
    FloatType: (DoubleType,),
}


def declared_columns(spark: SparkSession, state: State) -> StructType:
    """The table's columns, all of them nullable."""
    declared = spark.createDataFrame([], state.fields).schema
    return StructType([StructField(field.name, field.dataType) for field in declared.fields])


def check_stored(version: Version, columns: StructType, keys: Sequence[str]) -> None:
    """Check that the declared columns fit the stored table; new columns and wider numbers are allowed.

    Raises:
        StateDefinitionError: they do not fit; the text names the differences.
    """
    stored = StructType.fromJson(dict(version.schema))
    problems = []
    if tuple(version.keys) != tuple(keys):
        problems.append(f"the keys were {', '.join(version.keys)} and are {', '.join(keys)}")
    for field in stored.fields:
        if field.name not in columns.names:
            problems.append(f"the column {field.name} is gone")
        elif not _fits(field.dataType, columns[field.name].dataType):
            now = columns[field.name].dataType.simpleString()
            problems.append(f"the column {field.name} was {field.dataType.simpleString()} and is {now}")
    if problems:
        raise StateDefinitionError(
            f"The state of batch {time_text(version.batch_time_ms)} does not fit the stream's definition: "
            f"{'; '.join(problems)}.",
            remedy="Only new columns and wider numbers are possible. For other changes give the stream a new name, or "
            "delete the folder state/ in its folder to begin with an empty table.",
        )


def check_returned(returned: StructType, columns: StructType, *, may_remove: bool) -> None:
    """Check that what an update returned has the state's columns, in any order.

    Raises:
        StateRowsError: a column is missing, unknown, duplicate or of another type; the text names each one.
    """
    allowed = {*columns.names, REMOVED_FLAG} if may_remove else set(columns.names)
    problems = [f"{name} is missing" for name in columns.names if name not in returned.names]
    problems += [f"{name} is not one of the fields" for name in returned.names if name not in allowed]
    problems += [f"{name} occurs twice" for name in sorted(set(returned.names)) if returned.names.count(name) > 1]
    for field in returned.fields:
        if field.name not in allowed:
            continue
        wanted = columns[field.name].dataType if field.name in columns.names else BooleanType()
        if not _fits(field.dataType, wanted):
            problems.append(f"{field.name} is {field.dataType.simpleString()} and not {wanted.simpleString()}")
    if problems:
        raise StateRowsError(
            f"The columns that the state's update returned are not those of state.fields: {'; '.join(problems)}.",
            remedy="Select and cast them in the update.",
        )


def has_map(kind: DataType) -> bool:
    """Whether values of this type contain a map or a variant, which Spark cannot compare."""
    if isinstance(kind, ArrayType):
        return has_map(kind.elementType)
    if isinstance(kind, StructType):
        return any(has_map(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType) or kind.typeName() == "variant"


def quoted(name: str) -> str:
    """A column's name, quoted for Spark's expressions."""
    return "`" + name.replace("`", "``") + "`"


def _fits(given: DataType, wanted: DataType) -> bool:
    """Whether every value of type ``given`` fits type ``wanted``; nullability is ignored."""
    if type(wanted) in _WIDER.get(type(given), ()):
        return True
    return given.simpleString() == wanted.simpleString()
