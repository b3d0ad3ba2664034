"""Avro by a schema of the definition, in a real Spark: its columns, its documents, and a host without the library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType
from tests.support.avro_examples import VALUES, arrow_of, encoded, record
from tests.unit.formats.test_avro_schema import COLUMNS

from headrace.formats.avro_schema import read_schema
from headrace.spark.records.arrow_types import arrow_type
from headrace.stream import AvroDecoder, DecoderDefinition, ElasticsearchOutput, KafkaInput, Stream
from headrace.testing.extensions import check_decoder
from headrace.testing.transforms import run_transform

pytestmark = pytest.mark.slow


def stream_of(decoder: DecoderDefinition, tmp_path: Any, **fields: Any) -> Stream:
    return Stream(
        name="orders",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="orders", value_decoder=decoder),
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        **fields,
    )


def test_spark_has_the_columns_that_the_schema_says(spark: SparkSession) -> None:
    for type_, _ in COLUMNS:
        schema = json.dumps(record(("value", type_)))
        made = read_schema(schema)
        for decimals in ("number", "text"):
            spoken = arrow_type(DataType.fromDDL(made.columns(decimals)))
            assert str(spoken) == str(arrow_of(made, decimals)), schema


def test_values_of_all_types_keep_the_contract(spark: SparkSession) -> None:
    """A record with a field of each: what a transform gets, and what is refused."""
    fields = [(f"f{number}", kind) for number, (kind, _, _) in enumerate(VALUES.values())]
    schema: Any = record(*fields)
    names: set[str] = set()
    for field in schema["fields"]:
        field["type"] = defined_once(field["type"], names)
    value = encoded(schema, {f"f{number}": given for number, (_, given, _) in enumerate(VALUES.values())})
    check_decoder(AvroDecoder(schema_text=json.dumps(schema)), [value], refused=[b"", value + b"x"], spark=spark)


def defined_once(kind: Any, names: set[str]) -> Any:
    """The type, with the name of an enum, fixed or record that another field has defined."""
    if isinstance(kind, list):
        return [defined_once(each, names) for each in kind]
    if not isinstance(kind, dict):
        return kind
    if "name" in kind:
        name = f"{kind['name']}{kind.get('size', '')}{kind.get('logicalType', '').replace('-', '')}"
        if name in names:
            return name if "." in name else f"shop.{name}"
        names.add(name)
        return {**kind, "name": name}
    return {key: defined_once(held, names) if key in ("items", "values") else held for key, held in kind.items()}


def test_a_documents_fields_are_those_of_the_schema(spark: SparkSession, tmp_path: Any) -> None:
    price = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
    at = {"type": "long", "logicalType": "timestamp-micros"}
    schema = record(("price", price), ("at", at), ("name", ["null", "string"]))
    output = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders")
    value = encoded(schema, {"price": (10**37).to_bytes(16, "big"), "at": 1_700_000_000_123_456, "name": None})
    run = run_transform(
        stream_of(AvroDecoder(schema_text=json.dumps(schema)), tmp_path, outputs=output), [value, b"{}"], spark=spark
    )
    (document,) = run.documents()
    assert document.document is not None
    assert json.loads(document.document, parse_float=str) == {
        "price": "1" + "0" * 35 + ".00",
        "at": "2023-11-14T22:13:20.123456Z",
    }
    (refused,) = run.undecodable()
    assert refused["undecodable_reason"].startswith("the value is no Avro value of shop.Order: ")
