"""docs/guides/from-kafka-connect.md says which decoder reads what a converter of Kafka Connect has written."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
from tests.support.change_events import decode

from headrace.spark.records.json_objects import JsonObjects

FIELDS = [
    {"field": "id", "type": "int32"},
    {"field": "day", "type": "int32", "name": "org.apache.kafka.connect.data.Date"},
    {
        **{"field": "total", "type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"},
        "parameters": {"scale": "2"},
    },
]
PAYLOAD = {"id": 1, "day": 20_458, "total": "AMg="}
VALUE = {"schema": {"type": "struct", "fields": FIELDS}, "payload": PAYLOAD}


def test_a_schema_part_is_read_beside_any_record() -> None:
    row = pa.struct([("id", pa.int32()), ("day", pa.date32()), ("total", pa.decimal128(10, 2))])
    (made, absent), refused = decode(VALUE, {"schema": None, "payload": None}, row=row)
    assert refused == {}
    assert made["value"] == {"id": 1, "day": date(2026, 1, 5), "total": Decimal("2.00")}
    assert absent is None or absent["value"] is None


def test_a_payload_may_be_any_value_without_its_schema() -> None:
    fields: list[Any] = [("id", pa.int32()), ("day", pa.int32()), ("total", pa.binary())]
    texts = pa.array([json.dumps(VALUE).encode()], pa.binary())
    (made,) = JsonObjects(pa.struct([("payload", pa.struct(fields))])).decode(texts)[0].to_pylist()
    assert made == {"payload": {"id": 1, "day": 20_458, "total": b"\x00\xc8"}}
    number = pa.array([b'{"schema": {"type": "int64"}, "payload": 5}'], pa.binary())
    assert JsonObjects(pa.struct([("payload", pa.int64())])).decode(number)[0].to_pylist() == [{"payload": 5}]
