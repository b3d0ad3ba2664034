"""docs/types.md says what each of Avro's types becomes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from headrace.formats.avro_schema import AvroKind, read_schema

PAGE = Path(__file__).parents[3] / "docs" / "types.md"
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
