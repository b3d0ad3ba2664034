"""Records of some hundred kilobytes whose lists have elements of two or three bytes, each with 400 fields: their
columns would take gigabytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from tests.support import avro_examples, protobuf_examples
from tests.support.change_events import changes_of

from headrace.formats import avro_schema, protobuf_schema
from headrace.formats.schema_text import SchemaText
from headrace.spark.records.avro.values import AvroValues
from headrace.spark.records.events.change_events import ChangeEvents
from headrace.spark.records.exact_columns import MOST_CELLS, TooManyCellsError
from headrace.spark.records.json_objects import JsonObjects
from headrace.spark.records.json_schema_values import JsonSchemaValues
from headrace.spark.records.protobuf.values import ProtobufValues

FIELDS = 400
ELEMENTS = MOST_CELLS // FIELDS
"""More of them are refused."""
WIDE = pa.struct([(f"f{n}", pa.int64()) for n in range(FIELDS)])
Decode = Callable[[pa.Array], Any]
Made = tuple[Decode, Callable[[int], bytes]]
"""A decoder, and a value of so many elements."""


def json_objects() -> Made:
    kind = pa.struct([("w", pa.list_(WIDE))])
    return JsonObjects(kind).decode, lambda number: b'{"w":[' + b",".join([b"{}"] * number) + b"]}"


def json_maps() -> Made:
    kind = pa.struct([("w", pa.map_(pa.string(), WIDE))])
    return JsonObjects(kind).decode, lambda number: b'{"w":{%b}}' % b",".join(b'"%d":{}' % n for n in range(number))


def json_nulls() -> Made:
    kind = pa.struct([("w", pa.list_(WIDE))])
    return JsonObjects(kind).decode, lambda number: b'{"w":[' + b",".join([b"null"] * number) + b"]}"


def json_schema() -> Made:
    properties = {
        "w": {"type": "array", "items": {"properties": {f"f{n}": {"type": "integer"} for n in range(FIELDS)}}}
    }
    kind = pa.struct([("w", pa.list_(WIDE))])
    decode = JsonSchemaValues(kind, schema=json.dumps({"properties": properties})).decode
    return decode, json_objects()[1]


def change_events() -> Made:
    row = pa.struct([("w", pa.list_(WIDE))])
    decode = ChangeEvents(changes_of(row)).decode
    return decode, lambda number: b'{"op":"c","source":{},"after":%b}' % json_objects()[1](number)


def mongo_documents() -> Made:
    def value(number: int) -> bytes:
        return json.dumps({"op": "c", "source": {}, "after": json_objects()[1](number).decode()}).encode()

    return change_events()[0], value


def protobuf(kind: str = "repeated Wide w = 1;", key: bytes = b"") -> Made:
    fields = " ".join(f"int64 f{n} = {n};" for n in range(1, FIELDS + 1))
    schema = protobuf_examples.compiled(f"message Wide {{ {fields} }} {kind}")
    column = protobuf_examples.arrow_of(protobuf_schema.read_schema(schema, "shop.Order"))
    return ProtobufValues(
        column, schema=schema, message="shop.Order"
    ).decode, lambda number: (b"\x0a\x00" + key) * number


def avro(*, added: int = 0) -> Made:
    """A list whose elements are null, or have fields that were added since."""
    given = [{"name": f"f{n}", "type": "long", "default": 0} for n in range(FIELDS)]
    wide = {"type": "record", "name": "Wide", "fields": given[: FIELDS - added]}
    written = avro_examples.record(("w", {"type": "array", "items": wide if added else ["null", wide]}))
    wanted = json.loads(json.dumps(written))
    if added:
        wanted["fields"][0]["type"]["items"]["fields"] = given
    text = json.dumps(wanted)
    column = avro_examples.arrow_of(avro_schema.read_schema(text), "number")
    decode = AvroValues(column, schema=text, writer=SchemaText(json.dumps(written)).to_json()).decode
    element: Any = {f"f{n}": 0 for n in range(FIELDS - added)} if added else None
    return decode, lambda number: avro_examples.encoded(written, {"w": [element] * number})


@pytest.mark.parametrize(
    "make",
    [
        json_objects,
        json_maps,
        json_nulls,
        json_schema,
        change_events,
        mongo_documents,
        protobuf,
        lambda: protobuf("map<int32, Wide> w = 1;"),
        avro,
        lambda: avro(added=FIELDS - 1),
    ],
    ids=[
        "objects",
        "maps",
        "nulls",
        "JSON Schema",
        "events",
        "MongoDB",
        "Protobuf",
        "Protobuf map",
        "Avro",
        "Avro, added fields",
    ],
)
@pytest.mark.parametrize("others", [0, 299], ids=["alone", "among others"])
def test_a_record_of_too_many_fields_is_reported(make: Callable[[], Made], others: int) -> None:
    decode, value_of = make()
    small = value_of(2)
    assert decode(pa.array([small] * 3, pa.binary()))[1] == {}
    with pytest.raises(TooManyCellsError):
        decode(pa.array([small] * others + [value_of(ELEMENTS + 1)], pa.binary()))


@pytest.mark.parametrize("make", [json_objects, protobuf, avro], ids=["objects", "Protobuf", "Avro"])
def test_several_records_of_many_fields_are_divided(make: Callable[[], Made]) -> None:
    """Each is decoded: together they would take gigabytes."""
    decode, value_of = make()
    value = value_of(ELEMENTS // 2)
    assert decode(pa.array([value], pa.binary()))[1] == {}
    with pytest.raises(TooManyCellsError):
        decode(pa.array([value] * 12, pa.binary()))


def test_a_cut_off_record_is_not_read_in_vain() -> None:
    decode, value_of = json_objects()
    with pytest.raises(TooManyCellsError):
        decode(pa.array([value_of(ELEMENTS + 1)[:-2]], pa.binary()))


def test_objects_that_no_list_declares_are_not_counted() -> None:
    kind = pa.struct([("raw", pa.string()), ("w", pa.list_(WIDE))])
    others = [{"a": 1}] * (ELEMENTS + 1)
    value = json.dumps({"other": others, "raw": others, "w": [{}]}).encode()
    (made,), refused = JsonObjects(kind).decode(pa.array([value], pa.binary()))
    assert (len(made["w"]), refused) == (1, {})


@pytest.mark.parametrize("make", [json_objects, protobuf, avro], ids=["objects", "Protobuf", "Avro"])
def test_a_large_record_of_fewer_fields_is_decoded(make: Callable[[], Made]) -> None:
    decode, value_of = make()
    values, refused = decode(pa.array([value_of(ELEMENTS // 20)], pa.binary()))
    assert (len(values[0]["w"]), refused) == (ELEMENTS // 20, {})


def test_braces_in_a_text_are_no_objects() -> None:
    kind = pa.struct([("text", pa.string()), ("w", pa.list_(WIDE))])
    text = "{" * (ELEMENTS + 1)
    (value,), refused = JsonObjects(kind).decode(pa.array([json.dumps({"text": text}).encode()], pa.binary()))
    assert (value["text"].as_py(), refused) == (text, {})


def test_elements_in_groups_are_counted_too() -> None:
    fields = " ".join(f"optional int64 f{n} = {n};" for n in range(1, FIELDS + 1))
    schema = protobuf_examples.compiled(f"repeated group W = 1 {{ {fields} }}", "", 'syntax = "proto2";')
    column = protobuf_examples.arrow_of(protobuf_schema.read_schema(schema, "shop.Order"))
    decode = ProtobufValues(column, schema=schema, message="shop.Order").decode
    (value,), _ = decode(pa.array([b"\x0b\x0c" * 3], pa.binary()))
    assert len(value["w"]) == 3
    with pytest.raises(TooManyCellsError):
        decode(pa.array([b"\x0b\x0c" * (ELEMENTS + 1)], pa.binary()))
