"""The OpenAPI document: each route has an example of its answer, which has all fields of the answer and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.support.page_server import NoAirflow

from headrace.ui.api.app import create_app, examples


@pytest.fixture(scope="module")
def document() -> Any:
    app = create_app(NoAirflow())
    app.state.ledgers.close()
    return app.openapi()


def _answers(document: Any) -> Iterator[tuple[str, str]]:
    """Each status of each route, with the name of its model."""
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            for status, answer in route["responses"].items():
                schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
                # FastAPI's own, of a parameter that is not valid.
                if status != "422" and "$ref" in schema:
                    yield f"{method} {path} {status}", schema["$ref"].rpartition("/")[2]


def _missing(document: Any, schema: Any, value: Any, at: str) -> Iterator[str]:
    """Yield the fields that an example leaves out, or has too many, at any depth."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if value is not None and len(options) == 1:
        schema = options[0]
        if "$ref" in schema:
            yield from _missing(document, schema, value, at)
            return
    if isinstance(value, dict) and "properties" in schema:
        yield from (f"{at}.{name}" for name in set(schema["properties"]) ^ set(value))
        for name in set(schema["properties"]) & set(value):
            yield from _missing(document, schema["properties"][name], value[name], f"{at}.{name}")
    if isinstance(value, list):
        for item in value:
            yield from _missing(document, schema.get("items", {}), item, f"{at}[]")


def test_the_answer_of_each_route_has_an_example(document: Any) -> None:
    answers = dict(_answers(document))
    assert len(answers) > 60
    without = {route: model for route, model in answers.items() if model not in examples()}
    assert without == {}
    assert set(examples()) == set(answers.values()), "an example of no route"
    assert document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]["text/plain"]["example"]


def test_each_example_is_a_complete_answer(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for name in examples():
        (example,) = schemas[name]["examples"]
        jsonschema.validate(example, {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})
        assert sorted(_missing(document, schemas[name], example, name)) == []
