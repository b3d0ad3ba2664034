"""What Confluent's serializers write with a real registry is decoded: each format, its references and its versions."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from tests.support.avro_examples import ARROW
from tests.support.confluent_serializers import ConfluentSerializers, Record, columns_of, id_in_header

from headrace.devstack.registry import RegistryServer
from headrace.registry.client import SchemaUnknownError
from headrace.spark.records.framed_values import FramedValues
from headrace.stream import AvroDecoder, JsonSchemaDecoder, ProtobufDecoder
from headrace.stream.ddl import ColumnType, parse_columns

pytestmark = pytest.mark.slow

Decode = Callable[..., tuple[list[Any], list[str]]]

CURRENCY = {"type": "enum", "name": "shop.Currency", "symbols": ["EUR", "USD"]}
MONEY = {"type": "record", "name": "shop.Money", "fields": [{"name": "currency", "type": "shop.Currency"}]}
MONEY_FILE = """syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Money { string currency = 1; int64 cents = 2; google.protobuf.Timestamp at = 3; }
"""
ORDER_FILE = """syntax = "proto3";
package shop;
import "confluent/meta.proto";
import "google/protobuf/timestamp.proto";
import "google/type/date.proto";
import "shop/money.proto";
message Other { string name = 1; }
message Order {
  int32 id = 1;
  Money net = 2;
  google.protobuf.Timestamp at = 3;
  google.type.Date day = 4 [(confluent.field_meta) = {doc: "of delivery"}];
  repeated Line lines = 5;
  map<string, int32> stock = 6;
  optional string note = 7;
  message Line { int32 n = 1; message Part { string name = 1; } }
}
"""
IMPORTS = {"shop/money.proto": MONEY_FILE}
ORDER = (
    'id: 5 net { currency: "EUR" cents: 3 at { seconds: 1700000000 } } at { seconds: 1700000000 nanos: 5000 } '
    'day { year: 2026 month: 1 day: 5 } lines { n: 7 } stock { key: "cup" value: 2 }'
)
AT = datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)
ORDER_ROW = {
    "id": 5,
    "net": {"currency": "EUR", "cents": 3, "at": AT},
    "at": AT.replace(microsecond=5),
    "day": datetime.date(2026, 1, 5),
    "lines": [{"n": 7}],
    "stock": [("cup", 2)],
    "note": None,
}
DRAFT = "http://json-schema.org/draft-07/schema#"


def order(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "shop.Order", "fields": [{"name": name, "type": kind} for name, kind in fields]}


def message(fields: str) -> str:
    return f'syntax = "proto3"; package shop; message Order {{ {fields} }}'


def json_schema(*, title: str = "Order", **more: Any) -> dict[str, Any]:
    return {"$schema": DRAFT, "title": title, "type": "object", **more}


@pytest.fixture
def decode(connection: str, asked: Any) -> Decode:
    """Decodes records of the topic as the first run of a batch does: the rows, and the reasons in order."""

    def decoded(kind: Any, *records: Record | None, part: str = "value", **fields: Any) -> tuple[list[Any], list[str]]:
        decoder, kept = asked(kind(registry=connection, **fields), part)
        columns = pa.struct([(column.name, arrow_of(column.type)) for column in parse_columns(decoder.column)])
        values, headers = columns_of(records)
        rows, refused = FramedValues(columns, kept=kept, **decoder.keywords).decode(values, headers=headers)
        return rows.to_pylist(), [refused[row] for row in sorted(refused)]

    return decoded


def arrow_of(kind: ColumnType) -> pa.DataType:
    parts = [arrow_of(part.type) for part in kind.parts]
    if kind.name == "struct":
        return pa.struct([(part.name, made) for part, made in zip(kind.parts, parts, strict=True)])
    if kind.name == "array":
        return pa.list_(pa.field("element", parts[0]))
    return pa.map_(*parts) if kind.name == "map" else ARROW[kind.name.upper()]


def unframed(data: bytes) -> Record:
    return data, []


def cut(record: Record) -> Record:
    return record[0][:-1], record[1]


def id_of(record: Record) -> int:
    return int.from_bytes(record[0][1:5], "big")


def test_avro_has_its_references_and_versions(serializers: ConfluentSerializers, decode: Decode) -> None:
    refers_to = {"shop.Currency": CURRENCY, "shop.Money": MONEY}
    first = order(("id", "int"))
    newest = order(("id", "long"), ("net", ["null", "shop.Money"]))
    newest["fields"][1]["default"] = None
    records = [
        serializers.avro(first, {"id": 1}),
        serializers.avro(newest, {"id": 2, "net": {"currency": "USD"}}, refers_to=refers_to),
    ]
    rows, reasons = decode(AvroDecoder, *records, None, cut(records[1]))
    assert rows == [{"id": 1, "net": None}, {"id": 2, "net": {"currency": "USD"}}, None, None]
    assert len(reasons) == 1
    assert reasons[0].endswith(f"(schema {id_of(records[1])})")


@pytest.mark.parametrize("conf", [{}, {"skip_known_types": False}, {"normalize_schemas": True}], ids=str)
def test_protobuf_is_decoded_with_what_its_file_imports(
    serializers: ConfluentSerializers, decode: Decode, conf: dict[str, Any]
) -> None:
    """Without known types skipped, Google's files are references too."""
    write = serializers.protobuf
    records = [
        write(ORDER_FILE, "shop.Order", ORDER, imports=IMPORTS, **conf),
        write(ORDER_FILE, "shop.Other", 'name: "x"', imports=IMPORTS, **conf),
        write(ORDER_FILE, "shop.Order.Line.Part", 'name: "y"', imports=IMPORTS, **conf),
    ]
    # A map is a message of its own within Order, before Line.
    assert [record[0][5:9] for record in records] == [b"\x02\x02\x08\x05", b"\x00\n\x01x", b"\x06\x02\x02\x00"]
    assert len({id_of(record) for record in records}) == 1
    rows, reasons = decode(ProtobufDecoder, *records, None, message="shop.Order")
    assert rows == [ORDER_ROW, None, None, None]
    assert [reason.partition("its message is ")[2] for reason in reasons] == [
        "shop.Other, and that of the columns is shop.Order",
        "shop.Order.Line.Part, and that of the columns is shop.Order",
    ]
    assert decode(ProtobufDecoder, *records)[0] == [None, {"name": "x"}, None]
    assert decode(ProtobufDecoder, *records, message="shop.Order.Line.Part")[0] == [None, None, {"name": "y"}]


def test_json_has_its_references(serializers: ConfluentSerializers, decode: Decode) -> None:
    money = json_schema(title="Money", properties={"cents": {"type": "integer"}})
    schema = json_schema(
        properties={
            "id": {"type": "integer"},
            "net": {"$ref": "money.json"},
            "at": {"type": "string", "format": "date-time"},
        },
        required=["id"],
    )
    value = {"id": 1, "net": {"cents": 3}, "at": "2023-11-14T22:13:20Z"}
    record = serializers.json(schema, value, refers_to={"money.json": money})
    wrong = serializers.json(schema, {"net": {}}, refers_to={"money.json": money}, validate=False)
    rows, reasons = decode(JsonSchemaDecoder, record, None, wrong, cut(record))
    assert rows == [{**value, "at": AT}, None, None, None]
    assert reasons[0] == f"no JSON object of Order: it has no field `id` - at `$` (schema {id_of(record)})"
    assert len(reasons) == 2


@pytest.mark.parametrize("part", ["key", "value"])
def test_the_id_may_be_in_a_header(registry: RegistryServer, decode: Decode, part: str) -> None:
    """Confluent's own ``header_schema_id_serializer`` writes GUIDs, which Apicurio 2.6 does not have."""
    text, schema = message("int32 id = 1;") + " message Other { int32 id = 1; }", order(("id", "int"))
    avro, protobuf, as_json = (ConfluentSerializers(registry.url) for _ in range(3))
    more: dict[str, Any] = {"part": part, "schema_id_serializer": id_in_header}
    named = json_schema(properties={"id": {"type": "integer"}})
    wanted: dict[str, Any] = {"schema_text": text, "message": "shop.Other"}
    for kind, record, fields in (
        (AvroDecoder, avro.avro(schema, {"id": 1}, **more), {"schema_text": json.dumps(schema)}),
        (ProtobufDecoder, protobuf.protobuf(text, "shop.Other", "id: 1", **more), wanted),
        (JsonSchemaDecoder, as_json.json(named, {"id": 1}, **more), {"schema_text": json.dumps(named)}),
    ):
        assert record[1][0][0] == f"__{part}_schema_id"
        assert decode(kind, record, part=part, **fields) == ([{"id": 1}], []), kind


def test_a_value_of_another_format_is_refused_with_its_id(
    registry: RegistryServer, serializers: ConfluentSerializers, decode: Decode
) -> None:
    # A subject of Apicurio has one format.
    protobuf, as_json = (ConfluentSerializers(registry.url) for _ in range(2))
    others = [
        protobuf.protobuf(message("int32 id = 1;"), "shop.Order", "id: 1"),
        as_json.json(json_schema(properties={"id": {"type": "integer"}}), {"id": 1}),
    ]
    good, bad = (serializers.avro(order(("id", "int"), *more), {"id": 1, "x": 1}) for more in ((), [("x", "int")]))
    refused = id_of(bad)
    reader = json.dumps(order(("id", "int")))
    rows, reasons = decode(AvroDecoder, *others, good, bad, schema_text=reader, refused_ids=(refused,))
    assert rows == [None, None, {"id": 1}, None]
    assert reasons == [
        f"of schema {id_of(others[0])}, which is Protobuf and not Avro",
        f"of schema {id_of(others[1])}, which is JSON Schema and not Avro",
        f"of schema {refused}, which refused_ids names",
    ]


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b"\x00" * 5, 0),
        (b"\x01" * 17, "01010101-0101-0101-0101-010101010101"),
    ],
)
def test_what_only_looks_like_a_frame_can_be_refused(
    serializers: ConfluentSerializers, decode: Decode, head: bytes, named: Any
) -> None:
    """Apicurio 2.6 knows no GUIDs."""
    records = serializers.avro(order(("id", "int")), {"id": 1}), unframed(head + b"x")
    with pytest.raises(SchemaUnknownError, match=f"{named}.*refused_ids"):
        decode(AvroDecoder, *records)
    rows, reasons = decode(AvroDecoder, *records, refused_ids=(named,))
    assert rows == [{"id": 1}, None]
    assert reasons == [f"of schema {named}, which refused_ids names"]


def test_protobuf_is_read_by_another_version(serializers: ConfluentSerializers, decode: Decode) -> None:
    big = 2**40
    write = serializers.protobuf
    records = [
        write(message("int32 id = 1; string gone = 2;"), "shop.Order", 'id: 1 gone: "x"'),
        write(message("string id = 1;"), "shop.Order", 'id: "x"'),
        write(message("int64 id = 1; optional string note = 3;"), "shop.Order", f'id: {big} note: "n"'),
    ]
    misfit, newest = id_of(records[1]), id_of(records[2])
    rows, reasons = decode(ProtobufDecoder, *records)
    assert rows == [{"id": 1, "note": None}, None, {"id": big, "note": "n"}]
    words = "no Protobuf message shop.Order: it was written by another schema: `$.id` was string, and is read as"
    assert reasons == [f"{words} int64 (schema {misfit})"]
    rows, reasons = decode(ProtobufDecoder, *records, version=1)
    assert rows == [{"id": 1, "gone": "x"}, None, None]
    assert reasons[0] == f"{words} int32 (schema {misfit})"
    assert f"{big}" in reasons[1]
    assert reasons[1].endswith(f"at `$.id` (schema {newest})")
    own = {"schema_text": message("string note = 3; int64 id = 1;"), "message": "shop.Order"}
    rows, _ = decode(ProtobufDecoder, *records, **own)
    assert rows == [{"note": "", "id": 1}, None, {"note": "n", "id": big}]


def test_json_is_read_by_another_version(serializers: ConfluentSerializers, decode: Decode) -> None:
    """Each value is valid by its writer's schema, which may forbid what the reader's allows."""
    id_, note = {"id": {"type": "integer"}}, {"note": {"type": "string"}}
    closed = json_schema(properties=id_, additionalProperties=False)
    newest = json_schema(properties={**id_, **note})
    records = [
        serializers.json(closed, {"id": 1}),
        serializers.json(closed, {"id": 2, "note": "x"}, validate=False),
        serializers.json(json_schema(properties={"id": {"type": "string"}}), {"id": "x"}),
        serializers.json(newest, {"id": 3, "note": "n", "more": 1}),
    ]
    rows, reasons = decode(JsonSchemaDecoder, *records)
    assert rows == [{"id": 1, "note": None}, None, None, {"id": 3, "note": "n"}]
    assert reasons[0] == (
        "no JSON object of Order: it has the field `note`, which the schema does not allow - at `$` "
        f"(schema {id_of(records[0])})"
    )
    assert "`$.id`" in reasons[1]
    assert reasons[1].endswith(f"(schema {id_of(records[2])})")
    assert decode(JsonSchemaDecoder, *records, version=1)[0] == [{"id": 1}, None, None, {"id": 3}]
    own = json.dumps(json_schema(properties=note))
    assert decode(JsonSchemaDecoder, *records, schema_text=own)[0] == [
        {"note": None},
        None,
        {"note": None},
        {"note": "n"},
    ]
