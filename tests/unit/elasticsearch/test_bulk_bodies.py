from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import parse_bulk

from headrace.elasticsearch.bulk_bodies import as_lines, prepare_rows


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


def lines(*documents: bytes | None) -> list[bytes | None]:
    result: list[bytes | None] = as_lines(pa.array(documents, pa.binary())).lines.to_pylist()
    return result


def rejected(*documents: bytes | None) -> dict[int, str]:
    return {row: reason.text for row, reason in as_lines(pa.array(documents, pa.binary())).rejected.items()}


def test_a_document_on_one_line_is_sent_unchanged() -> None:
    odd = b'{"a":1.10, "a":1e400,"b":0.30000000000000000001}'
    assert lines(odd, b"{}", None) == [odd, b"{}", None]
    assert rejected(odd, b"{}", None) == {}


def test_strings_are_converted_like_bytes() -> None:
    assert as_lines(pa.array(['{"é":1}', None])).lines.to_pylist() == ['{"é":1}'.encode(), None]


def test_a_column_of_tombstones_has_no_lines_to_check() -> None:
    assert lines(None, None) == [None, None]


@pytest.mark.parametrize(
    "document", [b'{"a": 1.10}\n', b'\n{"a": 1.10}', b'{"a": 1.10}\r\n', b'{"a":\n 1.10}', b'{"a":\r\n1.10\n}']
)
def test_line_breaks_between_tokens_become_spaces(document: bytes) -> None:
    """All the rest of the document is unchanged."""
    (line,) = lines(document)
    assert line is not None
    assert b"\n" not in line
    assert b"\r" not in line
    assert b"1.10" in line
    assert json.loads(line) == json.loads(document)
    assert rejected(document) == {}


@pytest.mark.parametrize("document", [b'{"a":"x\ny"}', b'{"a":1}\n{"b":2}', b'{\n"\x00":1}', b"{\x00\n}\x00"])
def test_a_document_of_two_lines_that_is_not_json_is_malformed(document: bytes) -> None:
    assert "JSON" in rejected(b"{}", document)[1]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"[1,2]", "no object"),
        (b"5", "no object"),
        (b"null", "no object"),
        (b'"x"', "no object"),
        (b"hello", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ('{"u":1}'.encode("utf-16-le"), "NUL"),
        ('{"u":1}'.encode("utf-16"), "not UTF-8"),
        (b'{"s":"\xed\xa0\x80"}', "not UTF-8"),
        (b'{"s":"\xff"}', "not UTF-8"),
        (b'{"\x00":1}', "NUL"),
    ],
)
def test_a_document_that_is_not_an_object_is_malformed(document: bytes, says: str) -> None:
    assert says in rejected(b"{}", document, None)[1]


def test_leading_blanks_and_a_byte_order_mark_are_removed() -> None:
    odd = (b'  {"a":1}', b'\xef\xbb\xbf{"a":1}', b"{}")
    assert rejected(*odd) == {}
    assert lines(*odd) == [b'{"a":1}', b'{"a":1}', b"{}"]


def test_other_control_characters_are_left_to_elasticsearch() -> None:
    assert lines(b'{\t"a":"x\ty"}') == [b'{\t"a":"x\ty"}']


def test_only_the_slice_of_a_column_is_checked() -> None:
    column = pa.array([b"junk\n", b"{}", b'{"a":1}\n', None, b"junk"], pa.binary())
    lines = as_lines(column.slice(1, 3))
    assert lines.rejected == {}
    assert lines.lines.to_pylist() == [b"{}", b'{"a":1}', None]


def test_a_document_too_deep_to_parse_is_malformed() -> None:
    deep = b'{"a":\n' * 100_000 + b"1" + b"}" * 100_000
    assert "not JSON" in rejected(deep)[0]
