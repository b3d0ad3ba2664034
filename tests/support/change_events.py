"""Debezium's change events in JSON, of the kinds and in the forms that its documentation names."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headrace.formats.change_events import SOURCE
from headrace.spark.records.events.change_events import ChangeEvents

UNAVAILABLE = "__debezium_unavailable_value"
ORDERS = pa.struct([("id", pa.int32()), ("name", pa.string())])
MICROS = 1_767_617_100_250_000
"""2026-01-05T12:45:00.250Z."""


def changes_of(row: pa.DataType) -> pa.DataType:
    """The Arrow type of decoded change events with rows of this type."""
    orders = ("total_order", "data_collection_order")
    return pa.struct(
        [
            ("value", row),
            ("op", pa.string()),
            ("position", pa.int64()),
            ("before", row),
            ("changed_at", pa.timestamp("us", "UTC")),
            ("source", pa.struct([(name, pa.string()) for name in SOURCE])),
            ("transaction", pa.struct([("id", pa.string()), *((name, pa.int64()) for name in orders)])),
        ]
    )


def decode(
    *values: bytes | Mapping[str, Any] | None, row: pa.DataType = ORDERS, headers: Any = None, **settings: Any
) -> tuple[list[Any], dict[int, str]]:
    """The decoded events, and the reasons of those that are refused."""
    texts = [json.dumps(value).encode() if isinstance(value, Mapping) else value for value in values]
    decoder = ChangeEvents(changes_of(row), fields="the row", **settings)
    given = None if headers is None else pa.array(headers, HEADERS)
    decoded, refused = decoder.decode(pa.array(texts, pa.binary()), headers=given)
    decoded.validate(full=True)
    assert decoded.type == changes_of(row)
    return decoded.to_pylist(), refused


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def postgres(lsn: int, **more: Any) -> dict[str, Any]:
    """The source of a change in PostgreSQL."""
    return {
        **{"version": "3.6.1.Final", "connector": "postgresql", "name": "shop", "ts_ms": MICROS // 1_000},
        **{"snapshot": "false", "db": "shop", "sequence": '["24023119","24023128"]', "ts_us": MICROS},
        **{"ts_ns": MICROS * 1_000, "schema": "public", "table": "orders", "txId": 565, "lsn": lsn, "xmin": None},
        **more,
    }


def mysql(file: str, pos: int, row: int = 0, **more: Any) -> dict[str, Any]:
    """The source of a change in MySQL."""
    return {
        **{"version": "3.6.1.Final", "connector": "mysql", "name": "shop", "ts_ms": MICROS // 1_000},
        **{"snapshot": "false", "db": "shop", "sequence": None, "table": "orders", "server_id": 223_344, "gtid": None},
        **{"file": file, "pos": pos, "row": row, "thread": 7, "query": None, **more},
    }


def event(op: str, before: Any, after: Any, source: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """An envelope."""
    return {
        **{"before": before, "after": after, "source": source or postgres(24_023_128), "transaction": None, "op": op},
        **{"ts_ms": MICROS // 1_000 + 5, "ts_us": MICROS + 5_000, "ts_ns": MICROS * 1_000 + 5_000_000, **more},
    }


def with_schema(payload: Any, *fields: Mapping[str, Any]) -> dict[str, Any]:
    """An envelope in Connect's JSON with its schema part. ``fields``: Connect's schemas of the row's fields."""
    rows = [
        {"type": "struct", "fields": list(fields), "optional": True, "name": "shop.public.orders.Value", "field": part}
        for part in ("before", "after")
    ]
    return {"schema": {"type": "struct", "fields": rows, "name": "shop.public.orders.Envelope"}, "payload": payload}


def field(name: str, kind: str, semantic: str | None = None, **more: Any) -> dict[str, Any]:
    """Connect's schema of a field."""
    named = {} if semantic is None else {"name": semantic, "version": 1}
    return {"type": kind, "optional": True, **named, **more, "field": name}


def unscaled(number: int) -> str:
    """A decimal's digits as Connect's JSON has them."""
    length = number.bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(length, "big", signed=True)).decode()
