"""The columns about a change: where it comes from, when, in which transaction, and at which position of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.formats.change_events import SOURCE, position

_UNSENT = "__debezium_unavailable_value"
"""What Debezium sends in place of a large value of PostgreSQL that an update has left as it was."""


def refuse_unsent(rows: pa.StructArray, refused: dict[int, str]) -> None:
    """Refuse rows of which the database did not send a value: a document without it would not be the row."""
    for field, column in zip(rows.type, rows.flatten(), strict=True):
        kind, held = field.type, column
        if pa.types.is_list(kind):
            kind, held = kind.value_type, column.flatten()
        if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            continue
        mask = pc.equal(
            held, pa.scalar(_UNSENT, kind) if pa.types.is_string(kind) else pa.scalar(_UNSENT.encode(), kind)
        )
        if not pc.any(mask, min_count=0).as_py():
            continue
        places = pc.indices_nonzero(mask)
        for row in places.to_pylist() if held is column else pc.list_parent_indices(column).take(places).to_pylist():
            refused[row] = (
                f"the database did not send {field.name!r}, a large value that the change left as it was; give "
                "the table REPLICA IDENTITY FULL"
            )


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
    given_positions = [
        position(op, dict(zip(_OF_POSITION, given, strict=True))) if may else None
        for op, may, *given in zip(ops, positioned, *(of[name] for name in _OF_POSITION), strict=True)
    ]
    return pa.array(given_positions, pa.int64())


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
        bounds = None if numbers is None else pc.min_max(numbers).as_py()
        if bounds is not None and bounds["min"] >= 0 and bounds["max"] <= _MOST_MILLIS * 1_000:
            return numbers.cast(kind)
    at = [
        _micros(us, ms if ms is not None else sent)
        for us, ms, sent in zip(of["ts_us"], of["ts_ms"], times, strict=True)
    ]
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
    """The time in microseconds; None if there is none in the years up to 9999."""
    micros, millis = _whole(micros), _whole(millis)
    number = micros if micros is not None else None if millis is None else millis * 1_000
    return number if number is not None and 0 <= number <= _MOST_MILLIS * 1_000 else None


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
