"""Debezium's change events in Protobuf and JSON Schema, in the frame of a real registry.

The schemas and values are as Confluent's converters make them of Debezium's: ProtobufConverter names messages by the
last part of a struct's name and loses the names of times; JsonSchemaConverter has them as titles, with null in a oneOf.
Apicurio 2.6 takes no schema of Protobuf whose fields begin with two underscores: flattened rows in Protobuf are in the
unit tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from tests.support.change_events import MICROS, changes_of
from tests.support.confluent_serializers import ConfluentSerializers, Record, columns_of

from headrace.batch.readers import ReaderUnfitError
from headrace.spark.records.events.decoded_events import DecodedEvents, arrow_type
from headrace.stream import AvroDecoder, DebeziumDecoder, JsonSchemaDecoder, ProtobufDecoder
from headrace.stream.ddl import type_tree

pytestmark = pytest.mark.slow

Decode = Callable[..., tuple[list[Any], list[str]]]
AT = datetime.fromtimestamp(MICROS // 1_000_000, UTC).replace(microsecond=MICROS % 1_000_000)
LOCAL = AT.replace(tzinfo=None)
NOON = 43_200_000_000


@pytest.fixture
def decode(connection: str, asked: Any) -> Decode:
    """Decodes the events of the topic as the first run of a batch does: the events, and the reasons in order."""

    def decoded(kind: Any, *records: Record | None) -> tuple[list[Any], list[str]]:
        decoder, kept = asked(DebeziumDecoder(events=kind(registry=connection)))
        events = DecodedEvents(changes_of(arrow_type(type_tree(decoder.column))), kept=kept, **decoder.keywords)
        values, headers = columns_of(records)
        made, refused = events.decode(values, headers=headers)
        made.validate(full=True)
        return made.to_pylist(), [refused[row] for row in sorted(refused)]

    return decoded


def protobuf_envelope(nullable: str) -> str:
    """``nullable``: the label of a field that may be null; none without ``optional.for.nullables``."""
    return f"""syntax = "proto3";
package shop.public.orders;
import "confluent/meta.proto";
import "confluent/type/decimal.proto";
message Envelope {{
  Value before = 1;
  Value after = 2;
  Source source = 3;
  block transaction = 4;
  string op = 5;
  {nullable} int64 ts_ms = 6;
  {nullable} int64 ts_us = 7;
  {nullable} int64 ts_ns = 8;
  message Value {{
    int32 id = 1;
    {nullable} string name = 2;
    confluent.type.Decimal total = 3 [(confluent.field_meta) = {{
      params: [{{key: "precision", value: "10"}}, {{key: "scale", value: "2"}}]
    }}];
    {nullable} int64 at = 4;
    {nullable} int32 day = 5;
    Point place = 6;
    repeated string tags = 7;
    message Point {{ double x = 1; double y = 2; {nullable} bytes wkb = 3; {nullable} int32 srid = 4; }}
  }}
  message Source {{
    string version = 1; string connector = 2; string name = 3; int64 ts_ms = 4; {nullable} string snapshot = 5;
    string db = 6; {nullable} string sequence = 7; {nullable} int64 ts_us = 8; {nullable} int64 ts_ns = 9;
    string schema = 10; string table = 11; {nullable} int64 txId = 12; {nullable} int64 lsn = 13;
    {nullable} int64 xmin = 14;
  }}
  message block {{ string id = 1; int64 total_order = 2; int64 data_collection_order = 3; }}
}}
"""


SOURCE = f'connector: "postgresql" name: "shop" db: "shop" schema: "public" table: "orders" ts_ms: {MICROS // 1_000}'
ROW = f"""id: 1 name: "cup" total {{ value: "\\000\\310" precision: 10 scale: 2 }} at: {MICROS} day: 20458
    place {{ x: 1.5 y: 2 }} tags: "a" """
ROW_READ = {
    **{"id": 1, "name": "cup", "total": Decimal("2.00"), "at": MICROS, "day": 20_458, "tags": ["a"]},
    "place": {"x": 1.5, "y": 2.0, "wkb": None, "srid": None},
}


def test_events_in_protobuf_are_read(serializers: ConfluentSerializers, decode: Decode) -> None:
    def event(text: str) -> Record:
        return serializers.protobuf(protobuf_envelope("optional"), "shop.public.orders.Envelope", text)

    transaction = 'transaction { id: "5:6" total_order: 1 data_collection_order: 2 }'
    records = [
        event(f'op: "c" after {{ {ROW} }} source {{ {SOURCE} lsn: 100 txId: 5 ts_us: {MICROS} }} {transaction}'),
        event(f'op: "u" after {{ id: 1 name: "" }} source {{ {SOURCE} lsn: 108 }}'),
        event(f'op: "d" before {{ id: 1 }} source {{ {SOURCE} lsn: 116 }}'),
        event(f'op: "t" source {{ {SOURCE} lsn: 124 }}'),
        event(f'op: "u" source {{ {SOURCE} lsn: 132 }}'),
    ]
    (created, updated, deleted, truncated, none, tombstone), reasons = decode(ProtobufDecoder, *records, None)
    assert created["value"] == ROW_READ
    assert created["transaction"] == {"id": "5:6", "total_order": 1, "data_collection_order": 2}
    assert created["source"]["txId"] == "5"
    null = dict.fromkeys(ROW_READ)
    assert updated["value"] == {**null, "id": 1, "name": "", "tags": []}
    assert updated["source"]["snapshot"] is None
    assert (deleted["value"], deleted["before"]) == (None, {**null, "id": 1, "tags": []})
    read = [created, updated, deleted, truncated]
    assert [(each["op"], each["position"]) for each in read] == [("c", 100), ("u", 108), ("d", 116), ("t", 124)]
    # ts_us is not set in all but the first.
    assert [each["changed_at"] for each in read] == [AT] * 4
    assert none is tombstone is None
    assert reasons == ["no change event: it has the operation 'u', and no row after it"]


def test_protobuf_has_0_for_null_by_default(serializers: ConfluentSerializers, decode: Decode) -> None:
    """Without optional.for.nullables, as the guide says; what is about the change does not suffer from it."""
    text = f'op: "c" after {{ id: 1 }} source {{ {SOURCE} lsn: 100 }}'
    record = serializers.protobuf(protobuf_envelope(""), "shop.public.orders.Envelope", text)
    (made,), reasons = decode(ProtobufDecoder, record)
    assert not reasons
    assert made["value"] == {**dict.fromkeys(ROW_READ), "id": 1, "name": "", "at": 0, "day": 0, "tags": []}
    assert (made["position"], made["changed_at"]) == (100, AT)


def integer(size: str, title: str | None = None) -> dict[str, Any]:
    named = {} if title is None else {"title": f"io.debezium.time.{title}", "connect.version": 1}
    return {"type": "integer", "connect.type": size, **named}


def optional(kind: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, kind]}


def struct(title: str, **properties: dict[str, Any]) -> dict[str, Any]:
    fields = {name: {**kind, "connect.index": index} for index, (name, kind) in enumerate(properties.items())}
    return {"type": "object", "title": title, "properties": fields}


TEXT = {"type": "string"}
BYTES = {"type": "string", "connect.type": "bytes"}
DECIMAL = {
    **{"type": "number", "title": "org.apache.kafka.connect.data.Decimal", "connect.version": 1},
    **{"connect.type": "bytes", "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"}},
}
VALUE = struct(
    "shop.public.orders.Value",
    id=integer("int32"),
    name=optional(TEXT),
    total=optional(DECIMAL),
    day=optional(integer("int32", "Date")),
    millis=optional(integer("int64", "Timestamp")),
    micros=optional(integer("int64", "MicroTimestamp")),
    nanos=optional(integer("int64", "NanoTimestamp")),
    noon=optional(integer("int32", "Time")),
    noon_micros=optional(integer("int64", "MicroTime")),
    noon_nanos=optional(integer("int64", "NanoTime")),
    zoned=optional({**TEXT, "title": "io.debezium.time.ZonedTimestamp", "connect.version": 1}),
    place=optional(
        struct(
            "io.debezium.data.geometry.Point",
            x={"type": "number", "connect.type": "float64"},
            y={"type": "number", "connect.type": "float64"},
            wkb=optional(BYTES),
            srid=optional(integer("int32")),
        )
    ),
)
ENVELOPE = struct(
    "shop.public.orders.Envelope",
    before=optional(VALUE),
    after=optional(VALUE),
    source=struct(
        "io.debezium.connector.postgresql.Source",
        connector=TEXT,
        name=TEXT,
        ts_ms=integer("int64"),
        ts_us=optional(integer("int64")),
        snapshot=optional(TEXT),
        db=TEXT,
        schema=TEXT,
        table=TEXT,
        txId=optional(integer("int64")),
        lsn=optional(integer("int64")),
    ),
    transaction=optional(
        struct("event.block", id=TEXT, total_order=integer("int64"), data_collection_order=integer("int64"))
    ),
    op=TEXT,
    ts_ms=optional(integer("int64")),
)
NULLS = dict.fromkeys(VALUE["properties"])


def json_event(op: str, before: Any, after: Any, lsn: int) -> dict[str, Any]:
    source = {
        **{"connector": "postgresql", "name": "shop", "ts_ms": MICROS // 1_000, "ts_us": MICROS, "snapshot": "false"},
        **{"db": "shop", "schema": "public", "table": "orders", "txId": 5, "lsn": lsn},
    }
    return {"before": before, "after": after, "source": source, "transaction": None, "op": op, "ts_ms": 5}


def test_events_in_json_schema_are_read(serializers: ConfluentSerializers, decode: Decode) -> None:
    row = {
        **{"id": 1, "name": "cup", "total": "AMg=", "day": 20_458, "millis": MICROS // 1_000, "micros": MICROS},
        **{"nanos": MICROS * 1_000 + 1, "noon": NOON // 1_000, "noon_micros": NOON},
        **{"noon_nanos": NOON * 1_000 + 1, "zoned": "2026-01-05T12:45:00.25Z"},
        "place": {"x": 1.5, "y": 2.0, "wkb": "AQE=", "srid": None},
    }
    # Confluent's Python validates Connect's decimals as numbers only.
    write = {"validate": False}
    records = [
        serializers.json(ENVELOPE, json_event("c", None, row, 100), **write),
        serializers.json(ENVELOPE, json_event("d", {**NULLS, "id": 1}, None, 108), **write),
        serializers.json(ENVELOPE, json_event("c", None, {**row, "noon": -1}, 116), **write),
    ]
    (created, deleted, none, tombstone), reasons = decode(JsonSchemaDecoder, *records, None)
    assert created["value"] == {
        **{"id": 1, "name": "cup", "total": Decimal("2.00"), "day": date(2026, 1, 5), "millis": LOCAL, "micros": LOCAL},
        **{"nanos": "2026-01-05T12:45:00.250000001", "noon": "12:00:00.000", "noon_micros": "12:00:00.000000"},
        **{"noon_nanos": "12:00:00.000000001", "zoned": "2026-01-05T12:45:00.25Z"},
        "place": {"x": 1.5, "y": 2.0, "wkb": b"\x01\x01", "srid": None},
    }
    assert (created["op"], created["position"], created["changed_at"]) == ("c", 100, AT)
    assert (deleted["op"], deleted["value"], deleted["before"]) == ("d", None, {**NULLS, "id": 1})
    assert none is tombstone is None
    assert len(reasons) == 1
    assert "-1 - at `$.after.noon`" in reasons[0]


def test_flattened_rows_in_json_schema_are_read(serializers: ConfluentSerializers, decode: Decode) -> None:
    schema = struct(
        "shop.public.orders.Value",
        id=integer("int32"),
        op=optional(TEXT),
        after=optional(integer("int64", "MicroTimestamp")),
        __v=optional(integer("int32")),
        __deleted=optional(TEXT),
        __lsn=optional(integer("int64")),
    )
    row = {"id": 1, "op": "sold", "after": MICROS, "__v": 3}
    records = [serializers.json(schema, {**row, "__deleted": deleted, "__lsn": 7}) for deleted in ("false", "true")]
    (written, deleted), reasons = decode(JsonSchemaDecoder, *records)
    assert not reasons
    assert (written["op"], written["value"], written["position"]) == (None, {**row, "after": LOCAL}, 7)
    assert (deleted["op"], deleted["before"]) == ("d", {**row, "after": LOCAL})


def test_documents_of_mongodb_are_refused_in_words(serializers: ConfluentSerializers, decode: Decode) -> None:
    fields = [{"name": name, "type": ["null", "string"]} for name in ("before", "after", "op")]
    schema = {"type": "record", "name": "shop.orders.Envelope", "fields": fields}
    record = serializers.avro(schema, {"before": None, "after": json.dumps({"_id": 1}), "op": "c"})
    with pytest.raises(ReaderUnfitError, match=r"describes events whose row is a text, as MongoDB's documents are"):
        decode(AvroDecoder, record)
