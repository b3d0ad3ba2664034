from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.testing.fake_elasticsearch import parse_bulk


def body(rows: Any, options: Any) -> bytes:
    prepared = prepare_rows(rows, options).prepared
    assert prepared is not None
    return b"".join(prepared.body(lines) for lines in prepared.requests(options))


def test_documents_with_record_ids_are_sent_with_create(make_options: Any, make_rows: Any) -> None:
    assert body(make_rows([b'{"a":1}', b'{"b":2}']), make_options()) == (
        b'{"create":{"_id":"t+0+0"}}\n{"a":1}\n{"create":{"_id":"t+0+1"}}\n{"b":2}\n'
    )


def test_write_method_index_sends_index_actions(make_options: Any, make_rows: Any) -> None:
    assert body(make_rows([b"{}"]), make_options(write_method="index")) == b'{"index":{"_id":"t+0+0"}}\n{}\n'


@pytest.mark.parametrize(("method", "version_type"), [("create", b"external"), ("index", b"external_gte")])
def test_key_ids_carry_versions(make_options: Any, make_rows: Any, method: str, version_type: bytes) -> None:
    rows = make_rows([b"{}", None], keys=[b"a", b"b"], offsets=[5, 6])
    assert body(rows, make_options(document_id="key", write_method=method)) == (
        b'{"index":{"_id":"a","version":5,"version_type":"' + version_type + b'"}}\n{}\n'
        b'{"delete":{"_id":"b","version":6,"version_type":"' + version_type + b'"}}\n'
    )


def test_ids_are_escaped_as_json(make_options: Any, make_rows: Any) -> None:
    keys = ['a"b', "a\\b", "a\nb", "a\x00b", "é\u2028", "plain"]
    rows = make_rows([b"{}"] * len(keys), keys=[key.encode() for key in keys])
    assert [action.id for action in parse_bulk(body(rows, make_options(document_id="key")))] == keys


def test_dead_letters_and_tombstones_are_sorted_out(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}", b"junk", None, b'{"a":1}'])
    ignoring = prepare_rows(rows, make_options(tombstones="ignore"))
    assert ignoring.ignored_tombstones == 1
    assert {row: reason.type for row, reason in ignoring.rejected.items()} == {1: "malformed_document"}
    assert ignoring.prepared is not None
    assert [ignoring.prepared.row(line) for line in range(2)] == [0, 3]
    keeping = prepare_rows(rows, make_options(tombstones="dead_letter"))
    assert {row: reason.type for row, reason in keeping.rejected.items()} == {1: "malformed_document", 2: "tombstone"}


def test_an_ignored_tombstone_needs_no_key(make_options: Any, make_rows: Any) -> None:
    preparation = prepare_rows(make_rows([None], keys=[None]), make_options(document_id="key", tombstones="ignore"))
    assert (preparation.prepared, preparation.rejected, preparation.ignored_tombstones) == (None, {}, 1)


def test_a_tombstone_without_a_key_deletes_nothing(make_options: Any, make_rows: Any) -> None:
    preparation = prepare_rows(make_rows([None], keys=[None]), make_options(document_id="key"))
    assert preparation.prepared is None
    assert preparation.rejected[0].type == "missing_id"


def test_requests_are_bounded_by_actions_and_bytes(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([json.dumps({"n": n}).encode() for n in range(10)])
    by_actions = make_options(bulk_actions=4)
    prepared = prepare_rows(rows, by_actions).prepared
    assert prepared is not None
    assert [lines.tolist() for lines in prepared.requests(by_actions)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    one_line = len(prepared.body([0]))
    by_bytes = make_options(bulk_bytes=3 * one_line + 1)
    assert [len(lines) for lines in prepared.requests(by_bytes)] == [3, 3, 3, 1]


def test_a_document_larger_than_a_request_is_one_alone(make_options: Any, make_rows: Any) -> None:
    options = make_options(bulk_bytes=100)
    prepared = prepare_rows(make_rows([b"{}", {"a": "x" * 500}, b"{}"]), options).prepared
    assert prepared is not None
    assert [lines.tolist() for lines in prepared.requests(options)] == [[0], [1], [2]]


def test_any_lines_can_be_sent_again(make_options: Any, make_rows: Any) -> None:
    import numpy as np

    prepared = prepare_rows(make_rows([{"n": n} for n in range(5)]), make_options()).prepared
    assert prepared is not None
    assert [action.document for action in parse_bulk(prepared.body(np.array([0, 2, 4])))] == [
        {"n": 0},
        {"n": 2},
        {"n": 4},
    ]
    assert prepared.document(3) == b'{"n": 3}'


def test_a_slice_of_a_batch_is_sent_alone(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([{"n": n} for n in range(6)]).slice(2, 3)
    assert [action.id for action in parse_bulk(body(rows, make_options()))] == ["t+0+2", "t+0+3", "t+0+4"]
