"""DataFrames that the output writes as messages, by Spark."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.integration.spark.conftest import read_log
from tests.integration.spark.kafka_output.conftest import T, create, read, values

from headrace.spark.attempts.failures import first_cause
from headrace.spark.outputs.kafka import KafkaWriter, prepare_messages
from headrace.spark.outputs.writer import Counts, OutputRowsError, WrittenBatch
from headrace.spark.records.record_columns import RECORD_SCHEMA
from headrace.spark.records.transforms import BatchContext
from headrace.stream import KafkaInput, KafkaOutput, Stream

Write = Callable[..., Counts]


@pytest.fixture
def write(kafka: str, topic: str, tmp_path: Path) -> Write:
    """Write a frame as an attempt at a batch."""
    output = KafkaOutput(bootstrap_servers=kafka, topic=topic)
    stream = Stream(
        name=f"clicks-{uuid.uuid4().hex[:8]}",
        inputs=KafkaInput(bootstrap_servers=kafka, topics="clicks"),
        outputs=output,
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )

    def write(frame: DataFrame | None, *, attempt: int = 1, target: str = "", **fields: Any) -> Counts:
        written = output.model_copy(update=fields)
        batch = WrittenBatch(
            stream=stream.model_copy(update={"outputs": (written,)}),
            context=BatchContext.of(stream.name, T, 10_000, attempt),
            batch_time_ms=T,
            attempt=attempt,
            manifest_uri="",
            from_kafka=False,
            target=target,
            out=io.StringIO(),
            progress=lambda _: None,
        )
        return KafkaWriter(written).write(frame, batch)

    return write


@pytest.fixture
def log(spark: SparkSession, written_log: Any, make_records: Any) -> DataFrame:
    """Three records as the log has them."""
    written_log.add(make_records([b"one", None, b"\xff"]))
    return read_log(spark, written_log.manifest())


def test_records_of_the_log_keep_key_value_and_headers(kafka: str, topic: str, write: Write, log: DataFrame) -> None:
    counts = write(log)
    assert counts == {"messages": 3, "repeated": 0, "bytes": 4 + 3 * len(b"key-0")}
    found = {each.key(): each for each in read(kafka, topic)}
    assert [found[b"key-%d" % n].value() for n in range(3)] == [b"one", None, b"\xff"]
    assert found[b"key-0"].headers() == [("trace", b"\x00\xff")]
    # Where Java's producer puts these keys.
    assert {key: each.partition() for key, each in found.items()} == {
        b"key-%d" % n: murmur2(b"key-%d" % n) % 3 for n in range(3)
    }


def murmur2(data: bytes) -> int:
    """The hash of Java's partitioner, positive."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ (k >> 24)) * m & mask)
    if len(data) > whole:
        h = (h ^ int.from_bytes(data[whole:], "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return (h ^ (h >> 15)) & 0x7FFFFFFF


def test_a_repeat_by_another_transform_counts_and_sends_nothing(
    spark: SparkSession, kafka: str, topic: str, write: Write
) -> None:
    frame = spark.range(0, 30_000, 1, 4).selectExpr("CAST(id AS STRING) AS key", "struct(id AS n) AS value")
    assert write(frame)["messages"] == 30_000
    assert write(frame.limit(7), attempt=2) == {"messages": 0, "repeated": 30_000, "bytes": 0}
    found = read(kafka, topic)
    assert len(found) == 30_000
    assert json.loads(found[0].value()) == {"n": int(found[0].key())}


def test_a_renamed_output_does_not_send_a_batch_again(
    spark: SparkSession, kafka: str, topic: str, write: Write
) -> None:
    frame = spark.sql("SELECT 'a' AS value")
    assert write(frame)["messages"] == 1
    assert write(frame, attempt=2, id="clicks-out", renamed_from="kafka")["repeated"] == 1
    assert len(read(kafka, topic)) == 1


def test_an_output_with_a_new_id_does_not_send_a_batch_again(
    spark: SparkSession, kafka: str, topic: str, write: Write
) -> None:
    """Without renamed_from, and also if the ledger does not know the attempt of the former id."""
    frame = spark.sql("SELECT 'a' AS value")
    assert write(frame)["messages"] == 1
    assert write(frame, attempt=2, id="clicks-out")["repeated"] == 1
    assert write(frame, attempt=3, id="again")["repeated"] == 1
    assert len(read(kafka, topic)) == 1


def test_a_replay_sends_to_its_own_topic(
    spark: SparkSession, kafka: str, kafka_admin: AdminClient, topic: str, write: Write
) -> None:
    copy = f"{topic}-v2"
    create(kafka_admin, copy)
    frame = spark.sql("SELECT 'a' AS value, 2 AS partition")
    write(frame)
    assert write(frame, target="v2", topic=copy)["messages"] == 1
    (message,) = read(kafka, copy)
    assert (message.value(), message.partition(), message.key(), message.headers()) == (b"a", 2, None, None)


def test_the_order_of_the_rows_is_kept(spark: SparkSession, kafka: str, topic: str, write: Write) -> None:
    frame = spark.range(0, 30_000, 1, 4).selectExpr("CAST(id AS STRING) AS value", "1 AS partition")
    write(frame)
    assert [int(each.value() or b"") for each in read(kafka, topic)] == list(range(30_000))


def test_a_failing_transform_fails_the_batch_and_nothing_is_seen(
    spark: SparkSession, kafka: str, topic: str, write: Write
) -> None:
    fails = spark.range(0, 100_000, 1, 4).selectExpr("IF(id = 70000, raise_error('the 70000th'), 'x') AS value")
    with pytest.raises(PySparkException, match="the 70000th"):
        write(fails)
    assert values(kafka, topic) == []


def test_a_missing_topic_is_an_error_before_spark_computes_rows(spark: SparkSession, write: Write) -> None:
    with pytest.raises(PySparkException) as raised:
        write(spark.sql("SELECT 'a' AS value"), topic="nowhere")
    assert "There is no topic 'nowhere'" in first_cause(raised.value)


def test_a_batch_without_rows_opens_no_transaction(spark: SparkSession, write: Write) -> None:
    nothing = {"messages": 0, "repeated": 0, "bytes": 0}
    assert write(spark.sql("SELECT 'a' AS value").where("value = 'b'")) == nothing
    assert write(None) == nothing


@pytest.mark.parametrize(
    ("select", "says"),
    [
        ("'a' AS word", "no column 'value'"),
        ("'a' AS value, 1 AS n", "'n', which are not part of a message"),
        ("1 AS value", "'value' for output 'kafka' is int"),
        ("'a' AS value, 'x' AS partition", "is string, not a number"),
        ("'a' AS value, array('x') AS headers", "'headers' for output 'kafka' is array<string>"),
        ("'a' AS value, 't' AS topic", "'topic', which are not part of a message"),
        ("'a' AS value, 't' AS topic, 0 AS partition, 1L AS offset, 2 AS n", "'n', which are not part of a message"),
    ],
)
def test_rows_that_are_not_messages_are_refused(spark: SparkSession, select: str, says: str) -> None:
    with pytest.raises(OutputRowsError, match=says):
        prepare_messages(spark.sql(f"SELECT {select}"), "kafka")


def test_a_records_own_columns_are_left_out_and_others_refused(spark: SparkSession) -> None:
    records = spark.createDataFrame([], RECORD_SCHEMA)
    assert prepare_messages(records, "kafka").columns == ["value", "key", "headers"]
    chosen = records.withColumn("partition", F.lit(3))
    assert prepare_messages(chosen, "kafka").columns == ["value", "key", "headers", "partition"]
    with pytest.raises(OutputRowsError, match="'timestamp', which are not part of a message"):
        prepare_messages(records.withColumn("timestamp", F.lit("now")), "kafka")
