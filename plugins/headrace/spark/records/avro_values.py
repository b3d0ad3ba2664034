"""Decodes Avro into Arrow columns, with the reason of each value that is refused.

It imports no Spark. fastavro reads each value by the schema without its logical types; these are turned for a whole
column at a time, which is faster, and exact: fastavro's own dates end with the year 9999, and its times have no
nanoseconds. Only a batch with a value that does not fit is divided until these are found.

fastavro takes what no writer makes, and this module refuses it: bytes behind the value, and an enum's index below 0.
"""

from __future__ import annotations

import decimal
import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.avro_evolution import ValueMisfitError, member_of, turn_between
from headrace.formats.avro_references import joined
from headrace.formats.avro_schema import AvroKind, AvroSchemaError, AvroType, read_schema
from headrace.formats.missing_library import LibraryMissingError
from headrace.formats.schema_text import SchemaText, UnreadableSchemaError
from headrace.spark.records.exact_columns import YEARS_1_TO_9999, UnfitError, element_offsets, unfit

if TYPE_CHECKING:
    from headrace.formats.avro_schema import Decimals

_SECONDS_A_DAY = 86_400
# Other times are no texts that a JSON document can have.
_YEARS = "the year is not 1 to 9999"
_SHOWN_CHARACTERS = 60


class AvroValues:
    """Decodes values into the columns of one schema, the reader's. ``column`` is the Arrow type of its `AvroType.ddl`.
    The values have no frame around them, and were written by the same schema or by another one."""

    def __init__(
        self,
        column: pa.DataType,
        *,
        time_zone: str = "UTC",  # noqa: ARG002 - of the contract
        schema: str,
        writer: str | None = None,
        decimals: Decimals = "number",
    ) -> None:
        """
        Args:
            time_zone: makes no difference: Avro's times are in UTC, or of no zone.
            schema: the reader's.
            writer: the JSON of a `SchemaText`; None: the reader's schema.

        Raises LibraryMissingError, and UnreadableSchemaError if no value of the writer can be read.
        """
        try:
            import fastavro
        except ImportError as error:
            raise LibraryMissingError.of("decode Avro", error) from error
        made = read_schema(schema)
        written, self._turn = made, None
        if writer is not None and (text := _writers(writer)) != schema:
            written = _read_writers(text)
            self._turn = turn_between(written, made)
        self._wanted = f"no Avro value of {made.name or made.kind.value}"
        self._column = _column(made, column, "$", text=decimals == "text")
        self._read = fastavro.schemaless_reader
        self._schema: Any = fastavro.parse_schema(_with_numbers(written.plain, {}))

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The values of binary ``values``, and the reasons by row of those that are refused, which are null."""
        refused: dict[int, str] = {}
        read = [self._one(row, value, refused) for row, value in enumerate(values.to_pylist())]
        try:
            decoded = self._column.array(read)
        except UnfitError:
            for row, error in unfit(self._column, read):
                refused[row] = str(error)
                read[row] = None
            decoded = self._column.array(read)
        return decoded, {row: f"{self._wanted}: {reason}" for row, reason in refused.items()}

    def _one(self, row: int, value: bytes | None, refused: dict[int, str]) -> Any:
        if value is None:
            return None
        given = io.BytesIO(value)
        try:
            read = self._read(given, self._schema, None, return_named_type=True)
        except Exception as error:
            # Whatever the bytes are, they are one record's.
            refused[row] = _reason(error)
            return None
        if given.tell() != len(value):
            refused[row] = f"{len(value) - given.tell()} bytes follow it"
            return None
        if read is None:
            refused[row] = "it is null"
            return None
        try:
            return read if self._turn is None else self._turn(read)
        except ValueMisfitError as error:
            refused[row] = str(error)
            return None


def _writers(writer: str) -> str:
    """The text of the writer's schema. Raises UnreadableSchemaError."""
    try:
        return joined(SchemaText.from_json(writer))
    except AvroSchemaError as error:
        raise UnreadableSchemaError(f"it {error}") from None


def _read_writers(text: str) -> AvroType:
    try:
        return read_schema(text, of_columns=False)
    except AvroSchemaError as error:
        raise UnreadableSchemaError(f"it {error}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it ends too early"
    if isinstance(error, UnicodeDecodeError):
        return f"a text is not UTF-8: {error.reason}"
    if isinstance(error, IndexError):
        return "it names a member of a union that is not there"
    if isinstance(error, MemoryError):
        return "it says that it has more than fits into memory"
    return f"{type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]}"


def _with_numbers(plain: Any, enums: dict[str, Any], *, in_union: bool = False) -> Any:
    """The schema with the numbers of enums in place of their symbols, as they are encoded, so that a number below 0 is
    seen. In a union an enum stays: its value is told from others by its name.

    ``enums``: those met before, by name: the definition if it is not in the schema, None if it is.
    """
    if isinstance(plain, list):
        return [_with_numbers(each, enums, in_union=len(plain) > 1) for each in plain]
    if isinstance(plain, str):
        if plain not in enums or not in_union:
            return "int" if plain in enums else plain
        definition, enums[plain] = enums[plain], None
        return plain if definition is None else definition
    if plain["type"] == "enum":
        enums[plain["name"]] = None if in_union else plain
        return plain if in_union else "int"
    below = {key: _with_numbers(plain[key], enums) for key in ("items", "values") if key in plain}
    if "fields" in plain:
        below["fields"] = [
            {"name": each["name"], "type": _with_numbers(each["type"], enums)} for each in plain["fields"]
        ]
    return {**{key: value for key, value in plain.items() if key not in ("default", "aliases")}, **below}


@dataclass(frozen=True, slots=True)
class _Column:
    """The values of one place. ``convert`` makes an array of them, None where there is none; it raises UnfitError, or
    an error of Arrow or of a number, if some do not fit."""

    place: str
    convert: Callable[[Sequence[Any]], pa.Array]

    def array(self, values: Sequence[Any]) -> pa.Array:
        try:
            return self.convert(values)
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError) as error:
            shown = ", ".join(str(value) for value in values if value is not None)
            raise UnfitError(f"{error} ({shown[:_SHOWN_CHARACTERS]}) at `{self.place}`") from None


def _column(made: AvroType, kind: Any, place: str, *, text: bool) -> _Column:
    """The column of a type, as Arrow's ``kind``. ``text``: decimals are texts."""
    if made.kind in (AvroKind.RECORD, AvroKind.UNION):
        fields = list(kind)
        below = [
            _column(part, field.type, f"{place}.{name}", text=text)
            for (name, part), field in zip(made.parts, fields, strict=True)
        ]
        convert = _records if made.kind is AvroKind.RECORD else _members
        return _Column(place, lambda values: convert(values, made, fields, below))
    if made.kind in (AvroKind.ARRAY, AvroKind.MAP):
        part = made.parts[0][1]
        element = _column(
            part, kind.value_type if made.kind is AvroKind.ARRAY else kind.item_type, f"{place}[]", text=text
        )
        convert_all = _arrays if made.kind is AvroKind.ARRAY else _maps
        return _Column(place, lambda values: convert_all(values, kind, element))
    if made.kind is AvroKind.DECIMAL and (text or not pa.types.is_decimal(kind)):
        return _Column(place, lambda values: _decimal_texts(values, made))
    return _Column(place, lambda values: _CONVERSIONS[made.kind](values, kind, made))


def _absent(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


def _records(values: Sequence[Any], made: AvroType, fields: Sequence[pa.Field], below: Sequence[_Column]) -> pa.Array:
    # Within a union a record comes with its name.
    held = [value[1] if type(value) is tuple else value for value in values]
    arrays = [
        column.array([None if value is None else value[name] for value in held])
        for (name, _), column in zip(made.parts, below, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(fields), mask=_absent(values))


def _members(values: Sequence[Any], made: AvroType, fields: Sequence[pa.Field], below: Sequence[_Column]) -> pa.Array:
    """A column for each member of a union, of which one has the value."""
    member = [None if value is None else member_of(value, made) for value in values]
    arrays = [
        column.array([value if number == member_of else None for value, member_of in zip(values, member, strict=True)])
        for number, column in enumerate(below)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(fields), mask=_absent(values))


def _arrays(values: Sequence[Any], kind: Any, element: _Column) -> pa.Array:
    flat = list(chain.from_iterable(value for value in values if value is not None))
    return pa.ListArray.from_arrays(element_offsets(values), element.array(flat), type=kind)


def _maps(values: Sequence[Any], kind: Any, item: _Column) -> pa.Array:
    held = [value for value in values if value is not None]
    keys = pa.array(list(chain.from_iterable(held)), pa.string())
    items = item.array(list(chain.from_iterable(value.values() for value in held)))
    return pa.MapArray.from_arrays(element_offsets(values), keys, items, kind)


def _as_they_are(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    return pa.array(values, kind)


def _bytes(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    return pa.array(_plain(values), kind)


def _plain(values: Sequence[Any]) -> list[Any]:
    """The values of a fixed or an enum, which come with their name within a union."""
    return [value[1] if type(value) is tuple else value for value in values]


def _symbols(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    plain = _plain(values)
    if any(type(value) is str for value in plain):
        return pa.array(plain, kind)
    numbers = pa.array(plain, pa.int64())
    number = len(made.symbols)
    _check_between(numbers, 0, number - 1, f"of an enum of {number} symbols there is no such number")
    return pa.array(made.symbols, kind).take(numbers)


def _unscaled(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def _decimals(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    return pa.array([None if value is None else _decimal(value, made) for value in _plain(values)], kind)


def _decimal_texts(values: Sequence[Any], made: AvroType) -> pa.Array:
    made_texts = [None if value is None else f"{_decimal(value, made):f}" for value in _plain(values)]
    return pa.array(made_texts, pa.string())


def _decimal(value: bytes, made: AvroType) -> decimal.Decimal:
    digits = _unscaled(value)
    if abs(digits) >= 10**made.precision:
        raise ValueError(f"more than {made.precision} digits")
    sign, shown = int(digits < 0), tuple(map(int, str(abs(digits))))
    return decimal.Decimal((sign, shown, -made.scale))


_MOST_SHIFTED = 400


def _variable_decimals(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    """Decimals that each have a scale of their own, as texts."""
    return pa.array([None if value is None else _variable_decimal(value) for value in _plain(values)], kind)


def _variable_decimal(value: Mapping[str, Any]) -> str:
    if abs(value["scale"]) > _MOST_SHIFTED:
        raise ValueError(f"a scale of {value['scale']}")
    digits = _unscaled(value["value"])
    return f"{decimal.Decimal((int(digits < 0), tuple(map(int, str(abs(digits)))), -value['scale'])):f}"


def _uuids(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    texts = [str(uuid.UUID(bytes=value)) if isinstance(value, bytes) else value for value in _plain(values)]
    return pa.array(texts, kind)


def _dates(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    days = pa.array(values, pa.int32())
    first, last = YEARS_1_TO_9999
    _check_between(days, first // _SECONDS_A_DAY, last // _SECONDS_A_DAY, _YEARS)
    return days.cast(kind)


def _times(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    per_second = 1_000 if made.kind in (AvroKind.TIMESTAMP_MILLIS, AvroKind.LOCAL_MILLIS) else 1_000_000
    numbers = pa.array(values, pa.int64())
    first, last = YEARS_1_TO_9999
    _check_between(numbers, first * per_second, (last + 1) * per_second - 1, _YEARS)
    return pc.multiply_checked(numbers, 1_000_000 // per_second).cast(pa.timestamp("us")).cast(kind)


def _nanoseconds(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    """Texts of ISO 8601 with nine digits: Spark's times have six."""
    zone = "Z" if made.kind is AvroKind.TIMESTAMP_NANOS else ""
    numbers = pa.array(values, pa.int64())
    texts = pc.strftime(numbers.cast(pa.timestamp("ns")), format="%Y-%m-%dT%H:%M:%S")
    return pc.binary_join_element_wise(texts, pa.scalar(zone), "").cast(kind)


def _times_of_day(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    """Texts of ISO 8601."""
    unit = pa.time32("ms") if made.kind is AvroKind.TIME_MILLIS else pa.time64("us")
    per_second = 1_000 if made.kind is AvroKind.TIME_MILLIS else 1_000_000
    numbers = pa.array(values, pa.int64())
    _check_between(numbers, 0, _SECONDS_A_DAY * per_second - 1, "no time of a day")
    return numbers.cast(pa.int32() if made.kind is AvroKind.TIME_MILLIS else pa.int64()).cast(unit).cast(kind)


def _check_between(numbers: pa.Array, least: int, most: int, why: str) -> None:
    """Raise ValueError with ``why`` unless all numbers are from ``least`` to ``most``."""
    bounds = pc.min_max(numbers)
    if bounds["min"].is_valid and not (least <= bounds["min"].as_py() and bounds["max"].as_py() <= most):
        raise ValueError(why)


def _durations(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    """Months, days and milliseconds, each of four bytes, little-endian and without a sign."""
    plain = _plain(values)
    parts = [
        pa.array(
            [None if value is None else int.from_bytes(value[at : at + 4], "little") for value in plain], pa.int64()
        )
        for at in (0, 4, 8)
    ]
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=_absent(values))


_CONVERSIONS: Mapping[AvroKind, Callable[[Sequence[Any], Any, AvroType], pa.Array]] = {
    AvroKind.BOOLEAN: _as_they_are,
    AvroKind.INT: _as_they_are,
    AvroKind.LONG: _as_they_are,
    AvroKind.FLOAT: _as_they_are,
    AvroKind.DOUBLE: _as_they_are,
    AvroKind.STRING: _as_they_are,
    AvroKind.BYTES: _bytes,
    AvroKind.FIXED: _bytes,
    AvroKind.ENUM: _symbols,
    AvroKind.DECIMAL: _decimals,
    AvroKind.UUID: _uuids,
    AvroKind.DATE: _dates,
    AvroKind.TIME_MILLIS: _times_of_day,
    AvroKind.TIME_MICROS: _times_of_day,
    AvroKind.TIMESTAMP_MILLIS: _times,
    AvroKind.TIMESTAMP_MICROS: _times,
    AvroKind.TIMESTAMP_NANOS: _nanoseconds,
    AvroKind.LOCAL_MILLIS: _times,
    AvroKind.LOCAL_MICROS: _times,
    AvroKind.LOCAL_NANOS: _nanoseconds,
    AvroKind.DURATION: _durations,
    AvroKind.VARIABLE_DECIMAL: _variable_decimals,
}
