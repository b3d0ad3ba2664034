"""Avro values that were written by another schema than the one of the columns."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given as given_any
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.avro_examples import arrow_of, encoded, logical, record, unscaled
from tests.support.avro_pairs import Pairs, resolved
from tests.unit.spark.records.test_avro_columns import Schemas

from headrace.formats.avro_references import joined
from headrace.formats.avro_schema import read_schema
from headrace.formats.schema_text import SchemaText, UnreadableSchemaError
from headrace.spark.records.avro.values import AvroValues

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
    return read_bytes(writer, reader, *(encoded(writer, value) for value in values))


def read_bytes(writer: Any, reader: Any, *given: bytes) -> tuple[list[Any], dict[int, str]]:
    text = json.dumps(reader)
    made = AvroValues(
        arrow_of(read_schema(text), "number"), schema=text, writer=SchemaText(json.dumps(writer)).to_json()
    )
    array, refused = made.decode(pa.array(given, pa.binary()))
    array.validate(full=True)
    # So many are decoded together, without fastavro where that is exact.
    many, _ = made.decode(pa.array([*given] * _MANY, pa.binary()))
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


NANO_TIME = {"type": "long", "connect.name": "io.debezium.time.NanoTime"}


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
        (["int", "long"], "int", 3, 3),
        (["int", "long"], ["long", "null", "int"], 2**40, 2**40),
        (["null", "float", "double"], "double", 1.5, 1.5),
        (["int", "long", "string"], ["string", "long"], 2**40, {"string": None, "long": 2**40}),
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
        (logical("int", "time-millis"), NANO_TIME, 1, "00:00:00.001000000"),
        (NANO_TIME, NANO_TIME, 45_900_250_000_001, "12:45:00.250000001"),
        (logical("int", "date"), "long", 3, 3),
        (logical("bytes", "decimal", precision=5, scale=2), logical("bytes", "decimal", precision=9, scale=2),
         unscaled(12345), Decimal("123.45")),
        ("null", ["null", "string"], None, None),
    ],
)  # fmt: skip
def test_a_value_becomes_the_columns_type(writer: Any, reader: Any, value: Any, wanted: Any) -> None:
    assert one(writer, reader, value) == wanted


DATE, TIME = logical("int", "date"), logical("long", "timestamp-millis")


@pytest.mark.parametrize(
    ("writer", "reader", "value", "wanted"),
    [
        ([DATE, TIME], ["string", TIME, DATE], b"\0\2", {"string": None, "long": None,
                                                       "int": datetime.date(1970, 1, 2)}),
        ([DATE, TIME], ["string", TIME, DATE], b"\2\2",
         {"string": None, "long": datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, UTC), "int": None}),
        (["string", "int"], ["float", "string", "int"], b"\2\2", {"float": None, "string": None, "int": 1}),
        (["string", COLOURS], [enum("BLUE", "RED"), "int"], b"\2\2", {"Colour": "BLUE", "int": None}),
        (["null", COLOURS], [enum("BLUE"), "null", "int"], b"\2\2", {"Colour": "BLUE", "int": None}),
        ("boolean", ["int", "boolean"], b"\1", {"int": None, "boolean": True}),
        ([named("a.X", field("n", "int")), named("b.X", field("n", "int"))],
         ["string", named("a.X", field("n", "int")), named("b.X", field("n", "int"))], b"\2\2",
         {"string": None, "a.X": None, "b.X": {"n": 1}}),
    ],
)  # fmt: skip
def test_a_value_becomes_a_member_that_is_known(writer: Any, reader: Any, value: bytes, wanted: Any) -> None:
    values, refused = read_bytes(record(("v", writer)), record(("v", reader)), value)
    assert (values, refused) == ([{"v": wanted}], {})


@pytest.mark.parametrize(
    ("writer", "reader", "value", "why"),
    [
        (["null", COLOURS], COLOURS, b"\2\1", "of an enum of 2 symbols there is no number -1 at `v`"),
        (["string", COLOURS], [COLOURS, "int"], b"\2\1", "of an enum of 2 symbols there is no number -1 at `v`"),
        ("int", "long", b"\x80\x80\x80\x80\x10", "2147483648 is no int of 32 bits"),
        ("int", "double", b"\x80\x80\x80\x80\x10", "2147483648 is no int of 32 bits"),
        ("boolean", ["int", "boolean"], b"\2", "a truth value is 2"),
        ([named("P", field("x", "int")), named("Q", field("x", "int"))],
         [named("P", field("x", "int"), field("y", "int")), named("Q", field("x", "int"))], b"\0\2",
         "it is a P at `v`, which the columns' schema has no type for"),
        ([named("P", field("x", "int")), "string"],
         [named("P", field("x", "int"), field("y", "int")), "string"], b"\0\2", "it is a P at `v`"),
        ([named("P", field("x", "int")), named("Q", field("x", "int"))],
         named("P", field("x", "int"), field("y", "int"), aliases=["Q"]), b"\0\2", ""),
    ],
)  # fmt: skip
def test_a_value_of_damaged_or_unknown_members_is_refused(writer: Any, reader: Any, value: bytes, why: str) -> None:
    written, wanted = record(("v", writer)), record(("v", reader))
    if not why:
        with pytest.raises(UnreadableSchemaError, match="y has no default"):
            read_bytes(written, wanted, value)
        return
    values, refused = read_bytes(written, wanted, value)
    assert values == [None]
    assert why in refused[0]


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("int", "x"),
        ("int", 2**31),
        ("int", True),
        ("string", 1),
        ("double", "much"),
        ("bytes", "\u0100"),
        ({"type": "fixed", "name": "F", "size": 2}, "abc"),
        (COLOURS, "GREEN"),
        ({"type": "array", "items": "int"}, ["x"]),
        (named("P", field("x", "int")), {}),
        (named("P", field("x", "int")), "x"),
        (["int", "string"], 1.5),
    ],
)
def test_a_default_of_another_type_is_told(kind: Any, default: Any) -> None:
    reader = named("shop.Order", field("a", "int"), field("new", kind, default=default))
    with pytest.raises(UnreadableSchemaError, match=r"new.* has (no|the) default"):
        read(record(("a", "int")), reader)


def test_a_default_of_a_union_is_of_the_first_that_fits() -> None:
    reader = named("shop.Order", field("new", ["int", "string", "double"], default="x"))
    assert read(record(("a", "int")), reader, {"a": 1})[0] == [{"new": {"int": None, "string": "x", "double": None}}]
    reader = named("shop.Order", field("new", ["double", "string"], default="x"))
    assert read(record(("a", "int")), reader, {"a": 1})[0] == [{"new": {"double": None, "string": "x"}}]


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
        (["int", "long"], "int", [1, 2**40], [1, None], "it is a long at `v`, which the columns' schema has no type"),
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


TREE = named("Tree", field("v", "int"), field("next", ["null", "Tree"]))
FOREST = named(
    "Tree",
    field("trees", {"type": "array", "items": "Tree"}),
    field("x", ["string", "Tree", {"type": "map", "values": "Tree"}]),
    field("v", "int"),
)
PAIR = named("A", field("v", "int"), field("b", named("B", field("a", ["null", "A"]), field("b", ["null", "B"]))))


def tree(*numbers: int) -> Any:
    return {"v": numbers[0], "next": tree(*numbers[1:]) if numbers[1:] else None}


def leaf(name: str, *fields: Any, of: str) -> Any:
    """A record of the columns that has the name of a writer's one as an alias."""
    return ["null", named(name, *fields, aliases=[of])]


LEAF = {"trees": [], "x": "a", "v": 1}
END = {"v": 1, "b": {"a": None, "b": None}}


@pytest.mark.parametrize(
    ("writer", "reader", "value", "wanted"),
    [
        (TREE, named("Tree", field("v", "int")), tree(1, 2, 3), {"v": 1}),
        (
            TREE,
            named("Tree", field("v", "int"), field("next", leaf("Leaf", field("v", "long"), of="Tree"))),
            tree(1, 2, 3),
            {"v": 1, "next": {"v": 2}},
        ),
        (FOREST, named("Tree", field("v", "int")), {"trees": [LEAF, LEAF], "x": LEAF, "v": 2}, {"v": 2}),
        (FOREST, named("Tree", field("v", "int")), {"trees": [], "x": {"k": LEAF}, "v": 3}, {"v": 3}),
        (
            PAIR,
            named("A", field("b", named("B", field("b", leaf("B1", field("a", leaf("A1", field("v", "int"), of="A")),
                                                             of="B"))))),
            {"v": 0, "b": {"a": END, "b": {"a": {**END, "v": 7}, "b": None}}},
            {"b": {"b": {"a": {"v": 7}}}},
        ),
    ],
)  # fmt: skip
def test_a_writers_record_may_contain_itself(writer: Any, reader: Any, value: Any, wanted: Any) -> None:
    assert read(writer, reader, value) == ([wanted], {})


def test_a_record_within_itself_may_have_the_name_of_a_type() -> None:
    writer = named("map", field("v", "int"), field("next", ["null", "map"]))
    assert read_bytes(writer, named("map", field("v", "int")), b"\x02\x02\x04\x00") == ([{"v": 1}], {})


def test_a_record_that_is_too_deep_is_refused_alone() -> None:
    """fastavro's compiled code ends the process at some thousand records within each other."""
    deep = [b"\x02\x02" * levels + b"\x02\x00" for levels in (75, 101, 20_000, 3)]
    short, wrong = b"\x02\x02\x02", b"\x02\x05"
    values, refused = read_bytes(TREE, named("Tree", field("v", "int")), *deep, short, wrong)
    assert values == [{"v": 1}, None, None, {"v": 1}, None, None]
    assert "more than 100 records of the type Tree within each other" in refused[1]
    assert refused[2] == refused[1]
    assert "it ends too early" in refused[4]
    assert "it names a member of a union that is not there" in refused[5]


def test_levels_between_records_count_too() -> None:
    inner: Any = ["null", "Tree"]
    for number in range(20):
        inner = named(f"R{number}", field("f", {"type": "array", "items": inner}))
    writer = named("Tree", field("v", "int"), field("down", inner))
    values, refused = read_bytes(writer, named("Tree", field("v", "int")), (b"\x02" * 22) * 150)
    assert values == [None]
    assert "it is nested too deep" in refused[0]


def test_a_record_of_the_columns_may_not_contain_itself() -> None:
    with pytest.raises(ValueError, match="the record Tree, which contains itself at next"):
        read(TREE, TREE)


def test_malformed_aliases_of_a_writer_count_for_nothing() -> None:
    enum_of_five = {**COLOURS, "default": 5, "aliases": "x"}
    writer = named("shop.Order", field("v", enum_of_five, aliases=[5]), aliases=5)
    text = json.dumps(record(("v", COLOURS)))
    made = AvroValues(
        arrow_of(read_schema(text), "number"), schema=text, writer=SchemaText(json.dumps(writer)).to_json()
    )
    assert made.decode(pa.array([b"\x02"], pa.binary()))[0].to_pylist() == [{"v": "BLUE"}]


def test_a_schema_is_joined_with_those_that_it_refers_to() -> None:
    money = named("Money", field("amount", "long"), field("currency", "Currency"), namespace="shop.base")
    currency = {"type": "enum", "name": "Currency", "namespace": "shop.base", "symbols": ["EUR"]}
    order = named("Order", field("net", "shop.base.Money"), field("tax", "shop.base.Money"), namespace="shop")
    references = (("shop.base.Currency", json.dumps(currency)), ("shop.base.Money", json.dumps(money)))
    made = read_schema(joined(SchemaText(json.dumps(order), references)))
    assert made.columns() == "`net` STRUCT<`amount` BIGINT, `currency` STRING>, " + (
        "`tax` STRUCT<`amount` BIGINT, `currency` STRING>"
    )


@settings(max_examples=150, deadline=None)
@given_any(st.integers(0, 2**32))
def test_random_pairs_of_schemas_are_read_as_fastavro_does(seed: int) -> None:
    """One by one, and many together."""
    writer, reader = Pairs(seed).record()
    schemas = Schemas(seed)
    # No key twice: of two, columns refuse a wrong one that fastavro does not keep, or the other way round.
    schemas.fits = True
    values = [schemas.value(writer) for _ in range(_MANY)]
    text = json.dumps(reader)
    made = AvroValues(
        arrow_of(read_schema(text), "number"), schema=text, writer=SchemaText(json.dumps(writer)).to_json()
    )
    array = pa.array(values, pa.binary())
    each, refused = made._decode_each(array)
    wanted = resolved(writer, reader, values)
    assert repr(each.to_pylist()) == repr(wanted)
    assert sorted(refused) == [row for row, value in enumerate(wanted) if value is None]
    together, of_many = made.decode(array)
    assert repr(together.to_pylist()) == repr(wanted)
    assert of_many == refused
