"""headrace's own parser of DDL, by Spark's."""

from __future__ import annotations

import contextlib

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType, StructType
from tests.unit.stream.ddl_texts import REFUSED, TAKEN

from headrace.stream import JsonDecoder, StreamDefinitionError


def columns(text: str) -> StructType | None:
    """The columns that Spark makes of the text, or None."""
    with contextlib.suppress(Exception):  # some are py4j's own
        found = DataType.fromDDL(text)
        return found if isinstance(found, StructType) else None
    return None


def test_spark_takes_and_refuses_the_texts_that_our_parser_is_tested_by(spark: SparkSession) -> None:
    assert [text for text in TAKEN if columns(text) is None] == []
    assert [text for text in REFUSED if columns(text) is not None] == []


def decoder_takes(text: str) -> bool:
    try:
        JsonDecoder(fields=text)
    except StreamDefinitionError:
        return False
    return True


def test_a_json_decoder_takes_what_from_json_takes(spark: SparkSession) -> None:
    records = spark.sql("SELECT '{}' AS v")
    taken = [text for text in TAKEN if decoder_takes(text)]
    (row,) = records.select(*[F.from_json("v", columns(text) or StructType()).isNotNull() for text in taken]).collect()
    assert all(row)
    for text in set(TAKEN) - set(taken):
        with pytest.raises(PySparkException):
            records.select(F.from_json("v", columns(text) or StructType()).isNotNull()).collect()
