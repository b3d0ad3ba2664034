"""The columns of Parquet files: the same types whatever the session, and none that readers stumble over."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    DayTimeIntervalType,
    IntegerType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from headrace.spark.outputs.parquet import check_columns, file_schema
from headrace.spark.outputs.writer import OutputRowsError


def columns(**types: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])  # type: ignore[arg-type]


def test_times_are_in_utc_at_every_depth_and_may_be_null() -> None:
    local = pa.timestamp("us", tz="America/New_York")
    given = pa.schema(
        [
            pa.field("at", local, nullable=False),
            pa.field("local", pa.timestamp("us")),
            pa.field("deep", pa.list_(pa.struct([pa.field("at", local, nullable=False)]))),
            pa.field("by_name", pa.map_(pa.string(), local)),
            pa.field("price", pa.decimal128(10, 2)),
        ]
    )
    utc = pa.timestamp("us", tz="UTC")
    wanted = file_schema(given)
    assert wanted.field("at") == pa.field("at", utc)
    assert wanted.field("local").type == pa.timestamp("us")
    assert wanted.field("deep").type.value_type.field("at") == pa.field("at", utc)
    assert wanted.field("by_name").type.item_type == utc
    assert wanted.field("price").type == pa.decimal128(10, 2)
    noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    row = {"at": noon, "local": noon.replace(tzinfo=None), "deep": [{"at": noon}], "by_name": {"a": noon}, "price": 1}
    table = pa.Table.from_pylist([row], given).cast(wanted)
    assert table.to_pylist()[0]["deep"] == [{"at": noon}]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (columns(a=IntegerType(), A=StringType()), "several columns named 'a'"),
        (columns(Batch_Time=IntegerType()), "the name of the batch's folder"),
        (columns(a=NullType()), "'a' for output 'files' has the type void"),
        (columns(a=ArrayType(MapType(StringType(), DayTimeIntervalType()))), "has the type interval day to second"),
        (columns(a=StructType([StructField("b", VariantType())])), "has the type variant"),
        (StructType([]), "have no columns"),
    ],
)
def test_columns_that_some_readers_cannot_read_are_refused(schema: StructType, says: str) -> None:
    with pytest.raises(OutputRowsError, match=says):
        check_columns(schema, "files")


def test_other_columns_are_taken() -> None:
    check_columns(columns(interval_seconds=IntegerType(), void=ArrayType(StringType())), "files")
