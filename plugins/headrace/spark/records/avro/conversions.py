"""Values below Avro's logical types, as Arrow arrays of what they mean.

Values are given as `headrace.spark.records.avro.values` reads them, with None where there is none: an enum's symbol is
its number. Numbers may be an array of numpy. Each function raises ValueError, an ArithmeticError, or an error of Arrow,
if a value does not fit its type.
"""

from __future__ import annotations

import decimal
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from headrace.formats.avro_schema import AvroKind, AvroType
from headrace.spark.records import epoch_times


def absent(values: Sequence[Any]) -> pa.Array:
    """Where there is no value."""
    return pa.array([value is None for value in values], pa.bool_())


def _as_they_are(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    return pa.array(values, kind)


def _symbols(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    numbers = pa.array(values, pa.int64())
    number = len(made.symbols)
    epoch_times.check_between(numbers, 0, number - 1, f"of an enum of {number} symbols there is no such number")
    return pa.array(made.symbols, kind).take(numbers)


def _unscaled(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def _decimals(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    return pa.array([None if value is None else _decimal(value, made) for value in values], kind)


def decimal_texts(values: Sequence[Any], made: AvroType) -> pa.Array:
    made_texts = [None if value is None else f"{_decimal(value, made):f}" for value in values]
    return pa.array(made_texts, pa.string())


def _decimal(value: bytes, made: AvroType) -> decimal.Decimal:
    digits = _unscaled(value)
    if abs(digits) >= 10**made.precision:
        raise ValueError(f"more than {made.precision} digits")
    sign, shown = int(digits < 0), tuple(map(int, str(abs(digits))))
    return decimal.Decimal((sign, shown, -made.scale))


_MOST_SHIFTED = 400
"""More digits than this behind the point, or zeros before it, are no number of a database."""


def _variable_decimals(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    """Decimals that each have a scale of their own, as texts."""
    return pa.array([None if value is None else _variable_decimal(value) for value in values], kind)


def _variable_decimal(value: Mapping[str, Any]) -> str:
    if abs(value["scale"]) > _MOST_SHIFTED:
        raise ValueError(f"a scale of {value['scale']}")
    digits = _unscaled(value["value"])
    return f"{decimal.Decimal((int(digits < 0), tuple(map(int, str(abs(digits)))), -value['scale'])):f}"


def _uuids(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    texts = [str(uuid.UUID(bytes=value)) if isinstance(value, bytes) else value for value in values]
    return pa.array(texts, kind)


def _dates(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    return epoch_times.dates(pa.array(values, pa.int32()), kind)


def _times(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    per_second = 1_000 if made.kind in (AvroKind.TIMESTAMP_MILLIS, AvroKind.LOCAL_MILLIS) else 1_000_000
    return epoch_times.times(pa.array(values, pa.int64()), kind, per_second)


def _nanoseconds(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    zone = "Z" if made.kind is AvroKind.TIMESTAMP_NANOS else ""
    return epoch_times.nanosecond_texts(pa.array(values, pa.int64()), kind, zone)


def _times_of_day(values: Sequence[Any], kind: Any, made: AvroType) -> pa.Array:
    per_second = {AvroKind.TIME_MILLIS: 1_000, AvroKind.TIME_MICROS: 1_000_000}.get(made.kind, 1_000_000_000)
    return epoch_times.times_of_day(pa.array(values, pa.int64()), kind, per_second)


def _durations(values: Sequence[Any], kind: Any, _: AvroType) -> pa.Array:
    """Months, days and milliseconds, each of four bytes, little-endian and without a sign."""
    parts = [
        pa.array(
            [None if value is None else int.from_bytes(value[at : at + 4], "little") for value in values], pa.int64()
        )
        for at in (0, 4, 8)
    ]
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=absent(values))


CONVERSIONS: Mapping[AvroKind, Callable[[Sequence[Any], Any, AvroType], pa.Array]] = {
    AvroKind.BOOLEAN: _as_they_are,
    AvroKind.INT: _as_they_are,
    AvroKind.LONG: _as_they_are,
    AvroKind.FLOAT: _as_they_are,
    AvroKind.DOUBLE: _as_they_are,
    AvroKind.STRING: _as_they_are,
    AvroKind.BYTES: _as_they_are,
    AvroKind.FIXED: _as_they_are,
    AvroKind.ENUM: _symbols,
    AvroKind.DECIMAL: _decimals,
    AvroKind.UUID: _uuids,
    AvroKind.DATE: _dates,
    AvroKind.TIME_MILLIS: _times_of_day,
    AvroKind.TIME_MICROS: _times_of_day,
    AvroKind.TIME_NANOS: _times_of_day,
    AvroKind.TIMESTAMP_MILLIS: _times,
    AvroKind.TIMESTAMP_MICROS: _times,
    AvroKind.TIMESTAMP_NANOS: _nanoseconds,
    AvroKind.LOCAL_MILLIS: _times,
    AvroKind.LOCAL_MICROS: _times,
    AvroKind.LOCAL_NANOS: _nanoseconds,
    AvroKind.DURATION: _durations,
    AvroKind.VARIABLE_DECIMAL: _variable_decimals,
}
