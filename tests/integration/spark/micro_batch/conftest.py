"""A batch from a plain script: transforms for it, and its run in a session."""

from __future__ import annotations

import io
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.stream import (
    SparkSettings,
)

Records = Callable[..., pa.RecordBatch]
Make = Callable[..., Any]

TRANSFORMS = """
import time
from pyspark.sql import functions as F

def words(lines):
    return (lines.select(F.explode(F.split("value", " ")).alias("word")).groupBy("word").count().orderBy("word"))

def shops(records):
    return records.select("value.shop", "value.n", "topic", "partition", "offset")

def with_headers(records):
    return records.select("value.n", "topic", "partition", "offset", "headers", "timestamp")

def shops_corrected(records):
    named = F.expr("IF(COALESCE(shop, '') = '', 'no', LOWER(shop))")
    return shops(records).withColumn("shop", named)

def timed(records, batch):
    return records.select(F.lit(str(batch.batch_time)).alias("time"), F.lit(batch.attempt).alias("attempt")).limit(1)

def both(left, right):
    return left.select("value").union(right.select("value")).orderBy("value")

def left_alone(left, right):
    return left.select("value")

def fails(records):
    def wrong(value):
        raise ValueError("this value is wrong")
    return records.select(F.udf(wrong, "string")("value"))

def slow(records):
    def sleep(value):
        time.sleep(60)
        return value
    return records.select(F.udf(sleep, "binary")("value"))

def count(records):
    return records.agg(F.count("*").alias("n"))
"""


@pytest.fixture
def transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The fields of a stream whose transform is one of the above."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"transforms_{uuid.uuid4().hex}"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(TRANSFORMS)
    yield lambda function: {
        "transform": f"{name}:{function}",
        "spark": SparkSettings(py_files=(str(tmp_path / "code"),)),
    }
    sys.modules.pop(name, None)


def run(spark: Any, batch: Any, **options: Any) -> tuple[Any, str]:
    """Run the next batch; its result and what it printed."""
    time_ms = batch.allocate()
    out = io.StringIO()
    result = batch.run(spark, batch.begin(time_ms), out=out, **options)
    return result, out.getvalue()


def refuse() -> SparkSession:
    raise AssertionError("this batch needs no Spark")
