"""The transform modules of `headrace from-connect` in a real Spark: ids, versions and documents as the connector's."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyspark.sql import SparkSession
from tests.unit.kafka_connect.made import AVRO, JSON, TEXTS, decided, defined, loaded
from tests.unit.kafka_connect.test_real_connectors import of_file

from headrace.kafka_connect.definition import Definition
from headrace.testing.transforms import KafkaRecord, run_transform

pytestmark = pytest.mark.slow

APACHE = "org.apache.kafka.connect.transforms."


def written(
    definition: Definition, records: list[KafkaRecord], spark: SparkSession, folder: Path, *, text: str = ""
) -> list[tuple[Any, Any, Any]]:
    """The id, the version and the document of each record; the type of the reason in place of a refused one."""
    with loaded(definition, folder, text=text) as (stream,):
        documents = run_transform(stream, records, spark=spark).documents()
    return [
        (each.id, each.version, json.loads(each.document or "null") if each.rejected is None else each.rejected.type)
        for each in documents
    ]


def key(number: int) -> str:
    return json.dumps({"schema": {"type": "struct"}, "payload": {"id": number}})


def event(op: str, row: Any) -> str:
    return json.dumps({"schema": {}, "payload": {"op": op, "before": None, "after": row, "source": {"db": "shop"}}})


def test_a_table_is_written_by_the_field_of_its_key(spark: SparkSession, tmp_path: Path) -> None:
    records = [
        KafkaRecord(event("c", {"id": 1, "name": "ü", "price": 1.10}), key(1)),
        KafkaRecord(event("d", None), key(1)),
        KafkaRecord(None, key(1)),
        KafkaRecord("no JSON", key(2)),
    ]
    assert written(of_file("table_with_key_field.json"), records, spark, tmp_path) == [
        ("1", 0, {"id": 1, "name": "ü", "price": 1.1}),
        ("1", 1, None),
        ("1", 2, None),
        (None, None, "malformed_document"),
    ]


def test_keys_of_json_are_ids_without_quotes(spark: SparkSession, tmp_path: Path) -> None:
    plain = defined(of={"key.ignore": "false", "key.converter": JSON, "key.converter.schemas.enable": "false"})
    keys = ['"k"', "17", "no JSON", ' {"id": 1}', "[1]"]
    refused = (None, None, "missing_id")
    assert written(plain, [KafkaRecord('{"a":1}', each) for each in keys], spark, tmp_path) == [
        *(("k", 0, {"a": 1}), ("17", 1, {"a": 1}), refused, refused, refused),
    ]
    enveloped = defined(of={"key.ignore": "false", "key.converter": JSON})
    keys = [f'{{"schema":{{"type":"x"}}, "payload" : {each}}}' for each in ('"k"', "17", '{"id": 1}', "null")]
    assert written(enveloped, [KafkaRecord('{"a":1}', each) for each in keys], spark, tmp_path) == [
        *(("k", 0, {"a": 1}), ("17", 1, {"a": 1}), refused, refused),
    ]


def test_a_header_is_the_version(spark: SparkSession, tmp_path: Path) -> None:
    definition = defined(of={"key.ignore": "false", "key.converter": TEXTS, "external.version.header": "it's"})
    records = [
        KafkaRecord('{"a":1}', "k", headers=(("it's", b"5"), ("other", b"6"), ("it's", b"17"))),
        KafkaRecord('{"a":1}', "k"),
        KafkaRecord('{"a":1}', "k", headers=(("it's", b"x"),)),
    ]
    assert written(definition, records, spark, tmp_path) == [
        ("k", 17, {"a": 1}),
        (None, None, "missing_version"),
        (None, None, "missing_version"),
    ]


def test_records_go_to_the_indices_of_the_connector(spark: SparkSession, tmp_path: Path) -> None:
    routed = {
        "topics": "Orders,_returns",
        "transforms": "f,r",
        "transforms.f.type": f"{APACHE}InsertField$Value",
        "transforms.f.topic.field": "t",
        "transforms.r.type": f"{APACHE}TimestampRouter",
        "transforms.r.timestamp.format": "yyyy.MM.dd",
    }
    records = [KafkaRecord('{"a":1}', topic=topic) for topic in ("Orders", "_returns")]
    with loaded(defined(of=routed), tmp_path) as (stream,):
        documents = run_transform(stream, records, spark=spark).documents()
    assert {each.id: (each.index, json.loads(each.document or "null")) for each in documents} == {
        "Orders+0+0": ("orders-2025.12.31", {"a": 1, "t": "Orders"}),
        "_returns+0+0": ("returns-2025.12.31", {"a": 1, "t": "_returns"}),
    }


TRANSFORMS = {
    "transforms": "key,id,without,more",
    "transforms.key.type": f"{APACHE}ValueToKey",
    "transforms.key.fields": "id",
    "transforms.id.type": f"{APACHE}ExtractField$Key",
    "transforms.id.field": "id",
    "transforms.without.type": f"{APACHE}ReplaceField$Value",
    "transforms.without.exclude": "id",
    "transforms.without.renames": "AB:ab,c:e",
    "transforms.more.type": f"{APACHE}InsertField$Value",
    "transforms.more.topic.field": "t",
    "transforms.more.offset.field": "o",
    "transforms.more.timestamp.field": "ts",
    "transforms.more.static.field": "s",
    "transforms.more.static.value": "v",
}
SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": name, "type": "int"} for name in ("id", "AB", "c")],
}


def test_json_and_columns_of_avro_become_the_same(spark: SparkSession, tmp_path: Path) -> None:
    value = {"id": 3, "AB": 4, "c": 5}
    encoded = io.BytesIO()
    fastavro.schemaless_writer(encoded, fastavro.parse_schema(SCHEMA), value)
    by_key = {"key.ignore": "false", "key.converter": TEXTS, "behavior.on.null.values": "ignore"}
    as_json = defined(of={**by_key, **TRANSFORMS})
    as_avro = defined(of={**by_key, **TRANSFORMS, "value.converter": AVRO})
    own_schema = decided(as_avro.text).replace(
        'registry="schema_registry_default"', f"schema_text={json.dumps(SCHEMA)!r}"
    )
    document = {"ab": 4, "e": 5, "t": "orders", "o": 0, "ts": 1_767_225_590_000, "s": "v"}
    records = [KafkaRecord(json.dumps(value), "k")]
    assert written(as_json, records, spark, tmp_path) == [("3", 0, document)]
    records = [KafkaRecord(encoded.getvalue(), "k")]
    assert written(as_avro, records, spark, tmp_path, text=own_schema) == [("3", 0, document)]
