"""Decodes Avro into Arrow columns, with the reason of each value that is refused.

It imports no Spark. The values of a batch are decoded together (`AvroColumns`), which is several times faster.
fastavro reads each value that this leaves out, and each of a batch in which one does not fit: it is the judge, and its
errors are the reasons. It reads by the schema without its logical types; these are turned for a whole column at a time,
which is faster, and exact: fastavro's own dates end with the year 9999, and its times have no nanoseconds. Only a batch
with a value that does not fit is divided until these are found.

fastavro does not say of which member of a union a number is, so it reads by another schema, which stands for the same
bytes (`_to_read`). It also takes what no writer makes, and this module refuses it: bytes behind the value, a number of
an enum's symbol below 0, and what `AvroDamage` finds.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.avro_evolution import ValueMisfitError, turn_between
from headrace.formats.avro_references import joined
from headrace.formats.avro_schema import AvroKind, AvroSchemaError, AvroType, read_schema
from headrace.formats.missing_library import LibraryMissingError
from headrace.formats.schema_text import SchemaText, UnreadableSchemaError
from headrace.spark.records.avro.columns import AvroColumns, bytes_and_places, merged
from headrace.spark.records.avro.conversions import CONVERSIONS, absent, decimal_texts
from headrace.spark.records.avro.damage import AvroDamage, DamagedError
from headrace.spark.records.avro.scan import AvroScan, NotScannedError
from headrace.spark.records.exact_columns import (
    MOST_CELLS,
    UnfitError,
    check_cells,
    element_offsets,
    unfit,
    widest_element,
)

if TYPE_CHECKING:
    from headrace.formats.avro_schema import Decimals

_SHOWN_CHARACTERS = 60
_FEWEST_ROWS = 256
"""Fewer are decoded one by one, which is faster, unless they are large."""
_FEWEST_BYTES = 1_000_000
_FEWEST_TO_SCAN = 64
"""Damage is looked for in fewer one by one."""


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
        self._columns = _columns(made, column, written, text=decimals == "text")
        self._written, self._widest = written, widest_element(column)
        self._read = fastavro.schemaless_reader
        self._schema = _to_read(written)
        self._damage = AvroDamage(written.plain)
        self._is_deep = self._damage.has_records_within_themselves
        self._scan = None if self._is_deep else AvroScan(written.plain)

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The values of binary ``values``, and the reasons by row of those that are refused, which are null.

        Raises TooManyCellsError.
        """
        if self._columns is None or (len(values) < _FEWEST_ROWS and values.nbytes < _FEWEST_BYTES):
            return self._decode_each(values)
        there = pc.is_valid(values).to_numpy(zero_copy_only=False)
        try:
            decoded, kept = self._columns.decode(values.drop_null() if values.null_count else values)
        except UnfitError:
            return self._decode_each(values)
        if len(decoded) == len(values):
            return decoded, {}
        of_columns = there.copy()
        of_columns[there] = kept
        left = there & ~of_columns
        each, refused = self._decode_each(values.filter(pa.array(left)))
        rows = np.flatnonzero(left).tolist()
        array = merged([(decoded, of_columns), (each, left)])
        return array, {rows[number]: reason for number, reason in refused.items()}

    def _decode_each(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        refused: dict[int, str] = {}
        whole = self._proved(values)
        read = [self._one(row, value, refused, row in whole) for row, value in enumerate(values.to_pylist())]
        try:
            decoded = self._column.array(read)
        except UnfitError:
            for row, error in unfit(self._column, read):
                refused[row] = str(error)
                read[row] = None
            decoded = self._column.array(read)
        return decoded, {row: f"{self._wanted}: {reason}" for row, reason in refused.items()}

    def _proved(self, values: pa.Array) -> frozenset[int]:
        """Rows of values that have no damage, as far as that is known at once."""
        if self._scan is None or len(values) < _FEWEST_TO_SCAN:
            return frozenset()
        data, places = bytes_and_places(values)
        if not len(data):
            return frozenset()
        return frozenset(np.flatnonzero(self._scan.scan(data, places[:-1], places[1:])[1]).tolist())

    def _one(self, row: int, value: bytes | None, refused: dict[int, str], whole: bool) -> Any:
        if value is None:
            return None
        if self._is_deep and (reason := self._too_deep(value)):
            refused[row] = reason
            return None
        given = io.BytesIO(value)
        try:
            read: Any = self._read(given, self._schema, None)
            read = read[""]
        except Exception as error:
            # Whatever the bytes are, they are one record's.
            refused[row] = _reason(error)
            return None
        if given.tell() != len(value):
            refused[row] = f"{len(value) - given.tell()} bytes follow it"
            return None
        try:
            if not (whole or self._is_deep):
                self._damage.check(value)
            if read is None:
                raise ValueMisfitError("it is null")
            return self._turned(read, len(value))
        except (DamagedError, ValueMisfitError) as error:
            refused[row] = str(error)
            return None

    def _turned(self, read: Any, length: int) -> Any:
        if self._turn is None:
            return read
        if length * self._widest > MOST_CELLS:
            # Each element gets the fields that were added since.
            check_cells(_elements(read, self._written), self._widest)
        return self._turn(read)

    def _too_deep(self, value: bytes) -> str:
        """Why fastavro is not to read a value, before it does."""
        try:
            self._damage.check(value)
        except IndexError:
            # It ends too early, which fastavro says.
            return ""
        except DamagedError as error:
            return str(error)
        return ""


def _elements(read: Any, made: AvroType) -> int:
    """The number of elements of all arrays and maps in a value that fastavro has read."""
    if read is None or not made.parts:
        return 0
    if made.kind in (AvroKind.ARRAY, AvroKind.MAP):
        held = read if made.kind is AvroKind.ARRAY else read.values()
        return len(read) + sum(_elements(each, made.parts[0][1]) for each in held)
    if made.kind is AvroKind.UNION:
        return sum(_elements(each, made.parts[number][1]) for number, each in read.items())
    return sum(_elements(read[name], part) for name, part in made.parts)


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


def _columns(made: AvroType, column: pa.DataType, written: AvroType, *, text: bool) -> AvroColumns | None:
    """What decodes many values at once; None for schemas that it does not do."""
    try:
        return AvroColumns(made, column, text=text, writer=None if written is made else written)
    except NotScannedError:
        return None


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


def _to_read(made: AvroType) -> Any:
    """The schema by which fastavro reads values, which come as the field "" of a record.

    It stands for the same bytes, and is made as fastavro's own parser would, so that the schema is not parsed again. By
    it, an enum is its number; and a value of a union that has a column for each member is a record whose only field has
    the number of the member as its name.
    """
    named: dict[str, Any] = {}
    read = _record_of({"": _types_to_read(made, made.plain, named)})
    within = {_INNER + name: kind for name, kind in named.items()}
    return {**read, "__fastavro_parsed": True, "__named_schemas": within}


def _record_of(fields: Mapping[Any, Any]) -> dict[str, Any]:
    listed = [{"name": name, "type": kind} for name, kind in fields.items()]
    return {"type": "record", "name": "Record", "fields": listed}


def _types_to_read(made: AvroType, plain: Any, named: dict[str, Any]) -> Any:
    """``plain`` is that of ``made``, or one of its members. ``named``: the types that have a name, and were met."""
    if isinstance(plain, list):
        return _members_to_read(made, plain, named)
    if isinstance(plain, str):
        return named.get(plain, _INNER + plain if made.is_within_itself else plain)
    read = plain
    if plain["type"] == "record":
        parts = dict(made.parts)
        read = _record_of(
            {
                field["name"]: _types_to_read(parts.get(field["name"], _NULL), field["type"], named)
                for field in plain["fields"]
            }
        )
    elif plain["type"] in ("array", "map"):
        key = "items" if plain["type"] == "array" else "values"
        return {"type": plain["type"], key: _types_to_read(made.parts[0][1], plain[key], named)}
    named[plain["name"]] = "int" if plain["type"] == "enum" else read
    return named[plain["name"]]


def _members_to_read(made: AvroType, plain: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    is_union, number = made.kind is AvroKind.UNION, 0
    read: list[Any] = []
    for each in plain:
        if each == "null":
            read.append(each)
            continue
        member = _types_to_read(made.parts[number][1] if is_union else made, each, named)
        read.append(_record_of({number: member}) if is_union else member)
        number += 1
    return read


_NULL = AvroType(AvroKind.NULL, "null")
_INNER = "."
"""Before the name by which a record within itself refers to itself, so that it is no type of Avro's."""


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
        return _Column(place, lambda values: decimal_texts(values, made))
    return _Column(place, lambda values: CONVERSIONS[made.kind](values, kind, made))


def _records(values: Sequence[Any], made: AvroType, fields: Sequence[pa.Field], below: Sequence[_Column]) -> pa.Array:
    arrays = [
        column.array([None if value is None else value[name] for value in values])
        for (name, _), column in zip(made.parts, below, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(fields), mask=absent(values))


def _members(values: Sequence[Any], _: AvroType, fields: Sequence[pa.Field], below: Sequence[_Column]) -> pa.Array:
    """A column for each member of a union, of which one has the value."""
    arrays = [
        column.array([None if value is None else value.get(number) for value in values])
        for number, column in enumerate(below)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(fields), mask=absent(values))


def _arrays(values: Sequence[Any], kind: Any, element: _Column) -> pa.Array:
    flat = list(chain.from_iterable(value for value in values if value is not None))
    check_cells(len(flat), widest_element(kind))
    return pa.ListArray.from_arrays(element_offsets(values), element.array(flat), type=kind)


def _maps(values: Sequence[Any], kind: Any, item: _Column) -> pa.Array:
    held = [value for value in values if value is not None]
    check_cells(sum(map(len, held)), widest_element(kind))
    keys = pa.array(list(chain.from_iterable(held)), pa.string())
    items = item.array(list(chain.from_iterable(value.values() for value in held)))
    return pa.MapArray.from_arrays(element_offsets(values), keys, items, kind)
