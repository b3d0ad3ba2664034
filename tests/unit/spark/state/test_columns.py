from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from headrace.spark.state.updating import check_returned, check_stored, has_map
from headrace.spark.state.version import StateDefinitionError, StateRowsError


def columns(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


COUNTS = columns(word=StringType(), count=LongType())


@pytest.mark.parametrize(
    "returned",
    [
        COUNTS,
        columns(count=LongType(), word=StringType()),
        columns(word=StringType(), count=IntegerType()),
        StructType([StructField("word", StringType(), nullable=False), StructField("count", LongType())]),
    ],
)
def test_the_fields_in_any_order_are_taken(returned: StructType) -> None:
    check_returned(returned, COUNTS, may_remove=False)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (columns(word=StringType()), "count is missing"),
        (columns(word=StringType(), count=StringType()), "count is string and not bigint"),
        (columns(word=StringType(), count=LongType(), more=LongType()), "more is not one of the fields"),
        (columns(word=StringType(), count=LongType(), removed=BooleanType()), "removed is not one of the fields"),
        (StructType([*COUNTS.fields, StructField("word", StringType())]), "word occurs twice"),
    ],
)
def test_other_columns_are_refused_by_name(returned: StructType, message: str) -> None:
    with pytest.raises(StateRowsError, match=f"{message}.*Select and cast"):
        check_returned(returned, COUNTS, may_remove=False)


def test_changes_may_say_which_keys_go() -> None:
    check_returned(columns(word=StringType(), count=LongType(), removed=BooleanType()), COUNTS, may_remove=True)
    with pytest.raises(StateRowsError, match="removed is string and not boolean"):
        check_returned(columns(word=StringType(), count=LongType(), removed=StringType()), COUNTS, may_remove=True)


def test_a_column_may_be_added_and_a_number_widened(versions: Any) -> None:
    stored = versions.update(0, added=1)
    check_stored(stored, COUNTS, ("word",))
    check_stored(stored, columns(word=StringType(), count=LongType(), seen=LongType()), ("word",))
    narrow = columns(word=StringType(), count=IntegerType())
    check_stored(replace(stored, schema=narrow.jsonValue()), COUNTS, ("word",))


@pytest.mark.parametrize(
    ("declared", "keys", "message"),
    [
        (columns(word=StringType()), ("word",), "the column count is gone"),
        (columns(word=StringType(), count=StringType()), ("word",), "the column count was bigint and is string"),
        (columns(word=StringType(), count=IntegerType()), ("word",), "the column count was bigint and is int"),
        (COUNTS, ("word", "count"), "the keys were word and are word, count"),
    ],
)
def test_any_other_change_of_the_definition_is_refused_with_a_remedy(
    versions: Any, declared: StructType, keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StateDefinitionError, match=f"{message}.*delete the folder state/"):
        check_stored(versions.update(0, added=1), declared, keys)


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        (StringType(), False),
        (ArrayType(StringType()), False),
        (MapType(StringType(), LongType()), True),
        (ArrayType(columns(inner=MapType(StringType(), LongType()))), True),
    ],
)
def test_maps_are_found_wherever_they_are(kind: DataType, has: bool) -> None:
    assert has_map(kind) is has
