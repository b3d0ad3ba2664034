"""docs/types.md says what each type of Avro, Protobuf, JSON Schema and of change events becomes."""

from __future__ import annotations

import base64
import json
import re
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.support.change_events import decode, event, field, with_schema
from tests.support.protobuf_examples import TYPES, compiled

from headrace.formats import json_schema, protobuf_schema
from headrace.formats.avro_schema import AvroKind, read_schema
from headrace.formats.json_schema import JsonKind
from headrace.formats.protobuf_schema import ProtoKind
from headrace.formats.schema_text import SchemaText
from headrace.spark.records.events.decoded_events import arrow_type
from headrace.stream.ddl import type_tree

PAGE = Path(__file__).parents[3] / "docs" / "types.md"
FIELD = re.compile(r"^\| `(\w[^`]* = 1[^`]*;)` \| (`{1,2})(.+?)\2 \|", re.MULTILINE)
ROW = re.compile(r"^\| `((?:\"|\[|\{).*?)` \| (`{1,2})(.+?)\2 \|", re.MULTILINE)


def rows_of(heading: str) -> list[tuple[str, str]]:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [(text, ddl) for text, _, ddl in ROW.findall(section)]


def test_the_table_of_avros_types_is_true_and_complete() -> None:
    rows = rows_of("Avro")
    kinds = set()
    for text, ddl in rows:
        made = read_schema(
            json.dumps({"type": "record", "name": "Row", "fields": [{"name": "x", "type": json.loads(text)}]})
        )
        assert made.columns() == f"`x` {ddl}", text
        kinds.add(made.parts[0][1].kind)
    assert kinds == set(AvroKind) - {AvroKind.NULL}


def test_the_table_of_protobufs_types_is_true_and_complete() -> None:
    types = re.sub("message Line {.*}", "message Line { int32 n = 1; }", TYPES)
    kinds = set()
    for text, _, ddl in FIELD.findall(PAGE.read_text()):
        made = protobuf_schema.read_schema(compiled(text, types), "shop.Order")
        assert made.columns() == f"`value` {ddl}", text
        kinds.add(made.fields[0].type.kind)
    assert kinds == set(ProtoKind)


def test_the_table_of_json_schema_is_true_and_complete() -> None:
    kinds = set()
    for text, ddl in rows_of("JSON Schema"):
        made = json_schema.read_schema(SchemaText(json.dumps({"properties": {"x": json.loads(text)}})))
        assert made.columns() == f"`x` {ddl}", text
        kinds.add(made.parts[0][1].kind)
    assert kinds == set(JsonKind) - {JsonKind.NULL}


TYPES_OF_JSON = {str: "string", int: "int64", float: "double", dict: "struct", list: "array"}
SPACES = {"connect": "org.apache.kafka.connect.data", "data": "io.debezium.data", "time": "io.debezium.time"}


def in_document(value: Any) -> Any:
    """A value as Spark's JSON has it."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if value.tzinfo else "")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return "NaN" if value != value else value  # noqa: PLR0124


def test_the_table_of_debeziums_types_is_true() -> None:
    part = PAGE.read_text().partition("\n## Debezium and Connect\n")[2]
    rows = [
        re.fullmatch(r"\| (.+?) \| `(.+)`(?:, scale (\d+))? \| `(.+?)` \| `(.+)` \|", line)
        for line in part.splitlines()
        if re.match(r"\| (`(data|time|connect)\.|none: )", line)
    ]
    assert len(rows) > 25
    for row in rows:
        assert row is not None
        named, text, scale, ddl, expected = row.groups()
        value = json.loads(text)
        space, _, name = named.strip("`").partition(".")
        semantic = f"{SPACES[space]}.{name}" if space in SPACES else None
        more = {} if scale is None else {"parameters": {"scale": scale}}
        schema = field("v", "bytes" if scale or ddl == "BINARY" else TYPES_OF_JSON[type(value)], semantic, **more)
        (made,), refused = decode(
            with_schema(event("c", None, {"v": value}), schema), row=pa.struct([("v", arrow_type(type_tree(ddl)))])
        )
        assert not refused, row[0]
        assert in_document(made["value"]["v"]) == json.loads(expected, parse_float=of_text(ddl)), row[0]


BELOW = {"time.Date": "int", "time.Time": "int", "time.ZonedTimestamp": "string", "time.IsoTimestamp": "string"}
"""The types of Avro below Debezium's; the others are longs."""


def test_the_table_of_times_in_other_formats_is_true() -> None:
    part = PAGE.read_text().partition("\n| values | Avro | JSON Schema | Protobuf |\n")[2]
    named = [
        (name, avro, in_json)
        for first, avro, in_json in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|", part, re.MULTILINE)
        for name in re.findall(r"`(time\.\w+)`", first)
    ]
    assert len(named) == 9
    for name, avro, in_json in named:
        below, title = BELOW.get(name, "long"), f"io.debezium.{name}"
        row = {
            "type": "record",
            "name": "Row",
            "fields": [{"name": "x", "type": {"type": below, "connect.name": title}}],
        }
        kind = {"type": "string" if below == "string" else "integer", "title": title}
        columns = read_schema(json.dumps(row)).columns()
        assert columns == f"`x` {avro.replace('stay texts', '`STRING`').strip('`')}", name
        columns = json_schema.read_schema(SchemaText(json.dumps({"properties": {"x": kind}}))).columns()
        assert columns == f"`x` {in_json.replace('stay texts', '`STRING`').strip('`')}", name


def of_text(ddl: str) -> Any:
    return Decimal if ddl.startswith("DECIMAL") else float
