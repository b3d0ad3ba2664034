"""Batches as Parquet files: what Spark and pandas read of them, and what a failure leaves."""

from __future__ import annotations

import datetime
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.integration.spark.conftest import read_log

from headrace.spark.attempts.failures import first_cause
from headrace.spark.outputs.parquet import ParquetWriter
from headrace.spark.outputs.writer import Counts, OutputRowsError, WrittenBatch
from headrace.spark.records.transforms import BatchContext
from headrace.stream import KafkaInput, ParquetOutput, Stream

T = 1_700_000_010_000

Write = Callable[..., Counts]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "clicks files"


@pytest.fixture
def write(tmp_path: Path, path: Path) -> Write:
    """Write a frame as an attempt at a batch."""
    output = ParquetOutput(path=path.as_uri())
    stream = Stream(
        name="clicks",
        inputs=KafkaInput(bootstrap_servers="localhost:1", topics="clicks"),
        outputs=output,
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )

    def write(frame: DataFrame | None, *, batch_time_ms: int = T, attempt: int = 1, **fields: Any) -> Counts:
        batch = WrittenBatch(
            stream=stream,
            context=BatchContext.of("clicks", batch_time_ms, 10_000, attempt),
            batch_time_ms=batch_time_ms,
            attempt=attempt,
            manifest_uri="",
            from_kafka=False,
            target="",
            out=io.StringIO(),
            progress=lambda _: None,
        )
        return ParquetWriter(output.model_copy(update=fields)).write(frame, batch)

    return write


def files(path: Path, batch_time_ms: int = T) -> list[Path]:
    return sorted((path / f"batch_time={batch_time_ms}").glob("*.parquet"))


def leftovers(path: Path) -> list[Path]:
    """What attempts left, without the replaced files that readers may still list."""
    return [each for each in (path / ".headrace").iterdir() if not each.name.startswith("trash.")]


def test_every_type_comes_back_in_spark_and_pandas(spark: SparkSession, write: Write, path: Path) -> None:
    frame = spark.sql(
        """
        SELECT id, TIMESTAMP '2026-03-29 01:30:00 UTC' AS at, TIMESTAMP_NTZ '2026-03-29 01:30:00' AS local,
            DATE '2026-03-29' AS day, CAST('12345678901234567.89' AS DECIMAL(20, 2)) AS price, X'00FF' AS raw,
            named_struct('at', TIMESTAMP '2026-03-29 01:30:00 UTC', 'tags', array('a', NULL)) AS deep,
            map('k', 1.5D) AS numbers, CAST(NULL AS STRING) AS nothing
        FROM RANGE(0, 5000, 1, 3)
        """
    )
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        counts = write(frame)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert (counts["rows"], counts["files"]) == (5000, 3)
    assert counts["bytes"] == sum(each.stat().st_size for each in files(path))
    assert leftovers(path) == []
    back = spark.read.parquet(str(path))
    assert back.drop("batch_time").schema.simpleString() == frame.schema.simpleString()
    assert back.drop("batch_time").sort("id").collect() == frame.sort("id").collect()
    assert {row.batch_time for row in back.select("batch_time").distinct().collect()} == {T}
    pandas = pd.read_parquet(path)
    first = pandas.sort_values("id").iloc[0]
    noon = pd.Timestamp("2026-03-29T01:30:00Z")
    assert (first["at"], first["local"], first["price"], first["raw"]) == (
        noon,
        pd.Timestamp("2026-03-29T01:30:00"),
        Decimal("12345678901234567.89"),
        b"\x00\xff",
    )
    assert str(pandas["at"].dtype) == "datetime64[us, UTC]"
    assert first["deep"]["at"] == noon
    assert pq.ParquetFile(files(path)[0]).metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_repeat_replaces_and_other_batches_stay(spark: SparkSession, write: Write, path: Path) -> None:
    write(spark.range(10))
    write(spark.range(100, 105), batch_time_ms=T + 10_000)
    before = files(path, T + 10_000)
    # Also after the output was renamed: the folder is its own.
    assert write(spark.range(4), attempt=2, id="folder", renamed_from="parquet")["rows"] == 4
    assert [row.id for row in spark.read.parquet(str(path)).where(f"batch_time = {T}").sort("id").collect()] == [
        0,
        1,
        2,
        3,
    ]
    assert files(path, T + 10_000) == before


def test_a_batch_without_rows_has_columns(spark: SparkSession, write: Write, path: Path) -> None:
    frame = spark.sql("SELECT 1 AS a, current_timestamp() AS at").where("a > 1")
    counts = write(frame)
    assert (counts["rows"], counts["files"]) == (0, 1)
    assert spark.read.parquet(str(files(path)[0])).schema.simpleString() == frame.schema.simpleString()
    assert pd.read_parquet(files(path)[0].parent).columns.tolist() == ["a", "at"]
    assert write(None, attempt=2) == {"rows": 0, "files": 0, "bytes": 0}
    assert len(files(path)) == 1, "nothing comes of nothing, and what stands there stays"


def test_a_failed_attempt_changes_nothing_and_leaves_nothing(spark: SparkSession, write: Write, path: Path) -> None:
    write(spark.range(10))
    before = files(path)
    fails = spark.range(0, 1000, 1, 4).selectExpr("IF(id = 700, raise_error('the 700th'), id) AS id")
    with pytest.raises(PySparkException, match="the 700th"):
        write(fails, attempt=2)
    assert files(path) == before
    assert leftovers(path) == []


def test_a_replaced_attempt_gets_an_error_and_changes_no_file(spark: SparkSession, write: Write, path: Path) -> None:
    write(spark.range(10), attempt=2)
    before = files(path)
    with pytest.raises(PySparkException) as raised:
        write(spark.range(5), attempt=1)
    assert "Attempt 2 at batch 2023-11-14T22:13:30Z has replaced attempt 1" in first_cause(raised.value)
    assert files(path) == before


def test_columns_no_file_can_have_are_refused_before_spark_works(spark: SparkSession, write: Write) -> None:
    with pytest.raises(OutputRowsError, match="'batch_time', which is the name of the batch's folder"):
        write(spark.sql("SELECT 1 AS batch_time"))


KILLED = """
import os, sys
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType
from headrace.spark.outputs.parquet import Claim
from headrace.spark.outputs.parquet import ParquetSink

claim = Claim(sys.argv[1], "clicks", "parquet", "", int(sys.argv[2]), 2, "dead")
claim.take()
sink = ParquetSink(claim, "zstd", "", StructType([StructField("id", LongType())]))
rows = pa.record_batch([pa.array(range(1000))], names=["id"])

def killed_in_the_middle():
    yield rows
    os.kill(os.getpid(), 9)

sink.write(iter([rows]))
sink.write(killed_in_the_middle())
"""


def test_a_killed_attempt_shows_nothing_and_the_next_removes_it(spark: SparkSession, write: Write, path: Path) -> None:
    write(spark.range(10))
    before = files(path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(T)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert files(path) == before
    (left,) = leftovers(path)
    assert len(os.listdir(left)) == 2  # noqa: PTH208
    assert spark.read.parquet(str(path)).count() == len(pd.read_parquet(path)) == 10
    write(spark.range(20), attempt=3)
    assert leftovers(path) == []
    assert spark.read.parquet(str(path)).count() == 20


def test_the_log_itself_can_be_kept(
    spark: SparkSession, write: Write, path: Path, written_log: Any, make_records: Any
) -> None:
    written_log.add(make_records([b"one", None, b"\xff"]))
    write(read_log(spark, written_log.manifest()))
    table = pq.read_table(files(path)[0])
    assert table.column("value").to_pylist() == [b"one", None, b"\xff"]
    assert table.column("headers").to_pylist()[0] == [{"key": "trace", "value": b"\x00\xff"}]
    assert table.schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    assert table.column("timestamp").to_pylist()[0] == datetime.datetime(
        2023, 11, 14, 22, 13, 20, 123_000, tzinfo=datetime.UTC
    )
