"""Columns whose names differ in case only, which are one name to Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession

from headrace.elasticsearch.errors import UnsuitableRowsError
from headrace.spark.outputs.documents import prepare_documents
from headrace.stream import ElasticsearchOutput

OUTPUT = ElasticsearchOutput(hosts="http://h:1", index="i")


@pytest.fixture
def case_sensitive(spark: SparkSession) -> Iterator[SparkSession]:
    spark.conf.set("spark.sql.caseSensitive", "true")
    yield spark
    spark.conf.unset("spark.sql.caseSensitive")


def _rows(spark: SparkSession, *beside: str) -> DataFrame:
    coordinates = ["'t' AS topic", "0 AS partition", "1L AS offset"]
    return spark.range(1).selectExpr(*coordinates, *beside)


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        (("1 AS Id", "2 AS id"), "'Id' and 'id'"),
        (("1 AS Topic",), "'topic' and 'Topic'"),
        (("1 AS OFFSET", "2 AS b"), "'offset' and 'OFFSET'"),
        (("1 AS value", "2 AS Value"), "'value' and 'Value'"),
    ],
)
def test_a_transforms_columns_of_one_name_are_refused_by_name(
    spark: SparkSession, beside: tuple[str, ...], named: str
) -> None:
    with pytest.raises(UnsuitableRowsError, match=f"have the columns {named}, which differ in case only"):
        prepare_documents(_rows(spark, *beside), OUTPUT)


def test_a_case_sensitive_session_makes_documents_of_both(case_sensitive: SparkSession) -> None:
    prepared = prepare_documents(_rows(case_sensitive, "1 AS Id", "2 AS id", "'x' AS Topic"), OUTPUT)
    assert [row.document for row in prepared.collect()] == ['{"Id":1,"id":2,"Topic":"x"}']


def test_the_fields_of_a_struct_may_differ_in_case_only(spark: SparkSession) -> None:
    prepared = prepare_documents(_rows(spark, "named_struct('Id', 1, 'id', 2) AS value"), OUTPUT)
    assert [row.document for row in prepared.collect()] == ['{"Id":1,"id":2}']
