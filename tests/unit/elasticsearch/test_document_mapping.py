"""The fields of documents by their columns, and the mapping for them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.elasticsearch.document_mapping import (
    TEXT,
    MappingBody,
    document_fields,
    field_count,
    index_body,
    lacking,
    made_mapping,
)
from headrace.stream.ddl import parse_columns


def fields(columns: str) -> dict[str, tuple[str, str]]:
    return {field.path: (field.column, str(field.form)) for field in document_fields(parse_columns(columns))}


def mapping(columns: str, **how: Any) -> dict[str, Any]:
    return made_mapping(document_fields(parse_columns(columns)), **how)


def test_each_type_of_spark_has_a_form_in_json() -> None:
    columns = (
        "a BOOLEAN, b TINYINT, c BIGINT, d FLOAT, e DOUBLE, f DECIMAL(10, 2), g DECIMAL(10, 0), h STRING, "
        "i VARCHAR(3), j BINARY, k DATE, l TIMESTAMP, m TIMESTAMP_NTZ, n TIME, o VARIANT, p VOID, q STRUCT<>"
    )
    assert [form for _, form in fields(columns).values()] == [
        *("boolean", "integer", "integer", "number", "number", "number", "integer", "text", "text", "base64", "date"),
        *("timestamp", "timestamp without a zone", "text", "any JSON", "any JSON", "object"),
    ]


def test_fields_within_are_paths() -> None:
    assert fields("a STRUCT<b: ARRAY<STRUCT<c: INT>>, `d.e`: INT>, m MAP<STRING, STRUCT<n: INT>>, `x.y` INT") == {
        "a": ("STRUCT", "object"),
        "a.b": ("ARRAY<STRUCT>", "object"),
        "a.b.c": ("INT", "integer"),
        "a.d": ("STRUCT", "object"),
        "a.d.e": ("INT", "integer"),
        "m": ("MAP<STRING, STRUCT>", "object"),
        "m.*": ("STRUCT", "object"),
        "m.*.n": ("INT", "integer"),
        "x": ("STRUCT", "object"),
        "x.y": ("INT", "integer"),
    }


def test_the_mapping_has_the_types_that_the_page_says() -> None:
    columns = (
        "a BOOLEAN, b TINYINT, c BIGINT, d FLOAT, e DOUBLE, f DECIMAL(10, 2), g DECIMAL(18, 0), h DECIMAL(19, 0), "
        "i STRING, j BINARY, k DATE, l TIMESTAMP, m TIMESTAMP_NTZ, n TIME, o VARIANT, q STRUCT<>, r MAP<STRING, INT>"
    )
    made = mapping(columns)
    assert {name: field["type"] for name, field in made["properties"].items()} == {
        **{"a": "boolean", "b": "long", "c": "long", "d": "float", "e": "double", "f": "double", "g": "long"},
        **{"h": "double", "i": "text", "j": "binary", "k": "date", "l": "date", "m": "date", "n": "text"},
        **{"q": "object", "r": "object"},
    }
    assert made["properties"]["i"] == TEXT
    assert "dynamic_templates" not in made


def test_objects_hold_the_fields_of_dotted_names_too() -> None:
    assert mapping("a STRUCT<b: INT>, `a.c` INT, d ARRAY<STRUCT<e: DATE>>")["properties"] == {
        "a": {"properties": {"b": {"type": "long"}, "c": {"type": "long"}}},
        "d": {"properties": {"e": {"type": "date"}}},
    }


def test_values_of_maps_have_templates_where_the_first_decides() -> None:
    made = mapping("m MAP<STRING, STRING>, n MAP<STRING, BIGINT>, o MAP<STRING, STRUCT<p: DOUBLE, q: BOOLEAN>>")
    assert made["dynamic_templates"] == [
        {"m.* string": {"path_match": "m.*", "match_mapping_type": "string", "mapping": TEXT}},
        {"m.* date": {"path_match": "m.*", "match_mapping_type": "date", "mapping": TEXT}},
        {"o.*.p double": {"path_match": "o.*.p", "match_mapping_type": "double", "mapping": {"type": "double"}}},
        {"o.*.p long": {"path_match": "o.*.p", "match_mapping_type": "long", "mapping": {"type": "double"}}},
    ]
    assert made["properties"] == {name: {"type": "object"} for name in "mno"}


def test_times_of_the_records_own_json_are_no_numbers() -> None:
    """A number may be of seconds or of milliseconds: it is refused, and not read as another time."""
    made = mapping("at TIMESTAMP, day DATE, m MAP<STRING, TIMESTAMP>", as_recorded=True)
    text = {"type": "date", "format": "strict_date_optional_time"}
    assert made["properties"] == {"at": text, "day": {"type": "date"}, "m": {"type": "object"}}
    assert [next(iter(each.values()))["match_mapping_type"] for each in made["dynamic_templates"]] == ["string", "date"]


def test_limits_are_raised_only_for_what_needs_it() -> None:
    def settings(columns: str) -> Any:
        return index_body(document_fields(parse_columns(columns))).get("settings")

    assert settings("a STRING") is None
    assert settings(", ".join(f"c{n} STRING" for n in range(500))) is None
    assert settings(", ".join(f"c{n} STRING" for n in range(501))) == {
        "index": {"mapping": {"total_fields": {"limit": 2_002}}}
    }
    deepest = "STRUCT<x: " * 19 + "INT" + ">" * 19
    assert settings(f"d {deepest}") is None
    assert settings(f"d STRUCT<x: {deepest}>") == {"index": {"mapping": {"depth": {"limit": 21}}}}


def test_objects_and_fields_of_fields_are_counted() -> None:
    assert field_count(mapping("a STRING, o STRUCT<p: INT>")) == 4
    assert field_count({"properties": {"a": {"type": "long"}}, "runtime": {"b": {"type": "long"}}}) == 2


def test_bodies_are_for_an_index_or_for_a_template() -> None:
    made = {"mappings": {"properties": {}}}
    assert [(kind.value, kind.path("i"), kind.body(["i"], made)) for kind in MappingBody] == [
        ("mapping", "/i", made),
        ("index-template", "/_index_template/i", {"index_patterns": ["i"], "priority": 500, "template": made}),
        ("component-template", "/_component_template/i", {"template": made}),
    ]


@pytest.mark.parametrize(
    ("there", "lacks"),
    [
        ({"a": {"type": "long"}, "b": {"type": "ip"}}, []),
        ({"a": {"type": "text"}}, ["a.type is text, not long"]),
        ({"b": {"type": "long"}}, ["a is missing"]),
        ({"a": {"properties": {}}}, ["a.type is missing"]),
    ],
)
def test_what_exists_may_have_more(there: Any, lacks: list[str]) -> None:
    assert lacking({"a": {"type": "long"}}, there) == lacks


def test_what_a_server_writes_in_another_way_is_equal() -> None:
    assert lacking({"limit": 5, "o": {"type": "object"}}, {"limit": "5", "o": {"properties": {"x": {}}}}) == []
    assert lacking({"o": {"type": "object"}}, {"o": {"type": "flattened"}}) == ["o.type is flattened, not object"]
    assert lacking({"t": [{"a": 1}, {"b": 2}]}, {"t": [{"c": 3}, {"b": 2, "d": 4}]}) == ["t lacks {'a': 1}"]
