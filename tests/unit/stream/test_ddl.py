"""Columns in Spark's DDL, read without Spark."""

from __future__ import annotations

import pytest
from tests.unit.stream.ddl_texts import REFUSED, TAKEN

from headrace.stream import JsonDecoder, State
from headrace.stream.ddl import Column, ColumnType, column_differences, parse_columns
from headrace.stream.model import StreamDefinitionError


def test_what_spark_takes_is_taken() -> None:
    for text in TAKEN:
        assert parse_columns(text), text


def test_what_spark_refuses_is_refused() -> None:
    for text in [*REFUSED, "", "  ", "-- nothing"]:
        with pytest.raises(ValueError, match="is not in Spark's DDL"):
            parse_columns(text)


def test_columns_and_their_types_are_distinguished() -> None:
    inner = ColumnType("struct", (Column("b c", ColumnType("decimal", digits=(3, 1))),))
    structs = ColumnType("array", (Column("", inner),))
    columns = parse_columns("a: INT NOT NULL COMMENT 'x', `d``e` MAP<STRING, ARRAY<STRUCT<`b c` DECIMAL(3, 1)>>>")
    assert columns == (
        Column("a", ColumnType("int")),
        Column("d`e", ColumnType("map", (Column("", ColumnType("string")), Column("", structs)))),
    )
    assert [kind.name for kind in columns[1].type.all()] == ["map", "string", "array", "struct", "decimal"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n INTEGERR", "'INTEGERR' at character 3 is not a type; is INTEGER meant"),
        ("n INT, m", "it ends where a type should be"),
        ("n INT, n STRING", "names the column n twice"),
        ("n DECIMAL(40)", "more than 38 digits"),
    ],
)
def test_an_error_says_what_and_where(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_columns(text)


@pytest.mark.parametrize("given", [{"word": "STRING"}, ["word STRING"], None])
def test_columns_that_are_no_text_are_refused_with_an_example(given: object) -> None:
    wanted = f'is not in Spark.s DDL, such as "word STRING, count BIGINT": it is a {type(given).__name__}'
    with pytest.raises(StreamDefinitionError, match=wanted):
        JsonDecoder(fields=given)  # type: ignore[arg-type]
    with pytest.raises(StreamDefinitionError, match=wanted):
        State(update="code:update", fields=given, keys="word")  # type: ignore[arg-type]


def test_what_differs_between_columns_is_said_in_words() -> None:
    before = "id INT, gone STRING, at STRUCT<x: INT, y: INT>, tags ARRAY<STRING>"
    after = "id BIGINT, at STRUCT<x: INT, z: INT>, tags ARRAY<INT>, new MAP<STRING, INT>"
    assert column_differences(before, after) == [
        "at.z is new (INT)",
        "new is new (MAP)",
        "new[0] is new (STRING)",
        "new[1] is new (INT)",
        "gone is gone",
        "at.y is gone",
        "id was INT and is BIGINT",
        "tags[] was STRING and is INT",
    ]
    assert column_differences("price DECIMAL(8, 3), at STRUCT<>", "price DECIMAL(8,2), at INT, more STRUCT<>") == [
        "more is new (STRUCT)",
        "price was DECIMAL(8, 3) and is DECIMAL(8, 2)",
        "at was STRUCT and is INT",
    ]
    assert column_differences("price DECIMAL", "price DECIMAL(10, 0)") == []
    assert column_differences("STRING", "STRING") == []
    assert column_differences(before, before) == []
