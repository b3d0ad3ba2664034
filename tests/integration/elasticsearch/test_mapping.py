"""The mapping that headrace makes is taken by real servers, with all of a batch's documents; and what it says that an
index refuses, the index refuses. test_search_servers.py runs these tests on the other servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.document_edges import DDL, document

from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.document_mapping import MappingBody, document_fields, index_body
from headrace.elasticsearch.mapping_conflicts import MappedDocuments
from headrace.elasticsearch.transport import Cluster
from headrace.stream.ddl import parse_columns


@pytest.fixture
def asking(real: Any) -> Iterator[Administration]:
    with Administration.of(Cluster.of(real.options()), timeout_seconds=30, max_retry_seconds=10) as made:
        yield made


def mapped(asking: Administration, index: str, columns: str) -> MappedDocuments:
    return MappedDocuments(document_fields(parse_columns(columns)), asking.index_mapping(index))


def taken(real: Any, index: str, documents: dict[str, str]) -> dict[str, bool]:
    """Which of these documents, by id, the server takes."""
    lines = "".join(f'{{"create":{{"_id":"{id_}"}}}}\n{text}\n' for id_, text in documents.items())
    items = real.transport.request("POST", f"/{index}/_bulk", lines.encode()).json()["items"]
    statuses = {item["create"]["_id"]: item["create"]["status"] for item in items}
    assert set(statuses.values()) <= {201, 400}
    return {id_: status == 201 for id_, status in statuses.items()}


def test_a_made_mapping_takes_values_at_edges(real: Any, rows: Any, asking: Administration) -> None:
    body = index_body(document_fields(parse_columns(DDL)))
    assert asking.create(MappingBody.MAPPING, real.name, body) is None
    counts = real.index(rows([document(0).encode(), document(1).encode()]))
    assert (counts.created, counts.dead_lettered) == (2, 0), counts.dead_letter_example
    # The index holds all of the mapping, and no other type for what it had to add for maps.
    assert asking.create(MappingBody.MAPPING, real.name, body) == []
    labels = asking.index_mapping(real.name).mappings["properties"]["labels"]["properties"]
    assert labels["k"]["type"] == "text"
    assert [found.path for found in mapped(asking, real.name, DDL).fields if found.conflict] == []


def test_the_records_own_json_fits_its_mapping(real: Any, rows: Any, asking: Administration) -> None:
    """In the forms that a JsonDecoder takes; a number of seconds is refused, and not read as milliseconds."""
    columns = "at TIMESTAMP, local TIMESTAMP_NTZ, day DATE, total DECIMAL(10, 2), huge DECIMAL(38, 0), raw BINARY"
    body = index_body(document_fields(parse_columns(columns)), as_recorded=True)
    assert asking.create(MappingBody.MAPPING, real.name, body) is None
    forms = {
        "at": ("2026-01-05T13:45:00+01:00", "2026-01-05T12:45:00.25Z", "2026-01-05T12:45", "2026-01-05"),
        "local": ("2026-01-05T12:45:00.123456", "2026-01-05"),
        "day": ("0001-01-01",),
        "total": ("1.230", 1.5, 1, "-1e2"),
        "huge": (int("9" * 38), "9" * 38),
        "raw": ("AQI=", ""),
    }
    documents = [json.dumps({name: value}).encode() for name, values in forms.items() for value in values]
    counts = real.index(rows([*documents, b'{"more": {"fields": 1}}']))
    assert (counts.created, counts.dead_lettered) == (len(documents) + 1, 0), counts.dead_letter_example
    assert real.index(rows([b'{"at": 1767617100}'], first=100)).dead_lettered == 1


def test_without_it_the_first_text_makes_dead_letters(real: Any, rows: Any, asking: Administration) -> None:
    """What the check warns of, with the same documents."""
    warned = {found.path for found in mapped(asking, real.name, DDL).fields if "first text" in str(found.note)}
    assert {"text", "texts", "item.sizes.name", "labels.*", "by_name.*.note"} == warned
    counts = real.index(rows([b'{"text":"2026-01-05"}', b'{"text":"word"}']))
    assert (counts.created, counts.dead_lettered) == (1, 1)


def test_a_long_array_of_numbers_may_become_a_vector(real: Any, rows: Any, asking: Administration) -> None:
    (found,) = mapped(asking, real.name, "f ARRAY<DOUBLE>").fields
    warned = "dense_vector" in str(found.note)
    counts = real.index(rows([json.dumps({"f": [0.5] * length}).encode() for length in (128, 3)]))
    assert (warned, counts.dead_lettered) in ((True, 1), (False, 0))
    assert warned == (asking.server is None or asking.server.product == "Elasticsearch")


@pytest.mark.parametrize("kind", MappingBody)
def test_a_body_is_applied_once_and_changes_nothing(real: Any, asking: Administration, kind: MappingBody) -> None:
    wide = ", ".join(f"c{number} STRING" for number in range(600))
    deep = "STRUCT<x: " * 25 + "INT" + ">" * 25
    body = kind.body([real.name], index_body(document_fields(parse_columns(f"{DDL}, {wide}, deep {deep}"))))
    narrow = kind.body([real.name], index_body(document_fields(parse_columns("text BIGINT, new INT"))))
    try:
        assert asking.create(kind, real.name, body) is None
        before = real.ask("GET", kind.path(real.name))
        assert asking.create(kind, real.name, body) == []
        differing = asking.create(kind, real.name, narrow)
        assert differing is not None
        assert [text.rpartition("mappings.properties.")[2] for text in differing] == [
            "text.type is text, not long",
            "new is missing",
        ]
        assert real.ask("GET", kind.path(real.name)) == before
    finally:
        real.transport.request("DELETE", kind.path(real.name))


def test_an_index_template_gives_a_new_index_its_mapping(real: Any, rows: Any, asking: Administration) -> None:
    body = MappingBody.INDEX_TEMPLATE.body([real.name], index_body(document_fields(parse_columns(DDL))))
    try:
        assert asking.create(MappingBody.INDEX_TEMPLATE, real.name, body) is None
        simulated = asking.index_mapping(real.name)
        assert (simulated.exists, simulated.mappings["properties"]["bytes"]) == (False, {"type": "binary"})
        assert asking.index_mapping(f"{real.name}-dead-letters").mappings == {}
        assert real.index(rows([document(0).encode(), document(1).encode()])).created == 2
        assert asking.index_mapping(real.name).mappings["properties"]["bytes"] == {"type": "binary"}
    finally:
        real.transport.request("DELETE", MappingBody.INDEX_TEMPLATE.path(real.name))


def test_an_older_kind_of_template_counts_as_it_does(real: Any, asking: Administration) -> None:
    first = {"n": {"type": "keyword"}, "m": {"type": "ip"}}
    try:
        for order, properties in enumerate((first, {"n": {"type": "long"}})):
            template = {"index_patterns": [f"{real.name}*"], "order": order, "mappings": {"properties": properties}}
            real.ask("PUT", f"/_template/{real.name}-{order}", template)
        simulated = asking.index_mapping(real.name)
        real.ask("PUT", f"/{real.name}", {})
        assert simulated.mappings == asking.index_mapping(real.name).mappings
        assert simulated.mappings["properties"] == {"m": {"type": "ip"}, "n": {"type": "long"}}
    finally:
        for order in range(2):
            real.transport.request("DELETE", f"/_template/{real.name}-{order}")


COLUMNS = {
    "boolean": ("BOOLEAN", "true"),
    "tiny": ("TINYINT", "7"),
    "int": ("INT", "7"),
    "most": ("INT", "2147483647"),
    "big": ("BIGINT", "7"),
    "float": ("FLOAT", "1.5"),
    "double": ("DOUBLE", "1.5"),
    "money": ("DECIMAL(10, 2)", "1.50"),
    "unsigned": ("DECIMAL(20, 0)", "18446744073709551615"),
    "huge": ("DECIMAL(38, 0)", "9" * 38),
    "text": ("STRING", '"word"'),
    "bytes": ("BINARY", '"AQI="'),
    "day": ("DATE", '"2026-01-05"'),
    "at": ("TIMESTAMP", '"2026-01-05T12:45:00.250000Z"'),
    "local": ("TIMESTAMP_NTZ", '"2026-01-05T12:45:00.250000"'),
    "ints": ("ARRAY<INT>", "[1,2]"),
    "object": ("STRUCT<x: INT>", '{"x":1}'),
    "objects": ("ARRAY<STRUCT<x: INT>>", '[{"x":1}]'),
    "map": ("MAP<STRING, STRING>", '{"k":"word"}'),
}
TYPES = (
    *("boolean", "byte", "short", "integer", "long", "unsigned_long", "half_float", "float", "double", "text"),
    *("keyword", "wildcard", "match_only_text", "date", "date_nanos", "binary", "object", "nested", "flattened"),
    *("flat_object", "ip", "geo_point", "completion", "integer_range", "alias"),
)
FORMATS = (
    *("strict_date_optional_time", "date_optional_time", "strict_date_optional_time_nanos", "iso8601"),
    *("epoch_millis", "epoch_second", "date_time", "strict_date_time", "strict_date_time_no_millis"),
    *("strict_date", "date", "basic_date", "basic_date_time", "date_hour_minute_second", "date_hour", "week_date"),
    *("strict_date_hour_minute_second_fraction", "date_hour_minute_second_fraction", "yyyy-MM-dd", "uuuu-M-d"),
    *("yyyy-MM-dd HH:mm:ss", "yyyy-MM-dd'T'HH:mm:ss.SSSSSS", "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "yyyy-MM-dd||yyyy"),
    *("yyyy-MM-dd'T'HH:mm:ssX", "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS][XXX]", "uuuu-MM-dd'T'HH:mm:ss.SSSZ", "yyyy"),
    *("yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'", "yyyy-MM-dd'T'HH:mm:ss.SSSSSSZZZZZ", "epoch_millis||yyyy-MM-dd HH:mm:ss"),
    *("yyyy-MM-dd['T'HH:mm:ss.SSSSSSXX]", "rfc3339_lenient"),
)
FIELDS: dict[str, dict[str, Any]] = {
    **{kind: {"type": kind} for kind in TYPES},
    **{f"date as {text}": {"type": "date", "format": text} for text in FORMATS},
    "alias": {"type": "alias", "path": "there"},
    "long without coerce": {"type": "long", "coerce": False},
    "disabled": {"type": "object", "enabled": False},
    "date, malformed": {"type": "date", "ignore_malformed": True},
    "integer, malformed": {"type": "integer", "ignore_malformed": True},
    "boolean or malformed": {"type": "boolean", "ignore_malformed": True},
}


def test_what_is_said_of_each_field_is_what_the_server_does(real: Any, asking: Administration) -> None:
    """For each type of field and each type of column: a conflict is refused, and what has no note is taken."""
    limit = {"index.mapping.total_fields.limit": 10_000}
    real.ask("PUT", f"/{real.name}", {"mappings": {"properties": {"there": {"type": "long"}}}, "settings": limit})
    columns, documents = [], {}
    for label, mapping in FIELDS.items():
        names = {f"{name} into {label}".replace(".", "·"): of for name, of in COLUMNS.items()}
        body = json.dumps({"properties": dict.fromkeys(names, mapping)}).encode()
        # A server may not have this type or format.
        if real.transport.request("PUT", f"/{real.name}/_mapping", body).status == 200:
            columns += [f"`{name}` {kind}" for name, (kind, _) in names.items()]
            documents.update({name: f'{{"{name}":{value}}}' for name, (_, value) in names.items()})
    said = {found.path: found for found in mapped(asking, real.name, ", ".join(columns)).fields}
    wrong = [
        f"{'taken' if is_taken else 'refused'}: {said[name]}"
        for name, is_taken in taken(real, real.name, documents).items()
        if (said[name].conflict and is_taken) or not (said[name].conflict or said[name].note or is_taken)
    ]
    assert len(documents) > 700
    assert not wrong, "\n".join(wrong)


TEXTS_TO_LONG = [{"numbers": {"match_mapping_type": "string", "mapping": {"type": "long"}}}]
BY_PATH = [{"ids": {"path_match": "*.id", "mapping": {"type": "keyword"}}}]
REGEX = [{"ids": {"match_pattern": "regex", "match": "^id.*", "mapping": {"type": "ip"}}}]
SAYS_ALL = [{"all": {"match_mapping_type": "*", "mapping": {"type": "{dynamic_type}"}}}]
# (mappings, settings, columns, document, whether the server takes it, the type that it makes of one of its fields)
NEW: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, bool, dict[str, str]]] = {
    "strict": ({"dynamic": "strict"}, {}, "n INT", '{"n":1}', False, {}),
    "strict, an object": ({"dynamic": "strict"}, {}, "o STRUCT<n: INT>", '{"o":{"n":1}}', False, {}),
    "not dynamic": ({"dynamic": False}, {}, "n INT, o STRUCT<n: INT>", '{"n":1,"o":{"n":1}}', True, {}),
    "an open object": (
        {"dynamic": "strict", "properties": {"o": {"type": "object", "dynamic": True}}},
        {},
        "o STRUCT<n: INT>",
        '{"o":{"n":1}}',
        True,
        {"o.n": "long"},
    ),
    "types of its own": (
        {},
        {},
        "b BOOLEAN, i INT, d DOUBLE, s STRING, t TIMESTAMP, l TIMESTAMP_NTZ, y DATE, x BINARY",
        '{"b":true,"i":1,"d":1.5,"s":"w","t":"2026-01-05T12:45:00.250000Z","l":"2026-01-05T12:45:00.250000",'
        '"y":"2026-01-05","x":"AQI="}',
        True,
        dict(zip("bidstlyx", ("boolean", "long", "float", "text", "date", "date", "date", "text"), strict=True)),
    ),
    "no dates": ({"date_detection": False}, {}, "t TIMESTAMP", '{"t":"2026-01-05T12:45:00Z"}', True, {"t": "text"}),
    "other dates": (
        {"dynamic_date_formats": ["yyyy/MM/dd"]},
        {},
        "y DATE",
        '{"y":"2026-01-05"}',
        True,
        {"y": "text"},
    ),
    "a number beyond long": ({}, {}, "n DECIMAL(20, 0)", '{"n":18446744073709551615}', False, {}),
    "a template": ({"dynamic_templates": TEXTS_TO_LONG}, {}, "s STRING", '{"s":"word"}', False, {}),
    "a template by path": (
        {"dynamic_templates": BY_PATH},
        {},
        "id INT, o STRUCT<id: INT>",
        '{"id":1,"o":{"id":1}}',
        True,
        {"id": "long", "o.id": "keyword"},
    ),
    "a template of an expression": ({"dynamic_templates": REGEX}, {}, "id_a INT", '{"id_a":1}', False, {}),
    "a template for all": ({"dynamic_templates": SAYS_ALL}, {}, "s STRING", '{"s":"w"}', True, {"s": "text"}),
    "as many fields": ({}, {"total_fields.limit": 3}, "s STRING, n INT", '{"s":"w","n":1}', True, {"n": "long"}),
    "too many fields": ({}, {"total_fields.limit": 2}, "s STRING, n INT", '{"s":"w","n":1}', False, {}),
    "objects are fields": ({}, {"total_fields.limit": 1}, "o STRUCT<n: INT>", '{"o":{"n":1}}', False, {}),
    "deep": ({}, {"depth.limit": 3}, "a STRUCT<b: STRUCT<c: INT>>", '{"a":{"b":{"c":1}}}', True, {"a.b.c": "long"}),
    "too deep": (
        {},
        {"depth.limit": 3},
        "a STRUCT<b: STRUCT<c: STRUCT<d: INT>>>",
        '{"a":{"b":{"c":{"d":1}}}}',
        False,
        {},
    ),
    "a name with dots": ({}, {}, "`a.b` INT, a STRUCT<c: INT>", '{"a.b":1,"a":{"c":1}}', True, {"a.b": "long"}),
    "dots that collide": ({}, {}, "a INT, `a.b` INT", '{"a":1,"a.b":2}', False, {}),
    "dots at the end": ({}, {}, "`a.` INT", '{"a.":1}', True, {"a": "long"}),
    "dots in a row": ({}, {}, "`a..b` INT", '{"a..b":1}', False, {}),
    "no name": ({}, {}, "`` INT", '{"":1}', False, {}),
    "a name of the server": ({}, {}, "_id INT", '{"_id":1}', False, {}),
    "an underscore": ({}, {}, "_foo INT", '{"_foo":1}', True, {"_foo": "long"}),
    "a scalar over an object": (
        {"properties": {"a": {"properties": {"b": {"type": "long"}}}}},
        {},
        "a INT",
        '{"a":1}',
        False,
        {},
    ),
    "malformed": (
        {"properties": {"n": {"type": "long"}}},
        {"ignore_malformed": True},
        "n STRING",
        '{"n":"word"}',
        True,
        {"n": "long"},
    ),
}


@pytest.mark.parametrize("case", NEW)
def test_what_an_index_makes_of_a_new_field(real: Any, rows: Any, asking: Administration, case: str) -> None:
    mappings, settings, columns, text, is_taken, made = NEW[case]
    limits = {f"index.mapping.{name}": value for name, value in settings.items()}
    real.ask("PUT", f"/{real.name}", {"mappings": mappings, "settings": limits})
    said = mapped(asking, real.name, columns)
    refused = [*said.conflicts, *(found.conflict for found in said.fields if found.conflict is not None)]
    counts = real.index(rows([text.encode()]))
    assert (not refused, counts.dead_lettered == 0) == (is_taken, is_taken), (refused, counts.dead_letter_example)
    types = {found.path: (found.new or found.index or "").partition(",")[0] for found in said.fields}
    assert {path: types[path] for path in made} == made
    now = {found.path: found.index for found in mapped(asking, real.name, columns).fields}
    assert {path: now[path] for path in made} == made
    assert real.index(rows([text.encode()])).dead_lettered == (not is_taken)
