"""Joins an Avro schema with those that it refers to: a registry keeps a named type once, for all that use it."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from headrace.formats.avro_schema import AvroSchemaError
from headrace.formats.schema_text import SchemaText

_NAMED = ("record", "error", "enum", "fixed")


@lru_cache(maxsize=64)
def joined(schema: SchemaText) -> str:
    """The text of a schema in which each referred type is defined where it is first named.

    Raises AvroSchemaError if a text is no JSON.
    """
    if not schema.references:
        return schema.text
    definitions: dict[str, Any] = {}
    for name, text in schema.references:
        given = _read(text, name)
        if isinstance(given, dict) and isinstance(given.get("name"), str):
            definitions[_full_name(given, "")] = given
    return json.dumps(_Join(definitions).type(_read(schema.text, "it"), ""))


def _read(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AvroSchemaError(f"refers to {what}, which is no JSON: {error}") from None


def _full_name(given: dict[str, Any], space: str) -> str:
    name, space = given["name"], given.get("namespace", space)
    return name if "." in name or not space else f"{space}.{name}"


class _Join:
    """Puts definitions in the place of names, each once."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._left = definitions

    def type(self, given: Any, space: str) -> Any:
        if isinstance(given, str):
            return self._by_name(given, space)
        if isinstance(given, list):
            return [self.type(each, space) for each in given]
        return self._defined(given, space) if isinstance(given, dict) else given

    def _by_name(self, given: str, space: str) -> Any:
        for name in (given if "." in given or not space else f"{space}.{given}", given):
            if name in self._left:
                found = {**self._left.pop(name)}
                # Its names are in its own namespace, wherever it is put.
                found["namespace"] = name.rpartition(".")[0]
                return self.type(found, "")
        return given

    def _defined(self, given: dict[str, Any], space: str) -> dict[str, Any]:
        if given.get("type") in _NAMED and isinstance(given.get("name"), str):
            name = _full_name(given, space)
            self._left.pop(name, None)
            space = name.rpartition(".")[0]
        made = dict(given)
        if isinstance(given.get("fields"), list):
            made["fields"] = [
                {**each, "type": self.type(each["type"], space)} if isinstance(each, dict) and "type" in each else each
                for each in given["fields"]
            ]
        for key in ("items", "values"):
            if key in given:
                made[key] = self.type(given[key], space)
        if isinstance(given.get("type"), dict | list):
            made["type"] = self.type(given["type"], space)
        return made
