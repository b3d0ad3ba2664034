"""The reference page of the REST API, from the OpenAPI document that Airflow's API server serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docsite.home import ROOT

_PRINT = "import json; from headrace.ui.api.app import create_app; print(json.dumps(create_app().openapi()))"
_METHODS = ("get", "post", "put", "patch", "delete")


def rest_page() -> str:
    """Every route with its parameters and answers, and the fields of the answers."""
    document = _openapi()
    lines = [
        "# REST API",
        "",
        "The routes below `/headrace` of Airflow's API server. A request needs Airflow's login: a bearer token from "
        "`POST /auth/token`, or the cookie of the browser. A server has the same as an OpenAPI "
        "document at `/headrace/api/openapi.json`.",
        "",
    ]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            if method in _METHODS:
                lines += _route(method, path, route)
    lines += ["## Answers", ""]
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        lines += _schema(name, schema)
    return "\n".join(lines)


def _openapi() -> dict[str, Any]:
    # In a process of its own: it imports Airflow, which makes its home folder.
    with tempfile.TemporaryDirectory() as home:
        printed = subprocess.run(
            [sys.executable, "-c", _PRINT],
            cwd=ROOT,
            env=os.environ | {"AIRFLOW_HOME": home, "AIRFLOW__CORE__PLUGINS_FOLDER": str(Path(home) / "plugins")},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    document: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return document


def _route(method: str, path: str, route: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"## `{method.upper()} /headrace{path}`", "")
    yield from (f"{route.get('summary', '')}. {route.get('description', '')}".strip(), "")
    parameters = route.get("parameters", [])
    if parameters:
        yield from ("| parameter | in | meaning |", "| --- | --- | --- |")
        for parameter in parameters:
            yield f"| `{parameter['name']}` | {parameter['in']} | {_cell(parameter.get('description'))} |"
        yield ""
    yield from ("| status | answer |", "| --- | --- |")
    for status, answer in route["responses"].items():
        yield f"| {status} | {_cell(answer.get('description'))} {_body(answer)} |"
    yield ""


def _body(answer: Mapping[str, Any]) -> str:
    content = answer.get("content", {}).get("application/json", {})
    return f": {_type(content['schema'])}" if content.get("schema") else ""


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {name}", "")
    if schema.get("description"):
        yield from (_cell(schema["description"]), "")
    if schema.get("enum"):
        yield from ("Values: " + ", ".join(f"`{value}`" for value in schema["enum"]), "")
    if schema.get("properties"):
        yield from ("| field | type | meaning |", "| --- | --- | --- |")
        for field, value in schema["properties"].items():
            yield f"| `{field}` | {_type(value)} | {_cell(value.get('description'))} |"
        yield ""
    for example in schema.get("examples", []):
        yield from ("Example:", "", "```json", json.dumps(example, indent=2, ensure_ascii=False), "```", "")


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("format") or schema.get("type") or "any")


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
