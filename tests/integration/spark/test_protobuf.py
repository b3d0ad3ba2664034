"""Protobuf by a schema of the definition, in a real Spark: its columns, and its documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType
from tests.integration.spark.test_avro import stream_of
from tests.support.protobuf_examples import META, VALUES, arrow_of, compiled, serialized
from tests.unit.formats.test_protobuf_schema import COLUMNS

from headrace.formats.protobuf_schema import read_schema
from headrace.spark.records.arrow_types import arrow_type
from headrace.stream import ElasticsearchOutput, ProtobufDecoder
from headrace.testing.extensions import check_decoder
from headrace.testing.transforms import run_transform

pytestmark = pytest.mark.slow

ORDER = "shop.Order"


def test_spark_has_the_columns_that_the_schema_says(spark: SparkSession) -> None:
    for type_, _ in COLUMNS:
        made = read_schema(compiled(f"{type_} value = 1;"), ORDER)
        for settings in (("name", "refuse"), ("number", "text")):
            spoken = arrow_type(DataType.fromDDL(made.columns(*settings)))  # type: ignore[arg-type]
            assert str(spoken) == str(arrow_of(made, *settings)), type_


def test_values_of_all_types_keep_the_contract(spark: SparkSession) -> None:
    """A message with a field of each: what a transform gets, and what is refused."""
    kinds = list(dict.fromkeys(kind for kind, _, _ in VALUES.values() if "oneof" not in kind))
    schema = compiled(" ".join(kind.replace(" value = 1", f" f{at} = {at}") for at, kind in enumerate(kinds, 1)))
    given = {kind: text for kind, text, _ in VALUES.values()}
    texts = [given[kind].replace("value", f"f{at}", 1) for at, kind in enumerate(kinds, 1)]
    value = serialized(schema, " ".join(text for text in texts if "value {" not in text))
    decoder = ProtobufDecoder(descriptor_set=schema, message=ORDER)
    check_decoder(decoder, [value, b""], refused=[b"{}", value + b"x"], spark=spark)


def test_a_documents_fields_are_those_of_the_schema(spark: SparkSession, tmp_path: Any) -> None:
    schema = compiled(
        f"confluent.type.Decimal price = 1 {META}; google.protobuf.Timestamp at = 2; optional string name = 3; "
        "uint64 hash = 4; map<int64, Colour> colours = 5; Nothing nothing = 6; Line line = 7; "
        "map<bool, bool> flags = 8; map<uint64, int32> great = 9; bytes raw = 10; repeated Line lines = 11;"
    )
    output = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="orders")
    value = serialized(
        schema,
        r'price { value: "\001" scale: 3 } at { seconds: 1700000000 nanos: 123456000 } hash: 18446744073709551615 '
        "colours { key: -5 value: RED } nothing {} line {} flags { key: true value: false } "
        f'great {{ key: {2**64 - 1} value: 1 }} raw: "x"',
    )
    decoder = ProtobufDecoder(descriptor_set=schema, message=ORDER)
    run = run_transform(stream_of(decoder, tmp_path, outputs=output), [value, b"{}"], spark=spark)
    (document,) = run.documents()
    assert document.document is not None
    assert json.loads(document.document, parse_float=str, parse_int=str) == {
        "price": "0.001",
        "at": "2023-11-14T22:13:20.123456Z",
        "hash": "18446744073709551615",
        "colours": {"-5": "RED"},
        "nothing": {},
        "line": {"n": "0", "many": []},
        "flags": {"true": False},
        "great": {"18446744073709551615": "1"},
        "raw": "eA==",
        "lines": [],
    }
    (refused,) = run.undecodable()
    assert refused["undecodable_reason"].startswith("the value is no Protobuf message shop.Order: ")
