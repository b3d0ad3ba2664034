"""Decodes JSON that a JSON Schema describes into Arrow columns, with the reason of each value that is refused.

It imports no Spark. jsonschema-rs says whether a value is valid; then `JsonObjects` makes the columns of all values, as
for a JsonDecoder. Each value is parsed twice: the validator takes Python's objects only, whose numbers are not exact.

Nothing is fetched, whatever a schema refers to. A pattern has a limit of steps, so that no text can hold up a task.
"""

from __future__ import annotations

import binascii
import contextlib
import copy
import decimal
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import Failure, HeadraceError
from headrace.formats.json_schema import (
    DEFAULT_DRAFT,
    LOCAL,
    DateTimes,
    JsonKind,
    JsonSchemaError,
    JsonType,
    SchemaDocuments,
    alternatives,
    differing_unit,
    read_schema,
)
from headrace.formats.missing_library import LibraryMissingError
from headrace.formats.schema_text import SchemaText, UnreadableSchemaError
from headrace.spark.records import epoch_times
from headrace.spark.records.exact_columns import UnfitError
from headrace.spark.records.json_objects import (
    ANY_TEXT,
    REFUSED,
    DecimalValues,
    JsonObjects,
    MakePlaceValues,
    OwnPlaces,
    PlainValues,
    raw_text,
)

_SHOWN_CHARACTERS = 60
_STEPS_OF_A_PATTERN = 100_000
"""Of a pattern that goes back; most patterns need none. It is about a millisecond."""
_MOST_EXPLAINED = 256
"""Alternatives: to name the rule that a value breaks takes some 0.1 ms for each, and several kilobytes."""
_MOST_ALTERNATIVES = 100_000
"""To tell whether a value is valid takes some 10 ns for each, thus a millisecond."""
_INTEGER = decimal.Context(prec=20, traps=[decimal.Inexact, decimal.InvalidOperation])
_ONE = decimal.Decimal(1)
_DECIMAL = "org.apache.kafka.connect.data.Decimal"


class JsonSchemaUnusableError(HeadraceError):
    """A JSON Schema is not valid by its draft's own schema, has a pattern that is no regular expression, or too many
    alternatives for one place."""

    failure = Failure.CODE


def values_of(column: Any, *, writer: str | None = None, **keywords: Any) -> JsonSchemaValues:
    """The decoder of values that were written by a registry's schema: ``writer`` is the JSON of a `SchemaText`. Without
    a writer, it is the reader's schema.

    Raises UnreadableSchemaError if values cannot be validated by it, LibraryMissingError and JsonSchemaUnusableError.
    """
    if writer is None:
        return JsonSchemaValues(column, **keywords)
    try:
        return JsonSchemaValues(column, writer=SchemaText.from_json(writer), **keywords)
    except JsonSchemaUnusableError as error:
        raise UnreadableSchemaError(error.what) from None
    except ValueError as error:
        raise UnreadableSchemaError(f"it {error}") from None


class JsonSchemaValues:
    """Decodes values of one schema, without a frame around them. ``column`` is the Arrow type of `JsonType.columns`."""

    def __init__(
        self,
        column: Any,
        *,
        time_zone: str = "UTC",
        schema: str,
        references: Mapping[str, str] | None = None,
        writer: SchemaText | None = None,
        date_times: DateTimes = "timestamp",  # noqa: ARG002 - the column has it
    ) -> None:
        """``schema`` and ``references`` are the reader's, which has the columns. Values are validated by the
        ``writer``'s schema, by the reader's without one.

        Raises LibraryMissingError, JsonSchemaUnusableError, and JsonSchemaError if the writer's numbers are times of
        another unit.
        """
        own = SchemaText(schema, tuple((references or {}).items()))
        made = read_schema(own)
        named = made.title or "the schema"
        self._wanted = f"no JSON object of {named}"
        if writer is not None and (difference := _differing_unit(writer, made)) is not None:
            raise JsonSchemaError(f"was written by another schema: {difference}")
        documents = SchemaDocuments(writer or own)
        number = _alternatives(documents)
        self._is_explained = number <= _MOST_EXPLAINED
        self._validator = _validator(documents)
        self._parse = msgspec.json.Decoder().decode
        self._objects = JsonObjects(column, time_zone, named, _own_places(made))

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The values of binary ``values``, and the reasons by row of those that are refused, which are null."""
        invalid: dict[int, str] = {}
        parse, is_valid = self._parse, self._validator.is_valid
        for row, text in enumerate(values.to_pylist()):
            try:
                if text is not None and not is_valid(parse(text)):
                    invalid[row] = self._reason(parse(text))
            except REFUSED as error:
                invalid[row] = str(error)
            except MemoryError:
                raise
            except Exception as error:
                # Whatever the value is, it is one record's.
                invalid[row] = f"{type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]}"
        if invalid:
            mask = np.ones(len(values), bool)
            mask[list(invalid)] = False
            values = pc.if_else(pa.array(mask), values, None)
        decoded, refused = self._objects.decode(values)
        return decoded, {**{row: f"{self._wanted}: {reason}" for row, reason in invalid.items()}, **refused}

    def _reason(self, parsed: Any) -> str:
        if not self._is_explained:
            return "it does not fit its schema, which has too many alternatives to say why"
        import jsonschema_rs

        try:
            self._validator.validate(parsed)
        except jsonschema_rs.ValidationError as error:
            place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
            return f"it {_words(error)} - at `${place}`"
        return "it is not valid"


def _differing_unit(writer: SchemaText, reader: JsonType) -> str | None:
    with contextlib.suppress(JsonSchemaError):
        # A writer's schema may have no columns of its own.
        return differing_unit(read_schema(writer), reader)
    return None


def _alternatives(documents: SchemaDocuments) -> float:
    """Raises JsonSchemaUnusableError if there are too many to look at for each value."""
    try:
        number = alternatives(documents)
    except RecursionError:
        raise JsonSchemaUnusableError(
            "A JSON Schema cannot be used: it is nested too deep.", remedy="Make it flatter."
        ) from None
    # Of schemas that contain themselves, a value's own depth decides.
    if _MOST_ALTERNATIVES < number < math.inf:
        raise JsonSchemaUnusableError(
            f"A JSON Schema cannot be used: its anyOf, oneOf and allOf make {number:,.0f} alternatives for one place, "
            f"more than {_MOST_ALTERNATIVES:,}.",
            remedy="Name each schema in fewer of them.",
        )
    return number


def _validator(documents: SchemaDocuments) -> Any:
    try:
        import jsonschema_rs
    except ImportError as error:
        raise LibraryMissingError.of("decode by a JSON Schema", error) from error
    root = _with_decimals_as_written(documents.root)
    if isinstance(root, dict):
        root = {"$schema": f"{DEFAULT_DRAFT}#", **root, "$id": documents.base}
        root["id"] = documents.base
    resources = [
        (uri, root if given is documents.root else _with_decimals_as_written(given))
        for uri, given in documents.referred().items()
    ]
    try:
        return jsonschema_rs.validator_for(
            root,
            validate_formats=False,
            registry=jsonschema_rs.Registry(resources, draft=jsonschema_rs.Draft7),
            base_uri=LOCAL,
            offline=True,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=_STEPS_OF_A_PATTERN),
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise JsonSchemaUnusableError(
            f"A JSON Schema cannot be used: {str(getattr(error, 'message', error))[:200]}.",
            remedy="Correct the schema: it must be valid by the draft that its $schema names.",
        ) from error


def _with_decimals_as_written(schema: Any) -> Any:
    """The schema in which Connect's decimals are numbers or texts.

    Confluent's converter says that they are numbers, and writes the base64 of their bytes
    (confluentinc/schema-registry#2442).
    """
    schema = copy.deepcopy(schema)
    open_ = [schema]
    while open_:
        below = open_.pop()
        if isinstance(below, dict):
            if below.get("title") == _DECIMAL and below.get("type") in ("number", "string"):
                below["type"] = ["number", "string"]
            open_ += below.values()
        elif isinstance(below, list):
            open_ += below
    return schema


def _own_places(made: JsonType) -> OwnPlaces:
    """How the values of places are converted that a JsonDecoder does not have, or would parse twice."""
    own: dict[str, OwnPlaces | MakePlaceValues] = {}
    for name, part in made.parts:
        if part.kind in _CONVERSIONS:
            own[name] = _CONVERSIONS[part.kind]
        elif part.kind is JsonKind.OBJECT and not part.parts:
            own[name] = _AnyValues
        elif part.parts:
            own[name] = _own_places(part)
    return own


class _AnyValues:
    """Values of any type, as their texts in the record; a text as itself."""

    def __init__(self, kind: pa.DataType, _: str) -> None:
        self.strict = self.loose = msgspec.Raw | msgspec.UnsetType
        self._kind = kind

    def array(self, values: Sequence[Any]) -> pa.Array:
        return pa.array([None if value is None else raw_text(value) for value in values], self._kind)


class _ConnectDecimals(DecimalValues):
    """Numbers, or texts that are the base64 of unscaled numbers, big-endian."""

    def number(self, text: str) -> decimal.Decimal:
        """Raises ValueError."""
        unscaled = int.from_bytes(binascii.a2b_base64(text, strict_mode=True), "big", signed=True)
        sign, digits = int(unscaled < 0), tuple(map(int, str(abs(unscaled))))
        return decimal.Decimal((sign, digits, -self.kind.scale))


class _Integers:
    """Whole numbers, of which 1.0 is one since draft 6. Such ones are read from their text in the record: as a double,
    the last digits of 9007199254740993.0 are others."""

    def __init__(self, kind: pa.DataType, place: str) -> None:
        self.strict = int | None
        self.loose = ANY_TEXT
        self._kind, self._place = kind, place

    def array(self, values: Sequence[Any]) -> pa.Array:
        try:
            if msgspec.Raw in set(map(type, values)):
                return pa.array(
                    [_integer(each) if isinstance(each, msgspec.Raw) else each for each in values], self._kind
                )
            return pa.array(values, self._kind)
        except (pa.ArrowException, ArithmeticError, ValueError):
            texts = (bytes(each).decode() if isinstance(each, msgspec.Raw) else str(each) for each in values)
            shown = ", ".join(text for text in texts if text not in ("None", "null"))
        raise UnfitError(f"Not exactly {self._kind}: {shown[:_SHOWN_CHARACTERS]} - at `{self._place}`")


def _integer(raw: msgspec.Raw) -> int | None:
    """Raises an ArithmeticError or a ValueError. It does not make the digits of 1e999999999, which fill the memory."""
    text = bytes(raw)
    # The common form, several times faster.
    digits = text.removesuffix(b".0")
    if digits.removeprefix(b"-").isdigit():
        return int(digits)
    return None if text == b"null" else int(_INTEGER.quantize(decimal.Decimal(text.decode()), _ONE))


def _since_1970(convert: Callable[..., pa.Array], *more: Any) -> MakePlaceValues:
    return lambda kind, place: PlainValues(
        int, kind, place, lambda values, kind: convert(pa.array(values, pa.int64()), kind, *more)
    )


_CONVERSIONS: Mapping[JsonKind, MakePlaceValues] = {
    JsonKind.ANY: _AnyValues,
    **dict.fromkeys((JsonKind.TINY, JsonKind.SMALL, JsonKind.INT, JsonKind.LONG), _Integers),
    JsonKind.DECIMAL: _ConnectDecimals,
    JsonKind.DAYS: _since_1970(epoch_times.dates),
    JsonKind.MILLIS_OF_DAY: _since_1970(epoch_times.times_of_day, 1_000),
    JsonKind.MICROS_OF_DAY: _since_1970(epoch_times.times_of_day, 1_000_000),
    JsonKind.NANOS_OF_DAY: _since_1970(epoch_times.times_of_day, 1_000_000_000),
    JsonKind.MILLIS: _since_1970(epoch_times.times, 1_000),
    JsonKind.LOCAL_MILLIS: _since_1970(epoch_times.times, 1_000),
    JsonKind.LOCAL_MICROS: _since_1970(epoch_times.times, 1_000_000),
    JsonKind.LOCAL_NANOS: _since_1970(epoch_times.nanosecond_texts, ""),
}


def _words(error: Any) -> str:
    """The rule that a value breaks; the value itself, which may be large, is not shown."""
    kind, more = error.kind.name, error.kind.as_dict()
    say = _RULES.get(kind)
    return say(**more) if say else f"does not fit the rule {kind}"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name[:_SHOWN_CHARACTERS]}`" for name in list(names)[:3])


def _limit(words: str, limit: Any) -> str:
    return words.format(str(limit)[:_SHOWN_CHARACTERS])


_RULES: Mapping[str, Callable[..., str]] = {
    "type": lambda types: f"is not of type {' or '.join(types)}",
    "required": lambda property: f"has no field {_quoted([property])}",
    "additionalProperties": lambda unexpected: f"has the field {_quoted(unexpected)}, which the schema does not allow",
    "unevaluatedProperties": lambda unexpected: f"has the field {_quoted(unexpected)}, which the schema does not allow",
    "enum": lambda options: f"is none of the {len(options)} values of its enum",
    "const": lambda expected_value: _limit("is not {}", json.dumps(expected_value)),
    "pattern": lambda pattern="", **_: (
        _limit("does not match the pattern {}", pattern) if pattern else "takes too long to compare with its pattern"
    ),
    "maximum": partial(_limit, "is above {}"),
    "minimum": partial(_limit, "is below {}"),
    "exclusiveMaximum": partial(_limit, "is not below {}"),
    "exclusiveMinimum": partial(_limit, "is not above {}"),
    "maxLength": partial(_limit, "has more than {} characters"),
    "minLength": partial(_limit, "has fewer than {} characters"),
    "maxItems": partial(_limit, "has more than {} elements"),
    "minItems": partial(_limit, "has fewer than {} elements"),
    "maxProperties": partial(_limit, "has more than {} fields"),
    "minProperties": partial(_limit, "has fewer than {} fields"),
    "multipleOf": lambda multiple_of: _limit("is no multiple of {}", multiple_of),
    "falseSchema": lambda: "has what the schema never allows",
    "uniqueItems": lambda: "has an element twice",
    "anyOf": lambda **_: "fits no schema of its anyOf",
    "oneOf": lambda **_: "does not fit exactly one schema of its oneOf",
    "not": lambda **_: "fits the schema of its not",
}
