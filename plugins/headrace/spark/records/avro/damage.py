"""Finds in the bytes of an Avro value what fastavro reads, and no writer makes.

These are a number below 0 of a union's member, which Python's lists take from their end; a truth value that is not 0 or
1; a number of more than 64 bits; and a list of -2^63 elements. It imports no Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Walk = Callable[[bytes, int], int]
"""From a place in a value's bytes to the one behind what is there. Raises DamagedError."""
_MOST_OF_A_NUMBER = 10


class DamagedError(ValueError):
    """A value's bytes are none that a writer makes."""


class AvroDamage:
    """Looks for damage in values of a schema in Avro's JSON."""

    def __init__(self, schema: Any) -> None:
        self._walk = _walk(schema, {})

    def check(self, value: bytes) -> None:
        """Raise DamagedError if the value is damaged. fastavro has read it, so that it has its whole length."""
        self._walk(value, 0)


def _behind_number(data: bytes, at: int) -> int:
    first = at
    while data[at] > 0x7F:
        at += 1
    if at - first >= _MOST_OF_A_NUMBER - 1 and (at - first >= _MOST_OF_A_NUMBER or data[at] > 1):
        raise DamagedError("a number has more than 64 bits")
    return at + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number, and the place behind it."""
    end = _behind_number(data, at)
    value = 0
    for byte in data[at:end][::-1]:
        value = value << 7 | byte & 0x7F
    return (value >> 1) ^ -(value & 1), end


def _behind_text(data: bytes, at: int) -> int:
    length, at = _number(data, at)
    return at + length


def _behind_truth(data: bytes, at: int) -> int:
    if data[at] > 1:
        raise DamagedError(f"a truth value is {data[at]}, and not 0 or 1")
    return at + 1


def _behind_bytes(size: int) -> _Walk:
    return lambda _, at: at + size


def _behind_all(walks: Sequence[_Walk]) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        for each in walks:
            at = each(data, at)
        return at

    return walk


def _behind_member(walks: Sequence[_Walk]) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        number, at = _number(data, at)
        if number < 0:
            raise DamagedError("it names a member of a union that is not there")
        return walks[number](data, at)

    return walk


def _behind_list(element: _Walk) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        while True:
            number, at = _number(data, at)
            if number == 0:
                return at
            if number < 0:
                at = _behind_number(data, at)
            if abs(number) > len(data) - at:
                # fastavro takes a list of -2^63 as an empty one.
                raise DamagedError("a list has more elements than bytes")
            for _ in range(abs(number)):
                at = element(data, at)

    return walk


_SIMPLE: Mapping[str, _Walk] = {
    "null": _behind_bytes(0),
    "boolean": _behind_truth,
    "int": _behind_number,
    "long": _behind_number,
    "float": _behind_bytes(4),
    "double": _behind_bytes(8),
    "bytes": _behind_text,
    "string": _behind_text,
}


def _walk(given: Any, named: dict[str, _Walk]) -> _Walk:
    """``named``: the types that were met before, by name."""
    if isinstance(given, list):
        return _behind_member([_walk(each, named) for each in given])
    if isinstance(given, str):
        return _SIMPLE[given] if given in _SIMPLE else named[given]
    kind = given["type"]
    if kind == "array":
        return _behind_list(_walk(given["items"], named))
    if kind == "map":
        return _behind_list(_behind_all([_behind_text, _walk(given["values"], named)]))
    made: _Walk = _behind_number
    if kind == "record":
        made = _behind_all([_walk(field["type"], named) for field in given["fields"]])
    elif kind == "fixed":
        made = _behind_bytes(given["size"])
    named[given["name"]] = made
    return made
