"""Change events that a real Debezium 3.6.1 has sent of a real PostgreSQL: in JSON, flattened, and in Avro."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import text_format
from tests.support.avro_examples import encoded
from tests.support.change_events import changes_of, decode
from tests.support.protobuf_examples import message_class

from headrace.formats.protobuf_compiler import compile_schema
from headrace.formats.schema_text import SchemaText
from headrace.kept_values import KeptValues
from headrace.spark.records.events.decoded_events import DecodedEvents, arrow_type
from headrace.stream import AvroDecoder, DebeziumDecoder, ProtobufDecoder
from headrace.stream.ddl import type_tree

RECORDED = Path(__file__).parents[3] / "support" / "debezium_orders.jsonl"
RECORDS = [json.loads(line) for line in RECORDED.read_text().splitlines()]
ORDERS = pa.struct(
    [("id", pa.int32()), ("name", pa.string()), ("amount", pa.decimal128(10, 2)), ("at", pa.timestamp("us", "UTC"))]
)
TYPES: dict[str, tuple[pa.DataType, Any, Any]] = {
    "i8": (pa.int64(), -(2**63), 2**63 - 1),
    "n38_4": (pa.decimal128(38, 4), Decimal("-" + "9" * 34 + ".9999"), Decimal("9" * 34 + ".9999")),
    "n5_0": (pa.decimal128(5, 0), Decimal(-99999), Decimal(99999)),
    "f8": (pa.float64(), -1.7976931348623157e308, 1.7976931348623157e308),
    "b": (pa.bool_(), False, True),
    "t": (pa.string(), "", 'ÄÖÜ 漢字 😀 "quoted" \\ back'),
    "ba": (pa.binary(), b"", b"\x00\xff\x10"),
    "tstz": (pa.string(), "0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z"),
    "iv": (pa.int64(), -(2**63), 2**63 - 1),
    "u": (pa.string(), "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
    "j": (pa.string(), "{}", '{"a": [1, 2.50, null], "b":  "ü"}'),
    "ai": (pa.list_(pa.int32()), [], [1, None, 3]),
    "an": (pa.list_(pa.decimal128(10, 2)), [], [Decimal("1.50"), None]),
    "ats": (pa.list_(pa.string()), [], ["2026-11-29T23:00:00.000000Z"]),
    "m": (pa.decimal128(19, 2), Decimal("-92233720368547758.08"), Decimal("92233720368547758.07")),
    "bit10": (pa.binary(), b"", b"\x01\x02"),
    "pt": (pa.struct([("x", pa.float64()), ("y", pa.float64())]), {"x": 0.0, "y": 0.0}, {"x": 1.5, "y": -2.5}),
    "tsv": (pa.string(), "", "'a' 'cat' 'fat'"),
}


def recorded(topic: str, *offsets: int) -> list[bytes | None]:
    return [
        None if each["value"] is None else each["value"].encode()
        for each in RECORDS
        if each["topic"] == topic and (not offsets or each["offset"] in offsets)
    ]


def test_every_event_of_a_table_is_read() -> None:
    made, refused = decode(*recorded("orders"), row=ORDERS)
    assert not refused
    ops = "".join("-" if each is None else each["op"] for each in made)
    assert ops == "rrrcud-cd-cuud-currrruuurrrruuctcc"
    assert made[12]["value"]["amount"] == Decimal("3.00")
    assert made[5]["before"] == {"id": 10, "name": None, "amount": None, "at": None}
    assert all(each is None or each["position"] is not None for each in made)
    # The rows of an incremental snapshot have no LSN, but a sequence.
    assert [made[row]["position"] for row in (23, 24)] == [26611336, 26612103]


def test_a_transaction_over_a_snapshot_is_below_its_rows() -> None:
    """Why version_from="position" is no order over a snapshot that was taken again: the guide tells."""
    made, _ = decode(*recorded("orders"), row=ORDERS)
    read, written = made[17], made[21]
    assert (read["op"], written["op"]) == ("r", "u")
    assert read["value"]["id"] == written["value"]["id"] == 1
    assert written["position"] < read["position"]


@pytest.mark.parametrize("name", TYPES)
def test_a_value_at_its_edges_is_exact(name: str) -> None:
    kind, least, most = TYPES[name]
    made, refused = decode(*recorded("types", 0, 1, 2), row=pa.struct([(name, kind)]))
    assert not refused
    assert [each["value"][name] for each in made] == [least, most, None]


@pytest.mark.parametrize("name", ["d", "ts", "ts3"])
def test_an_infinite_time_is_refused_by_its_year(name: str) -> None:
    kind = pa.date32() if name == "d" else pa.timestamp("us")
    _, refused = decode(
        *recorded("types", 5), row=pa.struct([(name, kind)]), times="milliseconds" if name == "ts3" else "microseconds"
    )
    assert "the year is not 1 to 9999" in refused[0]


def test_a_message_is_no_row() -> None:
    (made,), refused = decode(*recorded("message"), row=ORDERS)
    assert not refused
    assert (made["op"], made["value"]) == ("m", None)


def test_flattened_events_give_the_same_rows() -> None:
    lines = (RECORDED.parent / "debezium_flat.jsonl").read_text().splitlines()
    made, refused = decode(*(json.loads(line)["value"].encode() for line in lines), row=ORDERS)
    assert not refused
    assert "".join(each["op"] for each in made).startswith("rrrcudcdcuudcurrrruuurrrruuc")
    assert made[10]["value"]["amount"] == Decimal("3.00")
    assert made[5]["before"]["id"] == 10
    assert all(each["position"] is not None for each in made)
    assert made[0]["source"]["table"] == "orders"


AVRO = json.loads((RECORDED.parent / "debezium_avro.json").read_text())


def in_avro(topic: str) -> tuple[DebeziumDecoder, list[bytes | None]]:
    """The decoder by the schema of a topic's records, and their values without the frame of the registry."""
    held = [each["value"] and base64.b64decode(each["value"]) for each in AVRO["records"] if each["topic"] == topic]
    (id_,) = {int.from_bytes(value[1:5], "big") for value in held if value}
    decoder = DebeziumDecoder(events=AvroDecoder(schema_text=AVRO["schemas"][str(id_)]))
    return decoder, [value and value[5:] for value in held]


def decoded_by(
    decoder: DebeziumDecoder, values: Sequence[bytes | None], tmp_path: Path
) -> tuple[list[Any], dict[int, str]]:
    kind = changes_of(arrow_type(type_tree(decoder.column)))
    made = DecodedEvents(kind, kept=KeptValues(str(tmp_path)), **decoder.keywords)
    decoded, refused = made.decode(pa.array(values, pa.binary()), headers=pa.nulls(len(values)))
    decoded.validate(full=True)
    assert decoded.type == kind
    return decoded.to_pylist(), refused


def test_events_in_avro_give_the_same_rows(tmp_path: Path) -> None:
    made, refused = decoded_by(*in_avro("orders"), tmp_path)
    # An update that left a large value as it was.
    assert all("did not send 'big'" in reason for reason in refused.values())
    ops = "".join("-" if each is None else each["op"] for each in made)
    assert ops.startswith("rrr")
    rows = [each for each in made if each is not None]
    assert {each["op"] for each in rows} >= {"c", "d", "r", "u"}
    assert all(each["position"] is not None for each in rows)
    assert all((each["value"] is None) == (each["op"] in "dt") for each in rows)
    assert rows[0]["source"]["connector"] == "postgresql"
    assert rows[0]["value"]["amount"] == Decimal("1.25")


def test_values_in_avro_are_exact(tmp_path: Path) -> None:
    (least, most, none), refused = decoded_by(*in_avro("types"), tmp_path)
    # 24:00:00 is no time of a day.
    assert list(refused) == [1]
    assert most is None
    row = least["value"]
    assert row["n38_4"] == Decimal("-" + "9" * 34 + ".9999")
    assert row["n_any"] == "-123456789012345678901234567890.123456789"
    assert row["d"] == date(1, 1, 1)
    assert row["ts"] == datetime(1, 1, 1)
    assert row["ts3"] == datetime(1899, 12, 31, 23, 59, 59, 999_000)
    assert row["ti3"] == "00:00:00.000"
    assert row["m"] == "-92233720368547758.08"
    assert none["value"]["n38_4"] is None


ROW = {"type": "record", "name": "Value", "fields": [{"name": "id", "type": "int"}]}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "fields": [{"name": "after", "type": ["null", ROW]}, {"name": "op", "type": ["null", "string"]}],
}
FLATTENED = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "__op", "type": ["null", "string"]},
        {"name": "__deleted", "type": ["null", "string"]},
    ],
}


def test_an_unknown_operation_in_avro_is_refused(tmp_path: Path) -> None:
    decoder = DebeziumDecoder(events=AvroDecoder(schema_text=json.dumps(ENVELOPE)))
    values = [encoded(ENVELOPE, {"after": {"id": 1}, "op": op}) for op in ("x", None, "c", "t", "m")]
    made, refused = decoded_by(decoder, [*values, None], tmp_path)
    assert list(refused) == [0, 1]
    assert "has the operation 'x'" in refused[0]
    assert [each and (each["op"], each["value"]) for each in made[2:]] == [
        ("c", {"id": 1}),
        ("t", None),
        ("m", None),
        None,
    ]


def test_a_flattened_row_in_avro_may_say_no_operation(tmp_path: Path) -> None:
    decoder = DebeziumDecoder(events=AvroDecoder(schema_text=json.dumps(FLATTENED)))
    said = [("x", "false"), (None, "false"), ("m", "false"), (None, "TRUE")]
    values = [encoded(FLATTENED, {"id": 1, "__op": op, "__deleted": deleted}) for op, deleted in said]
    made, refused = decoded_by(decoder, values, tmp_path)
    assert list(refused) == [0]
    assert [(each["op"], each["value"]) for each in made[1:]] == [(None, {"id": 1}), ("m", None), ("d", None)]


def record(name: str, *fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": each, "type": kind} for each, kind in fields]}


@pytest.mark.parametrize(
    "more",
    [
        {"after": "x"},
        {"op": "c", "after": "x"},
        {"op": "c", "after": "x", "before": "y", "source": "z", "__v": "1"},
    ],
)
def test_a_flattened_table_may_have_columns_of_an_envelope(more: dict[str, str], tmp_path: Path) -> None:
    schema = record("Value", ("id", "int"), *((name, "string") for name in more), ("__deleted", "string"))
    decoder = DebeziumDecoder(events=AvroDecoder(schema_text=json.dumps(schema)))
    values = [encoded(schema, {"id": 1, **more, "__deleted": deleted}) for deleted in ("false", "true")]
    made, refused = decoded_by(decoder, values, tmp_path)
    assert not refused
    row = {"id": 1, **more}
    assert [(each["op"], each["value"], each["before"]) for each in made] == [(None, row, None), ("d", None, row)]


def test_a_time_of_0_is_none(tmp_path: Path) -> None:
    """proto3 has it for what is not set."""
    source = record("Source", ("connector", "string"), ("ts_ms", "long"), ("ts_us", "long"))
    schema = record("Envelope", ("after", ["null", ROW]), ("source", source), ("op", "string"), ("ts_ms", "long"))
    decoder = DebeziumDecoder(events=AvroDecoder(schema_text=json.dumps(schema)))
    times = [(0, 0, 0), (0, 2, 0), (0, 2, 3), (4, 2, 3)]
    values = [
        encoded(
            schema,
            {"after": {"id": 1}, "op": "c", "ts_ms": sent, "source": {"connector": "x", "ts_ms": ms, "ts_us": us}},
        )
        for us, ms, sent in [*times, (0, 0, 3)]
    ]
    made, _ = decoded_by(decoder, values, tmp_path)
    micros = [each["changed_at"] and each["changed_at"].microsecond for each in made]
    assert micros == [None, 2_000, 2_000, 4, 3_000]


IN_PROTOBUF = """syntax = "proto3"; message Value {
  int32 id = 1; string after = 2; optional int32 __v = 3; string __deleted = 4; string __op = 5; int64 __lsn = 6;
  int64 __source_ts_ms = 7; int64 __source_ts_us = 8;
}"""


def test_flattened_rows_in_protobuf_are_read(tmp_path: Path) -> None:
    decoder = DebeziumDecoder(events=ProtobufDecoder(schema_text=IN_PROTOBUF, message="Value"))
    made = message_class(compile_schema(SchemaText(IN_PROTOBUF)), "Value")
    texts = [
        'id: 1 after: "x" __v: 0 __deleted: "false" __op: "u" __lsn: 100 __source_ts_ms: 5',
        'id: 1 __deleted: "true" __op: "d" __lsn: 108',
    ]
    values = [text_format.Parse(text, made()).SerializeToString() for text in texts]
    (updated, deleted), refused = decoded_by(decoder, values, tmp_path)
    assert not refused
    assert updated["value"] == {"id": 1, "after": "x", "__v": 0}
    assert (updated["op"], updated["position"], updated["changed_at"].microsecond) == ("u", 100, 5_000)
    assert (deleted["op"], deleted["position"], deleted["changed_at"]) == ("d", 108, None)
    assert (deleted["value"], deleted["before"]) == (None, {"id": 1, "after": "", "__v": None})
