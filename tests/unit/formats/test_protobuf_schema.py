"""Schemas of Protobuf: the columns that messages have, and those that are refused by name."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.support.protobuf_examples import TYPES, compiled

from headrace.formats import protobuf_compiler
from headrace.formats.protobuf_compiler import LibraryMissingError, compile_schema
from headrace.formats.protobuf_schema import (
    ProtobufSchemaError,
    ProtoKind,
    check_encoded,
    descriptor_set,
    message_at,
    message_names,
    read_schema,
)
from headrace.formats.schema_text import SchemaText

COLUMNS: list[tuple[str, str]] = [
    *[(name, "INT") for name in ("int32", "sint32", "sfixed32")],
    *[(name, "BIGINT") for name in ("uint32", "fixed32", "int64", "sint64", "sfixed64")],
    *[(name, "DECIMAL(20, 0)") for name in ("uint64", "fixed64")],
    *[("double", "DOUBLE"), ("float", "FLOAT"), ("bool", "BOOLEAN"), ("string", "STRING"), ("bytes", "BINARY")],
    ("Colour", "STRING"),
    ("optional int32", "INT"),
    ("repeated int32", "ARRAY<INT>"),
    ("map<string, int64>", "MAP<STRING, BIGINT>"),
    ("map<uint64, Line>", "MAP<DECIMAL(20, 0), STRUCT<`n` INT, `s` STRING, `many` ARRAY<BIGINT>>>"),
    ("Line", "STRUCT<`n` INT, `s` STRING, `many` ARRAY<BIGINT>>"),
    ("Nothing", "STRUCT<>"),
    ("google.protobuf.Timestamp", "TIMESTAMP"),
    ("google.protobuf.Duration", "STRUCT<`seconds` BIGINT, `nanos` INT>"),
    ("google.protobuf.UInt64Value", "DECIMAL(20, 0)"),
    ("repeated google.protobuf.StringValue", "ARRAY<STRING>"),
    ("google.protobuf.Struct", "STRING"),
    ("google.protobuf.ListValue", "STRING"),
    ("google.protobuf.Any", "STRUCT<`type_url` STRING, `value` BINARY>"),
    ("google.protobuf.FieldMask", "STRING"),
    ("google.protobuf.Empty", "STRUCT<>"),
    ("google.type.Date", "DATE"),
    ("google.type.TimeOfDay", "STRING"),
    ("google.type.Decimal", "STRING"),
    ("confluent.type.Decimal", "STRING"),
]


@pytest.mark.parametrize(("type_", "ddl"), COLUMNS)
def test_a_type_has_its_column(type_: str, ddl: str) -> None:
    assert read_schema(compiled(f"{type_} value = 1;"), "shop.Order").columns() == f"`value` {ddl}"


@pytest.mark.parametrize(
    ("parameters", "ddl"),
    [
        ({"precision": "8", "scale": "3"}, "DECIMAL(8, 3)"),
        ({"scale": "2"}, "DECIMAL(38, 2)"),
        ({"precision": "5"}, "DECIMAL(5, 0)"),
        ({"precision": "39", "scale": "3"}, "STRING"),
        ({"precision": "2", "scale": "3"}, "STRING"),
        ({"precision": "many"}, "STRING"),
        ({"doc": "x"}, "STRING"),
    ],
)
def test_a_decimal_has_what_its_field_declares(parameters: dict[str, str], ddl: str) -> None:
    shown = ", ".join(f'{{key: "{name}", value: "{value}"}}' for name, value in parameters.items())
    field = f"confluent.type.Decimal value = 1 [(confluent.field_meta) = {{params: [{shown}]}}];"
    assert read_schema(compiled(field), "shop.Order").columns() == f"`value` {ddl}"


def test_settings_change_the_columns() -> None:
    made = read_schema(compiled("Colour c = 1; repeated google.protobuf.Timestamp at = 2;"), "shop.Order")
    assert made.columns("number", "cut") == "`c` INT, `at` ARRAY<TIMESTAMP>"
    assert made.columns("name", "text") == "`c` STRING, `at` ARRAY<STRING>"


def test_a_message_of_a_known_name_needs_its_shape() -> None:
    own = 'syntax = "proto3"; package google.protobuf; message Timestamp { string text = 1; }'
    order = (
        'syntax = "proto3"; import "google/protobuf/timestamp.proto"; message M { google.protobuf.Timestamp at = 1; }'
    )
    schema = compile_schema(SchemaText(order, (("google/protobuf/timestamp.proto", own),)))
    assert read_schema(schema, "M").columns() == "`at` STRUCT<`text` STRING>"


def test_members_of_a_oneof_are_columns_beside_the_others() -> None:
    made = read_schema(compiled("oneof either { int32 a = 1; Line b = 2; } optional int32 c = 3;"), "shop.Order")
    assert [(field.name, field.oneof, field.has_presence) for field in made.fields] == [
        ("a", "either", True),
        ("b", "either", True),
        ("c", "", True),
    ]


def test_names_are_those_of_the_schema() -> None:
    made = read_schema(compiled('int32 order_id = 1 [json_name = "id"];'), "shop.Order")
    assert made.columns() == "`order_id` INT"


def test_a_message_is_found_by_its_name_or_place() -> None:
    text = (
        'syntax = "proto3"; package a.b; message First { message In { message Deep { int32 n = 1; } int32 n = 1; } '
        "map<string, In> in = 1; } message Second { int32 n = 1; }"
    )
    schema = compile_schema(SchemaText(text))
    assert message_names(schema) == ["a.b.First", "a.b.First.In", "a.b.First.In.Deep", "a.b.Second"]
    assert [message_at(schema, at) for at in ([0], [1], [0, 0, 0])] == [
        "a.b.First",
        "a.b.Second",
        "a.b.First.In.Deep",
    ]
    with pytest.raises(ProtobufSchemaError, match=r"has no message at \[2\]"):
        message_at(schema, [2])
    with pytest.raises(ProtobufSchemaError, match=r"has no message 'b.First'; it has a.b.First, a.b.First.In"):
        read_schema(schema, "b.First")


def test_files_that_are_given_are_imported() -> None:
    text = 'syntax = "proto3"; import "shop/line.proto"; message M { shop.Line line = 1; }'
    line = 'syntax = "proto3"; package shop; import "deep.proto"; message Line { Deep d = 1; }'
    deep = 'syntax = "proto3"; message Deep { int32 n = 1; }'
    schema = compile_schema(SchemaText(text, (("deep.proto", deep), ("shop/line.proto", line))))
    assert read_schema(schema, "M").columns() == "`line` STRUCT<`d` STRUCT<`n` INT>>"


MESSAGE = 'syntax = "proto3"; message M { int32 n = 1; }'
NOT_COMPILED = {
    "no schema": (SchemaText("{}"), r"does not compile: schema.proto:1:1: "),
    "an unknown type": (SchemaText("syntax = 'proto3';\nmessage M {\n  Q q = 1;\n}"), r'schema.proto:3:3: "Q" is not'),
    "a file that is not given": (SchemaText(MESSAGE + 'import "a/b.proto";'), "a/b.proto: File not found"),
    "a file of the host": (SchemaText(MESSAGE + 'import "/etc/hostname";'), "/etc/hostname"),
    "a file above": (SchemaText(MESSAGE + 'import "../made";'), "are not allowed in the virtual path"),
    "a name above": (SchemaText(MESSAGE, (("../x.proto", MESSAGE),)), "'../x.proto', which is no name of a file"),
    "a name of the host": (SchemaText(MESSAGE, (("/etc/x.proto", MESSAGE),)), "which is no name of a file"),
    "a file within a file": (SchemaText(MESSAGE, (("a", MESSAGE), ("a/b", MESSAGE))), "'a/b', which cannot be a file"),
    "a circle": (
        SchemaText(MESSAGE + 'import "a.proto";', (("a.proto", 'syntax = "proto3"; import "schema.proto";'),)),
        "recursively imports itself",
    ),
    "too much": (SchemaText(MESSAGE + " " * 5_000_000), "bytes, more than 4,194,304"),
}


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_does_not_compile_is_refused_with_its_place(name: str) -> None:
    schema, says = NOT_COMPILED[name]
    with pytest.raises(ProtobufSchemaError, match=says):
        compile_schema(schema)


def test_protoc_has_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf_compiler, "TIMEOUT_SECONDS", 0.001)
    with pytest.raises(ProtobufSchemaError, match=r"is not compiled in 0.001 seconds"):
        compile_schema(SchemaText(MESSAGE + "// slow"))


def test_a_host_without_protoc_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf_compiler.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(LibraryMissingError, match=r"grpcio-tools is not installed.*headrace\[registry\]"):
        compile_schema(SchemaText(MESSAGE + "// missing"))


def of(fields: str, types: str = TYPES) -> tuple[str, str]:
    return compiled(fields, types), "shop.Order"


DOUBLED = "message M0 { int32 n = 1; } " + " ".join(
    f"message M{n} {{ M{n - 1} a = 1; M{n - 1} b = 2; }}" for n in range(1, 31)
)
DEEP = "message M0 { int32 n = 1; } " + " ".join(f"message M{n} {{ M{n - 1} a = 1; }}" for n in range(1, 80))
# Recursion ended other converters by a StackOverflowError: ksql's issue 8156, Glue's pull request 448.
REFUSED: dict[str, tuple[Any, str]] = {
    "recursion": (lambda: of("repeated Order children = 1;"), r"shop.Order, which contains itself at children"),
    "recursion of two": (
        lambda: of("A a = 1;", "message A { map<int32, B> b = 1; } message B { A a = 1; }"),
        r"the message shop.A, which contains itself at a.b.a",
    ),
    "no fields": (lambda: of(""), "which has no field that could be a column"),
    "columns without end": (lambda: of("M30 m = 1;", DOUBLED), r"columns in the message shop.M\d+, more than 10,000"),
    "a deep message": (lambda: of("M79 m = 1;", DEEP), "deeper than 64 levels"),
    "no descriptors": (lambda: (base64.b64encode(b"\xff").decode(), "M"), "is no FileDescriptorSet"),
    "nothing": (lambda: ("", "M"), "has no message 'M'; it has none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_without_columns_is_refused_by_name(name: str) -> None:
    make, says = REFUSED[name]
    with pytest.raises(ProtobufSchemaError, match=says):
        read_schema(*make())


def test_a_set_without_its_imports_names_the_file() -> None:
    from headrace.formats.protobuf_schema import descriptor_set

    files = descriptor_set(compiled("google.protobuf.Timestamp at = 1;"))
    del files.file[:-1]
    with pytest.raises(ProtobufSchemaError, match=r"schema.proto.*compile it with --include_imports"):
        read_schema(base64.b64encode(files.SerializeToString()).decode(), "shop.Order")


def test_a_set_is_bytes_or_any_base64_of_them() -> None:
    schema = compiled("int32 n = 1;")
    raw = base64.b64decode(schema)
    assert check_encoded(raw) == check_encoded(base64.encodebytes(raw).decode()) == schema
    with pytest.raises(ProtobufSchemaError, match="is no base64"):
        check_encoded("ä")
    with pytest.raises(ProtobufSchemaError, match="more than 4,194,304"):
        check_encoded(b"x" * 5_000_000)


def test_equal_texts_compile_to_equal_sets() -> None:
    assert compile_schema(SchemaText(MESSAGE)) == compile_schema(SchemaText(MESSAGE + "\n// a comment"))


def test_every_kind_has_a_column() -> None:
    """The table of the tests above is complete."""
    kinds = set()
    for type_, _ in COLUMNS:
        kinds.add(read_schema(compiled(f"{type_} value = 1;"), "shop.Order").fields[0].type.kind)
    assert kinds == set(ProtoKind)


LINES = """syntax = "proto3";
package shop;
import "confluent/meta.proto";
import "google/type/date.proto";
import "shop/line.proto";
message Order { Line line = 1 [(confluent.field_meta) = {rules: {name: "r"}}]; google.type.Date day = 2; }
"""
LINE = 'syntax = "proto3"; package shop; import "google/protobuf/timestamp.proto"; message Line { int32 n = 1; }'
LINE_COLUMNS = "`line` STRUCT<`n` INT>, `day` DATE"


@pytest.mark.parametrize("all_described", [True, False])
@pytest.mark.parametrize("own_described", [True, False])
def test_a_file_may_be_what_protoc_made_of_it(*, own_described: bool, all_described: bool) -> None:
    """Confluent's serializer in Python registers files so, Google's too if it is told to."""
    plain = SchemaText(LINES, (("shop/line.proto", LINE),))
    files = descriptor_set(compile_schema(plain)).file
    described = {file.name: base64.b64encode(file.SerializeToString()).decode() for file in files}
    own = described.pop(files[-1].name)
    given = tuple(described.items()) if all_described else plain.references
    assert compile_schema(SchemaText(own if own_described else LINES, given)) == compile_schema(plain)
    assert read_schema(compile_schema(plain), "shop.Order").columns() == LINE_COLUMNS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("AAAA", "the file schema.proto, which is no FileDescriptorProto in base64"),
        ("Order", "the file schema.proto, which is no FileDescriptorProto in base64"),
        (base64.b64encode(b"\x1a\x07a.proto").decode(), "does not compile: a.proto: File not found"),
    ],
)
def test_base64_that_is_no_file_is_refused(text: str, says: str) -> None:
    with pytest.raises(ProtobufSchemaError, match=says):
        compile_schema(SchemaText(text))


@pytest.mark.parametrize("map_first", [True, False])
def test_a_path_never_leads_to_a_map(*, map_first: bool) -> None:
    """By the descriptor a map counts as a message; to Confluent's serializer in Java it comes after the messages."""
    parts = ["map<string, int32> stock = 1;", "message Line { message Part {} }"]
    schema = compile_schema(
        SchemaText(f'syntax = "proto3"; message Order {{ {" ".join(parts[:: 2 * map_first - 1])} }}')
    )
    assert message_at(schema, (0, 0, 0)) == "Order.Line.Part"
    if map_first:
        assert message_at(schema, (0, 1, 0)) == "Order.Line.Part"
    else:
        with pytest.raises(ProtobufSchemaError, match=r"has no message at \[0, 1\]"):
            message_at(schema, (0, 1))
