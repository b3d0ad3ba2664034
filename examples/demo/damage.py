"""Damages a record's value in several ways, or rewrites it in a valid but unusual form."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum


class Damage(Enum):
    """Ways to damage a flight's JSON; Elasticsearch accepts none of the results."""

    TRUNCATED = "truncated JSON"
    NOT_UTF8 = "not UTF-8"
    ARRAY = "an array"
    NUMBER = "a number"
    EMPTY = "an empty value"
    TOMBSTONE = "no value"
    TEXT_FOR_NUMBER = "text in a numeric field"
    OBJECT_FOR_NUMBER = "an object in a numeric field"
    OUT_OF_RANGE = "a number out of its field's range"
    NEWLINE_IN_STRING = "a raw newline in a string"
    FIELD_TWICE = "the same field twice"
    TWO_OBJECTS = "two objects in one value"


def damage(value: bytes, kind: Damage) -> bytes | None:
    """``value``, a flight as compact JSON, damaged in this way."""
    return _DAMAGES[kind](value)


def oddity(value: bytes, which: int) -> bytes:
    """``value`` written in an unusual way that is still valid JSON; ``which`` is below `ODDITIES`."""
    return _ODDITIES[which](value)


def _with(value: bytes, field: str, written: bytes) -> bytes:
    """The flight with ``field``'s value replaced by the bytes ``written``, without encoding."""
    flight = json.loads(value)
    flight[field] = "\0"
    return json.dumps(flight, separators=(",", ":")).encode().replace(b'"\\u0000"', written)


_DAMAGES: dict[Damage, Callable[[bytes], bytes | None]] = {
    Damage.TRUNCATED: lambda value: value[: len(value) // 2],
    Damage.NOT_UTF8: lambda value: _with(value, "dest", "Zürich".encode("latin-1").join([b'"', b'"'])),
    Damage.ARRAY: lambda value: b"[" + value + b"]",
    Damage.NUMBER: lambda _: b"2013",
    Damage.EMPTY: lambda _: b"",
    Damage.TOMBSTONE: lambda _: None,
    Damage.TEXT_FOR_NUMBER: lambda value: _with(value, "dep_delay", b'"late"'),
    Damage.OBJECT_FOR_NUMBER: lambda value: _with(value, "distance", b'{"miles":1400}'),
    Damage.OUT_OF_RANGE: lambda value: _with(value, "flight", b"92233720368547758080"),
    Damage.NEWLINE_IN_STRING: lambda value: _with(value, "tailnum", b'"N14\n228"'),
    Damage.FIELD_TWICE: lambda value: b'{"year":2012,' + value[1:],
    Damage.TWO_OBJECTS: lambda value: value + value,
}

_ODDITIES: tuple[Callable[[bytes], bytes], ...] = (
    # Newlines between tokens are valid JSON, but would break a bulk request's lines.
    lambda value: json.dumps(json.loads(value), indent=2).encode(),
    lambda value: value + b"\r\n",
    lambda value: _with(value, "dest", '"Zürich ✈ 東京"'.encode()),
    lambda value: _with(value, "dest", b'"\\u00e9\\n\\"quoted\\"\\\\"'),
    lambda value: _with(value, "distance", b"1.4e3"),
)
ODDITIES = len(_ODDITIES)
