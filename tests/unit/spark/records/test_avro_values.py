"""Avro values as Arrow columns: each type at its edges, and bytes that are no value."""

from __future__ import annotations

import datetime
import json
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.avro_examples import (
    DECIMAL,
    ENUM,
    MILLIS,
    VALUES,
    arrow_of,
    encoded,
    fixed,
    logical,
    record,
    unscaled,
)

from headrace.formats.avro_schema import read_schema
from headrace.spark.records.avro.values import AvroValues

UTC = datetime.UTC


def decoder(schema: Any, *, decimals: Any = "number") -> AvroValues:
    text = json.dumps(schema)
    return AvroValues(arrow_of(read_schema(text), decimals), schema=text, decimals=decimals)


def decoded(schema: Any, *values: Any, decimals: Any = "number") -> tuple[list[Any], dict[int, str]]:
    """The values as Python's, and the reasons of those that are refused. Bytes are given as they are, None is none."""
    made = decoder(schema, decimals=decimals)
    array, refused = made.decode(pa.array(values, pa.binary()))
    array.validate(full=True)
    return array.to_pylist(), refused


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_each_type_is_exact(name: str) -> None:
    """Also as a record's field, beside a record without a value."""
    kind, given_value, wanted = VALUES[name]
    schema = record(("value", kind))
    values, refused = decoded(schema, encoded(schema, {"value": given_value}), None)
    assert refused == {}
    assert values == [{"value": wanted}, None]


def test_a_nan_stays_one() -> None:
    values, refused = decoded(record(("x", "float")), encoded(record(("x", "float")), {"x": float("nan")}))
    assert not refused
    assert values[0]["x"] != values[0]["x"]


def test_decimals_as_texts_keep_their_scale() -> None:
    schema = record(("price", logical("bytes", "decimal", precision=12, scale=4)))
    assert decoded(schema, encoded(schema, {"price": unscaled(-50_000)}), decimals="text")[0] == [{"price": "-5.0000"}]


def test_a_schema_need_not_be_a_record() -> None:
    assert decoded("string", encoded("string", "x"))[0] == ["x"]
    assert decoded(["null", "string"], b"\x00") == ([None], {0: "no Avro value of string: it is null"})


def test_an_enum_may_be_named_within_a_union_later() -> None:
    schema = record(("first", ENUM), ("second", ["string", "shop.Colour"]), ("third", ["null", "shop.Colour"]))
    schema["fields"][0]["type"] = {**ENUM, "name": "shop.Colour"}
    value = encoded(schema, {"first": "BLUE", "second": ("shop.Colour", "RED"), "third": "BLUE"})
    (read,), refused = decoded(schema, value)
    assert refused == {}
    assert read == {"first": "BLUE", "second": {"string": None, "Colour": "RED"}, "third": "BLUE"}


DATE = logical("int", "date")
TIME = logical("long", MILLIS)
POINT = {"type": "record", "name": "Point", "fields": [{"name": "on", "type": [DATE, TIME]}]}
WHICH: dict[str, tuple[Any, bytes, Any]] = {
    "a date beside a time": ([DATE, TIME], b"\0\2", {"int": datetime.date(1970, 1, 2), "long": None}),
    "a time beside a date": (
        ["null", DATE, TIME], b"\4\2", {"int": None, "long": datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)}
    ),
    "a small long": (["int", "string", "long"], b"\4\2", {"int": None, "string": None, "long": 1}),
    "an int": (["int", "string", "long"], b"\0\2", {"int": 1, "string": None, "long": None}),
    "a float": (["double", "float", "int"], b"\2\0\0\0\0", {"double": None, "float": 0.0, "int": None}),
    "a truth beside a number": (["boolean", "int"], b"\0\1", {"boolean": True, "int": None}),
    "two enums with one symbol": (
        [ENUM, {**ENUM, "name": "Other"}], b"\2\2", {"Colour": None, "Other": "BLUE"}
    ),
    "a map beside a record": (
        [{"type": "map", "values": "int"}, POINT],
        b"\2\0\2",
        {"map": None, "Point": {"on": {"int": datetime.date(1970, 1, 2), "long": None}}},
    ),
    "a time of a fixed": (
        [logical({"type": "fixed", "name": "A", "size": 2}, "decimal", precision=4), DATE, fixed(1)],
        b"\4a",
        {"A": None, "int": None, "Fixed": b"a"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHICH)
@pytest.mark.parametrize("number", [1, 300])
def test_a_value_is_of_the_member_that_was_written(name: str, number: int) -> None:
    """Alone, and of so many that they are decoded together."""
    kind, value, wanted = WHICH[name]
    schema = record(("u", kind), ("many", {"type": "array", "items": "int"}))
    assert decoded(schema, *[value + b"\0"] * number) == ([{"u": wanted, "many": []}] * number, {})


def test_members_are_told_where_a_type_is_named_again() -> None:
    schema = record(("a", POINT), ("b", "shop.Point"), ("c", ["null", "shop.Point", ENUM]), ("d", ["null", "Colour"]))
    schema["fields"][0]["type"] = {**POINT, "namespace": "shop"}
    on = {"int": datetime.date(1970, 1, 2), "long": None}
    value = b"\0\2" + b"\0\2" + b"\2\0\2" + b"\2\2"
    (read,), refused = decoded(schema, value)
    assert refused == {}
    assert read == {"a": {"on": on}, "b": {"on": on}, "c": {"Point": {"on": on}, "Colour": None}, "d": "BLUE"}


SHORT = record(("n", "int"), ("s", "string"))
UNFIT: dict[str, tuple[Any, bytes, str]] = {
    "no bytes": (SHORT, b"", "it ends too early"),
    "a text that ends early": (SHORT, b"\x02\x10ab", "it ends too early"),
    "bytes behind it": (SHORT, b"\x02\x02a\x00", "1 bytes follow it"),
    "a text that is not UTF-8": (SHORT, b"\x02\x02\xff", "a text is not UTF-8"),
    "an int of 40 bits": (SHORT, encoded(record(("n", "long"), ("s", "string")), {"n": 2**40, "s": ""}), "at `$.n`"),
    "no such symbol": (record(("c", ENUM)), b"\x04", "of an enum of 2 symbols there is no such number"),
    "a symbol below 0": (record(("c", ENUM)), b"\x01", "there is no such number"),
    "a symbol below 0 that may be null": (record(("c", ["null", ENUM])), b"\x02\x01", "there is no such number"),
    "a symbol below 0 of a union": (record(("c", ["string", ENUM])), b"\x02\x01", "there is no such number"),
    "a symbol of a union that is not there": (record(("c", ["string", ENUM])), b"\x02\x04", "no such number"),
    "a member below 0": (record(("u", ["null", "int"])), b"\x01\x02", "a member of a union that is not there"),
    "the last member from below": (
        record(("u", ["null", "int", "string"])), b"\x05", "a member of a union that is not there"
    ),
    "a truth of two": (record(("t", "boolean")), b"\x02", "a truth value is 2, and not 0 or 1"),
    "a truth of 255 that may be null": (record(("t", ["null", "boolean"])), b"\x02\xff", "a truth value is 255"),
    "a truth of two in a map": (
        record(("t", {"type": "map", "values": "boolean"})), b"\x02\x00\x02\x00", "a truth value is 2"
    ),
    "a number of 65 bits": (record(("n", "long")), b"\xff" * 9 + b"\x02", "more than 64 bits"),
    "a number of eleven bytes": (record(("n", "long")), b"\x80" * 10 + b"\x00", "more than 64 bits"),
    "a member below 0 in the second block": (
        record(("u", {"type": "array", "items": ["null", fixed(2), DATE]})),
        b"\x02\x02ab" + b"\x01\x04\x04\x02" + b"\x02\x01\x02" + b"\x00",
        "a member of a union that is not there",
    ),
    "a list of -2^63": (
        record(("a", {"type": "array", "items": "double"})),
        b"\xff" * 9 + b"\x01\x00\x00",
        "a list has more elements than bytes",
    ),
    "no truth": (record(("t", "boolean")), b"", "it ends too early"),
    "no such member": (record(("u", ["null", "int"])), b"\x04", "a member of a union that is not there"),
    "too many digits": (record(("d", logical("bytes", "decimal", precision=2))), b"\x02\x64", "more than 2 digits"),
    "the year 10000": (record(("d", logical("int", "date"))), encoded("int", 2_932_897), "the year is not 1 to 9999"),
    "the year 0": (record(("t", logical("long", MILLIS))), encoded("long", -62_135_596_800_001), "the year is not 1"),
    "a time of a long day": (
        record(("t", logical("int", "time-millis"))),
        encoded("int", 86_400_000),
        "no time of a day",
    ),
    "a time before the day": (record(("t", logical("long", "time-micros"))), b"\x01", "no time of a day"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_and_its_neighbours_are_not(name: str) -> None:
    schema, value, says = UNFIT[name]
    values, refused = decoded(schema, None, value, None)
    assert values == [None] * 3
    assert list(refused) == [1]
    assert says in refused[1]
    assert refused[1].startswith("no Avro value of shop.Order: ")


def test_values_that_do_not_fit_are_found_among_many() -> None:
    schema = record(("d", logical("int", "date")))
    good, bad = encoded("int", 1), encoded("int", 2**31 - 1)
    values, refused = decoded(schema, *[bad if number in (0, 700, 701, 999) else good for number in range(1_000)])
    assert sorted(refused) == [0, 700, 701, 999]
    assert [number for number, value in enumerate(values) if value is None] == [0, 700, 701, 999]


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_have_a_reason(value: bytes) -> None:
    schema = record(
        ("u", ["null", "string", {"type": "array", "items": "long"}]),
        ("m", {"type": "map", "values": ENUM}),
        ("d", DECIMAL),
    )
    values, refused = decoded(schema, value)
    assert (values[0] is None) == (0 in refused)


def test_few_bytes_do_not_become_many_values() -> None:
    """An array that says it has a thousand million numbers, which then are not there."""
    started = time.process_time()
    _, refused = decoded({"type": "array", "items": "int"}, b"\x80\xa8\xd6\xb9\x07")
    assert "ends too early" in refused[0]
    assert time.process_time() - started < 1
