from __future__ import annotations

import json

import pyarrow as pa
import pytest

from headrace.elasticsearch.documents import as_lines


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
def test_line_breaks_between_tokens_become_spaces_and_the_rest_is_unchanged(document: bytes) -> None:
    (line,) = lines(document)
    assert line is not None
    assert b"\n" not in line
    assert b"\r" not in line
    assert b"1.10" in line
    assert json.loads(line) == json.loads(document)
    assert rejected(document) == {}


@pytest.mark.parametrize("document", [b'{"a":"x\ny"}', b'{"a":1}\n{"b":2}', b'{\n"\x00":1}', b"{\x00\n}\x00"])
def test_a_document_with_a_line_break_that_is_not_json_is_malformed(document: bytes) -> None:
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
    found = as_lines(column.slice(1, 3))
    assert found.rejected == {}
    assert found.lines.to_pylist() == [b"{}", b'{"a":1}', None]


def test_a_document_too_deep_to_parse_is_malformed() -> None:
    deep = b'{"a":\n' * 100_000 + b"1" + b"}" * 100_000
    assert "not JSON" in rejected(deep)[0]
