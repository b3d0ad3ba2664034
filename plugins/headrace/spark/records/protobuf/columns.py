"""Turns Protobuf's values in Arrow, as they are, into columns: enums into names, times into Spark's times, and so on.

``have`` is the type by which values were written, and ``want`` that of the columns. A whole column is turned at once,
and a value that does not fit exactly is an error of all of it: the caller divides them.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.protobuf_schema import Enums, Nanoseconds, ProtoField, ProtoKind, ProtoType, Unset
from headrace.spark.records.exact_columns import YEARS_1_TO_9999, UnfitError
from headrace.spark.records.protobuf.messages import raw_type

_SHOWN_CHARACTERS = 60
_NANOS = 1_000_000_000
_YEARS = "the year is not 1 to 9999"

Convert = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a decoder's definition chooses."""

    unset: Unset = "default"
    enums: Enums = "name"
    nanoseconds: Nanoseconds = "refuse"


@dataclass(frozen=True, slots=True)
class FieldColumn:
    """The column of a field: ``kind`` is its Arrow type. ``have``: the writer's field, None if it has none."""

    want: ProtoField
    have: ProtoField | None
    convert: Convert

    @classmethod
    def of(
        cls, want: ProtoField, have: ProtoField | None, kind: pa.DataType, place: str, settings: Settings
    ) -> FieldColumn:
        return cls(want, have, _field_conversion(want, have or want, kind, place, settings))

    def absent(self, rows: int) -> pa.Array:
        """The column of a field that the writer does not have."""
        raw = raw_type(self.want.type)
        if self.want.has_presence:
            return self.convert(pa.nulls(rows, raw))
        return self.convert(pa.repeat(_default(raw), rows) if not _is_nested(raw) else pa.array([[]] * rows, raw))


def conversion(want: ProtoType, have: ProtoType, kind: Any, place: str, settings: Settings) -> Convert:
    """The function that turns values into an array of ``kind``. It raises UnfitError for values that do not fit."""
    if want.kind is ProtoKind.MESSAGE:
        return _message(want, have, kind, place, settings)
    if want.kind is ProtoKind.LIST:
        return _list(want, have, kind, place, settings)
    if want.kind is ProtoKind.MAP:
        return _map(want, have, kind, place, settings)
    if want.kind is ProtoKind.WRAPPER:
        return _wrapper(want, have, kind, place, settings)
    convert = _LEAVES.get(want.kind, _scalar)

    def turned(raw: pa.Array) -> pa.Array:
        try:
            if raw.null_count == 0 or want.kind not in _LEAVES:
                return convert(raw, want, have, kind, settings)
            valid = raw.is_valid()
            rows = pc.if_else(valid, pc.subtract(pc.cumulative_sum(valid.cast(pa.int64())), 1), None)
            return convert(raw.filter(valid), want, have, kind, settings).take(rows)
        except (pa.ArrowException, ArithmeticError, ValueError) as error:
            shown = ", ".join(_shown(value, have) for value in raw.drop_null()[:3].to_pylist())
            raise UnfitError(f"{error} ({shown[:_SHOWN_CHARACTERS]}) at `{place}`") from None

    return turned


def _shown(value: Any, have: ProtoType) -> str:
    """The value as a text. Arrays of messages have names of fields of their own."""
    if not isinstance(value, dict):
        return str(value)
    return " ".join(f"{field.name}: {each}" for field, each in zip(have.fields, value.values(), strict=True))


def _field_conversion(want: ProtoField, have: ProtoField, kind: Any, place: str, settings: Settings) -> Convert:
    """As `conversion`, with what an unset field is."""
    below = conversion(want.type, have.type, kind, place, settings)
    if want.type.kind in (ProtoKind.LIST, ProtoKind.MAP) or _is_nested(raw_type(have.type)):
        if want.type.kind is ProtoKind.LIST and have.type.kind is not ProtoKind.LIST:
            return lambda raw: below(_lists_of_one(raw, null_default=not have.has_presence))
        return below
    if want.has_presence:
        return below if have.has_presence else lambda raw: below(_without_default(raw))
    filled = settings.unset == "default"
    if have.has_presence and filled:
        return lambda raw: below(pc.fill_null(raw, _default(raw.type)))
    return below if filled else lambda raw: below(_without_default(raw))


def _is_nested(raw: pa.DataType) -> bool:
    return bool(pa.types.is_nested(raw))


def _default(raw: pa.DataType) -> pa.Scalar:
    if pa.types.is_string(raw) or pa.types.is_binary(raw):
        return pa.scalar("" if pa.types.is_string(raw) else b"", raw)
    return pa.scalar(False, raw) if pa.types.is_boolean(raw) else pa.scalar(0, raw)


def _without_default(raw: pa.Array) -> pa.Array:
    """The values, null where they are the default, which is not in the bytes. -0.0 is no default."""
    bits = raw.view(pa.int64() if raw.type == pa.float64() else pa.int32()) if pa.types.is_floating(raw.type) else raw
    return pc.if_else(pc.equal(bits, _default(bits.type)), pa.scalar(None, raw.type), raw)


def _lists_of_one(raw: pa.Array, *, null_default: bool) -> pa.Array:
    """The values of a field that became repeated: an unset one is an empty list."""
    held = _without_default(raw) if null_default and not _is_nested(raw.type) else raw
    offsets = np.zeros(len(held) + 1, np.int32)
    np.cumsum(held.is_valid().to_numpy(zero_copy_only=False), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), held.drop_null())


def _message(want: ProtoType, have: ProtoType, kind: Any, place: str, settings: Settings) -> Convert:
    at = {field.number: (number, field) for number, field in enumerate(have.fields)}
    fields = list(kind)
    columns = [
        (
            at[field.number][0] if field.number in at else None,
            FieldColumn.of(
                field,
                at[field.number][1] if field.number in at else None,
                fields[number].type,
                f"{place}.{field.name}",
                settings,
            ),
        )
        for number, field in enumerate(want.fields)
    ]

    def turned(raw: pa.Array) -> pa.Array:
        if not columns:
            return pa.array([{} if there else None for there in raw.is_valid().to_pylist()], kind)
        arrays = [
            column.absent(len(raw)) if number is None else column.convert(raw.field(number))
            for number, column in columns
        ]
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=raw.is_null() if raw.null_count else None)

    return turned


def _wrapper(want: ProtoType, have: ProtoType, kind: Any, place: str, settings: Settings) -> Convert:
    """A message of one value, which is null where the message is unset; a value that is unset in it is its default."""
    if not have.fields:
        raw = raw_type(want.fields[0].type)
        return lambda given: pc.if_else(given.is_valid(), _default(raw), pa.scalar(None, raw)).cast(kind)
    below = conversion(want.fields[0].type, have.fields[0].type, kind, place, settings)
    fills = have.fields[0].has_presence

    def turned(raw: pa.Array) -> pa.Array:
        value = raw.field(0)
        value = pc.fill_null(value, _default(value.type)) if fills else value
        return below(pc.if_else(raw.is_valid(), value, pa.scalar(None, value.type)) if raw.null_count else value)

    return turned


def _offsets(raw: Any, *, null_empty: bool) -> tuple[pa.Array, int, int]:
    """Where each list or map begins among the elements that are used, and the first and the last of these."""
    starts = raw.offsets.to_numpy()
    mask = np.append(starts[1:] == starts[:-1], False) if null_empty else None
    return pa.array(starts - starts[0], pa.int32(), mask=mask), int(starts[0]), int(starts[-1])


def _list(want: ProtoType, have: ProtoType, kind: Any, place: str, settings: Settings) -> Convert:
    held = have.element if have.kind is ProtoKind.LIST else have
    below = conversion(want.element, held, kind.value_type, f"{place}[]", settings)

    def turned(raw: Any) -> pa.Array:
        offsets, first, last = _offsets(raw, null_empty=settings.unset == "null")
        return pa.ListArray.from_arrays(offsets, below(raw.values.slice(first, last - first)), type=kind)

    return turned


def _map(want: ProtoType, have: ProtoType, kind: Any, place: str, settings: Settings) -> Convert:
    keys = conversion(want.key, have.key, kind.key_type, f"{place}[].key", settings)
    items = conversion(want.element, have.element, kind.item_type, f"{place}[]", settings)

    def turned(raw: Any) -> pa.Array:
        offsets, first, last = _offsets(raw, null_empty=settings.unset == "null")
        used = slice(first, last)
        return pa.MapArray.from_arrays(offsets, keys(raw.keys[used]), items(raw.items[used]), kind)

    return turned


def _scalar(raw: pa.Array, want: ProtoType, have: ProtoType, kind: pa.DataType, _: Settings) -> pa.Array:
    if want.kind is ProtoKind.FLOAT and have.kind is ProtoKind.DOUBLE:
        narrow = raw.cast(pa.float32())
        same = pc.or_(pc.equal(narrow.cast(pa.float64()), raw), pc.is_nan(raw))
        if pc.any(pc.invert(same)).as_py():
            raise ValueError("no float of 32 bits")
        return narrow
    if want.kind is ProtoKind.JSON:
        return raw
    # Arrow checks that all fit.
    return raw.cast(raw_type(want)).cast(kind)


def _enum(raw: pa.Array, want: ProtoType, have: ProtoType, _: pa.DataType, settings: Settings) -> pa.Array:
    numbers = raw.cast(pa.int32())
    if settings.enums == "number":
        return numbers
    symbols = dict(have.symbols) | dict(want.symbols)
    names = pa.array(list(symbols.values()), pa.string())
    if list(symbols) == list(range(len(symbols))) and (
        not len(numbers) or 0 <= pc.min(numbers).as_py() <= pc.max(numbers).as_py() < len(symbols)
    ):
        return names.take(numbers)
    known = pc.index_in(numbers, value_set=pa.array(list(symbols), pa.int32()))
    # A number that the schema does not name is a text of it.
    return pc.coalesce(names.take(known), numbers.cast(pa.string()))


def _fields(raw: Any, want: ProtoType, have: ProtoType) -> list[np.ndarray[Any, Any]]:
    """The numbers in the messages, by the fields of ``want``; what the writer does not have is 0."""
    at = {field.number: number for number, field in enumerate(have.fields)}
    return [
        pc.fill_null(raw.field(at[field.number]).cast(pa.int64()), 0).to_numpy()
        if field.number in at
        else np.zeros(len(raw), np.int64)
        for field in want.fields
    ]


def _check(fits: Any, why: str) -> None:
    if not np.all(fits):
        raise ValueError(why)


def _timestamp(raw: pa.Array, want: ProtoType, have: ProtoType, kind: pa.DataType, settings: Settings) -> pa.Array:
    seconds, nanos = _fields(raw, want, have)
    first, last = YEARS_1_TO_9999
    _check((seconds >= first) & (seconds <= last), _YEARS)
    _check((nanos >= 0) & (nanos < _NANOS), "its nanoseconds are not 0 to 999,999,999")
    if settings.nanoseconds == "text":
        texts = pc.strftime(pa.array(seconds).cast(pa.timestamp("s")), format="%Y-%m-%dT%H:%M:%S")
        return _with_nanos(texts, nanos, "Z")
    micros = nanos // 1_000
    if settings.nanoseconds == "refuse":
        _check(
            micros * 1_000 == nanos,
            "it has nanoseconds, which Spark's times do not have: the decoder can cut them, or make texts",
        )
    return pa.array(seconds * 1_000_000 + micros).cast(pa.timestamp("us")).cast(kind)


def _with_nanos(texts: pa.Array, nanos: np.ndarray[Any, Any], end: str) -> pa.Array:
    digits = pc.utf8_lpad(pa.array(nanos).cast(pa.string()), 9, "0")
    return pc.binary_join_element_wise(texts, ".", digits, end, "")


def _date(raw: pa.Array, want: ProtoType, have: ProtoType, kind: pa.DataType, _: Settings) -> pa.Array:
    year, month, day = _fields(raw, want, have)
    _check((year >= 1) & (year <= 9999) & (month >= 1) & (month <= 12) & (day >= 1), "no day of a year")
    months = ((year - 1970) * 12 + month - 1).astype("M8[M]")
    days = months.astype("M8[D]") + (day - 1)
    _check((day <= 31) & (days < (months + 1).astype("M8[D]")), "no day of a year")
    return pa.array(days).cast(kind)


def _time_of_day(raw: pa.Array, want: ProtoType, have: ProtoType, kind: pa.DataType, _: Settings) -> pa.Array:
    hours, minutes, seconds, nanos = _fields(raw, want, have)
    _check((hours >= 0) & (hours < 24) & (minutes >= 0) & (minutes < 60), "no time of a day")
    _check((seconds >= 0) & (seconds < 60) & (nanos >= 0) & (nanos < _NANOS), "no time of a day")
    texts = pa.array(hours * 3600 + minutes * 60 + seconds, pa.int32()).cast(pa.time32("s")).cast(pa.string())
    return _with_nanos(texts, nanos, "").cast(kind)


def _decimal(raw: pa.Array, want: ProtoType, have: ProtoType, kind: pa.DataType, _: Settings) -> pa.Array:
    at = {field.number: raw.field(number).to_pylist() for number, field in enumerate(have.fields)}
    none = [None] * len(raw)
    texts = []
    for value, scale in zip(at.get(1, none), at.get(3, none), strict=True):
        digits = int.from_bytes(value or b"", "big", signed=True)
        if abs(scale or 0) > _MAX_SCALE or len(value or b"") > _MAX_BYTES:
            raise ValueError("more digits than a decimal has")
        sign, shown = int(digits < 0), tuple(map(int, str(abs(digits))))
        texts.append(decimal.Decimal((sign, shown, -(scale or 0))))
    if not want.precision:
        return pa.array([f"{each:f}" for each in texts], kind)
    context = decimal.Context(prec=want.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    unit = decimal.Decimal((0, (1,), -want.scale))
    try:
        return pa.array([context.quantize(each, unit) for each in texts], kind)
    except decimal.DecimalException:
        raise ValueError(f"not exactly a decimal of {want.precision} digits, {want.scale} behind the point") from None


_MAX_SCALE = 1_000
_MAX_BYTES = 400


def _field_mask(raw: Any, _want: ProtoType, have: ProtoType, kind: pa.DataType, _: Settings) -> pa.Array:
    if not have.fields:
        return pa.repeat(pa.scalar("", kind), len(raw))
    return pc.binary_join(raw.field(0), ",").cast(kind)


_LEAVES: Mapping[ProtoKind, Callable[[Any, ProtoType, ProtoType, Any, Settings], pa.Array]] = {
    ProtoKind.ENUM: _enum,
    ProtoKind.TIMESTAMP: _timestamp,
    ProtoKind.DATE: _date,
    ProtoKind.TIME_OF_DAY: _time_of_day,
    ProtoKind.DECIMAL: _decimal,
    ProtoKind.FIELD_MASK: _field_mask,
}
"""How values of these become columns: given those that are not null, they raise an error if some do not fit."""
