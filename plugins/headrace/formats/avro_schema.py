"""Reads a schema in Avro's JSON, and says of which type its values are in Spark. It needs no Avro library.

DAG files and pages ask for the columns of a definition; Spark's tasks turn values by the same tree. By Avro 1.12's
specification: a logical type that does not fit its type, or is not known, is left out, and the type below it counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

from headrace.formats.schema_text import MAX_COLUMNS, MAX_DEPTH, MAX_SCHEMA_BYTES

_MAX_DIGITS = 38
"""The most digits of a decimal in Spark."""
_SHOWN_CHARACTERS = 60

Decimals = Literal["number", "text"]


class AvroSchemaError(ValueError):
    """A text is no schema in Avro's JSON, or one whose values have no columns of a fixed depth."""


class AvroKind(StrEnum):
    """What a value is in Avro, with the logical types that headrace turns."""

    NULL = "null"
    BOOLEAN = "boolean"
    INT = "int"
    LONG = "long"
    FLOAT = "float"
    DOUBLE = "double"
    BYTES = "bytes"
    STRING = "string"
    FIXED = "fixed"
    ENUM = "enum"
    ARRAY = "array"
    MAP = "map"
    RECORD = "record"
    UNION = "union"
    DECIMAL = "decimal"
    UUID = "uuid"
    DATE = "date"
    TIME_MILLIS = "time-millis"
    TIME_MICROS = "time-micros"
    TIME_NANOS = "io.debezium.time.NanoTime"
    TIMESTAMP_MILLIS = "timestamp-millis"
    TIMESTAMP_MICROS = "timestamp-micros"
    TIMESTAMP_NANOS = "timestamp-nanos"
    LOCAL_MILLIS = "local-timestamp-millis"
    LOCAL_MICROS = "local-timestamp-micros"
    LOCAL_NANOS = "local-timestamp-nanos"
    DURATION = "duration"
    VARIABLE_DECIMAL = "io.debezium.data.VariableScaleDecimal"


@dataclass(frozen=True, slots=True)
class AvroType:
    """The type of a value.

    ``name`` is the full name of a record, enum or fixed, else "". ``parts`` are a record's fields, the element of an
    array or map, and the members of a union without null; their names are unique. ``plain`` is the type as Avro's JSON
    without logical types, by which values are read. ``size`` is the number of bytes of a fixed, ``symbols`` are those
    of an enum; ``precision`` and ``scale`` are those of a decimal.
    """

    kind: AvroKind
    plain: Any
    name: str = ""
    parts: tuple[tuple[str, AvroType], ...] = ()
    size: int = 0
    symbols: tuple[str, ...] = ()
    precision: int = 0
    scale: int = 0
    leaves: int = 1
    """The number of columns in it, of all depths."""
    depth: int = 1
    is_within_itself: bool = False
    """It names a record that it is within, and stands for all that this one has. Only a writer's schema has it."""

    def ddl(self, decimals: Decimals = "number") -> str:
        """The type of the value in Spark's DDL. ``decimals``: whether decimals are numbers, or texts."""
        kind = self.kind
        if kind is AvroKind.RECORD or kind is AvroKind.UNION:
            return f"STRUCT<{self.columns(decimals)}>"
        if kind is AvroKind.ARRAY:
            return f"ARRAY<{self.parts[0][1].ddl(decimals)}>"
        if kind is AvroKind.MAP:
            return f"MAP<STRING, {self.parts[0][1].ddl(decimals)}>"
        if kind is AvroKind.DECIMAL:
            is_number = decimals == "number" and self.precision <= _MAX_DIGITS
            return f"DECIMAL({self.precision}, {self.scale})" if is_number else "STRING"
        return _DDL[kind]

    def columns(self, decimals: Decimals = "number") -> str:
        """The fields of a record, or the members of a union, in Spark's DDL."""
        return ", ".join(f"{_quoted(name)} {part.ddl(decimals)}" for name, part in self.parts)


_DDL = {
    AvroKind.BOOLEAN: "BOOLEAN",
    AvroKind.INT: "INT",
    AvroKind.LONG: "BIGINT",
    AvroKind.FLOAT: "FLOAT",
    AvroKind.DOUBLE: "DOUBLE",
    AvroKind.BYTES: "BINARY",
    AvroKind.STRING: "STRING",
    AvroKind.FIXED: "BINARY",
    AvroKind.ENUM: "STRING",
    AvroKind.UUID: "STRING",
    AvroKind.DATE: "DATE",
    AvroKind.TIME_MILLIS: "STRING",
    AvroKind.TIME_MICROS: "STRING",
    AvroKind.TIME_NANOS: "STRING",
    AvroKind.TIMESTAMP_MILLIS: "TIMESTAMP",
    AvroKind.TIMESTAMP_MICROS: "TIMESTAMP",
    AvroKind.TIMESTAMP_NANOS: "STRING",
    AvroKind.LOCAL_MILLIS: "TIMESTAMP_NTZ",
    AvroKind.LOCAL_MICROS: "TIMESTAMP_NTZ",
    AvroKind.LOCAL_NANOS: "STRING",
    AvroKind.VARIABLE_DECIMAL: "STRING",
    AvroKind.DURATION: "STRUCT<months: BIGINT, days: BIGINT, millis: BIGINT>",
}

_LOGICAL = {
    AvroKind.INT: {AvroKind.DATE, AvroKind.TIME_MILLIS},
    AvroKind.LONG: {
        *(AvroKind.TIME_MICROS, AvroKind.TIMESTAMP_MILLIS, AvroKind.TIMESTAMP_MICROS, AvroKind.TIMESTAMP_NANOS),
        *(AvroKind.LOCAL_MILLIS, AvroKind.LOCAL_MICROS, AvroKind.LOCAL_NANOS),
    },
    AvroKind.STRING: {AvroKind.UUID},
    AvroKind.FIXED: {AvroKind.DECIMAL, AvroKind.UUID, AvroKind.DURATION},
    AvroKind.BYTES: {AvroKind.DECIMAL},
}
"""The logical types that headrace turns, by the type below them."""
_CONNECT_NAMES = {
    (AvroKind.INT, "io.debezium.time.Date"): AvroKind.DATE,
    (AvroKind.INT, "io.debezium.time.Time"): AvroKind.TIME_MILLIS,
    (AvroKind.LONG, "io.debezium.time.MicroTime"): AvroKind.TIME_MICROS,
    (AvroKind.LONG, "io.debezium.time.NanoTime"): AvroKind.TIME_NANOS,
    (AvroKind.LONG, "io.debezium.time.Timestamp"): AvroKind.LOCAL_MILLIS,
    (AvroKind.LONG, "io.debezium.time.MicroTimestamp"): AvroKind.LOCAL_MICROS,
    (AvroKind.LONG, "io.debezium.time.NanoTimestamp"): AvroKind.LOCAL_NANOS,
}
"""The logical types that Connect's converter writes by names of its own, by the type below them."""
_SIZES = {AvroKind.UUID: 16, AvroKind.DURATION: 12}
"""The number of bytes of a fixed below these."""
_WIDER = (frozenset({AvroKind.INT, AvroKind.LONG}), frozenset({AvroKind.FLOAT, AvroKind.DOUBLE}))
"""Members of a union that are one column, of the wider type, as Spark's own reader makes it. A writer's stay apart."""
_PRIMITIVE = frozenset(
    {
        AvroKind.NULL,
        AvroKind.BOOLEAN,
        AvroKind.INT,
        AvroKind.LONG,
        AvroKind.FLOAT,
        AvroKind.DOUBLE,
        AvroKind.BYTES,
        AvroKind.STRING,
    }
)


@lru_cache(maxsize=64)
def read_schema(text: str, *, of_columns: bool = True) -> AvroType:
    """The type of the values of a schema. ``of_columns``: its values are to have columns, and are not only read.

    Raises:
        AvroSchemaError: the text is no such schema; or, of columns, a record contains itself, or a value has no column.
    """
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise AvroSchemaError(f"has {len(text.encode()):,} bytes, more than {MAX_SCHEMA_BYTES:,}")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AvroSchemaError(f"is no JSON: {error}") from None
    read = _AvroReader(of_columns=of_columns).type(given, "", "")
    if of_columns and (read.kind is AvroKind.NULL or (read.kind is AvroKind.RECORD and not read.parts)):
        raise AvroSchemaError("has no value that could be a column")
    return read


class _AvroReader:
    """Reads types, with the names that are known so far and the records that are open."""

    def __init__(self, *, of_columns: bool) -> None:
        self._of_columns = of_columns
        self._wider = _WIDER if of_columns else ()
        self._named: dict[str, AvroType] = {}
        self._open: list[str] = []

    def type(self, given: Any, space: str, place: str) -> AvroType:
        """The type of a place, such as "items[].price". ``space``: the namespace that names are in."""
        if place.count(".") + place.count("[") > MAX_DEPTH:
            raise AvroSchemaError(f"is deeper than {MAX_DEPTH} levels at {place}")
        given = _unwrapped(given)
        if isinstance(given, str):
            return self._by_name(given, space, place)
        if isinstance(given, list):
            return self._union(given, space, place)
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str):
            raise AvroSchemaError(f"has {_shown(given)} in place of a type{_at(place)}")
        defining = {
            "record": self._record,
            "error": self._record,
            "enum": self._enum,
            "fixed": self._fixed,
            "array": self._repeated,
            "map": self._repeated,
        }
        if kind in defining:
            return defining[kind](given, space, place)
        return _logical(self._by_name(kind, space, place), given)

    def _by_name(self, name: str, space: str, place: str) -> AvroType:
        if name in _PRIMITIVE:
            return AvroType(AvroKind(name), name)
        full = name if "." in name or not space else f"{space}.{name}"
        for known in (full, name):
            if known in self._open:
                if not self._of_columns:
                    return AvroType(AvroKind.RECORD, known, known, is_within_itself=True)
                raise AvroSchemaError(
                    f"has the record {known}, which contains itself{_at(place)}; columns have a fixed depth: leave the "
                    "field out of the schema that the values are read by"
                )
            if known in self._named:
                # Defined once, and named after that.
                return replace(self._named[known], plain=known)
        raise AvroSchemaError(f"names the type {name!r}, which it does not define{_at(place)}")

    def _full_name(self, given: Mapping[str, Any], space: str, place: str) -> str:
        # A namespace that is null is none, as in Avro's Java.
        name, own = given.get("name"), space if given.get("namespace") is None else given["namespace"]
        if not isinstance(name, str) or not name or not isinstance(own, str):
            raise AvroSchemaError(f"has a {given['type']} without a name{_at(place)}")
        full = name if "." in name or not own else f"{own}.{name}"
        if full in self._named or full in self._open:
            raise AvroSchemaError(f"defines the name {full!r} twice{_at(place)}")
        return full

    def _define(self, full: str, made: AvroType) -> AvroType:
        self._named[full] = made
        return made

    def _aliases(self, given: Mapping[str, Any], what: str, place: str) -> dict[str, Any]:
        """The aliases, if there are some. Those of a writer's schema count for nothing."""
        aliases = given.get("aliases", [])
        is_list = isinstance(aliases, list) and all(isinstance(each, str) for each in aliases)
        if self._of_columns and not is_list:
            raise AvroSchemaError(f"has the aliases {_shown(aliases)} of the {what}, no list of names{_at(place)}")
        return {"aliases": aliases} if "aliases" in given else {}

    def _record(self, given: Mapping[str, Any], space: str, place: str) -> AvroType:
        full = self._full_name(given, space, place)
        fields = given.get("fields")
        if not isinstance(fields, list) or not all(isinstance(field, dict) for field in fields):
            raise AvroSchemaError(f"has the record {full} without fields{_at(place)}")
        self._open.append(full)
        inner = full.rpartition(".")[0]
        parts, plain = [], []
        for field in fields:
            name = field.get("name")
            if not isinstance(name, str) or not name or "type" not in field:
                raise AvroSchemaError(f"has a field without a name or a type in the record {full}{_at(place)}")
            made = self.type(field["type"], inner, f"{place}.{name}" if place else name)
            plain.append({**self._aliases(field, f"field {name} of the record {full}", place), "name": name})
            plain[-1] |= {"default": field["default"]} if "default" in field else {}
            plain[-1]["type"] = made.plain
            # A value that can only be null is no column.
            parts += [(name, made)] if made.kind is not AvroKind.NULL else []
        self._open.pop()
        names = [name for name, _ in parts]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise AvroSchemaError(f"names the field {double[0]!r} twice in the record {full}{_at(place)}")
        read = {**self._aliases(given, f"record {full}", place), "type": "record", "name": full, "fields": plain}
        kinds = {name: part.kind for name, part in parts}
        if full == AvroKind.VARIABLE_DECIMAL and kinds == {"scale": AvroKind.INT, "value": AvroKind.BYTES}:
            return self._define(full, AvroType(AvroKind.VARIABLE_DECIMAL, read, full, tuple(parts)))
        return self._define(full, _of_parts(AvroKind.RECORD, read, tuple(parts), place, full))

    def _enum(self, given: Mapping[str, Any], space: str, place: str) -> AvroType:
        full, symbols = self._full_name(given, space, place), given.get("symbols")
        if not isinstance(symbols, list) or not symbols or not all(isinstance(each, str) for each in symbols):
            raise AvroSchemaError(f"has the enum {full} without symbols{_at(place)}")
        read = {**self._aliases(given, f"enum {full}", place), "type": "enum", "name": full, "symbols": symbols}
        read |= {"default": given["default"]} if "default" in given else {}
        if self._of_columns and not isinstance(read.get("default", ""), str):
            raise AvroSchemaError(f"has the default {_shown(read['default'])} of the enum {full}, no text{_at(place)}")
        return self._define(full, AvroType(AvroKind.ENUM, read, full, symbols=tuple(symbols)))

    def _fixed(self, given: Mapping[str, Any], space: str, place: str) -> AvroType:
        full, size = self._full_name(given, space, place), given.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise AvroSchemaError(f"has the fixed {full} without a size{_at(place)}")
        read = {**self._aliases(given, f"fixed {full}", place), "type": "fixed", "name": full, "size": size}
        return self._define(full, _logical(AvroType(AvroKind.FIXED, read, full, size=size), given))

    def _repeated(self, given: Mapping[str, Any], space: str, place: str) -> AvroType:
        kind = AvroKind(given["type"])
        key = "items" if kind is AvroKind.ARRAY else "values"
        if key not in given:
            raise AvroSchemaError(f"has {kind} without {key}{_at(place)}")
        part = self.type(given[key], space, f"{place}[]")
        if kind is AvroKind.ARRAY and _least_bytes(part) == 0:
            # Five bytes could say that there are a thousand million of them.
            raise AvroSchemaError(f"has an array whose elements have no bytes{_at(place)}")
        if part.kind is AvroKind.NULL:
            raise AvroSchemaError(f"has a map whose values can only be null{_at(place)}")
        return _of_parts(kind, {"type": kind.value, key: part.plain}, (("", part),), place)

    def _union(self, given: list[Any], space: str, place: str) -> AvroType:
        if any(isinstance(_unwrapped(each), list) for each in given):
            raise AvroSchemaError(f"has a union within a union{_at(place)}")
        members = [self.type(each, space, place) for each in given]
        plain = [member.plain for member in members]
        types = [member.name or _type_name(member) for member in members]
        if double := sorted({name for name in types if types.count(name) > 1}):
            raise AvroSchemaError(f"has a union with two members of the type {double[0]}{_at(place)}")
        values = [member for member in members if member.kind is not AvroKind.NULL]
        if not values:
            return AvroType(AvroKind.NULL, plain)
        kinds = {member.kind for member in values}
        if len(values) == 1:
            # Every column can be null.
            return replace(values[0], plain=plain)
        for wider in self._wider:
            if kinds <= wider and kinds != {min(wider)}:
                last = max(values, key=lambda member: member.kind in (AvroKind.LONG, AvroKind.DOUBLE))
                return replace(last, plain=plain)
        return _of_parts(AvroKind.UNION, plain, tuple(zip(_member_names(values), values, strict=True)), place)


def _of_parts(
    kind: AvroKind, plain: Any, parts: tuple[tuple[str, AvroType], ...], place: str, name: str = ""
) -> AvroType:
    # A record without fields counts too: two names of the one before, thirty times, take no byte and all time.
    leaves = max(1, sum(part.leaves for _, part in parts))
    if leaves > MAX_COLUMNS:
        raise AvroSchemaError(
            f"has {leaves:,} columns{f' in the record {name}' * bool(name)}, more than {MAX_COLUMNS:,}"
        )
    # A name stands for all that is below it, whatever the place says.
    depth = 1 + max((part.depth for _, part in parts), default=0)
    if depth > MAX_DEPTH:
        raise AvroSchemaError(f"is deeper than {MAX_DEPTH} levels{_at(place)}")
    return AvroType(kind, plain, name, parts, leaves=leaves, depth=depth)


def _unwrapped(given: Any) -> Any:
    """The type within {"type": {"type": "string"}}, which Avro's own tools write."""
    while isinstance(given, dict) and isinstance(given.get("type"), dict | list):
        given = given["type"]
    return given


def _member_names(members: list[AvroType]) -> list[str]:
    """The names of a union's columns: the short name of a record, enum or fixed, the full one where two agree, and the
    name of any other type."""
    short = [member.name.rpartition(".")[2] or _type_name(member) for member in members]
    return [
        name if short.count(name) == 1 else member.name or name for name, member in zip(short, members, strict=True)
    ]


def _type_name(member: AvroType) -> str:
    return member.plain if isinstance(member.plain, str) else str(member.plain["type"])


def _logical(below: AvroType, given: Mapping[str, Any]) -> AvroType:
    """The type with the logical type that is given, if it fits."""
    named = given.get("logicalType")
    if not isinstance(named, str) or named not in _LOGICAL.get(below.kind, ()):
        connects = given.get("connect.name")
        kind = _CONNECT_NAMES.get((below.kind, connects)) if isinstance(connects, str) else None
        return below if kind is None else replace(below, kind=kind)
    kind = AvroKind(named)
    if kind is AvroKind.DECIMAL:
        precision, scale = _number(given.get("precision")), _number(given.get("scale", 0))
        if precision < 1 or not 0 <= scale <= precision:
            return below
        return replace(below, kind=kind, precision=precision, scale=scale)
    if below.kind is AvroKind.FIXED and below.size != _SIZES[kind]:
        return below
    return replace(below, kind=kind)


def _number(value: Any) -> int:
    """The whole number, or -1."""
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _shown(given: Any) -> str:
    return json.dumps(given)[:_SHOWN_CHARACTERS]


def _least_bytes(value: AvroType) -> int:
    """The fewest bytes of an encoded value, as far as it matters whether there are some."""
    if value.kind is AvroKind.NULL or (value.kind is AvroKind.FIXED and value.size == 0):
        return 0
    if value.kind is AvroKind.RECORD and not value.is_within_itself:
        return sum(_least_bytes(part) for _, part in value.parts)
    return 1


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _at(place: str) -> str:
    return f" at {place}" if place else ""
