"""The API's OpenAPI document: routes, parameters and models, without the examples, which are in ``examples.json``."""

from __future__ import annotations

import json
from typing import Any

from tests.support.page_server import NoAirflow
from tests.unit.pins.freezing import frozen

from headrace.ui.api.app import create_app

WIDTH = 120


def test_openapi_document() -> None:
    app = create_app(NoAirflow())
    app.state.ledgers.close()
    document = app.openapi()
    del document["info"]["version"]
    for schema in document["components"]["schemas"].values():
        schema.pop("examples", None)
    frozen("openapi.json", laid_out(document) + "\n")


def laid_out(value: Any, indent: str = "") -> str:
    """Sorted JSON in which what fits into a line stands in one: a quarter of the lines, and changes are seen whole."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"{inner}{laid_out(item, inner)}" for item in value) + f"\n{indent}]"
    parts = (f"{inner}{json.dumps(name)}: {laid_out(value[name], inner)}" for name in sorted(value))
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
