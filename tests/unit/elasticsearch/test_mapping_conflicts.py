"""What an index makes of documents; tests/integration/elasticsearch/test_mapping.py compares it with real servers."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.elasticsearch.document_mapping import JsonForm, document_fields
from headrace.elasticsearch.errors import MappingError
from headrace.elasticsearch.mapping_conflicts import FieldFinding, IndexMapping, MappedDocuments, accepts, check_names
from headrace.elasticsearch.search_server import SearchServer
from headrace.stream.ddl import parse_columns


def mapped(columns: str, mappings: Any = None, settings: Any = None, **more: Any) -> MappedDocuments:
    server = more.pop("server", None)
    index = IndexMapping("i", True, mappings or {}, settings or {}, server)
    return MappedDocuments(document_fields(parse_columns(columns)), index, **more)


def one(kind: str, mapping: Any, **more: Any) -> FieldFinding:
    (found,) = mapped(f"f {kind}", {"properties": {"f": mapping}}, **more).fields
    return found


@pytest.mark.parametrize(
    ("kind", "mapping", "conflict"),
    [
        ("STRING", {"type": "long"}, "a text that is no number is refused: the field is a long"),
        ("BOOLEAN", {"type": "text"}, None),
        ("STRING", {"type": "boolean"}, "a text is refused: the field is a boolean"),
        ("STRUCT<>", {"type": "keyword"}, "an object is refused: the field is a keyword"),
        ("INT", {"properties": {"x": {"type": "long"}}}, "an integer is refused: the field is an object"),
        (
            "DECIMAL(20, 0)",
            {"type": "long"},
            "numbers beyond a long are refused, and DECIMAL(20, 0) has 20 digits",
        ),
        (
            "TIMESTAMP",
            {"type": "date", "format": "yyyy-MM-dd HH:mm:ss||epoch_millis"},
            "2026-01-05T12:45:00.250000Z does not fit the field's format yyyy-MM-dd HH:mm:ss||epoch_millis",
        ),
        ("INT", {"type": "alias", "path": "g"}, "the field is an alias of g, which documents may not have"),
    ],
)
def test_a_conflict_says_what_is_refused(kind: str, mapping: Any, conflict: str | None) -> None:
    assert one(kind, mapping).conflict == conflict


@pytest.mark.parametrize(
    ("kind", "mapping", "note"),
    [
        ("BIGINT", {"type": "integer"}, "numbers beyond 2147483647 are refused: the field is an integer"),
        ("DECIMAL(9, 0)", {"type": "integer"}, None),
        ("DECIMAL(10, 0)", {"type": "integer"}, "numbers beyond 2147483647 are refused: the field is an integer"),
        ("DOUBLE", {"type": "long"}, "searched without the fraction: the field is a long"),
        ("DOUBLE", {"type": "float"}, "searched with 7 digits; numbers beyond 3.4e38 are refused"),
        ("BIGINT", {"type": "float"}, "searched with 7 digits"),
        ("SMALLINT", {"type": "float"}, None),
        ("FLOAT", {"type": "float"}, None),
        ("DECIMAL(5, 2)", {"type": "float"}, None),
        ("INT", {"type": "date"}, "read as milliseconds since 1970"),
        ("INT", {"type": "date", "format": "epoch_second"}, "read as seconds since 1970"),
        ("TIMESTAMP", {"type": "date_nanos"}, "times outside of 1970 to 2262 are refused"),
        ("STRING", {"type": "ip"}, "a text that is no IP address is refused"),
        ("STRING", {"type": "geo_shape"}, "whether the values fit is not known: the field is a geo_shape"),
        ("VARIANT", {"type": "long"}, "a VARIANT may be what a long refuses"),
        (
            "DATE",
            {"type": "date", "format": "qqq"},
            "2026-01-05 must fit the field's format qqq",
        ),
        (
            "STRING",
            {"type": "long", "ignore_malformed": True},
            "a text that is no number is refused: the field is a long; with ignore_malformed only the field is left "
            "out",
        ),
    ],
)
def test_what_depends_on_the_values_is_a_note(kind: str, mapping: Any, note: str | None) -> None:
    found = one(kind, mapping)
    assert (found.conflict, found.note) == (None, note)


def test_a_records_own_time_may_have_another_form() -> None:
    found = one("TIMESTAMP", {"type": "date", "format": "epoch_second"}, as_recorded=True)
    assert (found.conflict, found.note) == (
        None,
        "a record's time that does not fit the format epoch_second is refused",
    )


@pytest.mark.parametrize(
    ("server", "ignored"), [("Elasticsearch 9.1.0", False), ("OpenSearch 2.19.6", False), ("OpenSearch 3.3.2", True)]
)
def test_who_leaves_out_a_malformed_object(server: str, ignored: bool) -> None:
    product, _, version = server.partition(" ")
    of = {"server": SearchServer(product, version)}
    assert (one("STRUCT<>", {"type": "date", "ignore_malformed": True}, **of).conflict is None) == ignored
    of_index = one("STRUCT<>", {"type": "keyword"}, settings={"ignore_malformed": "true"}, **of)
    assert (of_index.conflict is None) == (product == "OpenSearch")


def test_new_fields_are_what_the_server_makes() -> None:
    found = mapped("a INT, b DOUBLE, c STRING, d BINARY, e TIMESTAMP, f MAP<STRING, INT>, g VARIANT").fields
    assert {each.path: each.new for each in found} == {
        **{"a": "long", "b": "float", "c": "text", "d": "text", "e": "date", "f": "object"},
        **{"f.*": "long, for each key", "g": "what the first value is"},
    }
    assert all(each.index is None and each.conflict is None for each in found)


def test_a_text_may_become_what_the_first_one_looks_like() -> None:
    note = "if the first text looks like a {}, the field becomes {} and refuses other texts"
    (by_default,) = mapped("s STRING").fields
    (no_dates,) = mapped("s STRING", {"date_detection": False}).fields
    (numbers,) = mapped("s STRING", {"date_detection": False, "numeric_detection": True}).fields
    keywords = [{"k": {"match_mapping_type": "date", "mapping": {"type": "keyword"}}}]
    (by_template,) = mapped("s STRING", {"dynamic_templates": keywords}).fields
    assert [each.note for each in (by_default, no_dates, by_template)] == [note.format("date", "a date"), None, None]
    assert numbers.note == note.format("number", "a long or a float")


def test_a_template_is_named_and_judged() -> None:
    templates = [
        {"other": {"match": "x*", "unmatch": "x1", "mapping": {"type": "ip"}}},
        {"texts": {"match_mapping_type": ["string"], "path_unmatch": "o.*", "mapping": {"type": "long"}}},
    ]
    found = mapped("x1 STRING, o STRUCT<s: STRING>, x2 STRING", {"dynamic_templates": templates}).fields
    by_path = {each.path: (each.new, each.conflict) for each in found}
    assert by_path == {
        "x1": ("long, by dynamic template 'texts'", "a text that is no number is refused: the field is a long"),
        "o": ("object", None),
        "o.s": ("text", None),
        "x2": ("ip, by dynamic template 'other'", None),
    }


def test_the_nearest_object_says_what_is_dynamic() -> None:
    mappings = {"dynamic": "strict", "properties": {"o": {"properties": {"p": {"dynamic": "true", "properties": {}}}}}}
    columns = "n INT, o STRUCT<n: INT, p: STRUCT<n: INT, q: STRUCT<n: INT>>>, m MAP<STRING, INT>"
    found = {each.path: each for each in mapped(columns, mappings).fields}
    strict = "the index has no such field and takes no new one: dynamic is strict"
    assert {path: each.conflict for path, each in found.items() if each.conflict} == dict.fromkeys(
        ("n", "o.n", "m"), strict
    )
    assert (found["o.p.n"].new, found["o.p.q.n"].new, found["m.*"].new) == ("long", "long", "refused")


def test_what_no_index_makes_is_kept_and_not_indexed() -> None:
    found = mapped("o STRUCT<n: INT>", {"dynamic": False}).fields
    assert [each.new for each in found] == ["kept and not indexed"] * 2
    (runtime,) = mapped("s STRING", {"dynamic": "runtime"}).fields
    assert runtime.new == "keyword, a runtime field"


def test_opensearchs_own_dynamic_is_by_template() -> None:
    templates = [{"n": {"match": "n*", "mapping": {"type": "long"}}}]
    found = mapped("n1 INT, x INT", {"dynamic": "strict_allow_templates", "dynamic_templates": templates}).fields
    assert [each.conflict is None for each in found] == [True, False]
    found = mapped("n1 INT, x INT", {"dynamic": "false_allow_templates", "dynamic_templates": templates}).fields
    assert [each.new for each in found] == ["long, by dynamic template 'n'", "kept and not indexed"]


def test_nothing_is_said_of_fields_within_one_value() -> None:
    mappings = {"properties": {"o": {"type": "flattened"}, "p": {"type": "object", "enabled": False}}}
    found = mapped("o STRUCT<n: INT>, p STRUCT<n: INT>", mappings).fields
    assert [(each.path, each.new, each.conflict) for each in found[1::2]] == [
        ("o.n", "within o", None),
        ("p.n", "within p", None),
    ]


def test_fields_beyond_a_limit_are_one_conflict() -> None:
    mappings = {"properties": {"a": {"type": "text", "fields": {"keyword": {"type": "keyword"}}}}}
    limit = {"total_fields": {"limit": "4"}}
    assert mapped("a STRING, b STRING", mappings, limit).conflicts == []
    assert mapped("a STRING, b STRING, c INT", mappings, limit).conflicts == [
        "the index has 2 fields, and the documents add 3: that is beyond index.mapping.total_fields.limit, 4"
    ]
    assert mapped("a STRING, b STRING, c INT", {**mappings, "dynamic": False}, limit).conflicts == []
    spared = {"total_fields": {"limit": "4", "ignore_dynamic_beyond_limit": "true"}}
    assert mapped("a STRING, b STRING, c INT", mappings, spared).conflicts == []
    assert mapped(", ".join(f"c{n} STRING" for n in range(501))).conflicts != []


def test_an_object_beyond_the_depth_is_named() -> None:
    columns = "a STRUCT<b: STRUCT<c: STRUCT<d: INT>>>"
    assert mapped(columns, {}, {"depth.limit": "4"}).conflicts == []
    assert mapped(columns, {}, {"depth.limit": "3"}).conflicts == [
        "the object a.b.c is deeper than index.mapping.depth.limit, 3"
    ]


def test_names_that_no_index_takes_are_named() -> None:
    columns = "`` INT, `a..b` INT, _id INT, c INT, `c.d` INT, m MAP<STRING, INT>, `e.` INT"
    with pytest.raises(MappingError) as raised:
        check_names("orders", document_fields(parse_columns(columns)))
    empty = "a server takes no name that is empty, also between dots"
    assert raised.value.what == (
        f"There is no mapping for the columns of output 'orders'. '': {empty}; 'a..b': {empty}; '_id': the name is the "
        "server's own, and documents with it are refused; 'c': it is an object in one column and a value in another; "
        "names with dots are fields of objects."
    )


def test_two_columns_of_one_field_must_fit_each_other() -> None:
    found = mapped("`a.b` INT, a STRUCT<b: STRING, c: INT>, `a.d` INT").fields
    assert [(each.path, each.conflict) for each in found] == [
        ("a", None),
        ("a.b", None),
        ("a.b", "a text that is no number is refused: the field is a long"),
        ("a.c", None),
        ("a.d", None),
    ]


@pytest.mark.parametrize(
    ("formats", "taken"),
    [
        ("strict_date_optional_time||epoch_millis", (True, True, True)),
        ("yyyy-MM-dd", (True, False, False)),
        ("yyyy-MM-dd'T'HH:mm:ss[.SSSSSS][XXX]", (False, True, True)),
        ("yyyy-MM-dd'T'HH:mm:ss.SSSSSS''", (False, False, False)),
        ("basic_date_time_no_millis", (False, False, False)),
        ("eee", (None, None, None)),
        ("eee||iso8601", (True, True, True)),
    ],
)
def test_whether_a_format_takes_a_time(formats: str, taken: tuple[bool | None, ...]) -> None:
    assert (
        tuple(accepts(formats, form) for form in (JsonForm.DATE, JsonForm.TIMESTAMP, JsonForm.LOCAL_TIMESTAMP)) == taken
    )
