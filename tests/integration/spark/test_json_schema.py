"""JSON by a schema of the definition, in a real Spark: its columns, its documents, and what a transform gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType
from tests.integration.spark.test_avro import stream_of
from tests.unit.docs.test_types import rows_of
from tests.unit.spark.records.test_json_schema_values import DECIMAL, arrow_of

from headrace.formats.json_schema import read_schema
from headrace.formats.schema_text import SchemaText
from headrace.spark.records.arrow_types import arrow_type
from headrace.stream import ElasticsearchOutput, JsonSchemaDecoder
from headrace.testing.extensions import check_decoder
from headrace.testing.transforms import run_transform

pytestmark = pytest.mark.slow

SCHEMA = json.dumps(
    {
        "title": "Order",
        "properties": {
            "price": DECIMAL,
            "at": {"type": "string", "format": "date-time"},
            "lines": {"items": {"$ref": "line.json"}},
            "more": {},
        },
        "required": ["price"],
    }
)
REFERENCES = {"line.json": json.dumps({"properties": {"n": {"type": "integer", "connect.type": "int32"}}})}
VALUE = b'{"price": "MDk=", "at": "2026-01-05T13:05:00.25Z", "lines": [{"n": 1}], "more": {"x": 1.10}}'
DECODER = JsonSchemaDecoder(schema_text=SCHEMA, references=REFERENCES)


def test_spark_has_the_columns_that_the_schema_says(spark: SparkSession) -> None:
    for kind, _ in rows_of("JSON Schema"):
        made = read_schema(SchemaText(json.dumps({"properties": {"x": json.loads(kind)}})))
        assert str(arrow_type(DataType.fromDDL(made.columns()))) == str(arrow_of(made)), kind


def test_values_keep_the_contract(spark: SparkSession) -> None:
    refused = [b"", b"{}", b"null", b'{"price": "x"}', b'{"price": 1, "lines": [{"n": 2147483648}]}']
    check_decoder(DECODER, [VALUE], refused=refused, spark=spark)


def test_a_document_is_the_records_own_bytes(spark: SparkSession, tmp_path: Any) -> None:
    output = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders")
    run = run_transform(stream_of(DECODER, tmp_path, outputs=output), [VALUE, b"{}"], spark=spark)
    (document,) = run.documents()
    assert document.document is not None
    assert document.document.encode() == VALUE
    (refused,) = run.undecodable()
    assert refused["undecodable_reason"] == "the value is no JSON object of Order: it has no field `price` - at `$`"


def columns_of_the_order(records: Any) -> Any:
    return records.selectExpr(
        "topic", "partition", "offset", "value.price * 2 AS price", "value.lines[0].n AS n", "value.more"
    )


def test_a_transform_gets_the_columns(spark: SparkSession, tmp_path: Any) -> None:
    output = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders")
    stream = stream_of(DECODER, tmp_path, outputs=output, transform=f"{__name__}:columns_of_the_order")
    run = run_transform(stream, [VALUE], spark=spark)
    (document,) = run.documents()
    assert document.document is not None
    assert json.loads(document.document, parse_float=str) == {"price": "246.90", "n": 1, "more": '{"x": 1.10}'}
