"""The OpenAPI document of the API, with an example of each route's answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI


@cache
def examples() -> dict[str, Any]:
    """An example of each answer, by the name of its model in `headrace.ui.api.models`."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
    return found


def add_examples(app: FastAPI) -> None:
    """Let the application's document have the examples.

    They are not written into the models: FastAPI leaves out all nulls of a document, also those of an example.
    """
    without: Callable[[], dict[str, Any]] = app.openapi

    def document() -> dict[str, Any]:
        found = without()
        for name, example in examples().items():
            found["components"]["schemas"][name]["examples"] = [example]
        return found

    app.openapi = document  # type: ignore[method-assign]
