"""Values of each of Protobuf's types, serialized, and what they become."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from google.protobuf import message_factory, text_format
from tests.support.avro_examples import ARROW

from headrace.formats.protobuf_compiler import compile_schema
from headrace.formats.protobuf_schema import ProtoKind, ProtoType, descriptor_pool, descriptor_set
from headrace.formats.schema_text import SchemaText

UTC = datetime.UTC

TYPES = """
import "confluent/meta.proto";
import "confluent/type/decimal.proto";
import "google/protobuf/any.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/empty.proto";
import "google/protobuf/field_mask.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
import "google/type/date.proto";
import "google/type/decimal.proto";
import "google/type/timeofday.proto";
enum Colour { option allow_alias = true; NONE = 0; RED = 1; BLUE = 7; AZURE = 7; }
message Line { int32 n = 1; optional string s = 2; repeated int64 many = 3; }
message Nothing {}
"""


def schema_text(fields: str, types: str = TYPES, syntax: str = 'syntax = "proto3";') -> str:
    """A schema with the message shop.Order, which has the fields."""
    return f"{syntax}\npackage shop;\n{types}\nmessage Order {{ {fields} }}\n"


def compiled(fields: str, types: str = TYPES, syntax: str = 'syntax = "proto3";') -> str:
    return compile_schema(SchemaText(schema_text(fields, types, syntax)))


def message_class(schema: str, name: str = "shop.Order") -> Any:
    return message_factory.GetMessageClass(descriptor_pool(descriptor_set(schema)).FindMessageTypeByName(name))


def serialized(schema: str, text: str, name: str = "shop.Order") -> bytes:
    """The message that Protobuf's text format says."""
    made: bytes = text_format.Parse(text, message_class(schema, name)()).SerializeToString()
    return made


def arrow_of(made: ProtoType, enums: Any = "name", nanoseconds: Any = "refuse") -> pa.DataType:
    """The Arrow type that Spark gives to the type's DDL; tests/integration/spark/test_protobuf.py compares the two."""
    if made.kind is ProtoKind.MESSAGE:
        return pa.struct([(field.name, arrow_of(field.type, enums, nanoseconds)) for field in made.fields])
    if made.kind is ProtoKind.LIST:
        return pa.list_(pa.field("element", arrow_of(made.element, enums, nanoseconds)))
    if made.kind is ProtoKind.MAP:
        return pa.map_(arrow_of(made.key), arrow_of(made.element, enums, nanoseconds))
    ddl = made.ddl(enums, nanoseconds)
    if ddl.startswith("DECIMAL"):
        return pa.decimal128(*map(int, ddl.removeprefix("DECIMAL(").removesuffix(")").split(",")))
    return ARROW[ddl]


LEAST, MOST = -(2**63), 2**63 - 1
META = '[(confluent.field_meta) = {params: [{key: "precision", value: "8"}, {key: "scale", value: "3"}]}]'
LINE: dict[str, Any] = {"n": 5, "s": None, "many": []}
AT = "google.protobuf.Timestamp value = 1;"
# Among them what other converters got wrong: ksql's issue 9333 (nulls became defaults), issues 28 and 31 of
# kafka-connect-protobuf-converter (uint64 was unknown, no time was 1970), Confluent's pull request 2321.
VALUES: dict[str, tuple[str, str, Any]] = {
    "double": ("double value = 1;", "value: 1.7976931348623157e308", 1.7976931348623157e308),
    "minus zero": ("double value = 1;", "value: -0.0", -0.0),
    "infinity": ("float value = 1;", "value: -inf", float("-inf")),
    "float": ("float value = 1;", "value: 0.5", 0.5),
    "the least int32": ("int32 value = 1;", f"value: {-(2**31)}", -(2**31)),
    "the greatest sint32": ("sint32 value = 1;", f"value: {2**31 - 1}", 2**31 - 1),
    "sfixed32": ("sfixed32 value = 1;", "value: -1", -1),
    "the greatest uint32": ("uint32 value = 1;", f"value: {2**32 - 1}", 2**32 - 1),
    "fixed32": ("fixed32 value = 1;", f"value: {2**32 - 1}", 2**32 - 1),
    "the least int64": ("int64 value = 1;", f"value: {LEAST}", LEAST),
    "the greatest int64": ("sint64 value = 1;", f"value: {MOST}", MOST),
    "sfixed64": ("sfixed64 value = 1;", f"value: {LEAST}", LEAST),
    "the greatest uint64": ("uint64 value = 1;", f"value: {2**64 - 1}", Decimal(2**64 - 1)),
    "fixed64": ("fixed64 value = 1;", f"value: {2**63}", Decimal(2**63)),
    "bool": ("bool value = 1;", "value: true", True),
    "string": ("string value = 1;", 'value: "grün\\000"', "grün\0"),
    "bytes": ("bytes value = 1;", r'value: "\000\377"', b"\x00\xff"),
    "enum": ("Colour value = 1;", "value: RED", "RED"),
    "an enum's second name": ("Colour value = 1;", "value: AZURE", "BLUE"),
    "an enum's unknown number": ("Colour value = 1;", "value: 5", "5"),
    "an enum's number below zero": ("Colour value = 1;", "value: -1", "-1"),
    "an unset number": ("int64 value = 1;", "", 0),
    "an unset text": ("string value = 1;", "", ""),
    "an unset enum": ("Colour value = 1;", "", "NONE"),
    "an unset optional": ("optional int32 value = 1;", "", None),
    "an optional zero": ("optional int32 value = 1;", "value: 0", 0),
    "an optional enum": ("optional Colour value = 1;", "value: NONE", "NONE"),
    "message": ("Line value = 1;", "value { n: 5 }", LINE),
    "an unset message": ("Line value = 1;", "", None),
    "an empty message": ("Line value = 1;", "value {}", {**LINE, "n": 0}),
    "a message without fields": ("Nothing value = 1;", "value {}", {}),
    "no message without fields": ("google.protobuf.Empty value = 1;", "", None),
    "repeated": ("repeated int32 value = 1;", "value: [3, 1, 2]", [3, 1, 2]),
    "an unset repeated": ("repeated int32 value = 1;", "", []),
    "repeated, not packed": ("repeated sint64 value = 1 [packed = false];", "value: [3, -1]", [3, -1]),
    "repeated texts": ("repeated string value = 1;", 'value: ["b", ""]', ["b", ""]),
    "repeated enums": ("repeated Colour value = 1;", "value: [RED, 5]", ["RED", "5"]),
    "repeated messages": (
        "repeated Line value = 1;",
        'value { n: 5 } value { s: "" many: 7 }',
        [LINE, {"n": 0, "s": "", "many": [7]}],
    ),
    "repeated times": (
        "repeated google.protobuf.Timestamp value = 1;",
        "value {} value { seconds: 1 }",
        [datetime.datetime(1970, 1, 1, tzinfo=UTC), datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)],
    ),
    "map": (
        "map<string, int64> value = 1;",
        'value { key: "b" value: 2 } value { key: "a" value: 1 }',
        [("a", 1), ("b", 2)],
    ),
    "an unset map": ("map<string, int64> value = 1;", "", []),
    "a map of numbers": (
        "map<int32, Line> value = 1;",
        "value { key: 7 value { n: 5 } } value { key: -7 value { n: 5 } }",
        [(-7, LINE), (7, LINE)],
    ),
    "a map of truth values": ("map<bool, string> value = 1;", 'value { key: true value: "x" }', [(True, "x")]),
    "a map of great numbers": (
        "map<uint64, Colour> value = 1;",
        f"value {{ key: {2**64 - 1} value: RED }}",
        [(Decimal(2**64 - 1), "RED")],
    ),
    "a oneof's member": ("oneof either { int32 value = 1; string other = 2; }", "value: 0", 0),
    "a oneof's other member": ("oneof either { int32 value = 1; string other = 2; }", 'other: ""', None),
    "time": (
        AT, "value { seconds: 1700000000 nanos: 123456000 }",
        datetime.datetime(2023, 11, 14, 22, 13, 20, 123456, UTC),
    ),
    "the first time": (AT, "value { seconds: -62135596800 }", datetime.datetime(1, 1, 1, tzinfo=UTC)),
    "the last time": (
        AT, "value { seconds: 253402300799 nanos: 999999000 }",
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
    ),
    "before 1970": (AT, "value { seconds: -1 nanos: 1000 }", datetime.datetime(1969, 12, 31, 23, 59, 59, 1, UTC)),
    "no time": (AT, "", None),
    "duration": (
        "google.protobuf.Duration value = 1;", "value { seconds: -3 nanos: -5 }", {"seconds": -3, "nanos": -5}
    ),
    "int32 wrapper": ("google.protobuf.Int32Value value = 1;", "value {}", 0),
    "no wrapper": ("google.protobuf.Int32Value value = 1;", "", None),
    "uint32 wrapper": ("google.protobuf.UInt32Value value = 1;", f"value {{ value: {2**32 - 1} }}", 2**32 - 1),
    "uint64 wrapper": ("google.protobuf.UInt64Value value = 1;", f"value {{ value: {2**64 - 1} }}", Decimal(2**64 - 1)),
    "bytes wrapper": ("google.protobuf.BytesValue value = 1;", 'value { value: "x" }', b"x"),
    "repeated wrappers": (
        "repeated google.protobuf.BoolValue value = 1;", "value {} value { value: true }", [False, True]
    ),
    "struct": (
        "google.protobuf.Struct value = 1;",
        'value { fields { key: "b" value { number_value: 1.5 } } fields { key: "a" value { list_value { '
        'values { null_value: NULL_VALUE } values { string_value: "ü" } values { number_value: 2 } values {} } } } }',
        '{"a":[null,"ü",2,null],"b":1.5}',
    ),
    "any": (
        "google.protobuf.Any value = 1;", 'value { type_url: "t/x" value: "y" }', {"type_url": "t/x", "value": b"y"}
    ),
    "field mask": ("google.protobuf.FieldMask value = 1;", 'value { paths: ["a.b", "c_d"] }', "a.b,c_d"),
    "an empty field mask": ("google.protobuf.FieldMask value = 1;", "value {}", ""),
    "date": ("google.type.Date value = 1;", "value { year: 2024 month: 2 day: 29 }", datetime.date(2024, 2, 29)),
    "the last date": (
        "google.type.Date value = 1;", "value { year: 9999 month: 12 day: 31 }", datetime.date(9999, 12, 31)
    ),
    "time of day": ("google.type.TimeOfDay value = 1;", "value { hours: 13 nanos: 25 }", "13:00:00.000000025"),
    "google's decimal": ("google.type.Decimal value = 1;", 'value { value: "1.50e3" }', "1.50e3"),
    "decimal": (f"confluent.type.Decimal value = 1 {META};", r'value { value: "\377" scale: 2 }', Decimal("-0.010")),
    "a decimal that declares nothing": (
        "confluent.type.Decimal value = 1;", r'value { value: "\001\000" precision: 3 scale: 2 }', "2.56"
    ),
    "a decimal with zeros": ("confluent.type.Decimal value = 1;", r'value { value: "d" scale: -2 }', "10000"),
}  # fmt: skip
