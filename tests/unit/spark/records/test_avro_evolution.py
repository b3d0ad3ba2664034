"""Avro values that were written by another schema than the one of the columns."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.support.avro_examples import arrow_of, encoded, logical, record, unscaled

from headrace.formats.avro_references import joined
from headrace.formats.avro_schema import read_schema
from headrace.formats.schema_text import SchemaText, UnreadableSchemaError
from headrace.spark.records.avro_values import AvroValues

UTC = datetime.UTC
_MANY = 300
COLOURS = {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}
POINT = record(("x", "int"))


def enum(*symbols: str, **more: Any) -> Any:
    return {"type": "enum", "name": "Colour", "symbols": list(symbols), **more}


def named(name: str, *fields: Any, **more: Any) -> Any:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, **more: Any) -> Any:
    return {"name": name, "type": kind, **more}


def read(writer: Any, reader: Any, *values: Any) -> tuple[list[Any], dict[int, str]]:
    """The values, encoded by ``writer``, as ``reader`` has them."""
    text = json.dumps(reader)
    made = AvroValues(
        arrow_of(read_schema(text), "number"), schema=text, writer=SchemaText(json.dumps(writer)).to_json()
    )
    given = [encoded(writer, value) for value in values]
    array, refused = made.decode(pa.array(given, pa.binary()))
    array.validate(full=True)
    # So many are decoded together, without fastavro where that is exact.
    many, _ = made.decode(pa.array(given * _MANY, pa.binary()))
    assert repr(many.to_pylist()[-len(given) :]) == repr(array.to_pylist())
    return array.to_pylist(), refused


def one(writer: Any, reader: Any, value: Any) -> Any:
    """A field's value, written as ``writer`` and read as ``reader``."""
    values, refused = read(record(("v", writer)), record(("v", reader)), {"v": value})
    assert refused == {}
    return values[0]["v"]


def test_fields_are_added_removed_and_put_in_another_order() -> None:
    writer = record(("gone", "string"), ("a", "int"), ("b", "string"))
    reader = named("shop.Order", field("b", "string"), field("a", "int"), field("new", ["null", "int"], default=None))
    assert read(writer, reader, {"gone": "x", "a": 1, "b": "y"}) == ([{"b": "y", "a": 1, "new": None}], {})


@pytest.mark.parametrize(
    ("kind", "default", "wanted"),
    [
        ("boolean", True, True),
        ("int", 7, 7),
        ("double", 1, 1.0),
        ("double", "NaN", None),
        ("string", "none", "none"),
        ("bytes", "\u00ff\u0000", b"\xff\x00"),
        ({"type": "fixed", "name": "F", "size": 2}, "ab", b"ab"),
        (COLOURS, "BLUE", "BLUE"),
        ({"type": "array", "items": "int"}, [1, 2], [1, 2]),
        ({"type": "map", "values": "string"}, {"a": "b"}, [("a", "b")]),
        (["int", "string"], 3, {"int": 3, "string": None}),
        (["int", "string"], "x", {"int": None, "string": "x"}),
        (["null", "string"], None, None),
        (named("P", field("x", "int"), field("y", "int", default=2)), {"x": 1}, {"x": 1, "y": 2}),
        ([named("P", field("x", "int")), "null"], {"x": 1}, {"x": 1}),
        (logical("int", "date"), 1, datetime.date(1970, 1, 2)),
        (logical("bytes", "decimal", precision=5, scale=2), "\u0001\u0000", Decimal("2.56")),
        (logical("long", "timestamp-millis"), 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)),
    ],
)  # fmt: skip
def test_an_added_field_has_its_default(kind: Any, default: Any, wanted: Any) -> None:
    """Also of logical types, which libraries leave as they are in the schema."""
    reader = named("shop.Order", field("a", "int"), field("new", kind, default=default))
    values, refused = read(record(("a", "int")), reader, {"a": 1}, {"a": 2})
    assert refused == {}
    if default == "NaN":
        assert values[0]["new"] != values[0]["new"]
    else:
        assert [value["new"] for value in values] == [wanted, wanted]


@pytest.mark.parametrize(
    ("writer", "reader", "value", "wanted"),
    [
        ("int", "long", -(2**31), -(2**31)),
        ("int", "float", 3, 3.0),
        ("int", "double", 2**31 - 1, float(2**31 - 1)),
        ("long", "double", 2**53, float(2**53)),
        ("float", "double", 1.5, 1.5),
        ("string", "bytes", "ä", "ä".encode()),
        ("bytes", "string", "ä".encode(), "ä"),
        ("int", ["null", "long"], 3, 3),
        (["null", "int"], ["null", "long"], None, None),
        (["null", "int"], "int", 3, 3),
        ("int", ["string", "long"], 3, {"string": None, "long": 3}),
        (["string", "int"], ["int", "string", "null"], "x", {"int": None, "string": "x"}),
        (["string", "int"], "string", "x", "x"),
        ({"type": "array", "items": "int"}, {"type": "array", "items": "double"}, [1], [1.0]),
        ({"type": "map", "values": "int"}, {"type": "map", "values": ["null", "long"]}, {"a": 1}, [("a", 1)]),
        (COLOURS, enum("BLUE", "GREEN", "RED"), "RED", "RED"),
        (COLOURS, enum("RED", "OTHER", default="OTHER"), "BLUE", "OTHER"),
        (["null", COLOURS], ["null", enum("OTHER", default="OTHER")], "BLUE", "OTHER"),
        (["null", COLOURS], COLOURS, "BLUE", "BLUE"),
        (COLOURS, [COLOURS, "int"], "RED", {"Colour": "RED", "int": None}),
        ("long", logical("long", "timestamp-millis"), 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)),
        (logical("long", "timestamp-millis"), "long", 1, 1),
        (logical("long", "timestamp-millis"), logical("long", "timestamp-micros"), 1,
         datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)),
        (logical("int", "time-millis"), logical("long", "time-micros"), 1, "00:00:00.001000"),
        (logical("int", "date"), "long", 3, 3),
        (logical("bytes", "decimal", precision=5, scale=2), logical("bytes", "decimal", precision=9, scale=2),
         unscaled(12345), Decimal("123.45")),
        ("null", ["null", "string"], None, None),
    ],
)  # fmt: skip
def test_a_value_becomes_the_columns_type(writer: Any, reader: Any, value: Any, wanted: Any) -> None:
    assert one(writer, reader, value) == wanted


def test_names_are_followed_by_aliases() -> None:
    writer = named("shop.Purchase", field("amount", "int"), field("p", named("shop.Point", field("x", "int"))))
    reader = named(
        "shop.Order",
        field("total", "long", aliases=["amount"]),
        field("place", named("geo.Place", field("lon", "int", aliases=["x"]), aliases=["shop.Point"]), aliases=["p"]),
        aliases=["shop.Purchase"],
    )
    assert read(writer, reader, {"amount": 3, "p": {"x": 1}}) == ([{"total": 3, "place": {"lon": 1}}], {})


def test_a_type_that_is_named_again_is_followed_too() -> None:
    point, wider = named("P", field("x", "int")), named("P", field("x", "long"), field("y", "int", default=0))
    writer = record(("a", point), ("b", "P"), ("c", ["null", "P"]))
    reader = record(("a", wider), ("b", "P"), ("c", ["null", "P"]))
    values, refused = read(writer, reader, {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}})
    assert refused == {}
    assert values == [{"a": {"x": 1, "y": 0}, "b": {"x": 2, "y": 0}, "c": {"x": 3, "y": 0}}]


@pytest.mark.parametrize(
    ("writer", "reader", "values", "wanted", "why"),
    [
        (["null", "int"], "int", [1, None], [1, None], "it is null at `v`, where the columns' schema allows none"),
        (COLOURS, enum("RED"), ["RED", "BLUE"], ["RED", None], "it is BLUE at `v`, a symbol that the columns' schema"),
        (["int", "string"], "int", [1, "x"], [1, None], "it is a string at `v`, which the columns' schema has no type"),
        ("bytes", "string", [b"a", b"\xff"], ["a", None], "its bytes are no UTF-8"),
    ],
)  # fmt: skip
def test_only_the_values_that_do_not_fit_are_refused(
    writer: Any, reader: Any, values: list[Any], wanted: list[Any], why: str
) -> None:
    read_, refused = read(record(("v", writer)), record(("v", reader)), *({"v": value} for value in values))
    assert [None if value is None else value["v"] for value in read_] == wanted
    assert list(refused) == [1]
    assert why in refused[1]


@pytest.mark.parametrize(
    ("writer", "reader", "why"),
    [
        ("string", "int", "v is string where it was written, and int in the columns"),
        ("long", "int", "v is long where it was written, and int in the columns"),
        ("null", "int", "v is null where it was written, and int in the columns"),
        (logical("long", "timestamp-micros"), logical("long", "timestamp-millis"),
         "v is timestamp-micros where it was written, and timestamp-millis in the columns"),
        (logical("bytes", "decimal", precision=5, scale=2), logical("bytes", "decimal", precision=5, scale=3),
         "v is decimal(5, 2) where it was written, and decimal(5, 3) in the columns"),
        ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3},
         "fixed shop.F of 2 bytes"),
        ({"type": "array", "items": "string"}, {"type": "array", "items": "int"}, "v[] is string where it was written"),
        (named("P", field("x", "int")), named("Q", field("x", "int")), "v is record shop.P where it was written"),
        (named("P", field("x", "int")), named("P", field("x", "int"), field("y", "int")), "v.y has no default"),
        (["int", "string"], "boolean", "v is int or string where it was written, and boolean in the columns"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_read_is_told_in_words(writer: Any, reader: Any, why: str) -> None:
    with pytest.raises(UnreadableSchemaError) as error:
        read(record(("v", writer)), record(("v", reader)))
    assert why in str(error.value)


def test_a_record_that_contains_itself_is_told() -> None:
    tree = named("Tree", field("next", ["null", "Tree"]))
    with pytest.raises(UnreadableSchemaError, match="contains itself"):
        read(tree, record(("v", "int")))


def test_a_schema_is_joined_with_those_that_it_refers_to() -> None:
    money = named("Money", field("amount", "long"), field("currency", "Currency"), namespace="shop.base")
    currency = {"type": "enum", "name": "Currency", "namespace": "shop.base", "symbols": ["EUR"]}
    order = named("Order", field("net", "shop.base.Money"), field("tax", "shop.base.Money"), namespace="shop")
    references = (("shop.base.Currency", json.dumps(currency)), ("shop.base.Money", json.dumps(money)))
    made = read_schema(joined(SchemaText(json.dumps(order), references)))
    assert made.columns() == "`net` STRUCT<`amount` BIGINT, `currency` STRING>, " + (
        "`tax` STRUCT<`amount` BIGINT, `currency` STRING>"
    )
