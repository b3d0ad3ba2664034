"""docs/types.md says what each of Avro's and Protobuf's types becomes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.protobuf_examples import TYPES, compiled

from headrace.formats import protobuf_schema
from headrace.formats.avro_schema import AvroKind, read_schema
from headrace.formats.protobuf_schema import ProtoKind

PAGE = Path(__file__).parents[3] / "docs" / "types.md"
FIELD = re.compile(r"^\| `(\w[^`]* = 1[^`]*;)` \| (`{1,2})(.+?)\2 \|", re.MULTILINE)
ROW = re.compile(r"^\| `((?:\"|\[|\{).*?)` \| (`{1,2})(.+?)\2 \|", re.MULTILINE)


def test_the_table_of_avros_types_is_true_and_complete() -> None:
    rows = [(text, ddl) for text, _, ddl in ROW.findall(PAGE.read_text())]
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
