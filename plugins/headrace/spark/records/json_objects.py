"""Decodes JSON objects into an Arrow struct, or UTF-8 into texts, with the reason of each value that is refused.

It imports no Spark.

Each text must be one JSON document (RFC 8259), and each value must fit its declared type exactly; the table of
conversions is in docs/stream.md. A whole batch is converted at once by msgspec and Arrow, at about a microsecond for a
record; only a column that does not convert is divided until its values that do not fit are found.
"""

from __future__ import annotations

import binascii
import contextlib
import decimal
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.spark.records.exact_columns import (
    MOST_CELLS,
    YEARS_1_TO_9999,
    UnfitError,
    check_cells,
    element_offsets,
    must_count,
    unfit,
    widest_element,
)

# msgspec checks the nesting by Python's limit of recursion.
REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ZONE = r"[T ].*(Z|[+-]\d\d(:?\d\d)?)$"
_SHOWN_CHARACTERS = 60
# A number in RFC 8259. Python's Decimal also takes 1_000, +1, 01, blanks and the digits of all scripts.
JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

_Conversion = Callable[[Sequence[Any], Any], pa.Array]


class JsonObjects:
    """Decodes into ``kind``, which ``fields`` names in errors. Texts of times without an offset are in ``time_zone``, a
    name of the IANA database."""

    def __init__(
        self, kind: pa.StructType, time_zone: str = "UTC", fields: str = "", own: OwnPlaces | None = None
    ) -> None:
        """``own``: the places that are not converted by the table."""
        self._wanted = f"no JSON object of {fields}" if fields else "no such JSON object"
        self._bound = ElementsBound(kind)
        self._objects = Objects(kind, "$", partial(leaf, time_zone=time_zone), own)
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(self._objects.strict).decode
        self._decode_texts: Callable[[bytes], Any] | None = None
        if self._objects.loose is not self._objects.strict:
            self._decode_texts = msgspec.json.Decoder(self._objects.loose).decode

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The structs of binary ``values``, and the reasons by row of those that are refused, which are null.

        A null stays null, without a reason. Raises TooManyCellsError.
        """
        self._bound.check(values)
        texts = values.to_pylist()
        refused = not_utf8(values)
        objects: list[Any] = []
        try:
            if refused:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "")
            decode = self._decode
            objects = [None if text is None else decode(text) for text in texts]
        except REFUSED:
            objects = [self._one(row, text, refused) for row, text in enumerate(texts)]
        return self._array(objects, refused), {row: f"{self._wanted}: {reason}" for row, reason in refused.items()}

    def _one(self, row: int, text: bytes | None, refused: dict[int, str]) -> Any:
        if text is None or row in refused:
            return None
        try:
            return self._decode(text)
        except REFUSED as error:
            reason = error
        if self._decode_texts is not None:
            # A number, an object and so on in a STRING: the second parse keeps its text.
            try:
                return self._decode_texts(text)
            except REFUSED as error:
                reason = error
        refused[row] = str(reason)
        return None

    def _array(self, objects: list[Any], refused: dict[int, str]) -> pa.Array:
        try:
            return self._objects.array(objects)
        except UnfitError:
            for row, error in self._objects.unfit(objects):
                refused.setdefault(row, str(error))
                objects[row] = None
        return self._objects.array(objects)


_SHORTEST_OBJECT = 3
"""Bytes of an empty object with a comma."""


class ElementsBound:
    """The bound of elements in the lists of JSON values: msgspec's objects have a place for each field of an element.

    ``rows``: the objects of ``kind`` in a value that is parsed.
    """

    def __init__(self, kind: pa.DataType, rows: Callable[[Any], Iterable[Any]] = lambda parsed: (parsed,)) -> None:
        self._kind, self._rows = kind, rows
        self._widest = widest_element(kind)

    def check(self, values: pa.Array) -> None:
        """Raise TooManyCellsError if one of binary ``values`` has too many, or several may have."""
        if must_count(values, self._widest, _SHORTEST_OBJECT) and values[0].is_valid:
            self._count(values[0].as_py())

    def check_text(self, text: bytes) -> None:
        """Raise TooManyCellsError if a value has too many."""
        if len(text) // _SHORTEST_OBJECT * self._widest > MOST_CELLS:
            self._count(text)

    def _count(self, text: bytes) -> None:
        elements = text.count(b"{") + text.count(b"null")
        if elements * self._widest > MOST_CELLS:
            # They may be in texts, or in fields that are not declared.
            with contextlib.suppress(*REFUSED):
                elements = sum(_elements(row, self._kind) for row in self._rows(msgspec.json.decode(text)))
        check_cells(elements, self._widest)


def _elements(parsed: Any, kind: Any) -> int:
    """The elements of the lists and maps that are declared."""
    if pa.types.is_struct(kind):
        return sum(_elements(parsed.get(field.name), field.type) for field in kind) if isinstance(parsed, dict) else 0
    if pa.types.is_list(kind) and isinstance(parsed, list):
        return len(parsed) + sum(_elements(each, kind.value_type) for each in parsed)
    if pa.types.is_map(kind) and isinstance(parsed, dict):
        return len(parsed) + sum(_elements(each, kind.item_type) for each in parsed.values())
    return 0


class Utf8Texts:
    """Decodes into texts."""

    def __init__(self, kind: pa.DataType, time_zone: str = "UTC") -> None:
        """The type is always that of a text, and the time zone makes no difference."""

    @staticmethod
    def decode(values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The texts of binary ``values``, and the reasons by row of those that are not UTF-8, which are null."""
        refused = not_utf8(values)
        if not refused:
            return values.cast(pa.string()), {}
        mask = np.ones(len(values), bool)
        mask[list(refused)] = False
        return pc.if_else(pa.array(mask), values, None).cast(pa.string()), refused


def not_utf8(values: pa.Array) -> dict[int, str]:
    """The rows of binary ``values`` that are not UTF-8, with the reason."""
    try:
        # Arrow checks the bytes without copying them.
        values.cast(pa.string())
    except pa.ArrowInvalid:
        refused = {}
        for row, text in enumerate(values.to_pylist()):
            try:
                (text or b"").decode()
            except UnicodeDecodeError as error:
                refused[row] = f"not UTF-8: {error.reason} at byte {error.start}"
        return refused
    return {}


class PlaceValues(Protocol):
    """The values of one place in the objects. ``strict`` is their type for msgspec; ``loose`` takes any value for a
    STRING, as its text in the record."""

    strict: Any
    loose: Any

    def array(self, values: Sequence[Any]) -> pa.Array:
        """The values (None where there is none) as Arrow's; raises UnfitError."""
        ...


MakePlaceValues = Callable[[pa.DataType, str], PlaceValues]
"""Makes the values of a place of an Arrow type; the place is as in "$.items[].price"."""
OwnPlaces = Mapping[str, "OwnPlaces | MakePlaceValues"]
"""By a field's name; "" is the element of a list or map."""


class PlainValues:
    """Values that are converted by one function; an error of it means that some do not fit."""

    def __init__(self, strict: Any, kind: pa.DataType, place: str, convert: _Conversion) -> None:
        self.strict = self.loose = strict | None
        self._kind, self._place, self._convert = kind, place, convert

    def array(self, values: Sequence[Any]) -> pa.Array:
        try:
            return self._convert(values, self._kind)
        except (pa.ArrowException, ArithmeticError, ValueError):
            shown = ", ".join(str(value) for value in values if value is not None)
            raise UnfitError(f"Not exactly {self._kind}: {shown[:_SHOWN_CHARACTERS]} - at `{self._place}`") from None


ANY_TEXT: Any = msgspec.Raw | msgspec.UnsetType
"""The type of any value, as its text in the record."""


class _Texts:
    """Values of a STRING."""

    def __init__(self) -> None:
        self.strict = str | None
        self.loose = ANY_TEXT

    @staticmethod
    def array(values: Sequence[Any]) -> pa.Array:
        if msgspec.Raw in set(map(type, values)):
            values = [raw_text(value) if isinstance(value, msgspec.Raw) else value for value in values]
        return pa.array(values, pa.string())


class DecimalValues:
    """Values of a DECIMAL. msgspec gives them as their text in the record, since it takes other texts for numbers than
    JSON does."""

    def __init__(self, kind: Any, place: str) -> None:
        self.strict = self.loose = msgspec.Raw | msgspec.UnsetType
        self.kind, self._place = kind, place
        # Arrow is given only what fits: it crashed on 1E-999999999.
        self._context = decimal.Context(prec=kind.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
        self._unit = decimal.Decimal((0, (1,), -kind.scale))

    def array(self, values: Sequence[Any]) -> pa.Array:
        return pa.array([None if value is None else self._decimal(value) for value in values], self.kind)

    def _decimal(self, raw: msgspec.Raw) -> decimal.Decimal | None:
        """The decimal of a JSON number, or of a text that is one."""
        shown = bytes(raw).decode()
        if shown == "null":
            return None
        try:
            is_text = shown[0] == '"'
            number = self.number(msgspec.json.decode(raw, type=str)) if is_text else decimal.Decimal(shown)
            return self._context.quantize(number, self._unit)
        except (ArithmeticError, ValueError, msgspec.DecodeError):
            pass
        raise UnfitError(f"Not exactly {self.kind}: {shown[:_SHOWN_CHARACTERS]} - at `{self._place}`")

    def number(self, text: str) -> decimal.Decimal:
        """The number of a text, which is one of JSON. Raises ValueError, or an ArithmeticError."""
        if not JSON_NUMBER.fullmatch(text):
            raise ValueError("no number of JSON")
        return decimal.Decimal(text)


class Objects:
    """Values of a STRUCT. ``leaf`` makes the values of a place that is no struct, list or map; ``own`` those of its
    places, whatever they are."""

    def __init__(self, kind: pa.StructType, place: str, leaf: MakePlaceValues, own: OwnPlaces | None = None) -> None:
        self.kind = kind
        self._fields = {
            f"f{n}": (field, _values(field.type, f"{place}.{field.name}", leaf, (own or {}).get(field.name)))
            for n, field in enumerate(kind)
        }
        rename = {name: field.name for name, (field, _) in self._fields.items()}
        given: Any = {"gc": False, "rename": rename, "kw_only": True}
        strict = [(name, values.strict, None) for name, (_, values) in self._fields.items()]
        self.strict: Any = msgspec.defstruct("Strict", strict, **given)
        loose = [(name, values.loose, None) for name, (_, values) in self._fields.items()]
        same = all(values.loose is values.strict for _, values in self._fields.values())
        self.loose: Any = self.strict if same else msgspec.defstruct("Loose", loose, **given)

    def array(self, values: Sequence[Any]) -> pa.Array:
        absent = [value is None for value in values]
        if not self._fields:
            return pa.array([None if none else {} for none in absent], self.kind)
        some = any(absent)
        children = []
        for name, (_, held) in self._fields.items():
            get = attrgetter(name)
            column = [None if value is None else get(value) for value in values] if some else list(map(get, values))
            children.append(held.array(column))
        fields = [field for field, _ in self._fields.values()]
        return pa.StructArray.from_arrays(children, fields=fields, mask=pa.array(absent, pa.bool_()))

    def unfit(self, values: Sequence[Any]) -> Iterator[tuple[int, UnfitError]]:
        """The numbers of the values that do not fit, by field. Each field is searched by itself: where all records are
        at fault, often only one of their fields is."""
        for name, (_, held) in self._fields.items():
            column = [None if value is None else getattr(value, name) for value in values]
            yield from held.objects.unfit(column) if isinstance(held, _Optional) else unfit(held, column)


class _Optional:
    """A STRUCT within another value, which may be null."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.strict = objects.strict | None
        self.loose = self.strict if objects.loose is objects.strict else objects.loose | None

    def array(self, values: Sequence[Any]) -> pa.Array:
        return self.objects.array(values)


class _Lists:
    """Values of an ARRAY."""

    def __init__(self, kind: Any, element: PlaceValues) -> None:
        self._kind, self._element = kind, element
        self._cells = widest_element(kind)
        self.strict = list[element.strict] | None  # type: ignore[name-defined]
        self.loose = self.strict if element.loose is element.strict else list[_inner(element)] | None  # type: ignore[misc]

    def array(self, values: Sequence[Any]) -> pa.Array:
        flat = list(chain.from_iterable(value for value in values if value is not None))
        check_cells(len(flat), self._cells)
        return pa.ListArray.from_arrays(element_offsets(values), self._element.array(flat), type=self._kind)


class _Maps:
    """Values of a MAP with texts as keys."""

    def __init__(self, kind: Any, item: PlaceValues) -> None:
        self._kind, self._item = kind, item
        self._cells = widest_element(kind)
        self.strict = dict[str, item.strict] | None  # type: ignore[name-defined]
        self.loose = self.strict if item.loose is item.strict else dict[str, _inner(item)] | None  # type: ignore[misc]

    def array(self, values: Sequence[Any]) -> pa.Array:
        held = [value for value in values if value is not None]
        check_cells(sum(map(len, held)), self._cells)
        keys = pa.array(list(chain.from_iterable(held)), pa.string())
        items = self._item.array(list(chain.from_iterable(value.values() for value in held)))
        return pa.MapArray.from_arrays(element_offsets(values), keys, items, self._kind)


def _inner(values: PlaceValues) -> Any:
    return msgspec.Raw if values.loose is ANY_TEXT else values.loose


def _values(
    kind: pa.DataType, place: str, leaf: MakePlaceValues, own: OwnPlaces | MakePlaceValues | None = None
) -> PlaceValues:
    if callable(own):
        return own(kind, place)
    own = own or {}
    if pa.types.is_struct(kind):
        return _Optional(Objects(kind, place, leaf, own))
    if pa.types.is_list(kind):
        return _Lists(kind, _values(kind.value_type, f"{place}[]", leaf, own.get("")))
    if pa.types.is_map(kind):
        return _Maps(kind, _values(kind.item_type, f"{place}[]", leaf, own.get("")))
    return leaf(kind, place)


def leaf(kind: pa.DataType, place: str, *, time_zone: str) -> PlaceValues:
    """The values of a place that are no objects or arrays."""
    if pa.types.is_string(kind):
        return _Texts()
    if pa.types.is_decimal(kind):
        return DecimalValues(kind, place)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return PlainValues(str | int, kind, place, lambda values, kind: _times(values, kind, time_zone))
    for fits, strict, convert in _CONVERSIONS:
        if fits(kind):
            return PlainValues(strict, kind, place, convert)
    raise TypeError(f"JSON is not decoded into {kind}")


def _as_they_are(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind)


def _finite(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    array = pa.array(values, kind)
    if pc.any(pc.is_inf(array)).as_py():
        raise ValueError("out of range")
    return array


def _from_base64(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    decoded = [None if value is None else binascii.a2b_base64(value, strict_mode=True) for value in values]
    return pa.array(decoded, kind)


def _dates(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return _in_calendar(pa.array(values, pa.string()).cast(kind))


def _times_of_day(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    texts = pa.array([None if value is None else f"1970-01-01T{value}" for value in values], pa.string())
    return texts.cast(pa.timestamp("us")).cast(pa.time64("us")).cast(kind)


def _local_times(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return _in_calendar(_cut_zeros(pa.array(values, pa.string())).cast(kind))


def _times(values: Sequence[Any], kind: Any, time_zone: str) -> pa.Array:
    seconds = None
    if int in set(map(type, values)):
        seconds = pa.array([value if isinstance(value, int) else None for value in values], pa.int64())
        least, most = pc.min_max(seconds).as_py().values()
        if least < YEARS_1_TO_9999[0] or most > YEARS_1_TO_9999[1]:
            raise ValueError("milliseconds?")
        values = [value if isinstance(value, str) else None for value in values]
    texts = _cut_zeros(pa.array(values, pa.string()))
    has_zone = pc.match_substring_regex(texts, _ZONE)
    if pc.all(has_zone).as_py():
        times = texts.cast(kind)
    else:
        local = pc.if_else(has_zone, None, texts).cast(pa.timestamp(kind.unit))
        zoned = pc.if_else(has_zone, texts, None).cast(kind)
        times = pc.coalesce(zoned, pc.assume_timezone(local, time_zone).cast(kind))
    times = _in_calendar(times)
    if seconds is None:
        return times
    return pc.coalesce(times, pc.multiply(seconds, 1_000_000).cast(pa.timestamp("us")).cast(kind))


def _in_calendar(times: pa.Array) -> pa.Array:
    """The times if all are in the years 1 to 9999: Arrow takes the year 0, and UTC may be in another year."""
    least, most = pc.min_max(times.cast(pa.timestamp("s", getattr(times.type, "tz", None)), safe=False)).values()
    if least.is_valid and not (YEARS_1_TO_9999[0] <= least.value and most.value <= YEARS_1_TO_9999[1]):
        raise ValueError("the year is not 1 to 9999")
    return times


def _cut_zeros(texts: pa.Array) -> pa.Array:
    """The texts without the zeros behind their microseconds, which Arrow does not take."""
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if longest <= len("2026-01-02T03:04:05.123456Z"):
        return texts
    return pc.replace_substring_regex(texts, r"(\.\d{6})0+", r"\1")


def raw_text(raw: msgspec.Raw) -> str | None:
    """A text itself; any other value as its text in the record."""
    text = bytes(raw)
    if text == b"null":
        return None
    return msgspec.json.decode(text, type=str) if text.startswith(b'"') else text.decode()


_CONVERSIONS: tuple[tuple[Callable[[pa.DataType], bool], Any, _Conversion], ...] = (
    (pa.types.is_boolean, bool, _as_they_are),
    (pa.types.is_integer, int, _as_they_are),
    (pa.types.is_floating, float, _finite),
    (pa.types.is_binary, str, _from_base64),
    (pa.types.is_date, str, _dates),
    (pa.types.is_time, str, _times_of_day),
    (pa.types.is_timestamp, str, _local_times),
)
"""What the values are in JSON, and the function that converts them; it raises an error if some do not fit."""
