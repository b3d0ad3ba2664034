"""The columns about a change: where it comes from, when, in which transaction, and at which position of its source."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.change_events import SOURCE, position

_UNSENT = "__debezium_unavailable_value"
"""What Debezium sends in place of a large value of PostgreSQL that an update has left as it was."""


_UNSENT_BYTES = _UNSENT.encode()
_UNSENT_TEXTS = pa.array([_UNSENT, base64.b64encode(_UNSENT_BYTES).decode(), _UNSENT_BYTES.hex()])
"""It in place of a text, and of bytes that are declared as a text."""
_UNSENT_PAIR = rf'^\{{\s*"{_UNSENT}"\s*:\s*"{_UNSENT}"\s*\}}$'
"""It in place of an hstore that is declared as a text."""


def refuse_unsent(rows: pa.StructArray, refused: dict[int, str]) -> None:
    """Refuse rows of which the database did not send a value: a document without it would not be the row."""
    for field, column in zip(rows.type, rows.flatten(), strict=True):
        for row in _unsent_rows(column):
            refused[row] = (
                f"the database did not send {field.name!r}, a large value that the change left as it was; give "
                "the table REPLICA IDENTITY FULL"
            )


def _unsent_rows(column: pa.Array) -> list[int]:
    """The rows in which Debezium's placeholder stands: of the column's own type, or of each of its elements."""
    kind = column.type
    if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
        # In place of an array of numbers stand the bytes of the placeholder.
        alike = pc.indices_nonzero(pc.equal(pc.list_value_length(column), len(_UNSENT_BYTES))).to_pylist()
        return [row for row in alike if column[row].as_py() == list(_UNSENT_BYTES)]
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        held = pc.list_flatten(column) if pa.types.is_list(kind) else _keys_of(column)
        places = _unsent_places(held)
        if not places:
            return []
        # Of an array and of a map the offsets say which row an element is of.
        ends = np.cumsum(_lengths(column))
        rows: list[int] = np.searchsorted(ends, places, side="right").tolist()
        return rows
    return _unsent_places(column)


def _keys_of(maps: pa.MapArray) -> pa.Array:
    first, last = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
    return maps.keys.slice(first, last - first)


def _lengths(column: pa.Array) -> Any:
    if pa.types.is_map(column.type):
        return np.diff(column.offsets.to_numpy())
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)


def _unsent_places(values: pa.Array) -> list[int]:
    if pa.types.is_string(values.type):
        mask = pc.is_in(values, _UNSENT_TEXTS)
        if pc.any(pc.starts_with(values, "{"), min_count=0).as_py():
            mask = pc.or_(mask, pc.fill_null(pc.match_substring_regex(values, _UNSENT_PAIR), False))
    elif pa.types.is_binary(values.type):
        mask = pc.equal(values, pa.scalar(_UNSENT_BYTES, values.type))
    else:
        return []
    places: list[int] = pc.indices_nonzero(mask).to_pylist() if pc.any(mask, min_count=0).as_py() else []
    return places


def columns_of_source(
    of: Mapping[str, Sequence[Any]],
    ops: Sequence[Any],
    positioned: Sequence[bool],
    times: Sequence[Any],
    present: Sequence[bool],
) -> dict[str, pa.Array]:
    """The columns ``source``, ``position`` and ``changed_at``, of lists of a source's fields by name."""
    tables = [
        table if table is not None else collection
        for table, collection in zip(of["table"], of["collection"], strict=True)
    ]
    texts = [_texts(tables if name == "table" else of[name]) for name in SOURCE]
    source = pa.StructArray.from_arrays(
        texts, names=list(SOURCE), mask=pa.array([not there for there in present], pa.bool_())
    )
    return {
        "source": source,
        "position": _positions(of, ops, positioned),
        "changed_at": _times(of, times),
    }


_OF_POSITION = ("connector", "lsn", "sequence", "file", "pos", "row", "ts_ms", "ord", "txnNumber")


def _positions(of: Mapping[str, Sequence[Any]], ops: Sequence[Any], positioned: Sequence[bool]) -> pa.Array:
    if set(of["connector"]) == {"postgresql"} and set(map(type, of["lsn"])) == {int} and all(positioned):
        numbers = _int64s(of["lsn"])
        if numbers is not None and pc.min(numbers).as_py() > 0:
            return pc.subtract(numbers, pa.array([op == "r" for op in ops], pa.bool_()).cast(pa.int64()))
    found = [
        position(op, dict(zip(_OF_POSITION, given, strict=True))) if may else None
        for op, may, *given in zip(ops, positioned, *(of[name] for name in _OF_POSITION), strict=True)
    ]
    return pa.array(found, pa.int64())


def _int64s(numbers: Sequence[int]) -> pa.Array | None:
    """None if one of the numbers has more than 64 bits."""
    try:
        return pa.array(numbers, pa.int64())
    except (OverflowError, pa.ArrowException):
        return None


def _times(of: Mapping[str, Sequence[Any]], times: Sequence[Any]) -> pa.Array:
    kind = pa.timestamp("us", "UTC")
    if set(map(type, of["ts_us"])) == {int}:
        numbers = _int64s(of["ts_us"])
        if numbers is not None:
            bounds = pc.min_max(numbers).as_py()
            if bounds["min"] > 0 and bounds["max"] <= _MOST_MILLIS * 1_000:
                return numbers.cast(kind)
    at = [_micros(us, _whole(ms) or sent) for us, ms, sent in zip(of["ts_us"], of["ts_ms"], times, strict=True)]
    return pa.array(at, kind)


def _texts(values: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except (pa.ArrowException, TypeError):
        return pa.array([text_of(value) for value in values], pa.string())


def text_of(value: Any) -> str | None:
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


_MOST_MILLIS = 253_402_300_799_999


def _micros(micros: Any, millis: Any) -> int | None:
    """The time in microseconds; None if there is none in the years up to 9999.

    0 is none: proto3 has it for what is not set, and Debezium for a time that it does not know.
    """
    number = _whole(micros) or (_whole(millis) or 0) * 1_000
    return number if 0 < number <= _MOST_MILLIS * 1_000 else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if value.isascii() and value.removeprefix("-").isdecimal() and len(value) <= 20 else None
    return value if isinstance(value, int) else None


def _order(value: Any) -> int | None:
    """The number of an order; None if it is none of 64 bits."""
    number = _whole(value)
    return number if number is not None and -(1 << 63) <= number < 1 << 63 else None


def transactions_of(transactions: Sequence[Any]) -> pa.Array:
    kind = pa.struct([("id", pa.string()), ("total_order", pa.int64()), ("data_collection_order", pa.int64())])
    if not any(transaction is not None for transaction in transactions):
        return pa.nulls(len(transactions), kind)
    rows = [
        None
        if held is None
        else {
            "id": held.id,
            "total_order": _order(held.total_order),
            "data_collection_order": _order(held.data_collection_order),
        }
        for held in transactions
    ]
    return pa.array(rows, kind)


def connector_of(lsn: Any, sequence: Any, file: Any) -> str | None:
    """The connector of a flattened row that does not name it, by what it says of the position."""
    if lsn is not None or sequence is not None:
        return "postgresql"
    return None if file is None else "mysql"
