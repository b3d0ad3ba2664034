from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.integration.spark.conftest import read_log

from headrace.batch.manifest import ManifestError
from headrace.spark.records.record_columns import RECORD_SCHEMA
from headrace.spark.records.wal_source import _SIZED_AS_A_RECORD, ListedBlock, read_partition

Records = Callable[..., pa.RecordBatch]


def test_every_column_comes_back_as_it_was(spark: SparkSession, written_log: Any, make_records: Records) -> None:
    written_log.add(make_records([b'{"a": 1}', None, b"\x00\xff"]))
    frame = read_log(spark, written_log.manifest())
    assert frame.schema == RECORD_SCHEMA
    rows = frame.orderBy("offset").collect()
    assert [row.value for row in rows] == [b'{"a": 1}', None, b"\x00\xff"]
    assert [row.key for row in rows] == [b"key-0", b"key-1", b"key-2"]
    first = rows[0]
    assert (first.topic, first.partition, first.offset, first.incarnation, first.timestampType) == (
        "clicks",
        0,
        0,
        1,
        0,
    )
    assert [(header.key, header.value) for header in first.headers] == [("trace", b"\x00\xff")]


def test_timestamps_are_right_whatever_the_sessions_time_zone(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    written_log.add(make_records([b"x"], timestamps=[1_700_000_000_123]))
    manifest = written_log.manifest()
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for zone, wall in (("UTC", "22:13:20"), ("America/Los_Angeles", "14:13:20"), ("Asia/Kolkata", "03:43:20")):
            spark.conf.set("spark.sql.session.timeZone", zone)
            row = (
                read_log(spark, manifest)
                .select(
                    F.expr("unix_millis(timestamp)").alias("ms"),
                    F.date_format("timestamp", "HH:mm:ss").alias("wall"),
                    "timestamp",
                )
                .first()
            )
            assert row is not None
            assert (row.ms, row.wall) == (1_700_000_000_123, wall)
            # Python's side has the machine's zone, as everywhere in pyspark.
            assert row.timestamp.astimezone(UTC) == datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")


def test_a_timestamp_that_spark_cannot_hold_is_null(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    # Producers set timestamps; none may make its batch unreadable.
    written_log.add(make_records([b"x"] * 3, timestamps=[2**63 - 1, -(2**63) + 1, -1]))
    rows = (
        read_log(spark, written_log.manifest()).select("offset", F.expr("unix_millis(timestamp)").alias("ms")).collect()
    )
    assert {row.offset: row.ms for row in rows} == {0: None, 1: None, 2: -1}


def test_an_empty_batch_is_an_empty_frame_with_the_schema(spark: SparkSession, written_log: Any) -> None:
    frame = read_log(spark, written_log.manifest())
    assert frame.schema == RECORD_SCHEMA
    assert frame.count() == 0


def test_inputs_are_kept_apart_and_one_without_blocks_is_empty(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    written_log.add(make_records([b"a"]), input_id="left")
    written_log.add(make_records([b"b", b"c"], topic="orders"), input_id="right")
    manifest = written_log.manifest()
    assert read_log(spark, manifest, input_id="left").count() == 1
    assert {row.topic for row in read_log(spark, manifest, input_id="right").collect()} == {"orders"}
    assert read_log(spark, manifest, input_id="silent").count() == 0


def test_blocks_are_spread_over_partitions_and_none_is_lost(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    for block in range(8):
        # Incompressible enough to pass the size below which one task does it all.
        values = [pa.array([0]).to_pylist()[0].to_bytes(1) + _noise(block, index) for index in range(100)]
        written_log.add(make_records(values, first_offset=block * 100))
    frame = read_log(spark, written_log.manifest(), tasks=3)
    assert frame.rdd.getNumPartitions() == 3
    assert sorted(row.offset for row in frame.select("offset").collect()) == list(range(800))


def _noise(block: int, index: int) -> bytes:
    import random

    return random.Random(block * 1000 + index).randbytes(4000)


def test_a_damaged_block_is_an_error_with_its_handle(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    written_log.add(make_records([b"whole"]))
    block = written_log.add(make_records([b"damaged" * 100], first_offset=1))
    segment: Path = written_log.folder / "log" / block.handle.segment
    content = bytearray(segment.read_bytes())
    content[block.handle.offset + block.handle.length - 20] ^= 0xFF
    segment.write_bytes(content)
    with pytest.raises(PySparkException, match="DamagedBlockError") as failed:
        read_log(spark, written_log.manifest()).count()
    handle = block.handle
    assert f"{handle.segment}, offset {handle.offset}, length {handle.length} cannot be read" in str(failed.value)


def test_a_missing_segment_is_an_error_with_its_handle(written_log: Any, make_records: Records) -> None:
    block = written_log.add(make_records([b"x"]))
    (written_log.folder / "log" / block.handle.segment).unlink()
    listed = ListedBlock(block.handle, block.records, block.payload_bytes)
    with pytest.raises(Exception, match=f"{block.handle.segment}, offset {block.handle.offset}"):
        list(read_partition(f"{written_log.folder}/log", [listed]))


def test_fewer_records_than_the_manifest_says_is_an_error(written_log: Any, make_records: Records) -> None:
    block = written_log.add(make_records([b"x", b"y"]))
    listed = ListedBlock(block.handle, 3, block.payload_bytes)
    with pytest.raises(Exception, match="has 2 records, its manifest says 3"):
        list(read_partition(f"{written_log.folder}/log", [listed]))


def test_the_batches_of_a_window_are_one_scan(spark: SparkSession, written_log: Any, make_records: Records) -> None:
    manifests = []
    for number in range(60):
        written_log.add(make_records([b"%d" % number], first_offset=number))
        manifests.append(written_log.manifest(number * 1000))
    frame = read_log(spark, *manifests)
    assert sorted(int(row.value) for row in frame.collect()) == list(range(60))
    assert frame.rdd.getNumPartitions() <= 2


def test_a_read_without_manifests_gives_no_rows(spark: SparkSession) -> None:
    assert read_log(spark).collect() == []


def test_a_missing_manifest_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(ManifestError, match="does not exist"):
        read_log(spark, "/nowhere/manifests/1.json")


def test_tasks_that_spark_cuts_anew_read_each_block_once(
    spark: SparkSession, written_log: Any, make_records: Records
) -> None:
    """A transform may change the number of tasks before it, and Spark sends a task its numbers in several batches."""
    for block in range(8):
        written_log.add(make_records([_noise(block, index) for index in range(100)], first_offset=block * 100))
    manifest = written_log.manifest()
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    try:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
        for tasks in (1, 3):
            frame = read_log(spark, manifest, tasks=tasks)
            for cut in (frame, frame.coalesce(2), frame.repartition(5)):
                assert sorted(row.offset for row in cut.select("offset").collect()) == list(range(800))
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)


def test_spark_estimates_a_batch_by_its_records(spark: SparkSession, written_log: Any, make_records: Records) -> None:
    """Or it would send a large batch whole to every task of a join."""
    written_log.add(make_records([b"x"] * 1_000))
    frame = read_log(spark, written_log.manifest())
    plan: Any = frame._jdf.queryExecution().optimizedPlan()  # type: ignore[operator]
    assert plan.stats().sizeInBytes() > 150_000


def test_that_estimate_costs_little_time(spark: SparkSession) -> None:
    """A null map in place of the struct took twenty times as long as the numbers alone."""

    def seconds(*columns: str) -> float:
        numbers = spark.range(0, 400_000, 1, 2).selectExpr("id", *columns)
        started = time.monotonic()
        numbers.mapInArrow(lambda batches: (each for each in batches if not each.num_rows), "id LONG").count()
        return time.monotonic() - started

    sized = f"CAST(NULL AS {_SIZED_AS_A_RECORD}) AS size"
    took = [(seconds(), seconds(sized)) for _ in range(4)]
    assert min(sized for _, sized in took) < 6 * min(plain for plain, _ in took)
