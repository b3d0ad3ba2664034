"""What the package takes Elasticsearch to do, done by a real one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.elasticsearch.errors import (
    ElasticsearchRefusedError,
    ElasticsearchUnavailableError,
    UnsuitableTargetError,
)
from headrace.elasticsearch.transport import Response


def concrete(real: Any) -> str | None:
    found = real.concrete()
    return None if found is None else found.name


def test_running_again_changes_nothing(real: Any, rows: Any) -> None:
    batch = rows([json.dumps({"n": n}).encode() for n in range(1000)])
    first = real.index(batch, bulk_actions=100)
    before = real.versions()
    second = real.index(batch, bulk_actions=100)
    assert (first.created, first.requests, second.repeated, second.indexed) == (1000, 10, 1000, 0)
    assert real.versions() == before
    assert real.documents()["t+0+7"] == {"n": 7}


@pytest.mark.parametrize("write_method", ["create", "index"])
def test_the_answer_to_new_documents_is_not_parsed(
    real: Any, rows: Any, write_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elasticsearch writes it as `headrace.elasticsearch.bulk_sender` expects: parsing was most of a task's work."""
    parsed: list[Response] = []
    monkeypatch.setattr(Response, "json", parsed.append)
    assert real.index(rows([b'{"n": 1}'] * 100), bulk_actions=30, write_method=write_method).created == 100
    assert parsed == []


def test_write_method_index_replaces_an_old_transforms_documents(real: Any, rows: Any) -> None:
    real.index(rows([b'{"n": 1}']))
    assert real.index(rows([b'{"n": 2}'])).foreign == 1, "nothing says that the batch was run before"
    assert real.index(rows([b'{"n": 2}']), written_before=True).kept == 1
    assert real.index(rows([b'{"n": 2}']), write_method="index").updated == 1
    assert real.documents() == {"t+0+0": {"n": 2}}


def test_keys_hold_their_latest_value_in_any_order(real: Any, rows: Any) -> None:
    by_key = {"document_id": "key"}
    newer = rows([b'{"n": "new"}', None], first=10, keys=[b"a", b"b"])
    older = rows([b'{"n": "old"}', b'{"n": 1}'], first=5, keys=[b"a", b"b"])
    assert (counts := real.index(newer, **by_key)).created == 1
    assert counts.deleted == 1
    assert real.index(older, **by_key).superseded == 2
    again = real.index(newer, **by_key)
    assert (again.repeated, again.deleted, again.indexed) == (2, 0, 0)
    assert real.documents() == {"a": {"n": "new"}}
    replaced = real.index(rows([b'{"n": "newer"}'], first=10, keys=[b"a"]), **by_key, write_method="index")
    assert replaced.updated == 1


MALFORMED = [
    b"",
    b" ",
    b"junk",
    b"[1,2]",
    b"null",
    b'"x"',
    b'{"a":1',
    b'{"a":1}{"b":2}',
    b'{"a":1}}',
    b'{"a":1} junk',
    b'{"a":1}\n{"b":2}',
    b'{"a":"x\ny"}',
    b'{"a":NaN}',
    b"\xff\xfe",
    b'{"s":"\xff"}',
    b'{"s":"\xed\xa0\x80"}',
    '{"u":1}'.encode("utf-16-le"),
    b'{"s":"a\tb"}',
    b'{"a":1,"a":2}',
    b'{"":1}',
    b'{"_id":"other"}',
    b'{"\x00":1}',
    b'{"n":' * 1200 + b"1" + b"}" * 1200,
]


def test_malformed_values_are_dead_letters_and_others_indexed(real: Any, rows: Any) -> None:
    values = [value for bad in MALFORMED for value in (bad, b'{"ok": 1}')]
    counts = real.index(rows(values))
    assert (counts.created, counts.dead_lettered) == (len(MALFORMED), len(MALFORMED))
    letters = real.documents(f"{real.name}-dead-letters")
    assert set(letters) == {f"{real.name}/t+0+{2 * n}" for n in range(len(MALFORMED))}
    assert counts.requests == 2


def test_values_that_only_look_odd_are_indexed_as_they_are(real: Any, rows: Any) -> None:
    odd = [
        b'{"a":1}\n',
        b'{"b":1.10,\r\n"c":"\xc3\xa9"}',
        b'\xef\xbb\xbf{"d":1}',
        b' {"e":1} ',
        b'{"f":{"create":{}}}',
        b"{}",
    ]
    counts = real.index(rows(odd))
    assert (counts.created, counts.dead_lettered) == (len(odd), 0)
    # A byte order mark in a document would make every search answer that has it unreadable.
    assert real.documents()["t+0+2"] == {"d": 1}
    assert real.documents()["t+0+1"] == {"b": 1.10, "c": "é"}


def test_a_value_against_the_mapping_is_a_dead_letter_once(real: Any, rows: Any) -> None:
    real.ask("PUT", f"/{real.name}", {"mappings": {"properties": {"n": {"type": "long"}}}})
    batch = rows([b'{"n": 1}', b'{"n": "many"}'])
    for _ in range(2):
        counts = real.index(batch, stream_name="s", batch_time_ms=1700000000000)
        assert counts.dead_lettered == 1
        # OpenSearch has the older name.
        assert list(counts.dead_letter_reasons) in (["document_parsing_exception"], ["mapper_parsing_exception"])
    (letter,) = real.documents(f"{real.name}-dead-letters").values()
    assert letter["value_text"] == '{"n": "many"}'
    assert 'For input string: "many"' in letter["reason"]["text"]
    found = real.ask("GET", f"/{real.name}-dead-letters/_search", {"query": {"range": {"batch_time": {"lte": "now"}}}})
    assert found["hits"]["total"]["value"] == 1


def test_odd_keys_are_ids(real: Any, rows: Any) -> None:
    keys = ['a"b', "a\\b", "a\nb", "é\u2028", "a/b?c", "_x", "k" * 512, "a\x00b"]
    counts = real.index(rows([b"{}"] * len(keys), keys=[key.encode() for key in keys]), document_id="key")
    assert counts.created == len(keys)
    assert set(real.documents()) == set(keys)


def test_a_concrete_index_is_found_and_a_rollover_alias_refused(real: Any) -> None:
    assert concrete(real) is None
    real.ask("PUT", f"/{real.name}-1", {"aliases": {real.name: {}}})
    assert concrete(real) == f"{real.name}-1"
    real.ask("POST", f"/{real.name}-1/_alias/{real.name}", {"routing": "1"})
    with pytest.raises(UnsuitableTargetError, match="a routing of its own"):
        concrete(real)
    real.ask("POST", f"/{real.name}-1/_alias/{real.name}", {"is_write_index": True})
    with pytest.raises(UnsuitableTargetError, match="rolls over"):
        concrete(real)
    real.ask("PUT", f"/{real.name}-2", {"aliases": {real.name: {}}})
    with pytest.raises(UnsuitableTargetError, match="2 indices"):
        concrete(real)


def test_the_one_document_in_a_templates_data_stream_is_deleted(real: Any, rows: Any) -> None:
    template = f"/_index_template/{real.name}"
    real.ask("PUT", template, {"index_patterns": [real.name], "data_stream": {}, "priority": 900})
    try:
        assert concrete(real) is None
        with pytest.raises(ElasticsearchRefusedError, match=r"is a data stream.*1 documents .* were deleted again"):
            real.index(rows([b'{"@timestamp": 1700000000000}'] * 5), first_alone=True)
        assert real.documents() == {}
        with pytest.raises(UnsuitableTargetError, match="data stream"):
            concrete(real)
    finally:
        # The data stream's index cannot be deleted without the data stream, and that not on this server.
        real.transport.request("DELETE", template)


def test_a_missing_alias_becomes_no_index_and_is_used_when_back(real: Any, rows: Any) -> None:
    """Tasks that write through an alias let the server refuse to create an index of its name."""
    real.ask("PUT", f"/{real.name}-1", {"aliases": {real.name: {}}})
    assert real.index(rows([b"{}"]), through_alias=True).created == 1
    real.ask("DELETE", f"/{real.name}-1/_alias/{real.name}")
    with pytest.raises(ElasticsearchRefusedError, match="is not an alias"):
        real.index(rows([b"{}"], first=1), through_alias=True)
    assert concrete(real) is None
    real.ask("PUT", f"/{real.name}-1/_alias/{real.name}")
    assert real.index(rows([b"{}"], first=1), through_alias=True).created == 1


def test_a_blocked_index_is_waited_for_for_a_bounded_time(real: Any, rows: Any) -> None:
    real.ask("PUT", f"/{real.name}", {"settings": {"index.blocks.read_only_allow_delete": True}})
    with pytest.raises(ElasticsearchUnavailableError, match="flood-stage"):
        real.index(rows([b"{}"]), max_retry_seconds=0.3)
    real.ask("PUT", f"/{real.name}/_settings", {"index.blocks.read_only_allow_delete": None})


def test_a_closed_index_fails_the_batch_without_dead_letters(real: Any, rows: Any) -> None:
    real.ask("PUT", f"/{real.name}")
    real.ask("POST", f"/{real.name}/_close")
    with pytest.raises(ElasticsearchRefusedError, match="Open the index"):
        real.index(rows([b"{}"]))


def test_a_missing_index_that_may_not_be_made_is_an_error(real: Any, rows: Any) -> None:
    setting = "action.auto_create_index"
    real.ask("PUT", "/_cluster/settings", {"persistent": {setting: f"-{real.name}*,+*"}})
    try:
        with pytest.raises(ElasticsearchRefusedError, match="auto_create_index"):
            real.index(rows([b"{}"]))
    finally:
        real.ask("PUT", "/_cluster/settings", {"persistent": {setting: None}})


def test_the_same_version_of_another_record_is_superseded(real: Any, rows: Any) -> None:
    import pyarrow as pa

    options = {"document_id": "key", "version": "version"}
    first = rows([b'{"n": 1.50}'], keys=[b"a"]).append_column("version", pa.array([7]))
    other = rows([b'{"n": 2}'], keys=[b"a"]).append_column("version", pa.array([7]))
    assert real.index(first, **options).created == 1
    assert real.index(first, **options).repeated == 1
    assert real.index(other, **options).superseded == 1


DEEP = b'{"n":' * 1000 + b"1" + b"}" * 1000
MANY = [
    b'{"a": 1.10, "b": 1, "c": [{"d": 1}, {"e": 2, "d": 3}], "f": {"d": 1}}',
    b'{"a": 1e400, "b": 123456789012345678901234567890}',
    b'{"a": 0.1234567890123456789, "a.b": [], "c": {}, "b": null}',
]
# (the mapping's _source, settings, at least so many of the five documents that are known to be the same)
STORED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "whole": ({}, {}, 5),
    "excluded": ({"excludes": ["b", "c.d", "f*"]}, {}, 4),
    "included": ({"includes": ["a", "c.*", "z"]}, {}, 4),
    "disabled": ({"enabled": False}, {}, 0),
    "synthetic": ({}, {"index.mapping.source.mode": "synthetic"}, 0),
    "derived": ({}, {"index.derived_source.enabled": True}, 0),
}


@pytest.mark.parametrize("stored", STORED)
def test_what_the_index_took_once_is_settled_the_second_time(real: Any, rows: Any, stored: str) -> None:
    """Whatever its mapping keeps, and though a search's or a client's parser cannot read it."""
    source, settings, the_same = STORED[stored]
    mappings = {"dynamic": False, "_source": source, "properties": {"z": {"type": "keyword"}}}
    made = {"mappings": mappings, "settings": settings}
    if b"unknown setting" in real.transport.request("PUT", f"/{real.name}", json.dumps(made).encode()).body:
        pytest.skip(f"this server has no {settings}")
    batch = rows([*MANY, DEEP, b'{"z": "y"}'])
    first = real.index(batch)
    assert (first.created, first.dead_lettered) == (5, 0)
    again = real.index(batch)
    assert (again.repeated + again.uncompared, again.indexed, again.foreign, again.dead_lettered) == (5, 0, 0, 0), again
    assert again.repeated >= the_same, again


def test_what_an_index_keeps_of_documents_tells_them_apart(real: Any, rows: Any) -> None:
    mappings = {"_source": {"excludes": ["secret"]}}
    real.ask("PUT", f"/{real.name}", {"mappings": mappings})
    real.index(rows([b'{"n": 1, "secret": 1}', b'{"n": 2, "secret": 1}']))
    again = real.index(rows([b'{"n": 1, "secret": 2}', b'{"n": 3, "secret": 1}']), written_before=True)
    assert (again.repeated, again.kept) == (1, 1)
