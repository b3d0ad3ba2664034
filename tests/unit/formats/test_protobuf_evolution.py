"""Pairs of a reader's and a writer's message: what is read, and what is refused in words."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.support.protobuf_examples import arrow_of, compiled, serialized

from headrace.formats.protobuf_evolution import differences
from headrace.formats.protobuf_schema import read_like, read_schema
from headrace.spark.records.protobuf.values import ProtobufValues

ORDER = "shop.Order"
NESTED = "message A { int32 n = 1; string s = 2; }"

# The reader's field, the writer's, a value, and what it becomes.
READ: dict[str, tuple[str, str, str, Any]] = {
    "a field that was added": ("int32 v = 2;", "int32 n = 1;", "n: 1", 0),
    "an optional that was added": ("optional int32 v = 2;", "int32 n = 1;", "n: 1", None),
    "a text that was added": ("string v = 2;", "int32 n = 1;", "n: 1", ""),
    "an enum that was added": ("Colour v = 2;", "int32 n = 1;", "n: 1", "NONE"),
    "a list that was added": ("repeated Line v = 2;", "int32 n = 1;", "n: 1", []),
    "a map that was added": ("map<string, Line> v = 2;", "int32 n = 1;", "n: 1", []),
    "a message that was added": ("Line v = 2;", "int32 n = 1;", "n: 1", None),
    "a field with another name": ("int32 v = 1;", "int32 w = 1;", "w: 3", 3),
    "int32 to int64": ("int64 v = 1;", "int32 v = 1;", "v: -3", -3),
    "int64 to int32": ("int32 v = 1;", "int64 v = 1;", "v: -3", -3),
    "int32 to sint64": ("sint64 v = 1;", "int32 v = 1;", "v: -3", -3),
    "int32 to fixed64": ("fixed64 v = 1;", "int32 v = 1;", "v: 3", Decimal(3)),
    "uint64 to int64": ("int64 v = 1;", "uint64 v = 1;", "v: 3", 3),
    "bool to int32": ("int32 v = 1;", "bool v = 1;", "v: true", 1),
    "int32 to an enum": ("Colour v = 1;", "int32 v = 1;", "v: 7", "BLUE"),
    "an enum to int32": ("int32 v = 1;", "Colour v = 1;", "v: BLUE", 7),
    "a name that only the writer has": (
        "enum E { Z = 0; } E v = 1;", "enum E { Z = 0; NEW = 1; } E v = 1;", "v: NEW", "NEW"
    ),
    "a name that the reader has otherwise": (
        "enum E { Z = 0; OURS = 1; } E v = 1;", "enum E { Z = 0; THEIRS = 1; } E v = 1;", "v: THEIRS", "OURS"
    ),
    "float to double": ("double v = 1;", "float v = 1;", "v: 0.5", 0.5),
    "double to float": ("float v = 1;", "double v = 1;", "v: 0.5", 0.5),
    "string to bytes": ("bytes v = 1;", "string v = 1;", 'v: "ü"', "ü".encode()),
    "bytes to string": ("string v = 1;", "bytes v = 1;", r'v: "\303\274"', "ü"),
    "one to many": ("repeated int32 v = 1;", "optional int32 v = 1;", "v: 0", [0]),
    "a message to many": ("repeated Line v = 1;", "Line v = 1;", "v { n: 2 }", [{"n": 2, "s": None, "many": []}]),
    "packed to not packed": (
        "repeated int64 v = 1 [packed = false];", "repeated int32 v = 1;", "v: [1, 2]", [1, 2]
    ),
    "into a oneof": ("oneof o { int32 v = 1; string s = 2; }", "int32 v = 1;", "v: 3", 3),
    "out of a oneof": ("int32 v = 1; string s = 2;", "oneof o { int32 v = 1; string s = 2; }", 's: "x"', 0),
    "implicit to optional": ("optional int32 v = 1;", "int32 v = 1;", "", None),
    "optional to implicit": ("int32 v = 1;", "optional int32 v = 1;", "", 0),
    "a field within that was added": (
        "message A { int32 n = 1; int32 more = 5; } A v = 1;", f"{NESTED} A v = 1;", "v { n: 2 }", {"n": 2, "more": 0}
    ),
    "a wrapper whose value is wider": (
        "google.protobuf.Int64Value v = 1;", "google.protobuf.Int32Value v = 1;", "v {}", 0
    ),
    "what contains itself in the writer": ("int32 v = 1;", "int32 v = 1; repeated Order more = 2;", "v: 1 more {}", 1),
    "a map's wider values": (
        "map<int64, int64> v = 1;", "map<int32, int32> v = 1;", "v { key: 1 value: 2 }", [(1, 2)]
    ),
}  # fmt: skip


def values_of(reader: str, writer: str, *texts: str) -> tuple[list[Any], dict[int, str]]:
    ours, theirs = compiled(reader), compiled(writer)
    made = ProtobufValues(
        arrow_of(read_schema(ours, ORDER)), schema=ours, message=ORDER, writer=theirs, writer_message=ORDER
    )
    values = [serialized(theirs, text) for text in texts]
    array, refused = made.decode(pa.array([*values, None], pa.binary()))
    array.validate(full=True)
    made_slow = ProtobufValues(array.type, schema=ours, message=ORDER, writer=theirs, writer_message=ORDER)
    if not made_slow._differences:
        made_slow._reader = None
        assert made_slow.decode(pa.array([*values, None], pa.binary())) == (array, refused)
    return array.to_pylist(), refused


@pytest.mark.parametrize("name", READ)
def test_a_changed_field_is_read_by_what_it_meant(name: str) -> None:
    reader, writer, text, wanted = READ[name]
    values, refused = values_of(reader, writer, text)
    assert refused == {}
    assert values[0]["v"] == wanted
    assert values[1] is None


REFUSED = {
    "int32 to string": ("string v = 1;", "int32 v = 1;", "`$.v` was int32, and is read as string"),
    "int32 to bool": ("bool v = 1;", "int32 v = 1;", "`$.v` was int32, and is read as bool"),
    "int64 to double": ("double v = 1;", "int64 v = 1;", "`$.v` was int64, and is read as double"),
    "many to one": ("int32 v = 1;", "repeated int32 v = 1;", "`$.v` was repeated int32, and is read as int32"),
    "a message to a text": ("string v = 1;", "Line v = 1;", "`$.v` was shop.Line, and is read as string"),
    "a map to a list": (
        "repeated Line v = 1;", "map<int32, Line> v = 1;",
        "`$.v` was map<int32, shop.Line>, and is read as repeated shop.Line",
    ),
    "within": (
        "message A { int32 n = 1; } repeated A v = 1;", "message A { string n = 1; } repeated A v = 1;",
        "`$.v[].n` was string, and is read as int32",
    ),
    "JSON": ("google.protobuf.Struct v = 1;", "string v = 1;", "was string, and is read as google.protobuf.Struct"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_for_all(name: str) -> None:
    reader, writer, says = REFUSED[name]
    values, refused = values_of(reader, writer, "", "")
    assert values == [None] * 3
    assert list(refused) == [0, 1]
    assert refused[0].startswith("no Protobuf message shop.Order: it was written by another schema: ")
    assert says in refused[0]


NARROW = {
    "int64 to int32": ("int32 v = 1;", "int64 v = 1;", f"v: {2**31}"),
    "int32 to uint64": ("uint64 v = 1;", "int32 v = 1;", "v: -1"),
    "uint64 to int64": ("int64 v = 1;", "uint64 v = 1;", f"v: {2**63}"),
    "double to float": ("float v = 1;", "double v = 1;", "v: 0.1"),
    "bytes to string": ("string v = 1;", "bytes v = 1;", r'v: "\377"'),
}


@pytest.mark.parametrize("name", NARROW)
def test_a_value_that_does_not_fit_is_refused_alone(name: str) -> None:
    reader, writer, text = NARROW[name]
    values, refused = values_of(reader, writer, "", text)
    assert values[0] is not None
    assert list(refused) == [1]
    assert "at `$.v`" in refused[1]


def test_a_required_field_must_be_the_writers_too() -> None:
    ours = compiled("required int32 a = 1; optional int32 b = 2;", "", 'syntax = "proto2";')
    theirs = compiled("optional int32 b = 2;", "", 'syntax = "proto2";')
    reader = read_schema(ours, ORDER)
    assert list(differences(reader, read_like(theirs, ORDER, reader))) == ["`$.a` was not there, and is required"]
