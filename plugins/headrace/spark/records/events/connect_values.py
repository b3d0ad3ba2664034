"""The values of Connect's and Debezium's semantic types in JSON, as Arrow's columns: a base64 decimal, days since 1970,
microseconds, a geometry.

It imports no Spark. What a value is says its schema part (``headrace.formats.change_events.Said``), or, where an event
has none, the declared type with two settings. All else is as `JsonObjects` has it.
"""

from __future__ import annotations

import binascii
import decimal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.change_events import PER_SECOND, PLAIN, DecimalTexts, Meaning, Said, TimeUnit
from headrace.spark.records import epoch_times
from headrace.spark.records.exact_columns import YEARS_1_TO_9999, UnfitError
from headrace.spark.records.json_objects import ANY_TEXT, PlaceValues
from headrace.spark.records.json_objects import leaf as json_leaf

_SECONDS_A_DAY = 86_400
_SHOWN_CHARACTERS = 60
_MOST_SHIFTED = 400
"""More digits than this between the scale of a value and that of its column are no number of a database."""
_UNITS = {1_000: "ms", 1_000_000: "us", 1_000_000_000: "ns"}

_Convert = Callable[[Sequence[Any]], pa.Array]


@dataclass(frozen=True, slots=True)
class ConnectLeaf:
    """Makes the columns of values that are no objects or arrays, by their type and place.

    ``said``: what the schema part says of each place; None if the events have none.
    """

    said: Mapping[str, Said] | None
    times: TimeUnit | None
    decimals: DecimalTexts
    time_zone: str = "UTC"

    def __call__(self, kind: pa.DataType, place: str) -> PlaceValues:
        said = None if self.said is None else self.said.get(place, PLAIN)
        json = json_leaf(kind, place, time_zone=self.time_zone)
        if pa.types.is_decimal(kind):
            as_base64 = said.meaning is Meaning.DECIMAL if said is not None else self.decimals == "base64"
            return _Leaf(
                json.strict, json.loose, place, partial(_decimals, kind=kind, said=said, as_base64=as_base64, json=json)
            )
        if pa.types.is_string(kind):
            return _Leaf(str | int | bool | None, ANY_TEXT, place, partial(_texts, said=said))
        if pa.types.is_boolean(kind):
            return _Leaf(bool | int | None, None, place, _truths)
        if pa.types.is_floating(kind):
            return _Leaf(float | str | None, None, place, partial(_floats, kind=kind, json=json))
        unit = PER_SECOND[self.times] if said is None and self.times else (said or PLAIN).per_second
        strict: Any = str | int | None
        if pa.types.is_date(kind):
            convert: _Convert = partial(_dates, kind=kind, json=json)
        elif pa.types.is_timestamp(kind):
            convert = partial(_times, kind=kind, per_second=unit, said=said, json=json)
        elif pa.types.is_time(kind):
            convert = partial(_times_of_day, kind=kind, per_second=unit, said=said, json=json)
        elif pa.types.is_binary(kind) and said is not None and said.meaning in (Meaning.TEXT, Meaning.LOCAL_TEXT):
            strict, convert = str | None, _no_bytes
        else:
            return json
        return _Leaf(strict, None, place, convert)


class _Leaf:
    """PlaceValues that one function converts; an error of it means that some do not fit."""

    def __init__(self, strict: Any, loose: Any, place: str, convert: _Convert) -> None:
        self.strict = strict
        self.loose = strict if loose is None else loose
        self._place, self._convert = place, convert

    def array(self, values: Sequence[Any]) -> pa.Array:
        try:
            return self._convert(values)
        except UnfitError:
            raise
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError, struct.error, msgspec.DecodeError) as error:
            shown = ", ".join(_shown(value) for value in values if value is not None)
            raise UnfitError(f"{error}: {shown[:_SHOWN_CHARACTERS]} - at `{self._place}`") from None


def _shown(value: Any) -> str:
    return bytes(value).decode() if isinstance(value, msgspec.Raw) else str(value)


def _split(values: Sequence[Any]) -> tuple[pa.Array | None, list[Any] | Sequence[Any]]:
    """The numbers among the values (int64; None if there is none), and the other values."""
    if int not in set(map(type, values)):
        return None, values
    numbers = pa.array([value if type(value) is int else None for value in values], pa.int64())
    return numbers, [value if type(value) is str else None for value in values]


def _joined(made: pa.Array, texts: Sequence[Any], json: _Convert) -> pa.Array:
    """The values made of numbers, and those of texts."""
    return made if not any(text is not None for text in texts) else pc.coalesce(made, json(texts))


def _without_z(texts: Sequence[Any]) -> list[Any]:
    return [text.removesuffix("Z") if type(text) is str else None for text in texts]


def _truths(values: Sequence[Any]) -> pa.Array:
    if any(type(value) is int and value not in (0, 1) for value in values):
        raise ValueError("a number that is neither 0 nor 1")
    return pa.array([None if value is None else bool(value) for value in values], pa.bool_())


_NO_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _floats(values: Sequence[Any], *, kind: Any, json: PlaceValues) -> pa.Array:
    if str not in set(map(type, values)):
        return json.array(values)
    finite = json.array([value if type(value) is not str else None for value in values])
    if unknown := next((value for value in values if type(value) is str and value not in _NO_NUMBERS), None):
        raise ValueError(f"a text that is no number ({unknown[:_SHOWN_CHARACTERS]})")
    return pc.coalesce(
        finite, pa.array([_NO_NUMBERS.get(value) if type(value) is str else None for value in values], kind)
    )


def _dates(values: Sequence[Any], *, kind: Any, json: PlaceValues) -> pa.Array:
    numbers, texts = _split(values)
    if numbers is None:
        return json.array(_without_z(texts))
    return _joined(epoch_times.dates(numbers, kind), texts, lambda given: json.array(_without_z(given)))


def _moments(numbers: pa.Array, per_second: int) -> pa.Array:
    """Times of no zone, in the unit of the numbers."""
    first, last = YEARS_1_TO_9999
    if per_second != PER_SECOND["nanoseconds"]:
        epoch_times.check_between(numbers, first * per_second, (last + 1) * per_second - 1, "the year is not 1 to 9999")
    return numbers.cast(pa.timestamp(_UNITS[per_second]))


def _times(values: Sequence[Any], *, kind: Any, per_second: int, said: Said | None, json: PlaceValues) -> pa.Array:
    numbers, texts = _split(values)
    if said is not None and said.meaning is Meaning.LOCAL_TEXT and kind.tz is None:
        texts = _without_z(texts)
    if numbers is None:
        return json.array(texts)
    if not per_second:
        raise ValueError(_no_unit(said))
    moments = _moments(numbers, per_second)
    if (
        per_second == PER_SECOND["nanoseconds"]
        and not pc.all(pc.equal(pc.multiply(pc.divide(numbers, 1_000), 1_000), numbers)).as_py()
        and pc.any(pc.is_valid(numbers)).as_py()
    ):
        raise ValueError("more digits than microseconds; declare the field as STRING")
    if per_second == PER_SECOND["nanoseconds"]:
        moments = pc.divide(numbers, 1_000).cast(pa.timestamp("us"))
    return _joined(moments.cast(pa.timestamp("us")).cast(kind), texts, json.array)


def _times_of_day(
    values: Sequence[Any], *, kind: Any, per_second: int, said: Said | None, json: PlaceValues
) -> pa.Array:
    numbers, texts = _split(values)
    if said is not None and said.meaning is Meaning.LOCAL_TEXT:
        texts = _without_z(texts)
    if numbers is None:
        return json.array(texts)
    if not per_second:
        raise ValueError(_no_unit(said))
    return _joined(_of_day(numbers, per_second).cast(kind), texts, json.array)


def _no_unit(said: Said | None) -> str:
    if said is not None:
        return "a number that is no time by the event's schema part"
    return "a number in place of a time, of which nothing says the unit; name it with times="


def _of_day(numbers: pa.Array, per_second: int) -> pa.Array:
    epoch_times.check_between(numbers, 0, _SECONDS_A_DAY * per_second - 1, "no time of a day")
    unit = _UNITS[per_second]
    return numbers.cast(pa.int32()).cast(pa.time32("ms")) if unit == "ms" else numbers.cast(pa.time64(unit))


def _no_bytes(values: Sequence[Any]) -> pa.Array:
    """Bytes that were sent as text: nothing says whether in hex or in a base64, and hex may be taken for base64."""
    if any(value is not None for value in values):
        raise ValueError(
            "a text by the event's schema part, and not bytes; set binary.handling.mode=bytes, or declare the field as "
            "STRING"
        )
    return pa.nulls(len(values), pa.binary())


# --- texts


def _texts(values: Sequence[Any], *, said: Said | None) -> pa.Array:
    kinds = set(map(type, values))
    if msgspec.Raw in kinds:
        if said is not None and said.meaning in (Meaning.DECIMAL, Meaning.GEOMETRY):
            return pa.array([None if value is None else _text_of_raw(value, said) for value in values], pa.string())
        values = [_decoded(value) if isinstance(value, msgspec.Raw) else value for value in values]
        kinds = set(map(type, values))
    if said is not None and said.meaning is Meaning.DECIMAL and said.scale is not None:
        return pa.array(
            [f"{_decimal(_unscaled(v), said.scale):f}" if type(v) is str else _plain(v) for v in values], pa.string()
        )
    if int in kinds and said is not None and said.meaning is not None and said.meaning in _AS_TEXT:
        numbers, texts = _split(values)
        turn = partial(_AS_TEXT[said.meaning], per_second=said.per_second)
        return _joined(_calendar_texts(numbers, turn), texts, lambda given: pa.array(given, pa.string()))
    if kinds <= {str, type(None)}:
        return pa.array(values, pa.string())
    return pa.array([_plain(value) for value in values], pa.string())


_AS_TEXT: Mapping[Meaning, Callable[..., pa.Array]] = {
    Meaning.DATE: lambda numbers, per_second: epoch_times.dates(numbers, pa.date32()).cast(pa.string()),  # noqa: ARG005
    Meaning.TIME_OF_DAY: lambda numbers, per_second: _of_day(numbers, per_second).cast(pa.string()),
    Meaning.TIME: lambda numbers, per_second: pc.strftime(_moments(numbers, per_second), format="%Y-%m-%dT%H:%M:%S"),
}
"""Texts of ISO 8601, with the digits of the unit."""


def _calendar_texts(numbers: pa.Array, turn: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """The texts of the calendar; that of the number for one that it does not have, such as PostgreSQL's infinity."""
    try:
        return turn(numbers)
    except (ValueError, pa.ArrowException):
        if len(numbers) == 1:
            return numbers.cast(pa.string())
    return pa.concat_arrays([_calendar_texts(numbers.slice(at, 1), turn) for at in range(len(numbers))])


def _plain(value: Any) -> str | None:
    """The text of the value in JSON."""
    if value is None or type(value) is str:
        return value
    return ("true" if value else "false") if type(value) is bool else str(value)


def _decoded(raw: msgspec.Raw) -> Any:
    """A text, a whole number or a truth value as it is; any other value as its text in the record."""
    text = bytes(raw)
    if text[:1] == b'"':
        return msgspec.json.decode(text, type=str)
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if text.removeprefix(b"-").isdigit() and len(text) <= 20 else text.decode()


_WORDS = {b"null": None, b"true": True, b"false": False}


class _Object(msgspec.Struct):
    """A decimal with its own scale, or a geometry."""

    value: str | None = None
    scale: int | None = None
    wkb: str | None = None
    srid: int | None = None
    x: float | None = None
    y: float | None = None


_read_object = msgspec.json.Decoder(_Object).decode


def _text_of_raw(raw: Any, said: Said) -> str | None:
    given = _decoded(raw) if isinstance(raw, msgspec.Raw) else raw
    if not isinstance(given, str) or not given.startswith("{"):
        if said.meaning is Meaning.DECIMAL and said.scale is not None and isinstance(given, str):
            return f"{_decimal(_unscaled(given), said.scale):f}"
        return _plain(given)
    held = _read_object(given)
    if said.meaning is Meaning.GEOMETRY:
        if held.wkb is not None:
            return well_known_text(binascii.a2b_base64(held.wkb, strict_mode=True))
        if held.x is None or held.y is None:
            raise ValueError("no geometry")
        return f"POINT ({held.x!r} {held.y!r})"
    return f"{_decimal(*_variable(held)):f}"


# --- decimals


def _unscaled(text: str | bytes) -> int:
    return int.from_bytes(binascii.a2b_base64(text, strict_mode=True), "big", signed=True)


def _decimal(unscaled: int, scale: int) -> decimal.Decimal:
    return decimal.Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))


def _variable(held: _Object) -> tuple[int, int]:
    if held.value is None or held.scale is None or abs(held.scale) > _MOST_SHIFTED:
        raise ValueError("no decimal with its scale")
    return _unscaled(held.value), held.scale


def _decimals(values: Sequence[Any], *, kind: Any, said: Said | None, as_base64: bool, json: PlaceValues) -> pa.Array:
    scale = kind.scale if said is None or said.scale is None else said.scale
    others: list[Any] = [None] * len(values)
    made: list[int | None] = [None] * len(values)
    most, shift = 10**kind.precision, kind.scale - scale
    for row, value in enumerate(values):
        if value is None:
            continue
        shown = bytes(value)
        if shown[:1] == b'"' and as_base64:
            text = shown[1:-1] if b"\\" not in shown else msgspec.json.decode(shown, type=str)
            number = _rescaled(_unscaled(text), shift) if shift else _unscaled(text)
        elif shown[:1] == b"{":
            unscaled, own = _variable(_read_object(shown))
            number = _rescaled(unscaled, kind.scale - own)
        else:
            others[row] = value
            continue
        if not -most < number < most:
            raise ValueError(f"more than {kind.precision} digits, {kind.scale} of them behind the point")
        made[row] = number
    array = _of_numbers(made, kind)
    return array if not any(other is not None for other in others) else pc.coalesce(array, json.array(others))


def _power(digits: int) -> int:
    return int("1" + "0" * digits)


def _rescaled(unscaled: int, shift: int) -> int:
    if shift >= 0:
        return unscaled * _power(shift)
    number, rest = divmod(unscaled, _power(-shift))
    if rest:
        raise ValueError("more digits behind the point than the column has")
    return number


_ZERO = bytes(16)


def _of_numbers(numbers: Sequence[int | None], kind: Any) -> pa.Array:
    """Decimals of unscaled numbers that fit."""
    data = b"".join(_ZERO if number is None else number.to_bytes(16, "little", signed=True) for number in numbers)
    valid = pa.array([number is not None for number in numbers], pa.bool_())
    return pa.Array.from_buffers(kind, len(numbers), [valid.buffers()[1], pa.py_buffer(data)])


# --- geometries

_SHAPES = ("", "POINT", "LINESTRING", "POLYGON", "MULTIPOINT", "MULTILINESTRING", "MULTIPOLYGON", "GEOMETRYCOLLECTION")
_Z, _M, _SRID = 0x80000000, 0x40000000, 0x20000000
_MOST_NESTED = 16


def well_known_text(wkb: bytes) -> str:
    """The text (WKT) of a geometry in well-known binary, also in PostGIS's form with a reference system.

    It is as Elasticsearch and OpenSearch read it: three coordinates without the mark Z, no measure (M), and the points
    of a MULTIPOINT without brackets of their own. Raises ValueError.
    """
    reader = _Wkb(wkb)
    text = reader.geometry(0)
    if reader.at != len(wkb):
        raise ValueError(f"{len(wkb) - reader.at} bytes follow the geometry")
    return text


class _Wkb:
    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def geometry(self, depth: int) -> str:
        (order,) = self._take("B", "<")
        if order > 1 or depth > _MOST_NESTED:
            raise ValueError("no geometry in well-known binary")
        end = "<" if order else ">"
        (code,) = self._take("I", end)
        if code & _SRID:
            self._take("I", end)
        iso, shape = divmod(code & 0xFFFF, 1_000)
        has_z, has_m = bool(code & _Z) or iso in (1, 3), bool(code & _M) or iso in (2, 3)
        if not 0 < shape < len(_SHAPES) or iso > 3:
            raise ValueError(f"the kind of geometry {code & 0xFFFF} has no text")
        # The measure is the last number of a point.
        point = f"{2 + has_z}d{'8x' * has_m}"
        return f"{_SHAPES[shape]} {self._body(shape, point, end, depth)}"

    def _body(self, shape: int, point: str, end: str, depth: int) -> str:
        """``point``: the form of a point's numbers."""
        if shape == 1:
            numbers = self._take(point, end)
            return "EMPTY" if numbers[0] != numbers[0] else f"({_coordinates(numbers)})"
        if shape == 2:
            return self._points(point, end)
        if shape == 3:
            return self._list(end, lambda: self._points(point, end))
        if shape == len(_SHAPES) - 1:
            return self._list(end, lambda: self.geometry(depth + 1))
        # The parts are geometries of their own, of one kind, which leave out their name.
        kind = _SHAPES[shape - 3]
        return self._list(end, lambda: self._part(depth, kind))

    def _part(self, depth: int, kind: str) -> str:
        name, _, body = self.geometry(depth + 1).partition(" ")
        if name != kind:
            raise ValueError(f"a {name} where a {kind} should be")
        return body if kind != "POINT" else "" if body == "EMPTY" else body[1:-1]

    def _points(self, point: str, end: str) -> str:
        return self._list(end, lambda: _coordinates(self._take(point, end)))

    def _list(self, end: str, read: Callable[[], str]) -> str:
        """The parts; those of no text, the empty points of a MULTIPOINT, are left out."""
        (number,) = self._take("I", end)
        if number > len(self._data):
            raise ValueError("the geometry ends too early")
        texts = [text for text in (read() for _ in range(number)) if text]
        return f"({', '.join(texts)})" if texts else "EMPTY"

    def _take(self, form: str, end: str) -> tuple[Any, ...]:
        taken = struct.unpack_from(end + form, self._data, self.at)
        self.at += struct.calcsize(end + form)
        return taken


def _coordinates(numbers: tuple[float, ...]) -> str:
    return " ".join(
        str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number) for number in numbers
    )
