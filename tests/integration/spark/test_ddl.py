"""headrace's own parser of DDL, by Spark's."""

from __future__ import annotations

import contextlib

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType, StructType
from tests.unit.stream.ddl_texts import REFUSED, TAKEN

from headrace.spark.records.arrow_types import arrow_type
from headrace.spark.records.decoding import RecordDecoding
from headrace.spark.records.json_objects import JsonObjects
from headrace.stream import JsonDecoder, KafkaInput, StreamDefinitionError


def columns(text: str) -> StructType | None:
    """The columns that Spark makes of the text, or None."""
    with contextlib.suppress(Exception):  # some are py4j's own
        found = DataType.fromDDL(text)
        return found if isinstance(found, StructType) else None
    return None


def test_spark_and_our_parser_take_and_refuse_the_same_texts(spark: SparkSession) -> None:
    assert [text for text in TAKEN if columns(text) is None] == []
    assert [text for text in REFUSED if columns(text) is not None] == []


def decoder_takes(text: str) -> bool:
    try:
        JsonDecoder(fields=text)
    except StreamDefinitionError:
        return False
    return True


def test_what_a_json_decoder_takes_can_be_decoded(spark: SparkSession) -> None:
    for text in filter(decoder_takes, TAKEN):
        source = KafkaInput(bootstrap_servers="x:1", topics="t", value_decoder=JsonDecoder(fields=text))
        decoding = RecordDecoding.of(source, spark, "")
        assert decoding is not None
        kind = arrow_type(decoding.decoders["value"].column)
        (found,), refused = JsonObjects(kind).decode(pa.array([b"{}"], pa.binary()))
        assert (set(found.as_py().values()) - {None}, refused) == (set(), {}), text
