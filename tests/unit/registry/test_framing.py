"""The frame of a schema registry around values."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
import pytest

from headrace.registry.framing import HEADERS, Frames, read_frames
from headrace.wal.frame import RECORD_SCHEMA

GUID = uuid.UUID("89791762-2336-4186-9674-299b90a802e2")


def framed(id_: int, payload: bytes) -> bytes:
    return b"\x00" + id_.to_bytes(4, "big") + payload


def read(*values: bytes | None, headers: Any = None, paths: bool = False) -> Frames:
    given = None if headers is None else pa.array(headers, RECORD_SCHEMA.field("headers").type)
    return read_frames(pa.array(values, pa.binary()), given, "value", message_paths=paths)


def groups(frames: Frames) -> list[tuple[Any, Any, list[int] | None, list[bytes | None]]]:
    return [(id_, path, rows, values.to_pylist()) for id_, path, rows, values in frames.groups()]


def test_values_of_one_schema_are_not_looked_at_one_by_one() -> None:
    frames = read(framed(7, b"a"), None, framed(7, b""))
    assert groups(frames) == [(7, (), None, [b"a", None, b""])]
    assert frames.refused == {}


def test_values_of_several_schemas_are_told_apart() -> None:
    frames = read(framed(7, b"a"), framed(2**31 - 1, b"b"), None, framed(7, b"c"))
    assert groups(frames) == [(7, (), [0, 3], [b"a", b"c"]), (2**31 - 1, (), [1], [b"b"])]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "it is empty"),
        (b"\x00\x00\x00\x07", "it ends within the schema's id"),
        (b"\x01" + GUID.bytes[:-1], "it ends within the schema's id"),
        (framed(2**31, b"a"), "it has the id 2147483648, and ids end at 2147483647"),
        (b'{"a":1}', "it begins with the byte 123, not with 0 or 1"),
    ],
)
def test_a_value_without_a_frame_is_refused_alone(value: bytes, reason: str) -> None:
    frames = read(framed(7, b"a"), value)
    assert groups(frames) == [(7, (), [0], [b"a"])]
    assert list(frames.refused) == [1]
    assert frames.refused[1] == f"not framed for a schema registry: {reason}"


def test_an_id_of_zero_is_an_id() -> None:
    assert groups(read(framed(0, b"a"))) == [(0, (), None, [b"a"])]


def test_a_guid_may_stand_for_the_id() -> None:
    frames = read(b"\x01" + GUID.bytes + b"a", framed(7, b"b"))
    assert groups(frames) == [(str(GUID), (), [0], [b"a"]), (7, (), [1], [b"b"])]


def test_a_header_may_have_the_id() -> None:
    header = {"key": HEADERS["value"], "value": b"\x01" + GUID.bytes}
    other = {"key": "trace", "value": b"x"}
    frames = read(b"a", framed(7, b"b"), None, headers=[[other, header], None, [header]])
    assert groups(frames) == [(str(GUID), (), [0], [b"a"]), (7, (), [1], [b"b"])]
    assert frames.refused == {}


def test_a_header_of_the_key_is_not_the_values() -> None:
    frames = read(framed(7, b"a"), headers=[[{"key": HEADERS["key"], "value": b"\x01" + GUID.bytes}]])
    assert groups(frames) == [(7, (), None, [b"a"])]


@pytest.mark.parametrize("header", [b"", b"\x01abc", b"\x00\x00\x00\x00\x07x", None])
def test_a_damaged_header_is_refused(header: bytes | None) -> None:
    frames = read(b"a", headers=[[{"key": HEADERS["value"], "value": header}]])
    assert list(frames.refused) == [0]
    assert "its header" in frames.refused[0]


@pytest.mark.parametrize(
    ("indexes", "path"),
    [(b"\x00", (0,)), (b"\x02\x00", (0,)), (b"\x02\x02", (1,)), (b"\x04\x02\x04", (1, 2)), (b"\x02\x80\x02", (128,))],
)
def test_a_protobuf_message_is_named_by_its_path(indexes: bytes, path: tuple[int, ...]) -> None:
    (found,) = groups(read(framed(7, indexes + b"a"), paths=True))
    assert found[:2] == (7, path)
    assert found[3] == [b"a"]


def test_messages_of_one_schema_are_told_apart() -> None:
    frames = read(framed(7, b"\x00a"), framed(7, b"\x02\x02b"), framed(7, b"\x00c"), paths=True)
    assert groups(frames) == [(7, (0,), [0, 2], [b"a", b"c"]), (7, (1,), [1], [b"b"])]


@pytest.mark.parametrize("indexes", [b"", b"\x02", b"\x01\x01", b"\x02\x01", b"\xff\xff\xff\xff\xff\xff", b"\xca\x01"])
def test_a_damaged_path_is_refused(indexes: bytes) -> None:
    """It ends too early, is negative, or has more indexes than bytes."""
    frames = read(framed(7, indexes), framed(7, b"\x00a"), paths=True)
    assert list(frames.refused) == [0]
