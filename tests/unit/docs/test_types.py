"""docs/types.md says what each type of Avro, Protobuf and JSON Schema becomes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.protobuf_examples import TYPES, compiled

from headrace.formats import json_schema, protobuf_schema
from headrace.formats.avro_schema import AvroKind, read_schema
from headrace.formats.json_schema import JsonKind
from headrace.formats.protobuf_schema import ProtoKind
from headrace.formats.schema_text import SchemaText

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
    for field, _, ddl in FIELD.findall(PAGE.read_text()):
        made = protobuf_schema.read_schema(compiled(field, types), "shop.Order")
        assert made.columns() == f"`value` {ddl}", field
        kinds.add(made.fields[0].type.kind)
    assert kinds == set(ProtoKind)


def test_the_table_of_json_schema_is_true_and_complete() -> None:
    kinds = set()
    for text, ddl in rows_of("JSON Schema"):
        made = json_schema.read_schema(SchemaText(json.dumps({"properties": {"x": json.loads(text)}})))
        assert made.columns() == f"`x` {ddl}", text
        kinds.add(made.parts[0][1].kind)
    assert kinds == set(JsonKind) - {JsonKind.NULL}
