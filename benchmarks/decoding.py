"""How fast Avro and Protobuf values become columns, beside the same values in JSON.

    python -m benchmarks.decoding [--records 16000] [--rounds 5] [--json]

Decodes one batch of orders of 16 fields, of which one is a time and one optional, in this process, by the classes that
Spark's tasks call. The rates are of processor time. Protobuf is also measured without ptars.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import fastavro
import pyarrow as pa
from benchmarks.measures import Measure, print_measures
from google.protobuf import message_factory
from tests.support.protobuf_examples import arrow_of

from headrace.formats.protobuf_schema import descriptor_pool, descriptor_set, read_schema
from headrace.spark.records.avro.values import AvroValues
from headrace.spark.records.framed_values import ValuesOfSchema
from headrace.spark.records.json_objects import JsonObjects
from headrace.spark.records.protobuf.values import ProtobufValues
from headrace.stream import ProtobufDecoder

PROTOBUF = """syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
enum Status { UNKNOWN = 0; PAID = 1; SENT = 2; }
message Order {
  int64 id = 1; string user = 2; string item = 3; double price = 4; int32 pieces = 5; bool paid = 6;
  google.protobuf.Timestamp at = 7; string note = 8; Status status = 9; int32 shop = 10; int64 hash = 11;
  optional string coupon = 12; float weight = 13; bytes token = 14; sint64 delta = 15; string country = 16;
}
"""
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        *[{"name": name, "type": kind} for name, kind in (("id", "long"), ("user", "string"), ("item", "string"))],
        *[{"name": name, "type": kind} for name, kind in (("price", "double"), ("pieces", "int"), ("paid", "boolean"))],
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "note", "type": "string"},
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["UNKNOWN", "PAID", "SENT"]}},
        *[{"name": name, "type": kind} for name, kind in (("shop", "int"), ("hash", "long"))],
        {"name": "coupon", "type": ["null", "string"]},
        *[{"name": name, "type": kind} for name, kind in (("weight", "float"), ("token", "bytes"), ("delta", "long"))],
        {"name": "country", "type": "string"},
    ],
}
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def order(number: int) -> dict[str, Any]:
    return {
        "id": number + 2**40,
        "user": f"user-{number % 997}",
        "item": f"item-{number % 31}",
        "price": number / 7,
        "pieces": number % 7,
        "paid": number % 2 == 0,
        "at": number * 1_001,
        "note": "n" * 48,
        "status": ("UNKNOWN", "PAID", "SENT")[number % 3],
        "shop": number,
        "hash": number * 2**40,
        "coupon": "SUMMER" if number % 3 == 0 else None,
        "weight": number * 0.5,
        "token": b"t" * 16,
        "delta": -number,
        "country": "DE",
    }


def as_json(given: dict[str, Any]) -> bytes:
    at = START + timedelta(microseconds=given["at"])
    token = base64.b64encode(given["token"]).decode()
    shown = {**given, "at": f"{at:%Y-%m-%dT%H:%M:%S.%f}Z", "token": token}
    return json.dumps({name: value for name, value in shown.items() if value is not None}).encode()


def as_avro() -> Callable[[dict[str, Any]], bytes]:
    schema = fastavro.parse_schema(AVRO)

    def write(given: dict[str, Any]) -> bytes:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, {**given, "at": START + timedelta(microseconds=given["at"])})
        return out.getvalue()

    return write


def as_protobuf(decoder: ProtobufDecoder) -> Callable[[dict[str, Any]], bytes]:
    pool = descriptor_pool(descriptor_set(decoder.descriptor_set))
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))

    def write(given: dict[str, Any]) -> bytes:
        at = START + timedelta(microseconds=given["at"])
        made = message(**{name: value for name, value in given.items() if value is not None and name != "at"})
        made.at.seconds, made.at.nanos = int(at.timestamp()), at.microsecond * 1_000
        written: bytes = made.SerializeToString()
        return written

    return write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    orders = [order(number) for number in range(options.records)]
    protobuf = ProtobufDecoder(schema_text=PROTOBUF, message="shop.Order")

    column: Any = arrow_of(read_schema(protobuf.descriptor_set, protobuf.message))
    keywords: dict[str, Any] = {name: value for name, value in protobuf.keywords.items() if name != "of"}
    slow = ProtobufValues(column, **keywords)
    slow._reader = None
    in_json, in_protobuf = list(map(as_json, orders)), list(map(as_protobuf(protobuf), orders))
    ways: dict[str, tuple[ValuesOfSchema, list[bytes]]] = {
        "JSON": (JsonObjects(column), in_json),
        "decode Avro records": (AvroValues(column, schema=json.dumps(AVRO)), list(map(as_avro(), orders))),
        "decode Protobuf records": (ProtobufValues(column, **keywords), in_protobuf),
        "decode Protobuf records without ptars": (slow, in_protobuf),
    }
    arrays = {name: pa.array(values, pa.binary()) for name, (_, values) in ways.items()}
    decoded = {name: decoder.decode(arrays[name]) for name, (decoder, _) in ways.items()}
    assert all(made == decoded["JSON"] for made in decoded.values())
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, (decoder, _values) in ways.items():
            began = time.process_time()
            decoder.decode(arrays[name])
            figures[name].append(options.records / (time.process_time() - began))
    beside = tuple(figures.pop("JSON"))
    measures = [Measure(name, "records/s", tuple(mine), "JSON", beside) for name, mine in figures.items()]
    print_measures(measures, as_json=options.json)


if __name__ == "__main__":
    main()
