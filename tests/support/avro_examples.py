"""Values of each of Avro's types, encoded, and what they become."""

from __future__ import annotations

import datetime
import io
import json
import uuid
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa

from headrace.formats.avro_schema import AvroKind, AvroType, read_schema

UTC = datetime.UTC


def record(*fields: tuple[str, Any]) -> Any:
    return {"type": "record", "name": "shop.Order", "fields": [{"name": name, "type": kind} for name, kind in fields]}


def encoded(schema: Any, value: Any) -> bytes:
    """The value by fastavro's writer, without logical types: the value below them is given."""
    plain = read_schema(json.dumps(schema), of_columns=False).plain
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(plain), value)
    return written.getvalue()


ARROW = {
    "BOOLEAN": pa.bool_(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BINARY": pa.binary(),
    "STRING": pa.string(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}


def arrow_of(made: AvroType, decimals: Any) -> pa.DataType:
    """The Arrow type that Spark gives to the type's DDL; tests/integration/spark/test_avro.py compares the two."""
    if made.kind in (AvroKind.RECORD, AvroKind.UNION):
        return pa.struct([(name, arrow_of(part, decimals)) for name, part in made.parts])
    if made.kind is AvroKind.ARRAY:
        return pa.list_(pa.field("element", arrow_of(made.parts[0][1], decimals)))
    if made.kind is AvroKind.MAP:
        return pa.map_(pa.string(), arrow_of(made.parts[0][1], decimals))
    if made.kind is AvroKind.DURATION:
        return pa.struct([(name, pa.int64()) for name in ("months", "days", "millis")])
    ddl = made.ddl(decimals)
    return pa.decimal128(made.precision, made.scale) if ddl.startswith("DECIMAL") else ARROW[ddl]


def logical(below: Any, name: str, **more: Any) -> Any:
    return {**(below if isinstance(below, dict) else {"type": below}), "logicalType": name, **more}


def fixed(size: int) -> Any:
    return {"type": "fixed", "name": "Fixed", "size": size}


def unscaled(number: int, size: int | None = None) -> bytes:
    return number.to_bytes(size or (number.bit_length() // 8 + 1), "big", signed=True)


ENUM = {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}
DECIMAL = logical("bytes", "decimal", precision=38, scale=10)
LINE = {"type": "record", "name": "Line", "fields": [{"name": "n", "type": "int"}]}
MOST = 10**38 - 1
MILLIS, MICROS = "timestamp-millis", "timestamp-micros"
VARIABLE = {
    "type": "record",
    "name": "io.debezium.data.VariableScaleDecimal",
    "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
}
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "boolean": ("boolean", True, True),
    "the least int": ("int", -(2**31), -(2**31)),
    "the greatest int": ("int", 2**31 - 1, 2**31 - 1),
    "the least long": ("long", -(2**63), -(2**63)),
    "the greatest long": ("long", 2**63 - 1, 2**63 - 1),
    "float": ("float", 0.5, 0.5),
    "infinity": ("double", float("-inf"), float("-inf")),
    "the greatest double": ("double", 1.7976931348623157e308, 1.7976931348623157e308),
    "bytes": ("bytes", b"\x00\xff", b"\x00\xff"),
    "no bytes": ("bytes", b"", b""),
    "string": ("string", "grün", "grün"),
    "fixed": (fixed(2), b"ab", b"ab"),
    "enum": (ENUM, "BLUE", "BLUE"),
    "array": ({"type": "array", "items": "int"}, [1, 2], [1, 2]),
    "an empty array": ({"type": "array", "items": "int"}, [], []),
    "an array with nulls": ({"type": "array", "items": ["null", "int"]}, [1, None], [1, None]),
    "map": ({"type": "map", "values": ["null", "long"]}, {"a": 1, "b": None}, [("a", 1), ("b", None)]),
    "an array of records": ({"type": "array", "items": LINE}, [{"n": 1}], [{"n": 1}]),
    "null": (["null", "string"], None, None),
    "a value that may be null": (["null", "string"], "x", "x"),
    "int or long": (["int", "long"], 2**40, 2**40),
    "a text of a union": (["null", "string", "int"], "x", {"string": "x", "int": None}),
    "a number of a union": (["null", "string", "int"], 5, {"string": None, "int": 5}),
    "a wide number of a union": (["string", "int", "long"], 2**40, {"string": None, "int": None, "long": 2**40}),
    "a null of a union": (["null", "string", "int"], None, None),
    "an enum of a union": (["string", ENUM], ("shop.Colour", "RED"), {"string": None, "Colour": "RED"}),
    "a text beside an enum": (["string", ENUM], "RED", {"string": "RED", "Colour": None}),
    "an enum that may be null": (["null", ENUM], "RED", "RED"),
    "a record of a union": (
        [LINE, {"type": "map", "values": "int"}], ("shop.Line", {"n": 7}), {"Line": {"n": 7}, "map": None}
    ),
    "decimal": (logical("bytes", "decimal", precision=5, scale=2), unscaled(-12345), Decimal("-123.45")),
    "no digits": (logical("bytes", "decimal", precision=5, scale=2), b"", Decimal("0.00")),
    "the greatest decimal": (DECIMAL, unscaled(MOST), Decimal("9" * 28 + "." + "9" * 10)),
    "the least decimal": (DECIMAL, unscaled(-MOST), Decimal("-" + "9" * 28 + "." + "9" * 10)),
    "a fixed decimal": (logical(fixed(8), "decimal", precision=18), unscaled(-7, 8), Decimal(-7)),
    "more digits than Spark has": (
        logical("bytes", "decimal", precision=40, scale=1), unscaled(10**39), "1" + "0" * 38 + ".0"
    ),
    "uuid": (logical("string", "uuid"), "6a7b1f2e-0000-4000-8000-00000000000a", "6a7b1f2e-0000-4000-8000-00000000000a"),
    "a fixed uuid": (logical(fixed(16), "uuid"), uuid.UUID(int=10).bytes, str(uuid.UUID(int=10))),
    "the first date": (logical("int", "date"), -719_162, datetime.date(1, 1, 1)),
    "the last date": (logical("int", "date"), 2_932_896, datetime.date(9999, 12, 31)),
    "time in milliseconds": (logical("int", "time-millis"), 86_399_999, "23:59:59.999"),
    "time in microseconds": (logical("long", "time-micros"), 1, "00:00:00.000001"),
    "milliseconds": (logical("long", MILLIS), -1, datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)),
    "a date before 1900": (
        logical("long", MILLIS), -2_500_000_000_000, datetime.datetime(1890, 10, 11, 19, 33, 20, 0, UTC)
    ),
    "the last microsecond": (
        logical("long", MICROS), 253_402_300_799_999_999, datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)
    ),
    "nanoseconds": (logical("long", "timestamp-nanos"), 1_700_000_000_123_456_789, "2023-11-14T22:13:20.123456789Z"),
    "nanoseconds before 1970": (logical("long", "timestamp-nanos"), -1, "1969-12-31T23:59:59.999999999Z"),
    "a local time": (logical("long", "local-timestamp-millis"), 1, datetime.datetime(1970, 1, 1, 0, 0, 0, 1_000)),
    "a local time in nanoseconds": (logical("long", "local-timestamp-nanos"), 1, "1970-01-01T00:00:00.000000001"),
    "a date of Debezium": (
        {"type": "int", "connect.name": "io.debezium.time.Date"}, 20_458, datetime.date(2026, 1, 5)
    ),
    "a time of Debezium": (
        {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"},
        1,
        datetime.datetime(1970, 1, 1, 0, 0, 0, 1),
    ),
    "a decimal with a scale of its own": (VARIABLE, {"scale": 3, "value": unscaled(-1234)}, "-1.234"),
    "one that may be null": (["null", VARIABLE], {"scale": 0, "value": unscaled(5)}, "5"),
    "duration": (
        logical(fixed(12), "duration"),
        b"\x01\x00\x00\x00\x02\x00\x00\x00\xff\xff\xff\xff",
        {"months": 1, "days": 2, "millis": 2**32 - 1},
    ),
}  # fmt: skip
