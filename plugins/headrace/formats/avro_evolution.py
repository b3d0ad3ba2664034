"""Turns values that were written by one Avro schema into values of another one, by the rules of Avro 1.12.

https://avro.apache.org/docs/1.12.0/specification/#schema-resolution: fields by name or alias, defaults for those that
are added, promotions, enum defaults, unions by their first member that fits; as in Avro's Java, one of the same name or
type goes before others. Beyond them: a logical type that only one schema has is the reader's choice, and times become
finer where the reader's are.

Values are those that `headrace.spark.records.avro.values` reads: an enum is the number of its symbol, and a
value of a union with a column for each member is {number of the member among those not null: its value}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.formats.avro_schema import AvroKind, AvroType
from headrace.formats.schema_text import UnreadableSchemaError

Turn = Callable[[Any], Any]
"""Turns a value of the writer's type. Raises ValueMisfitError."""

_MAX_SHOWN = 3
_FINER: Mapping[tuple[AvroKind, AvroKind], int] = {
    (AvroKind.TIMESTAMP_MILLIS, AvroKind.TIMESTAMP_MICROS): 1_000,
    (AvroKind.TIMESTAMP_MILLIS, AvroKind.TIMESTAMP_NANOS): 1_000_000,
    (AvroKind.TIMESTAMP_MICROS, AvroKind.TIMESTAMP_NANOS): 1_000,
    (AvroKind.LOCAL_MILLIS, AvroKind.LOCAL_MICROS): 1_000,
    (AvroKind.LOCAL_MILLIS, AvroKind.LOCAL_NANOS): 1_000_000,
    (AvroKind.LOCAL_MICROS, AvroKind.LOCAL_NANOS): 1_000,
    (AvroKind.TIME_MILLIS, AvroKind.TIME_MICROS): 1_000,
    (AvroKind.TIME_MILLIS, AvroKind.TIME_NANOS): 1_000_000,
    (AvroKind.TIME_MICROS, AvroKind.TIME_NANOS): 1_000,
}
_NAMED = ("record", "enum", "fixed")


class ValueMisfitError(ValueError):
    """A value has nothing that it could become in the reader's schema."""


def turn_between(writer: AvroType, reader: AvroType) -> Turn:
    """The function that turns values of ``writer`` into those of ``reader``.

    Raises UnreadableSchemaError with what differs, if no value can be turned.
    """
    resolver = _Resolver(writer, reader)
    turn = resolver.type(writer, reader, "")
    if turn is None or resolver.differences:
        shown = resolver.differences[:_MAX_SHOWN]
        more = len(resolver.differences) - len(shown)
        raise UnreadableSchemaError("; ".join(shown) + (f"; and {more} more" if more else ""))
    return turn


def _below(made: AvroType) -> str:
    """The name of the type without its logical type. Of a union that is one column, it is the wider member's."""
    plain = made.plain
    if isinstance(plain, list):
        members = [each for each in plain if each != "null"]
        plain = members[-1] if len(members) == 1 else max(members, key=lambda each: each in ("long", "double"))
    if isinstance(plain, dict):
        return str(plain["type"])
    return _kind_of_name(made) if plain == made.name else str(plain)


def _kind_of_name(made: AvroType) -> str:
    """The type of what a schema names that it has defined before."""
    if made.kind in (AvroKind.RECORD, AvroKind.VARIABLE_DECIMAL):
        return "record"
    return "enum" if made.kind is AvroKind.ENUM else "fixed"


def _is_nullable(made: AvroType) -> bool:
    return made.kind is AvroKind.NULL or (isinstance(made.plain, list) and "null" in made.plain)


def _definitions(made: AvroType) -> dict[str, Mapping[str, Any]]:
    """The definitions of all records, enums and fixed in a schema, by their full names."""
    found: dict[str, Mapping[str, Any]] = {}

    def look(plain: Any) -> None:
        if isinstance(plain, list):
            for each in plain:
                look(each)
        elif isinstance(plain, dict):
            if plain["type"] in _NAMED:
                found[plain["name"]] = plain
            for each in plain.get("fields", ()):
                look(each["type"])
            for key in ("items", "values"):
                if key in plain:
                    look(plain[key])

    look(made.plain)
    return found


def _records(made: AvroType) -> dict[str, AvroType]:
    """The records of a schema by their full names, with their fields."""
    found: dict[str, AvroType] = {}
    left = [made]
    while left:
        each = left.pop()
        if each.kind is AvroKind.RECORD and (each.is_within_itself or each.name in found):
            continue
        if each.name and each.parts:
            found[each.name] = each
        left += [part for _, part in each.parts]
    return found


class _Resolver:
    def __init__(self, writer: AvroType, reader: AvroType) -> None:
        self._writers = _definitions(writer)
        self._readers = _definitions(reader)
        self._records = _records(writer)
        self.differences: list[str] = []

    def type(self, writer: AvroType, reader: AvroType, place: str) -> Turn | None:
        """How values of a place are turned; None if there is no way, which ``differences`` then has."""
        if writer.kind is AvroKind.NULL:
            if not _is_nullable(reader):
                self._differ(place, writer, reader)
            return _unchanged
        is_union = writer.kind is AvroKind.UNION
        turn = self._from_union(writer, reader, place) if is_union else self._to_member(writer, reader, place)
        if turn is None:
            self._differ(place, writer, reader)
            return None
        if _is_nullable(reader):
            return lambda value: None if value is None else turn(value)

        def not_null(value: Any) -> Any:
            if value is None:
                raise ValueMisfitError(f"it is null{_at(place)}, where the columns' schema allows none")
            return turn(value)

        return not_null if _is_nullable(writer) else turn

    def _from_union(self, writer: AvroType, reader: AvroType, place: str) -> Turn | None:
        turns: list[Turn | None] = []
        first = len(self.differences)
        for _, part in writer.parts:
            known = len(self.differences)
            turn_of = self._to_member(part, reader, place)
            turns.append(turn_of if len(self.differences) == known else None)
        if not any(turns):
            return None
        # A member that cannot be read is no matter for the others.
        del self.differences[first:]

        def turn(value: Any) -> Any:
            [(number, held)] = value.items()
            found = turns[number]
            if found is None:
                name = writer.parts[number][0]
                raise ValueMisfitError(f"it is a {name}{_at(place)}, which the columns' schema has no type for")
            return found(held)

        return turn

    def _to_member(self, writer: AvroType, reader: AvroType, place: str) -> Turn | None:
        """How values of a type that is no union are turned: by the reader's type, or the first member that fits."""
        if reader.kind is AvroKind.NULL:
            return None
        if reader.kind is not AvroKind.UNION:
            return self._plain(writer, reader, place)
        for number, part in sorted(
            ((number, part) for number, (_, part) in enumerate(reader.parts)),
            key=lambda numbered: (_below(writer) != _below(numbered[1]), writer.name != numbered[1].name),
        ):
            known = len(self.differences)
            turn = self._plain(writer, part, place)
            if turn is not None and len(self.differences) == known:
                return _of_member(number, turn)
            del self.differences[known:]
        return None

    def _plain(self, writer: AvroType, reader: AvroType, place: str) -> Turn | None:
        below = _below(writer)
        if below != _below(reader):
            return _promotion(writer, reader)
        if below in _NAMED and not self._have_one_name(writer, reader):
            return None
        of_kind = {"record": self._record, "array": self._repeated, "map": self._repeated, "enum": self._enum}
        if below in of_kind:
            return of_kind[below](writer, reader, place)
        return None if writer.size != reader.size else _logical(writer, reader)

    def _have_one_name(self, writer: AvroType, reader: AvroType) -> bool:
        """Whether the names agree, without their namespaces, or the reader has the writer's as an alias."""
        aliases = self._readers[reader.name].get("aliases", ())
        theirs = writer.name.rpartition(".")[2]
        return theirs in {name.rpartition(".")[2] for name in (reader.name, *aliases)}

    def _record(self, writer: AvroType, reader: AvroType, place: str) -> Turn | None:
        # Of a writer's record within itself, as many levels count as the reader has.
        written = dict(self._records.get(writer.name, writer).parts)
        given = {field["name"]: field for field in self._writers[writer.name]["fields"]}
        turns: list[tuple[str, str | None, Any]] = []
        for field in self._readers[reader.name]["fields"]:
            name = field["name"]
            made = dict(reader.parts).get(name)
            if made is None:
                # It can only be null, and is no column.
                continue
            inner = f"{place}.{name}" if place else name
            source = next((each for each in (name, *field.get("aliases", ())) if each in given), None)
            if source is not None:
                of = written.get(source) or replace(made, kind=AvroKind.NULL, plain="null")
                turns.append((name, source, self.type(of, made, inner)))
            elif "default" in field:
                turns.append((name, None, self._default(field["default"], made, inner)))
            else:
                self.differences.append(
                    f"{inner} has no default, and the schema that it was written by does not have it"
                )

        def turn(value: Any) -> Any:
            return {
                name: constant_or_turn if source is None else constant_or_turn(value[source])
                for name, source, constant_or_turn in turns
            }

        return turn

    def _repeated(self, writer: AvroType, reader: AvroType, place: str) -> Turn | None:
        # A map of the writer whose values have no column has none itself, and is refused when its schema is read.
        element = self.type(writer.parts[0][1], reader.parts[0][1], f"{place}[]")
        if element is None:
            return None
        if writer.kind is AvroKind.ARRAY:
            return lambda value: [element(each) for each in value]
        return lambda value: {key: element(each) for key, each in value.items()}

    def _enum(self, writer: AvroType, reader: AvroType, place: str) -> Turn:
        known = {symbol: number for number, symbol in enumerate(reader.symbols)}
        default = known.get(self._readers[reader.name].get("default", ""))
        numbers = [known.get(symbol, default) for symbol in writer.symbols]

        def turn(value: Any) -> Any:
            if not 0 <= value < len(numbers):
                raise ValueMisfitError(f"of an enum of {len(numbers)} symbols there is no number {value}{_at(place)}")
            if (number := numbers[value]) is None:
                raise ValueMisfitError(
                    f"it is {writer.symbols[value]}{_at(place)}, a symbol that the columns' schema does not have"
                )
            return number

        return turn

    def _default(self, default: Any, made: AvroType, place: str) -> Any:
        """The value of a field that was not written, as if it had been read."""
        if default is None:
            # Also where the type does not allow it, which is common: every column can be null.
            return None
        if made.kind is AvroKind.UNION:
            for number, (_, part) in enumerate(made.parts):
                known = len(self.differences)
                value = self._default(default, part, place)
                if len(self.differences) == known:
                    return {number: value}
                del self.differences[known:]
        elif _is_default(default, made):
            return self._default_of_type(default, made, place)
        self.differences.append(f"{place} has the default {json.dumps(default)}, which is no {_shown(made)}")
        return None

    def _default_of_type(self, default: Any, made: AvroType, place: str) -> Any:
        below, parts = _below(made), dict(made.parts)
        if below == "record":
            values = {}
            for field in self._readers[made.name]["fields"]:
                name = field["name"]
                inner = f"{place}.{name}"
                if name in parts and (name in default or "default" in field):
                    values[name] = self._default(default.get(name, field.get("default")), parts[name], inner)
                elif name in parts:
                    self.differences.append(f"{inner} has no default, and neither has the default of {place}")
            return values
        if below == "array":
            return [self._default(each, parts[""], f"{place}[]") for each in default]
        if below == "map":
            return {key: self._default(each, parts[""], f"{place}[]") for key, each in default.items()}
        return made.symbols.index(default) if below == "enum" else _OF_DEFAULT.get(below, _unchanged)(default)

    def _differ(self, place: str, writer: AvroType, reader: AvroType) -> None:
        of = place or "the value"
        self.differences.append(f"{of} is {_shown(writer)} where it was written, and {_shown(reader)} in the columns")


def _promotion(writer: AvroType, reader: AvroType) -> Turn | None:
    turn = _PROMOTIONS.get((_below(writer), _below(reader)))
    if turn is not None and _is_logical(writer) and _is_logical(reader):
        finer = _FINER.get((writer.kind, reader.kind))
        return None if finer is None else (lambda value: _int(value) * finer)
    return turn


def _logical(writer: AvroType, reader: AvroType) -> Turn | None:
    if not (_is_logical(writer) and _is_logical(reader)):
        return _unchanged
    if writer.kind is reader.kind:
        return _unchanged if writer.scale == reader.scale and writer.precision <= reader.precision else None
    finer = _FINER.get((writer.kind, reader.kind))
    return None if finer is None else (lambda value: value * finer)


def _unchanged(value: Any) -> Any:
    return value


def _of_member(number: int, turn: Turn) -> Turn:
    return lambda value: {number: turn(value)}


def _is_logical(made: AvroType) -> bool:
    return made.kind.value != _below(made)


def _int(value: int) -> int:
    if not -(2**31) <= value < 2**31:
        raise ValueMisfitError(f"{value} is no int of 32 bits")
    return value


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueMisfitError(
            f"its bytes are no UTF-8, and the columns' schema has a text there: {error.reason}"
        ) from None


_PROMOTIONS: Mapping[tuple[str, str], Turn] = {
    ("int", "long"): _int,
    ("int", "float"): lambda value: float(_int(value)),
    ("int", "double"): lambda value: float(_int(value)),
    ("long", "float"): float,
    ("long", "double"): float,
    ("float", "double"): float,
    ("string", "bytes"): lambda value: value.encode(),
    ("bytes", "string"): _decoded,
}


def _is_default(default: Any, made: AvroType) -> bool:
    """Whether a value of JSON is one of a type that is no union, without what is below it."""
    below = _below(made)
    if type(default) not in _OF_JSON[below]:
        return False
    if below in _BOUNDS:
        return bool(-_BOUNDS[below] <= default < _BOUNDS[below])
    if below in ("float", "double"):
        return not isinstance(default, str) or default in ("NaN", "Infinity", "-Infinity")
    if below in ("bytes", "fixed"):
        is_bytes = all(ord(each) < 256 for each in default)
        return is_bytes and (below == "bytes" or len(default) == made.size)
    return below != "enum" or default in made.symbols


_BOUNDS = {"int": 2**31, "long": 2**63}
_OF_JSON: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "int": (int,),
    "long": (int,),
    "float": (int, float, str),
    "double": (int, float, str),
    "bytes": (str,),
    "string": (str,),
    "enum": (str,),
    "fixed": (str,),
    "array": (list,),
    "map": (dict,),
    "record": (dict,),
}


# Code points 0 to 255 stand for bytes.
_OF_DEFAULT: Mapping[str, Turn] = {
    "bytes": lambda default: default.encode("latin-1"),
    "fixed": lambda default: default.encode("latin-1"),
    "float": float,
    "double": float,
}


def _shown(made: AvroType) -> str:
    """A type in words, such as "string or null"."""
    if made.kind is AvroKind.NULL:
        return "null"
    if made.kind is AvroKind.UNION:
        names: Sequence[str] = [name for name, _ in made.parts]
    elif made.kind is AvroKind.DECIMAL:
        names = [f"decimal({made.precision}, {made.scale})"]
    else:
        size = f" of {made.size} bytes" if made.kind is AvroKind.FIXED else ""
        names = [f"{made.kind.value} {made.name}".rstrip() + size]
    return " or ".join([*names, *(["null"] if _is_nullable(made) else [])])


def _at(place: str) -> str:
    return f" at `{place}`" if place else ""
