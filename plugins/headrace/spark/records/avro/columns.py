"""Decodes many Avro values of one schema at once into an Arrow array, as far as a scan proves that they are values.

What is left out, and a batch with a value that does not fit its type, is another reader's: it finds the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.avro_schema import AvroKind, AvroType
from headrace.spark.records.avro.conversions import CONVERSIONS, decimal_texts
from headrace.spark.records.avro.resolution import check_resolves, default_of
from headrace.spark.records.avro.scan import AvroScan, Branches, Lists, Mask, NotScannedError, Numbers, Scanned, Spans
from headrace.spark.records.exact_columns import UnfitError, check_cells, widest_element

_WIDEST_DECIMAL = 16
"""Bytes of an unscaled number in Arrow's decimal128."""
_MOST_BYTES = 2**31 - 64
"""Of a batch, whose places Arrow counts with 32 bits."""


class AvroColumns:
    """Decodes values by a schema. ``column`` is the Arrow type of `AvroType.ddl`. ``text``: decimals are texts."""

    def __init__(self, made: AvroType, column: pa.DataType, *, text: bool, writer: AvroType | None = None) -> None:
        """``writer``: the type of the writer's schema, if it is another one.

        Raises NotScannedError if only fastavro decodes such values.
        """
        _check(made)
        if writer is not None:
            check_resolves(writer, made)
        self._made, self._column, self._text = made, column, text
        self._scan = AvroScan((writer or made).plain)

    def decode(self, values: pa.Array) -> tuple[pa.Array, Mask]:
        """The decoded values, and which of ``values`` (binary, none of them null) these are.

        Raises UnfitError if one does not fit its type.
        """
        data, places = bytes_and_places(values)
        if not len(data) or places[-1] > _MOST_BYTES:
            return pa.array([], self._column), np.zeros(len(values), bool)
        found, kept = self._scan.scan(data, places[:-1], places[1:])
        if isinstance(found, Branches) and self._made.kind is not AvroKind.UNION and not _all_values(found):
            # A value that is null has a reason.
            raise UnfitError("it is null")
        return _Arrays(values.buffers()[2], self._text).array(self._made, self._column, found, int(kept.sum())), kept


def bytes_and_places(values: pa.Array) -> tuple[npt.NDArray[np.uint8], Numbers]:
    """The bytes of binary values, and where in them each begins, and the last ends."""
    _, offsets, buffer = values.buffers()
    places = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    return np.frombuffer(buffer if buffer is not None else b"", np.uint8), places


def _all_values(found: Branches) -> bool:
    return bool(np.isin(found.branch, found.values).all())


def _check(made: AvroType) -> None:
    """Raise NotScannedError if the type has what only fastavro decodes."""
    if made.kind is AvroKind.VARIABLE_DECIMAL or (made.kind is AvroKind.RECORD and not made.parts):
        raise NotScannedError("a record without columns")
    for _, part in made.parts:
        _check(part)


class _Arrays:
    """Makes arrays of the values that are in a buffer."""

    def __init__(self, buffer: pa.Buffer, text: bool) -> None:
        self._buffer, self._text = buffer, text

    def array(self, made: AvroType, kind: Any, found: Scanned, number: int) -> pa.Array:
        """The ``number`` values of a place. Raises UnfitError."""
        try:
            return self._array(made, kind, found, number)
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError) as error:
            raise UnfitError(str(error)) from None

    def _array(self, made: AvroType, kind: Any, found: Scanned, number: int) -> pa.Array:
        if found is None:
            return pa.nulls(number, kind)
        if isinstance(found, Branches):
            return self._of_union(made, kind, found)
        if isinstance(found, Lists):
            return self._of_lists(made, kind, found)
        if isinstance(found, dict):
            arrays = [
                self._array(part, field.type, found[name], number)
                if name in found
                else pa.repeat(pa.scalar(default_of(made, name), field.type), number)
                for (name, part), field in zip(made.parts, kind, strict=True)
            ]
            return pa.StructArray.from_arrays(arrays, fields=list(kind))
        return self._of_spans(made, kind, found) if isinstance(found, Spans) else _of_numbers(made, kind, found)

    def _of_union(self, made: AvroType, kind: Any, found: Branches) -> pa.Array:
        there = [found.branch == number for number in found.values]
        if made.kind is AvroKind.UNION:
            arrays = [
                self._spread(part, field.type, found.children[number], mask)
                for (_, part), field, number, mask in zip(made.parts, kind, found.values, there, strict=True)
            ]
            absent = ~np.logical_or.reduce(there)
            return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=pa.array(absent))
        if len(found.values) == 1:
            return self._spread(made, kind, found.children[found.values[0]], there[0])
        # Numbers of several widths are one column.
        numbers = np.zeros(len(found.branch), kind.to_pandas_dtype())
        for mask, member in zip(there, found.values, strict=True):
            if (child := found.children[member]) is not None:
                numbers[mask] = child
        return pa.array(numbers, kind, mask=~np.logical_or.reduce(there))

    def _spread(self, made: AvroType, kind: Any, child: Scanned, mask: Mask) -> pa.Array:
        """The values of a member where the mask is true, null elsewhere."""
        if child is None:
            return pa.nulls(len(mask), kind)
        array = self._array(made, kind, child, int(mask.sum()))
        return array if len(array) == len(mask) else _spread(array, mask)

    def _of_lists(self, made: AvroType, kind: Any, found: Lists) -> pa.Array:
        offsets = np.zeros(len(found.counts) + 1, np.int32)
        np.cumsum(found.counts, out=offsets[1:])
        part = made.parts[0][1]
        check_cells(len(found.order), widest_element(kind))
        if made.kind is AvroKind.ARRAY:
            elements = _in_order(self._array(part, kind.value_type, found.child, len(found.order)), found.order)
            return pa.ListArray.from_arrays(pa.array(offsets), elements, type=kind)
        entries: Any = found.child or {"key": Spans(found.order, found.order), "value": None}
        keys = _in_order(self._bytes(entries["key"]).cast(pa.string()), found.order)
        if _has_a_key_twice(keys, found.counts):
            raise ValueError("a map has a key twice")
        items = _in_order(self._array(part, kind.item_type, entries["value"], len(found.order)), found.order)
        return pa.MapArray.from_arrays(pa.array(offsets), keys, items, kind)

    def _of_spans(self, made: AvroType, kind: Any, found: Spans) -> pa.Array:
        if made.kind is AvroKind.DECIMAL and pa.types.is_decimal(kind) and not self._text:
            return self._decimals(made, kind, found)
        values = self._bytes(found)
        if pa.types.is_string(kind) and _is_text(made):
            return values.cast(kind)
        if made.kind in (AvroKind.BYTES, AvroKind.FIXED):
            return values.cast(kind)
        if made.kind is AvroKind.DECIMAL:
            return decimal_texts(values.to_pylist(), made)
        return CONVERSIONS[made.kind](values.to_pylist(), kind, made)

    def _bytes(self, found: Spans) -> pa.Array:
        """The spans as binary, which Arrow copies: of the buffer cut at each start and end every second piece."""
        start, number = found.start, len(found.start)
        order = None if (start[1:] >= start[:-1]).all() else np.argsort(start, kind="stable")
        starts, lengths = (start, found.length) if order is None else (start[order], found.length[order])
        cuts = np.empty(2 * number, np.int32)
        cuts[::2], cuts[1::2] = starts, starts + lengths
        pieces = pa.Array.from_buffers(pa.binary(), max(2 * number - 1, 0), [None, pa.py_buffer(cuts), self._buffer])
        wanted = np.arange(0, 2 * number, 2)
        if order is not None:
            wanted[order] = wanted.copy()
        return pieces.take(pa.array(wanted))

    def _decimals(self, made: AvroType, kind: Any, found: Spans) -> pa.Array:
        """The numbers, big-endian in Avro and of 16 bytes, little-endian, in Arrow."""
        if len(found.length) and found.length.max() > _WIDEST_DECIMAL:
            return CONVERSIONS[made.kind](self._bytes(found).to_pylist(), kind, made)
        data = np.frombuffer(self._buffer, np.uint8)
        back = np.arange(_WIDEST_DECIMAL)
        digits = data.take((found.start + found.length - 1)[:, None] - back, mode="clip")
        first = data.take(found.start, mode="clip")
        sign = np.where((found.length > 0) & (first >= 0x80), 0xFF, 0).astype(np.uint8)
        digits = np.where(back < found.length[:, None], digits, sign[:, None])
        made_of = pa.Array.from_buffers(kind, len(found.start), [None, pa.py_buffer(np.ascontiguousarray(digits))])
        made_of.validate(full=True)
        return made_of


def _of_numbers(made: AvroType, kind: Any, found: Any) -> pa.Array:
    if made.kind is AvroKind.INT:
        return pa.array(found.astype(np.int32), kind)
    return CONVERSIONS[made.kind](found, kind, made)


def _spread(array: pa.Array, mask: Mask) -> pa.Array:
    """The values where the mask is true, null elsewhere."""
    places = np.cumsum(mask, dtype=np.int64) - 1
    return array.take(pa.array(places, mask=~mask))


def _in_order(array: pa.Array, order: Numbers) -> pa.Array:
    return array if (order[1:] > order[:-1]).all() else array.take(pa.array(order))


def _is_text(made: AvroType) -> bool:
    """Whether the bytes are those of a text; a uuid may be a fixed."""
    plain = made.plain if isinstance(made.plain, list) else [made.plain]
    return made.kind is AvroKind.STRING or (made.kind is AvroKind.UUID and made.size == 0 and "string" in plain)


def _has_a_key_twice(keys: pa.Array, counts: npt.NDArray[Any]) -> bool:
    codes = pc.dictionary_encode(keys).indices.to_numpy(zero_copy_only=False).astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    both = owner * (int(codes.max(initial=0)) + 1) + codes
    return len(np.unique(both)) < len(both)


def merged(parts: Sequence[tuple[pa.Array, Mask]]) -> pa.Array:
    """One array of the values of each part where its mask is true; null where no mask is."""
    rows = np.zeros(len(parts[0][1]), np.int64)
    before, there = 0, np.zeros(len(rows), bool)
    for array, mask in parts:
        rows[mask] = np.arange(before, before + len(array))
        before += len(array)
        there |= mask
    array = pa.concat_arrays([array for array, _ in parts])
    return array.take(pa.array(rows, mask=~there))
