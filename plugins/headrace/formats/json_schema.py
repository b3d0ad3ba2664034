"""Reads a JSON Schema, and says of which type its values are in Spark. It needs no library of JSON Schema.

DAG files and pages ask for the columns of a definition; Spark's tasks turn values by the same tree. Whether a value is
valid is another question, which a task asks of the whole schema: a column only has to hold every value that is.

Confluent's converter writes what a type was in Kafka Connect as ``connect.type``, ``connect.index``,
``connect.parameters`` and a title such as ``org.apache.kafka.connect.data.Decimal``; they count. So do the titles of
Debezium's times.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, reduce
from typing import Any, Literal
from urllib.parse import unquote, urldefrag, urljoin

from headrace.formats.schema_text import MAX_COLUMNS, MAX_DEPTH, MAX_SCHEMA_BYTES, SchemaText

DateTimes = Literal["timestamp", "text"]

DEFAULT_DRAFT = "http://json-schema.org/draft-07/schema"
"""Of a schema that does not name its draft, as Confluent's serializers take it."""
LOCAL = "http://schema.invalid/"
"""The base of a schema without an id. Nothing is ever read from there: no host can have this name."""

_LONG = 2**63
_MAX_DIGITS = 38
_CONNECT = "org.apache.kafka.connect.data."
_DEBEZIUM = "io.debezium.time."
# Spark's decoder of JSON takes no such names.
_ESCAPED_IN_JSON = re.compile(r'["\\\x00-\x1f]')
_IGNORES_SIBLINGS = ("draft-04", "draft-06", "draft-07")
# What is under these is a value, and no schema.
_VALUES = frozenset({"enum", "const", "default", "examples"})


class JsonSchemaError(ValueError):
    """A text is no JSON Schema, or one whose values have no columns of a fixed depth."""


class JsonKind(StrEnum):
    """What the values of a place are, as far as columns are concerned."""

    NULL = "null"
    ANY = "any"
    """Different types, or any: a text, or the JSON of another value."""
    BOOLEAN = "boolean"
    TINY = "int8"
    SMALL = "int16"
    INT = "int32"
    LONG = "int64"
    BIG = "integer beyond 64 bits"
    FLOAT = "float32"
    DOUBLE = "number"
    STRING = "string"
    BYTES = "bytes"
    DATE = "date"
    DATE_TIME = "date-time"
    DECIMAL = "connect decimal"
    DAYS = "connect date"
    MILLIS_OF_DAY = "connect time"
    MICROS_OF_DAY = "debezium microtime"
    NANOS_OF_DAY = "debezium nanotime"
    MILLIS = "connect timestamp"
    LOCAL_MILLIS = "debezium timestamp"
    LOCAL_MICROS = "debezium microtimestamp"
    LOCAL_NANOS = "debezium nanotimestamp"
    ARRAY = "array"
    MAP = "map"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class JsonType:
    """The type of a value.

    ``parts`` are an object's fields, or the element of an array or map, whose name is "". ``precision`` and ``scale``
    are those of a decimal, ``title`` is that of the schema.
    """

    kind: JsonKind
    parts: tuple[tuple[str, JsonType], ...] = ()
    precision: int = 0
    scale: int = 0
    title: str = ""
    leaves: int = 1
    """The number of columns in it, of all depths."""
    depth: int = 1

    def ddl(self, date_times: DateTimes = "timestamp") -> str:
        """The type of the value in Spark's DDL. ``date_times``: whether texts of times are times, or stay texts."""
        kind = self.kind
        if kind is JsonKind.OBJECT:
            return f"STRUCT<{self.columns(date_times)}>" if self.parts else "STRING"
        if kind is JsonKind.ARRAY:
            return f"ARRAY<{self.parts[0][1].ddl(date_times)}>"
        if kind is JsonKind.MAP:
            return f"MAP<STRING, {self.parts[0][1].ddl(date_times)}>"
        if kind is JsonKind.DECIMAL:
            return f"DECIMAL({self.precision}, {self.scale})"
        if kind is JsonKind.DATE_TIME and date_times == "text":
            return "STRING"
        return _DDL[kind]

    def columns(self, date_times: DateTimes = "timestamp") -> str:
        """The fields of an object in Spark's DDL."""
        return ", ".join(f"{_quoted(name)} {part.ddl(date_times)}" for name, part in self.parts)


_DDL = {
    JsonKind.NULL: "STRING",
    JsonKind.ANY: "STRING",
    JsonKind.BOOLEAN: "BOOLEAN",
    JsonKind.TINY: "TINYINT",
    JsonKind.SMALL: "SMALLINT",
    JsonKind.INT: "INT",
    JsonKind.LONG: "BIGINT",
    JsonKind.BIG: f"DECIMAL({_MAX_DIGITS}, 0)",
    JsonKind.FLOAT: "FLOAT",
    JsonKind.DOUBLE: "DOUBLE",
    JsonKind.STRING: "STRING",
    JsonKind.BYTES: "BINARY",
    JsonKind.DATE: "DATE",
    JsonKind.DATE_TIME: "TIMESTAMP",
    JsonKind.DAYS: "DATE",
    JsonKind.MILLIS_OF_DAY: "STRING",
    JsonKind.MICROS_OF_DAY: "STRING",
    JsonKind.NANOS_OF_DAY: "STRING",
    JsonKind.MILLIS: "TIMESTAMP",
    JsonKind.LOCAL_MILLIS: "TIMESTAMP_NTZ",
    JsonKind.LOCAL_MICROS: "TIMESTAMP_NTZ",
    JsonKind.LOCAL_NANOS: "STRING",
}
_INTEGERS = (JsonKind.TINY, JsonKind.SMALL, JsonKind.INT, JsonKind.LONG, JsonKind.BIG)
"""Each is wider than those before it."""
_FLOATS = (JsonKind.FLOAT, JsonKind.DOUBLE)
_TEXTS = (JsonKind.STRING, JsonKind.DATE, JsonKind.DATE_TIME, JsonKind.BYTES)
_OF_CONNECT = {
    ("integer", "int8"): JsonKind.TINY,
    ("integer", "int16"): JsonKind.SMALL,
    ("integer", "int32"): JsonKind.INT,
    ("integer", "int64"): JsonKind.LONG,
    ("number", "float32"): JsonKind.FLOAT,
    ("number", "float64"): JsonKind.DOUBLE,
    ("string", "bytes"): JsonKind.BYTES,
    ("integer", f"{_CONNECT}Date"): JsonKind.DAYS,
    ("integer", f"{_CONNECT}Time"): JsonKind.MILLIS_OF_DAY,
    ("integer", f"{_CONNECT}Timestamp"): JsonKind.MILLIS,
    ("integer", f"{_DEBEZIUM}Date"): JsonKind.DAYS,
    ("integer", f"{_DEBEZIUM}Time"): JsonKind.MILLIS_OF_DAY,
    ("integer", f"{_DEBEZIUM}MicroTime"): JsonKind.MICROS_OF_DAY,
    ("integer", f"{_DEBEZIUM}NanoTime"): JsonKind.NANOS_OF_DAY,
    ("integer", f"{_DEBEZIUM}Timestamp"): JsonKind.LOCAL_MILLIS,
    ("integer", f"{_DEBEZIUM}MicroTimestamp"): JsonKind.LOCAL_MICROS,
    ("integer", f"{_DEBEZIUM}NanoTimestamp"): JsonKind.LOCAL_NANOS,
}
"""By the type, and by ``connect.type`` or the title."""
_UNITS: Mapping[JsonKind, str] = {
    JsonKind.DAYS: "days",
    JsonKind.MILLIS_OF_DAY: "milliseconds of a day",
    JsonKind.MICROS_OF_DAY: "microseconds of a day",
    JsonKind.NANOS_OF_DAY: "nanoseconds of a day",
    JsonKind.MILLIS: "milliseconds",
    JsonKind.LOCAL_MILLIS: "milliseconds",
    JsonKind.LOCAL_MICROS: "microseconds",
    JsonKind.LOCAL_NANOS: "nanoseconds",
}
"""What a number counts that is a date or a time."""
_OF_FORMAT = {"date": JsonKind.DATE, "date-time": JsonKind.DATE_TIME}
_NULL = JsonType(JsonKind.NULL)
_ANY = JsonType(JsonKind.ANY)


@lru_cache(maxsize=64)
def read_schema(schema: SchemaText) -> JsonType:
    """The type of the values of a schema.

    Raises:
        JsonSchemaError: the text is no such schema, refers to one that is not given, contains itself, or its values are
            no objects with fields.
    """
    documents = SchemaDocuments(schema)
    try:
        documents.referred()
        read = _TypeReader(documents).type(documents.root, documents.base, "")
    except RecursionError:
        raise JsonSchemaError(f"is deeper than {MAX_DEPTH} levels") from None
    if read.kind is not JsonKind.OBJECT or not read.parts:
        raise JsonSchemaError("describes no JSON objects with properties")
    title = documents.root.get("title") if isinstance(documents.root, dict) else ""
    return replace(read, title=title if isinstance(title, str) else "")


def differing_unit(writer: JsonType, reader: JsonType, place: str = "$") -> str | None:
    """Where a number is a time of one unit by the writer's schema, and of another one by the reader's; None if nowhere.

    Such a number is valid by both, and would be another time.
    """
    written, read = _UNITS.get(writer.kind), _UNITS.get(reader.kind)
    if written is not None and read is not None and written != read:
        return f"`{place}` was {written}, and is read as {read}"
    held = dict(writer.parts) if writer.kind is reader.kind else {}
    below = (
        differing_unit(held[name], part, f"{place}.{name}" if name else f"{place}[]")
        for name, part in reader.parts
        if name in held
    )
    return next(filter(None, below), None)


class SchemaDocuments:
    """A schema and those that it refers to, parsed. Nothing else is found, and nothing is fetched."""

    def __init__(self, schema: SchemaText) -> None:
        """Raises JsonSchemaError if one is too large, or no JSON."""
        self.root = _parsed(schema.text, "")
        self.draft = _text(self.root, "$schema").rstrip("#") or DEFAULT_DRAFT
        self.base = urljoin(LOCAL, _id_of(self.root))
        self._named: dict[str, Any] = {}
        """By the absolute URI."""
        self._given = {
            name: _parsed(text, f"the schema {name!r} that it refers to ") for name, text in schema.references
        }
        for name, document in self._given.items():
            self._named.setdefault(urljoin(self.base, name), document)
            self._named.setdefault(urljoin(LOCAL, name), document)
        self._all = [(self.base, self.root), *((urljoin(LOCAL, name), own) for name, own in self._given.items())]
        self._named[_text(self.root, "$id")] = self.root
        for base, document in self._all:
            self._named.setdefault(base, document)
            for at, below in _subschemas(document, base):
                if _id_of(below):
                    self._named.setdefault(urldefrag(at)[0], below)

    def document(self, uri: str) -> Any:
        """The document of an absolute URI. Raises KeyError."""
        uri = urldefrag(uri)[0]
        if uri in self._named:
            return self._named[uri]
        # Confluent names a reference as it stands in the schema, whatever base the schema has.
        for name, found in self._given.items():
            if uri.endswith(f"/{name}"):
                return found
        raise KeyError(uri)

    def resolve(self, reference: str, base: str, place: str) -> tuple[Any, str]:
        """The schema that a ``$ref`` names, and its base. Raises JsonSchemaError."""
        # urljoin knows no bases such as urn:example:order.
        uri, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        try:
            found = self.document(uri)
            if fragment and not fragment.startswith("/"):
                return next((below, at) for at, below in _subschemas(found, uri) if _is_anchor(below, fragment))
            for step in fragment.split("/")[1:]:
                key = unquote(step).replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError, StopIteration):
            raise JsonSchemaError(
                f"refers to {reference!r}, which is neither in it nor among its references{_at(place)}"
            ) from None
        return found, uri

    def referred(self) -> dict[str, Any]:
        """The documents that a ``$ref`` names, by absolute URI. Raises JsonSchemaError if one is not given."""
        found: dict[str, Any] = {}
        left = list(self._all)
        while left:
            base, document = left.pop()
            for at, below in _subschemas(document, base):
                if isinstance(below.get("$ref"), str):
                    _, uri = self.resolve(below["$ref"], at, "")
                    if uri not in found:
                        found[uri] = self.document(uri)
                        left.append((uri, found[uri]))
        return found


def _parsed(text: str, which: str) -> Any:
    if (size := len(text.encode())) > MAX_SCHEMA_BYTES:
        raise JsonSchemaError(f"{which}has {size:,} bytes, more than {MAX_SCHEMA_BYTES:,}")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JsonSchemaError(f"{which}is no JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise JsonSchemaError(f"{which}is no JSON object")
    return parsed


def _subschemas(given: Any, base: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects in a document that may be schemas, with their bases."""
    open_ = [(base, given)]
    while open_:
        base, below = open_.pop()
        if isinstance(below, dict):
            base = urljoin(base, _id_of(below))
            yield base, below
            open_ += [(base, held) for key, held in below.items() if key not in _VALUES]
        elif isinstance(below, list):
            open_ += [(base, held) for held in below]


def _id_of(given: Any) -> str:
    # Draft 4 has "id", which is a field's name in others.
    found = _text(given, "$id") or (_text(given, "id") if "draft-04" in _text(given, "$schema") else "")
    # Nothing is relative to an id such as urn:example:order.
    return "" if found.startswith("#") or urljoin(urljoin(LOCAL, found), "x") == "x" else found


def _is_anchor(given: Any, name: str) -> bool:
    return isinstance(given, dict) and (given.get("$anchor") == name or given.get("$id") == f"#{name}")


def _text(given: Any, key: str) -> str:
    found = given.get(key, "") if isinstance(given, dict) else ""
    return found if isinstance(found, str) else ""


def alternatives(documents: SchemaDocuments) -> float:
    """In how many ways one place of a value may have to be looked at, with all that is within these ways.

    It is what the time and the memory of a validation grow by: two anyOf of two schemas that name each other are four.
    Infinite if schemas that contain themselves are alternatives to each other.

    Raises JsonSchemaError if a reference leads to nothing that is given, and RecursionError.
    """
    return _Alternatives(documents).of(documents.root, documents.base)[0]


_BELOW_THE_PLACE = frozenset(
    {
        *("properties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
    }
)
"""Of these, one is for a place below."""
_ALTERNATIVES = _BELOW_THE_PLACE | {
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"),
    *("patternProperties", "contains"),
}
_BY_NAME = frozenset({"dependentSchemas", "dependencies", "properties", "patternProperties"})
"""These have schemas by names."""


class _Alternatives:
    """Counts alternatives, with those that are known so far, and the schemas that are open."""

    def __init__(self, documents: SchemaDocuments) -> None:
        self._documents = documents
        self._known: dict[int, tuple[float, frozenset[int]]] = {}
        self._open: set[int] = set()

    def of(self, given: Any, base: str) -> tuple[float, frozenset[int]]:
        """The number of a schema, and the open ones that it leads back to."""
        number = id(given)
        if not isinstance(given, dict):
            return 1, frozenset()
        if number in self._open:
            return 1, frozenset({number})
        if number not in self._known:
            self._open.add(number)
            count, back = self._of_parts(given, urljoin(base, _id_of(given)))
            self._open.discard(number)
            self._known[number] = count, back - {number}
        return self._known[number]

    def _of_parts(self, given: Mapping[str, Any], base: str) -> tuple[float, frozenset[int]]:
        parts: list[tuple[float, frozenset[int]]] = []
        below: list[tuple[float, frozenset[int]]] = []
        for key in [key for key in given if key in _ALTERNATIVES]:
            counted = [self.of(each, base) for each in _schemas(given, key)]
            (below if key in _BELOW_THE_PLACE else parts).extend(counted)
        if isinstance(given.get("$ref"), str):
            parts.append(self.of(*self._documents.resolve(given["$ref"], base, "")))
        if {"$recursiveRef", "$dynamicRef"} & given.keys():
            parts.append((1, frozenset(self._open)))
        if below:
            parts.append((max(count for count, _ in below), frozenset().union(*(back for _, back in below))))
        backs = [back for _, back in parts if back]
        count = max(1, sum(count for count, _ in parts)) if len(backs) < 2 else math.inf
        return count, frozenset().union(*backs)


def _schemas(given: Mapping[str, Any], key: str) -> Iterable[Any]:
    """The schemas of a keyword: one, or several in a list or by names."""
    found = given.get(key)
    if isinstance(found, dict):
        return found.values() if key in _BY_NAME else [found]
    return found if isinstance(found, list) else ()


class _TypeReader:
    """Reads types, with the references that are open and those that have been read."""

    def __init__(self, documents: SchemaDocuments) -> None:
        self._documents = documents
        self._only_ref = any(name in documents.draft for name in _IGNORES_SIBLINGS)
        self._open: list[int] = [id(documents.root)]
        self._read: dict[int, JsonType] = {}

    def type(self, given: Any, base: str, place: str) -> JsonType:
        """The type of a place, such as "items[].price"."""
        if isinstance(given, bool):
            return _ANY if given else _NULL
        if not isinstance(given, dict):
            raise JsonSchemaError(f"has {json.dumps(given)[:60]} in place of a schema{_at(place)}")
        base = urljoin(base, _id_of(given))
        if dynamic := {"$recursiveRef", "$dynamicRef"} & set(given):
            raise JsonSchemaError(f"has a {min(dynamic)}, by which it may contain itself{_at(place)}")
        read = []
        if isinstance(given.get("$ref"), str):
            read.append(self._referred(given["$ref"], base, place))
            if self._only_ref:
                return read[0]
        read.append(self._own(given, base, place))
        read += [self.type(each, base, place) for each in _list(given, "allOf")]
        for key in ("oneOf", "anyOf"):
            if members := _list(given, key):
                read.append(reduce(_either, [self.type(each, base, place) for each in members]))
        return _bounded(reduce(_both, read), place)

    def _referred(self, reference: str, base: str, place: str) -> JsonType:
        found, at = self._documents.resolve(reference, base, place)
        if id(found) in self._open:
            raise JsonSchemaError(
                f"refers to {reference!r}, which contains itself{_at(place)}; columns have a fixed depth: leave the "
                "property out of the schema that the values are read by"
            )
        if id(found) not in self._read:
            self._open.append(id(found))
            self._read[id(found)] = self.type(found, at, place)
            self._open.pop()
        return self._read[id(found)]

    def _own(self, given: Mapping[str, Any], base: str, place: str) -> JsonType:
        """The type by the schema's own keywords."""
        if given.get("title") == f"{_CONNECT}Decimal":
            return _decimal(given)
        kinds = given.get("type")
        if kinds is None:
            return self._without_type(given, base, place)
        made = [self._of_type(kind, given, base, place) for kind in (kinds if isinstance(kinds, list) else [kinds])]
        return reduce(_either, made, _NULL)

    def _without_type(self, given: Mapping[str, Any], base: str, place: str) -> JsonType:
        if "properties" in given:
            return self._object(given, base, place)
        if "items" in given or "prefixItems" in given:
            return self._array(given, base, place)
        values = [given["const"]] if "const" in given else _list(given, "enum")
        if not values:
            return _ANY
        return reduce(_either, [self._of_type(_type_of(value), {}, base, place) for value in values])

    def _of_type(self, kind: Any, given: Mapping[str, Any], base: str, place: str) -> JsonType:
        if kind in ("object", "array"):
            return (self._object if kind == "object" else self._array)(given, base, place)
        simple = {"null": _NULL, "boolean": JsonType(JsonKind.BOOLEAN), "any": _ANY}
        if isinstance(kind, str) and kind in simple:
            return simple[kind]
        if kind not in ("string", "integer", "number"):
            raise JsonSchemaError(f"has the type {json.dumps(kind)[:60]}, which JSON Schema does not know{_at(place)}")
        for named in (_text(given, "title"), _text(given, "connect.type")):
            if (kind, named) in _OF_CONNECT:
                return JsonType(_OF_CONNECT[kind, named])
        if kind == "integer":
            return JsonType(JsonKind.BIG if _is_beyond_64_bits(given) else JsonKind.LONG)
        text = _OF_FORMAT.get(_text(given, "format"), JsonKind.STRING)
        return JsonType(text if kind == "string" else JsonKind.DOUBLE)

    def _array(self, given: Mapping[str, Any], base: str, place: str) -> JsonType:
        """The element's type is the one that all elements have."""
        below = [*_list(given, "prefixItems"), *_list(given, "items")]
        for key in ("items", "additionalItems" if isinstance(given.get("items"), list) else "items"):
            if isinstance(given.get(key), dict | bool) and given[key] not in below:
                below.append(given[key])
        if not below:
            return _of_parts(JsonKind.ARRAY, (("", _ANY),), place)
        element = reduce(_either, [self.type(each, base, f"{place}[]") for each in below])
        return _of_parts(JsonKind.ARRAY, (("", element),), place)

    def _object(self, given: Mapping[str, Any], base: str, place: str) -> JsonType:
        properties = given.get("properties")
        if isinstance(properties, dict) and properties:
            return self._fields(properties, base, place)
        patterns = given.get("patternProperties")
        below = list(patterns.values()) if isinstance(patterns, dict) else []
        below += [given["additionalProperties"]] if isinstance(given.get("additionalProperties"), dict) else []
        if not below:
            return JsonType(JsonKind.OBJECT)
        return _of_parts(
            JsonKind.MAP, (("", reduce(_either, [self.type(each, base, f"{place}[]") for each in below])),), place
        )

    def _fields(self, properties: Mapping[str, Any], base: str, place: str) -> JsonType:
        parts = []
        for name in sorted(properties, key=lambda name: _index(properties[name])):
            if not name or _ESCAPED_IN_JSON.search(name):
                raise JsonSchemaError(
                    f"names the property {name!r}{_at(place)}; a column's name is not empty, and has no quotes, "
                    "backslashes or control characters"
                )
            made = self.type(properties[name], base, f"{place}.{name}" if place else name)
            # A value that can only be null is no column.
            parts += [(name, made)] if made.kind is not JsonKind.NULL else []
        return _of_parts(JsonKind.OBJECT, tuple(parts), place)


def _decimal(given: Mapping[str, Any]) -> JsonType:
    """Connect's decimal: a number, or the base64 of an unscaled one."""
    more = given.get("connect.parameters")
    more = more if isinstance(more, dict) else {}
    scale, precision = _number(more.get("scale")), _number(more.get("connect.decimal.precision"))
    precision = precision if 0 < precision <= _MAX_DIGITS else _MAX_DIGITS
    return JsonType(JsonKind.DECIMAL, precision=precision, scale=scale) if 0 <= scale <= precision else _ANY


def _number(given: Any) -> int:
    """The whole number of a text or number, or -1."""
    try:
        return int(given)
    except (TypeError, ValueError, OverflowError):
        return -1


def _is_beyond_64_bits(given: Mapping[str, Any]) -> bool:
    """Whether a bound says that the integers go beyond 64 bits."""
    bounds = [given.get(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
    numbers = [bound for bound in bounds if isinstance(bound, int | float) and not isinstance(bound, bool)]
    return any(bound < -_LONG or bound > _LONG for bound in numbers)


def _index(given: Any) -> float:
    """By which Confluent's converter orders fields; without one they follow, in their order."""
    found = given.get("connect.index") if isinstance(given, dict) else None
    return found if isinstance(found, int) else float("inf")


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "integer", float: "number", str: "string", list: "array", dict: "object"}[type(value)]


def _both(left: JsonType, right: JsonType) -> JsonType:
    """The type of values that are of both."""
    if left.kind is right.kind and left.parts and right.parts:
        return _merged(left, right, _both)
    return max(left, right, key=_says)


def _says(made: JsonType) -> int:
    """How much a type says about its values."""
    is_any_object = made.kind is JsonKind.OBJECT and not made.parts
    return 1 if is_any_object else _SAY.get(made.kind, 10)


_SAY = {
    JsonKind.ANY: 0,
    JsonKind.DOUBLE: 2,
    JsonKind.STRING: 2,
    JsonKind.LONG: 3,
    JsonKind.BIG: 4,
    JsonKind.OBJECT: 20,
    JsonKind.NULL: 21,
}
"""In ascending order; the other types are between them."""


def _either(left: JsonType, right: JsonType) -> JsonType:
    """The type that holds the values of each."""
    if left == right or right.kind is JsonKind.NULL:
        return left
    if left.kind is JsonKind.NULL:
        return right
    if left.kind is right.kind and left.kind in (JsonKind.OBJECT, JsonKind.ARRAY, JsonKind.MAP):
        return _merged(left, right, _either)
    return JsonType(_wider(left.kind, right.kind))


def _wider(*kinds: JsonKind) -> JsonKind:
    """The kind of two that are not the same."""
    if all(kind in _INTEGERS for kind in kinds):
        return max(kinds, key=_INTEGERS.index)
    if all(kind in (*_INTEGERS, *_FLOATS) for kind in kinds):
        return JsonKind.DOUBLE
    return JsonKind.STRING if all(kind in _TEXTS for kind in kinds) else JsonKind.ANY


def _merged(left: JsonType, right: JsonType, merge: Callable[[JsonType, JsonType], JsonType]) -> JsonType:
    """An object with the fields of both, or an array or map of both."""
    found = dict(left.parts)
    for name, part in right.parts:
        found[name] = merge(found[name], part) if name in found else part
    return _of_parts(
        left.kind, tuple((name, part) for name, part in found.items() if part.kind is not JsonKind.NULL), ""
    )


def _of_parts(kind: JsonKind, parts: tuple[tuple[str, JsonType], ...], place: str) -> JsonType:
    if kind is not JsonKind.OBJECT and (not parts or parts[0][1].kind is JsonKind.NULL):
        parts = (("", _ANY),)
    leaves = sum(part.leaves for _, part in parts) or 1
    depth = 1 + max((part.depth for _, part in parts), default=0)
    return _bounded(JsonType(kind, parts, leaves=leaves, depth=depth), place)


def _bounded(made: JsonType, place: str) -> JsonType:
    if made.leaves > MAX_COLUMNS:
        raise JsonSchemaError(f"has {made.leaves:,} columns{_at(place)}, more than {MAX_COLUMNS:,}")
    if made.depth > MAX_DEPTH:
        raise JsonSchemaError(f"is deeper than {MAX_DEPTH} levels{_at(place)}")
    return made


def _list(given: Mapping[str, Any], key: str) -> list[Any]:
    found = given.get(key)
    return found if isinstance(found, list) else []


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _at(place: str) -> str:
    return f" at {place}" if place else ""
