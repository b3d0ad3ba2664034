"""Schemas in Avro's JSON: the columns that they have, and those that are refused by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headrace.formats.avro_schema import AvroKind, AvroSchemaError, read_schema


def of(type_: Any, *, decimals: Any = "number") -> str:
    """The type of a record's only field."""
    record = {"type": "record", "name": "shop.Order", "fields": [{"name": "value", "type": type_}]}
    return read_schema(json.dumps(record)).columns(decimals).removeprefix("`value` ")


def logical(below: Any, name: str, **more: Any) -> Any:
    return {**(below if isinstance(below, dict) else {"type": below}), "logicalType": name, **more}


def fixed(size: int) -> Any:
    return {"type": "fixed", "name": "Fixed", "size": size}


COLUMNS: list[tuple[Any, str]] = [
    ("boolean", "BOOLEAN"),
    ("int", "INT"),
    ("long", "BIGINT"),
    ("float", "FLOAT"),
    ("double", "DOUBLE"),
    ("bytes", "BINARY"),
    ("string", "STRING"),
    (fixed(4), "BINARY"),
    ({"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}, "STRING"),
    ({"type": "array", "items": "int"}, "ARRAY<INT>"),
    ({"type": "map", "values": "long"}, "MAP<STRING, BIGINT>"),
    (["null", "string"], "STRING"),
    (["string", "null"], "STRING"),
    (["string"], "STRING"),
    (["int", "long"], "BIGINT"),
    (["null", "float", "double"], "DOUBLE"),
    (["null", "string", "int"], "STRUCT<`string` STRING, `int` INT>"),
    (["bytes", fixed(4)], "STRUCT<`bytes` BINARY, `Fixed` BINARY>"),
    (logical("bytes", "decimal", precision=10, scale=2), "DECIMAL(10, 2)"),
    (logical(fixed(16), "decimal", precision=38, scale=38), "DECIMAL(38, 38)"),
    (logical("bytes", "decimal", precision=39), "STRING"),
    (logical("string", "uuid"), "STRING"),
    (logical(fixed(16), "uuid"), "STRING"),
    (logical("int", "date"), "DATE"),
    (logical("int", "time-millis"), "STRING"),
    (logical("long", "time-micros"), "STRING"),
    (logical("long", "timestamp-millis"), "TIMESTAMP"),
    (logical("long", "timestamp-micros"), "TIMESTAMP"),
    (logical("long", "timestamp-nanos"), "STRING"),
    (logical("long", "local-timestamp-millis"), "TIMESTAMP_NTZ"),
    (logical("long", "local-timestamp-micros"), "TIMESTAMP_NTZ"),
    (logical("long", "local-timestamp-nanos"), "STRING"),
    (logical(fixed(12), "duration"), "STRUCT<months: BIGINT, days: BIGINT, millis: BIGINT>"),
    ({"type": "int", "connect.name": "io.debezium.time.Date"}, "DATE"),
    ({"type": "int", "connect.name": "io.debezium.time.Time"}, "STRING"),
    ({"type": "long", "connect.name": "io.debezium.time.MicroTime"}, "STRING"),
    ({"type": "long", "connect.name": "io.debezium.time.NanoTime"}, "STRING"),
    ({"type": "long", "connect.name": "io.debezium.time.Timestamp"}, "TIMESTAMP_NTZ"),
    ({"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}, "TIMESTAMP_NTZ"),
    ({"type": "long", "connect.name": "io.debezium.time.NanoTimestamp"}, "STRING"),
    ({"type": "int", "connect.name": "io.debezium.time.MicroTimestamp"}, "INT"),
    # What does not fit is left out, by Avro's specification.
    (logical("bytes", "decimal"), "BINARY"),
    (logical("bytes", "decimal", precision=2, scale=3), "BINARY"),
    (logical("string", "date"), "STRING"),
    (logical(fixed(4), "uuid"), "BINARY"),
    (logical("long", "of-a-house"), "BIGINT"),
    ({"type": {"type": "string", "avro.java.string": "String"}}, "STRING"),
    ({"type": "record", "name": "Line", "fields": [{"name": "a`b", "type": "int"}]}, "STRUCT<`a``b` INT>"),
]


@pytest.mark.parametrize(("type_", "ddl"), COLUMNS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_type_has_its_column(type_: Any, ddl: str) -> None:
    assert of(type_) == ddl


def test_decimals_can_be_texts() -> None:
    assert of(logical("bytes", "decimal", precision=10, scale=2), decimals="text") == "STRING"


def test_a_name_stands_for_what_it_was_defined_as() -> None:
    line = {"type": "record", "name": "Line", "fields": [{"name": "n", "type": "int"}]}
    fields = [
        {"name": "first", "type": line},
        {"name": "second", "type": "Line"},
        {"name": "third", "type": ["null", "shop.Line"]},
    ]
    read = read_schema(json.dumps({"type": "record", "name": "Order", "namespace": "shop", "fields": fields}))
    assert read.columns() == ", ".join(f"`{name}` STRUCT<`n` INT>" for name in ("first", "second", "third"))
    assert [field["type"] for field in read.plain["fields"][1:]] == ["shop.Line", ["null", "shop.Line"]]


def test_members_with_one_short_name_have_their_full_names() -> None:
    members = [{"type": "record", "name": name, "fields": [{"name": "n", "type": "int"}]} for name in ("a.X", "b.X")]
    assert of(members) == "STRUCT<`a.X` STRUCT<`n` INT>, `b.X` STRUCT<`n` INT>>"


def test_a_field_that_can_only_be_null_is_no_column() -> None:
    fields = [{"name": "n", "type": "int"}, {"name": "nothing", "type": "null"}]
    assert read_schema(json.dumps({"type": "record", "name": "R", "fields": fields})).columns() == "`n` INT"


def test_a_schema_need_not_be_a_record() -> None:
    assert read_schema('"string"').kind is AvroKind.STRING
    assert read_schema('{"type": "array", "items": "string"}').ddl() == "ARRAY<STRING>"


TREE = {
    "type": "record",
    "name": "n.Tree",
    "fields": [{"name": "children", "type": {"type": "array", "items": "Tree"}}],
}
REFUSED = {
    "no JSON": ("{", "is no JSON"),
    "null": ('"null"', "no value that could be a column"),
    "a record without columns": (json.dumps({"type": "record", "name": "R", "fields": []}), "no value that could be"),
    "recursion": (json.dumps(TREE), r"n\.Tree, which contains itself at children\[\]"),
    "an unknown name": ('"Nobody"', "'Nobody', which it does not define"),
    "a name twice": (
        json.dumps(["null", {"type": "array", "items": fixed(1)}, {"type": "map", "values": fixed(2)}]),
        "'Fixed' twice",
    ),
    "a field twice": (
        json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}] * 2}),
        "names the field 'a' twice",
    ),
    "elements without bytes": (json.dumps({"type": "array", "items": "null"}), "elements have no bytes"),
    "no type": (json.dumps({"name": "R"}), "in place of a type"),
    "a number": ("5", "has 5 in place of a type"),
    "no symbols": (json.dumps({"type": "enum", "name": "E", "symbols": []}), "the enum E without symbols"),
    "no size": (json.dumps({"type": "fixed", "name": "F"}), "the fixed F without a size"),
    "no items": (json.dumps({"type": "array"}), "array without items"),
    "a union within a union": (json.dumps(["null", ["int", "string"]]), "a union within a union"),
    "two members of a type": (
        json.dumps(["int", {"type": "int", "logicalType": "date"}]),
        "two members of the type int",
    ),
    "two arrays": (json.dumps([{"type": "array", "items": each} for each in ("int", "long")]), "of the type array"),
    **{
        f"aliases of {given!r}": (
            json.dumps({"type": "record", "name": "R", "fields": [], "aliases": given}),
            "no list",
        )
        for given in (None, 5, "Old", [5], {"a": 1}, [["Old"]])
    },
    "aliases of a field": (
        json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "aliases": 5}]}),
        "has the aliases 5 of the field a of the record R, no list of names",
    ),
    "aliases of an enum": (
        json.dumps({"type": "enum", "name": "E", "symbols": ["A"], "aliases": "Old"}),
        'has the aliases "Old" of the enum E',
    ),
    "aliases of a fixed": (
        json.dumps({"type": "fixed", "name": "F", "size": 1, "aliases": [None]}),
        r"has the aliases \[null\] of the fixed F",
    ),
    **{
        f"an enum's default {given!r}": (
            json.dumps({"type": "enum", "name": "E", "symbols": ["A"], "default": given}),
            "of the enum E, no text",
        )
        for given in (None, 5, ["A"], {"A": 1})
    },
    "unions without end": ('[{"type": ' * 400 + '"int"' + "}]" * 400, "a union within a union"),
    "a deep type": ('{"type": "array", "items": ' * 70 + '"int"' + "}" * 70, "deeper than 64 levels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_without_columns_is_refused_by_name(name: str) -> None:
    text, says = REFUSED[name]
    with pytest.raises(AvroSchemaError, match=says):
        read_schema(text)


@pytest.mark.parametrize("key", ["logicalType", "connect.name", "precision", "doc", "order", "connect.parameters"])
@pytest.mark.parametrize("given", [None, 5, ["a"], {"a": 1}])
def test_what_counts_for_nothing_may_be_anything(key: str, given: Any) -> None:
    made = {"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "bytes", key: given}, key: given}]}
    assert read_schema(json.dumps({**made, key: given})).columns() == "`a` BINARY"


def test_a_namespace_of_null_is_that_of_the_record_around() -> None:
    """fastavro/fastavro#537: a name without it was then not known."""
    row = {"type": "record", "name": "row", "namespace": None, "fields": [{"name": "n", "type": "int"}]}
    fields = [{"name": "a", "type": row}, {"name": "b", "type": "row"}]
    made = read_schema(json.dumps({"type": "record", "name": "R", "namespace": "shop", "fields": fields}))
    assert [part.name for _, part in made.parts] == ["shop.row", "shop.row"]


def test_a_writers_record_may_contain_itself() -> None:
    made = read_schema(json.dumps(TREE), of_columns=False)
    assert made.parts[0][1].parts[0][1].is_within_itself


@pytest.mark.parametrize("fields", [[{"name": "n", "type": "int"}], [{"name": "n", "type": "null"}], []])
def test_records_within_records_do_not_make_columns_without_end(fields: list[Any]) -> None:
    """Thirty names that each stand for two of the one before: a thousand million columns of a short text. Without
    fields, as many records would be read from no byte."""
    inner: Any = {"type": "record", "name": "R0", "fields": fields}
    for number in range(1, 31):
        fields = [{"name": "a", "type": inner}, {"name": "b", "type": f"R{number - 1}"}]
        inner = {"type": "record", "name": f"R{number}", "fields": fields}
    with pytest.raises(AvroSchemaError, match=r"columns in the record R\d+, more than 10,000"):
        read_schema(json.dumps({"type": "array", "items": inner}), of_columns=False)


def chain_of(records: int) -> str:
    """Records that are each defined in a place that is not deep, and have a field that names the one before."""
    chain = [{"type": "record", "name": "R0", "fields": [{"name": "n", "type": "int"}]}]
    for one in range(1, records):
        chain.append({"type": "record", "name": f"R{one}", "fields": [{"name": "below", "type": f"R{one - 1}"}]})
    fields = [{"name": f"f{number}", "type": each} for number, each in enumerate(chain)]
    return json.dumps({"type": "record", "name": "Top", "fields": fields})


def test_a_name_is_as_deep_as_what_it_stands_for() -> None:
    assert read_schema(chain_of(62)).depth == 64
    for records in (63, 80):
        with pytest.raises(AvroSchemaError, match="is deeper than 64 levels"):
            read_schema(chain_of(records))


def test_a_schema_of_a_megabyte_is_read_at_once() -> None:
    fields = [{"name": f"field_{number}", "type": ["null", "string"], "doc": "x" * 180} for number in range(5_000)]
    text = json.dumps({"type": "record", "name": "R", "fields": fields})
    assert len(text) > 1_000_000
    started = time.process_time()
    assert read_schema(text).leaves == 5_000
    assert time.process_time() - started < 2
    with pytest.raises(AvroSchemaError, match="more than 4,194,304"):
        read_schema(text * 5)
