"""JSON Schemas: the columns that they have, and those that are refused by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headrace.formats.json_schema import JsonSchemaError, read_schema
from headrace.formats.schema_text import SchemaText


def of(value: Any, date_times: Any = "timestamp", **more: Any) -> str:
    """The type of an object's only property."""
    schema = {"properties": {"value": value}, **more}
    return read_schema(SchemaText(json.dumps(schema))).columns(date_times).removeprefix("`value` ")


def refused(schema: Any, **references: Any) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    given = tuple((name, json.dumps(held)) for name, held in references.items())
    with pytest.raises(JsonSchemaError) as error:
        read_schema(SchemaText(text, given))
    return str(error.value)


A, B = {"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("value", "ddl"),
    [
        (True, "STRING"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "BIGINT"),
        ({"anyOf": [{"type": "integer", "connect.type": "int8"}, {"type": "integer"}]}, "BIGINT"),
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "string"}]}, "STRING"),
        ({"oneOf": [{"type": "string"}, A]}, "STRING"),
        ({"oneOf": [A, B]}, "STRUCT<`a` STRING>"),
        ({"oneOf": [{"type": "object"}, A]}, "STRUCT<`a` STRING>"),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["c"]}]}, "STRUCT<`a` STRING>"),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "BIGINT"),
        ({"allOf": [{"type": "object"}, A]}, "STRUCT<`a` STRING>"),
        ({"allOf": [A, {"properties": {"a": {"format": "date", "type": "string"}}}]}, "STRUCT<`a` DATE>"),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, "STRING"),
        ({"type": "object", "additionalProperties": False}, "STRING"),
        ({"type": "object", "additionalProperties": {"type": "null"}}, "MAP<STRING, STRING>"),
        ({"type": "array"}, "ARRAY<STRING>"),
        ({"items": [{"type": "integer"}], "additionalItems": {"type": "number"}}, "ARRAY<DOUBLE>"),
        ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, "ARRAY<STRING>"),
        ({"enum": [1, 2.5, None]}, "DOUBLE"),
        ({"enum": ["a", 1]}, "STRING"),
        ({"type": "integer", "exclusiveMinimum": -(2**70)}, "DECIMAL(38, 0)"),
        ({"type": "integer", "maximum": 2**63 - 1}, "BIGINT"),
        ({"title": "org.apache.kafka.connect.data.Decimal", "type": "number"}, "STRING"),
        ({"title": "org.apache.kafka.connect.data.Decimal", "connect.parameters": {"scale": 1e999}}, "STRING"),
    ],
)
def test_a_property_becomes_a_column(value: Any, ddl: str) -> None:
    assert of(value) == ddl


def test_date_times_may_stay_texts() -> None:
    assert of({"type": "array", "items": {"type": "string", "format": "date-time"}}, "text") == "ARRAY<STRING>"


@pytest.mark.parametrize(
    "given", ["#/definitions/x~1y", "#named", "sub.json", "http://shop.test/a.json#/definitions/x~1y"]
)
def test_a_reference_is_found_in_the_schema(given: str) -> None:
    definitions = {"x/y": {"type": "integer"}, "b": {"$id": "#named", "type": "integer"}}
    definitions["c"] = {"$id": "sub.json", "type": "integer"}
    assert of({"$ref": given}, definitions=definitions, **{"$id": "http://shop.test/a.json"}) == "BIGINT"


def test_beside_a_reference_other_keywords_count_since_2019() -> None:
    value = {"$ref": "#/$defs/a", "properties": {"b": {"type": "integer"}}}
    drafts = ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema")
    made = [of(value, **{"$defs": {"a": A}, "$schema": draft}) for draft in drafts]
    assert made == ["STRUCT<`a` STRING>", "STRUCT<`a` STRING, `b` BIGINT>"]


def test_a_type_may_be_named_in_two_places() -> None:
    schema = {"properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/a"}}, "$defs": {"a": A}}
    assert read_schema(SchemaText(json.dumps(schema))).leaves == 2


CHAIN = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}, "y": {"type": "null"}}} for n in range(70)}
WIDE = {f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "xy"}} for n in range(40)}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ('"' + "x" * (4 * 1024 * 1024) + '"', "more than 4,194,304"),
        ("[" * 100_000, "is no JSON"),
        ({"type": "string"}, "describes no JSON objects with properties"),
        ({"properties": {"a": {"type": "null"}}}, "describes no JSON objects with properties"),
        ({"properties": {"a": {"type": "strng"}}}, 'has the type "strng"'),
        ({"properties": {"a": {"type": {}}}}, "which JSON Schema does not know at a"),
        ({"properties": {"a": 5}}, "has 5 in place of a schema at a"),
        ({"properties": {'a"': {}}}, "has no quotes"),
        ({"properties": {"a": {"$ref": "#"}}}, "refers to '#', which contains itself at a"),
        ({"properties": {"a": {"items": {"$ref": "#/properties/a"}}}}, "contains itself at a[]"),
        ({"properties": {"a": {"$recursiveRef": "#"}}}, "has a $recursiveRef"),
        ({"properties": {"a": {"$ref": "http://shop.test/a.json"}}}, "neither in it nor among its references"),
        ({"properties": {"a": {"not": {"$ref": "#/definitions/x"}}}}, "neither in it nor among its references"),
        ({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**CHAIN, "d70": {}}}, "is deeper than 64 levels"),
        ({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**WIDE, "d40": {}}}, "more than 10,000"),
        ('{"properties": {"a": ' + '{"not":' * 900 + "{}" + "}" * 902, ""),
    ],
)
def test_what_has_no_columns_is_refused_by_name(schema: Any, says: str) -> None:
    if not says:
        # Deep, but only where nothing is a column.
        assert read_schema(SchemaText(schema)).columns() == "`a` STRING"
        return
    started = time.process_time()
    assert says in refused(schema)
    assert time.process_time() - started < 2


def test_references_may_refer_to_each_other_and_not_in_a_circle() -> None:
    root = {"properties": {"a": {"$ref": "b.json"}}}
    assert "contains itself" in refused(
        root, **{"b.json": {"items": {"$ref": "c.json"}}, "c.json": {"items": {"$ref": "b.json"}}}
    )
    assert "the schema 'b.json' that it refers to is no JSON object" in refused(root, **{"b.json": 5})
