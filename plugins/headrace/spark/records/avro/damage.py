"""Finds in the bytes of an Avro value what fastavro reads, and no writer makes.

These are a number below 0 of a union's member, which Python's lists take from their end; a truth value that is not 0 or
1; a number of more than 64 bits; a text of fewer bytes than none; and a list of -2^63 elements. It also finds records
within themselves that are too deep for fastavro, whose compiled code would end the process. It imports no Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Walk = Callable[[bytes, int], int]
"""From a place in a value's bytes to the one behind what is there. Raises DamagedError."""
_MOST_OF_A_NUMBER = 10
_DEEPEST = 100
"""Records within themselves."""


class DamagedError(ValueError):
    """A value's bytes are none that a writer makes."""


class AvroDamage:
    """Looks for damage in values of a schema in Avro's JSON."""

    def __init__(self, schema: Any) -> None:
        self.has_records_within_themselves = False
        self._depth = 0
        self._walk = self._of(schema, {})

    def check(self, value: bytes) -> None:
        """Raise DamagedError if the value is damaged, and IndexError if it ends too early."""
        try:
            self._walk(value, 0)
        except RecursionError:
            raise DamagedError("it is nested too deep") from None
        finally:
            self._depth = 0

    def _of(self, given: Any, named: dict[str, _Walk]) -> _Walk:
        """``named``: the types that were met before, by name."""
        if isinstance(given, list):
            return _behind_member([self._of(each, named) for each in given])
        if isinstance(given, str):
            if given in _SIMPLE:
                return _SIMPLE[given]
            return named[given] if given in named else self._within_itself(given, named)
        kind = given["type"]
        if kind == "array":
            return _behind_list(self._of(given["items"], named))
        if kind == "map":
            return _behind_list(_behind_all([_behind_text, self._of(given["values"], named)]))
        made: _Walk = _behind_number
        if kind == "record":
            made = _behind_all([self._of(field["type"], named) for field in given["fields"]])
        elif kind == "fixed":
            made = _behind_bytes(given["size"])
        named[given["name"]] = made
        return made

    def _within_itself(self, name: str, named: Mapping[str, _Walk]) -> _Walk:
        self.has_records_within_themselves = True

        def walk(data: bytes, at: int) -> int:
            if self._depth >= _DEEPEST:
                raise DamagedError(f"it has more than {_DEEPEST} records of the type {name} within each other")
            self._depth += 1
            at = named[name](data, at)
            self._depth -= 1
            return at

        return walk


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
    if length < 0:
        raise DamagedError(f"a text has {length} bytes")
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
