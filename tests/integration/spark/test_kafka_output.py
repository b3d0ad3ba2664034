"""Batches as Kafka transactions: all or nothing, once, whatever dies in between."""

from __future__ import annotations

import io
import json
import secrets
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from headrace.spark.failures import first_cause
from headrace.spark.outputs.errors import (
    AttemptReplacedError,
    KafkaRefusedError,
    MessageRefusedError,
    OutputRowsError,
    RowsCutOffError,
    TopicMissingError,
    TransactionTimedOutError,
)
from headrace.spark.outputs.kafka.message_columns import prepare_messages
from headrace.spark.outputs.kafka.sent_batches import Sent, SentRecords
from headrace.spark.outputs.kafka.transaction import BatchTransaction
from headrace.spark.outputs.kafka.writer import KafkaWriter
from headrace.spark.outputs.writer import Counts, WrittenBatch
from headrace.spark.transforms import BatchContext
from headrace.stream import KafkaInput, KafkaOutput, Stream

T = 1_700_000_010_000


@pytest.fixture
def topic(kafka_admin: AdminClient) -> str:
    name = f"enriched-{uuid.uuid4().hex}"
    create(kafka_admin, name)
    return name


def create(admin: AdminClient, topic: str) -> None:
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result()
    deadline = time.monotonic() + 30
    # The answer comes before every request sees the topic.
    while topic not in admin.list_topics(timeout=5).topics:
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


@pytest.fixture
def transaction(kafka: str, topic: str, tmp_path: Path) -> BatchTransaction:
    return BatchTransaction(
        config={"bootstrap.servers": kafka},
        topic=topic,
        name=f"headrace-test-{topic}-1000",
        attempt=1,
        timeout_seconds=30,
        records=SentRecords(str(tmp_path / "sent"), "1000.json"),
    )


def rows(*values: bytes | None, **columns: pa.Array) -> pa.RecordBatch:
    end = pa.array([False] * len(values), pa.bool_())
    return pa.record_batch({"value": pa.array(values, pa.binary()), **columns, "_end": end})


END = pa.record_batch({"value": pa.array([None], pa.binary()), "_end": pa.array([True])})


def read(kafka: str, topic: str) -> list[Message]:
    """Everything in the topic that is committed, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "tests",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    partitions = [TopicPartition(topic, number, 0) for number in range(3)]
    consumer.assign(partitions)
    messages, ended = [], set()
    deadline = time.monotonic() + 30
    while len(ended) < 3:
        assert time.monotonic() < deadline
        message = consumer.poll(1)
        if message is not None and message.error() is not None:
            ended.add(message.partition())
        elif message is not None:
            messages.append(message)
    consumer.close()
    return sorted(messages, key=lambda each: (each.partition(), each.offset()))


def values(kafka: str, topic: str) -> list[bytes | None]:
    return sorted((each.value() for each in read(kafka, topic)), key=lambda value: value or b"")


def groups(admin: AdminClient, name: str) -> list[str]:
    return [each.group_id for each in admin.list_consumer_groups().result().valid if each.group_id == name]


def test_a_batch_is_seen_as_a_whole_and_once(
    kafka: str, kafka_admin: AdminClient, topic: str, transaction: BatchTransaction
) -> None:
    def watched() -> Iterator[pa.RecordBatch]:
        yield rows(b"a", None)
        assert values(kafka, topic) == []
        yield rows(b"b")
        yield END

    sent, before = transaction.send(watched())
    assert (sent.messages, sent.bytes, before) == (3, 2, False)
    assert values(kafka, topic) == [None, b"a", b"b"]
    assert groups(kafka_admin, transaction.name) == []
    again, before = replace(transaction, attempt=2).send(iter([rows(b"a", None), rows(b"b"), END]))
    assert (again, before) == (sent, True)
    assert len(read(kafka, topic)) == 3


def test_after_a_crash_between_the_commit_and_its_record_kafka_itself_knows(
    kafka: str, kafka_admin: AdminClient, topic: str, transaction: BatchTransaction
) -> None:
    assert killed(transaction, "SentRecords.write = lambda *_: os.kill(os.getpid(), 9)") == -signal.SIGKILL
    assert values(kafka, topic) == [b"one", b"two"]
    assert transaction.records.find("any") is None
    sent, before = replace(transaction, attempt=2).send(iter([rows(b"one"), rows(b"two"), END]))
    assert (sent.messages, sent.attempt, sent.bytes, before) == (2, 1, 6, True)
    assert values(kafka, topic) == [b"one", b"two"]
    assert transaction.records.find(sent.topic_id) == sent
    assert groups(kafka_admin, transaction.name) == []


def test_an_attempt_killed_in_the_middle_is_aborted_by_the_next_at_once(
    kafka: str, topic: str, transaction: BatchTransaction
) -> None:
    kill = "middle = lambda: os.kill(os.getpid(), 9) if sending._producer.flush(20) == 0 else None"
    assert killed(transaction, kill) == -signal.SIGKILL
    started = time.monotonic()
    _, before = replace(transaction, attempt=2).send(iter([rows(b"three"), END]))
    assert time.monotonic() - started < 15 < transaction.timeout_seconds
    assert not before
    assert values(kafka, topic) == [b"three"]


KILLED = """
import gc, os, sys
import pyarrow as pa
from headrace.spark.outputs.kafka import transaction
from headrace.spark.outputs.kafka.sent_batches import Sent, SentRecords
from headrace.spark.outputs.kafka.transaction import BatchTransaction

middle = lambda: None
class Sending(transaction._Sending):
    def __init__(self, *given):
        global sending
        super().__init__(*given)
        sending = self
transaction._Sending = Sending
%s
servers, topic, name, folder = sys.argv[1:]
records = SentRecords(folder, "1000.json")
batch = BatchTransaction({"bootstrap.servers": servers}, topic, name, 1, 30, records)

def rows():
    yield pa.record_batch({"value": pa.array([b"one"], pa.binary()), "_end": [False]})
    middle()
    yield pa.record_batch({"value": pa.array([b"two", None], pa.binary()), "_end": [False, True]})

batch.send(rows())
"""


def killed(transaction: BatchTransaction, where: str) -> int:
    """Send "one" and "two" in a process that is killed; its exit code."""
    servers = transaction.config["bootstrap.servers"]
    arguments = [servers, transaction.topic, transaction.name, transaction.records.folder]
    return subprocess.run([sys.executable, "-c", KILLED % where, *arguments], check=False, timeout=60).returncode


def test_a_replaced_attempt_cannot_commit_after_a_later_one_began(
    kafka: str, topic: str, transaction: BatchTransaction
) -> None:
    def overtaken() -> Iterator[pa.RecordBatch]:
        yield rows(b"zombie")
        replace(transaction, attempt=2).send(iter([rows(b"living"), END]))
        yield rows(b"zombie")
        yield END

    with pytest.raises(AttemptReplacedError):
        transaction.send(overtaken())
    assert values(kafka, topic) == [b"living"]


def test_a_replaced_attempt_that_begins_late_finds_the_batch_sent(
    kafka: str, topic: str, transaction: BatchTransaction
) -> None:
    replace(transaction, attempt=2).send(iter([rows(b"living"), END]))
    assert transaction.send(iter([rows(b"zombie"), END]))[1]
    assert values(kafka, topic) == [b"living"]


def test_a_replaced_attempt_that_checked_before_the_batch_was_sent_does_not_send_it_again(
    kafka: str, topic: str, transaction: BatchTransaction
) -> None:
    class Overtaken(SentRecords):
        looks = 0

        def find(self, topic_id: str) -> Sent | None:
            found = super().find(topic_id)
            Overtaken.looks += 1
            if Overtaken.looks == 1:
                replace(transaction, attempt=2).send(iter([rows(b"living"), END]))
            return found

    zombie = replace(transaction, records=Overtaken(transaction.records.folder, transaction.records.name))
    assert zombie.send(iter([rows(b"zombie"), END]))[1]
    assert values(kafka, topic) == [b"living"]


def test_rows_that_fail_leave_no_messages_and_do_not_block_consumers(
    kafka: str, topic: str, transaction: BatchTransaction
) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield rows(*[b"x" * 100] * 1000)
        raise RuntimeError("the transform")

    with pytest.raises(RuntimeError, match="the transform"):
        transaction.send(failing())
    assert values(kafka, topic) == []
    transaction.send(iter([rows(b"a"), END]))
    assert values(kafka, topic) == [b"a"]


def test_rows_without_the_end_marker_are_not_committed(kafka: str, topic: str, transaction: BatchTransaction) -> None:
    """So it looks to a Python worker when the JVM before it fails, is cancelled or is killed."""
    with pytest.raises(RowsCutOffError):
        transaction.send(iter([rows(b"a")]))
    assert values(kafka, topic) == []


def test_a_batch_that_takes_longer_than_its_transaction_is_an_error_with_a_remedy(
    kafka: str, topic: str, transaction: BatchTransaction
) -> None:
    short = replace(transaction, timeout_seconds=1)

    def slow() -> Iterator[pa.RecordBatch]:
        yield rows(b"a")
        # The broker looks for transactions to abort every 10 seconds (transaction.abort.timed.out…interval.ms).
        threading.Event().wait(13)
        yield rows(b"b")
        yield END

    with pytest.raises(TransactionTimedOutError, match=r"transaction_timeout_seconds"):
        short.send(slow())
    assert values(kafka, topic) == []
    transaction.send(iter([rows(b"a"), rows(b"b"), END]))
    assert values(kafka, topic) == [b"a", b"b"]


def test_the_error_of_a_too_large_message_has_its_key(kafka: str, topic: str, transaction: BatchTransaction) -> None:
    large = rows(b"a", secrets.token_bytes(9 << 20), key=pa.array([b"k", b"big"]))
    with pytest.raises(MessageRefusedError, match=r"9,437,187 bytes with key b'big'.*max.message.bytes"):
        transaction.send(iter([large, END]))
    assert values(kafka, topic) == []


def test_a_message_for_a_missing_partition_is_an_error(topic: str, transaction: BatchTransaction) -> None:
    with pytest.raises(MessageRefusedError, match="Use only partitions that the topic has"):
        transaction.send(iter([rows(b"a", partition=pa.array([7], pa.int32())), END]))


def test_a_missing_topic_and_a_too_long_transaction_timeout_are_errors(transaction: BatchTransaction) -> None:
    with pytest.raises(TopicMissingError, match="There is no topic 'nowhere'"):
        replace(transaction, topic="nowhere").send(iter([rows(b"a"), END]))
    with pytest.raises(KafkaRefusedError, match=r"transaction.max.timeout.ms"):
        replace(transaction, timeout_seconds=3600).send(iter([rows(b"a"), END]))


def test_a_topic_that_was_created_again_gets_the_batch_again(
    kafka: str, kafka_admin: AdminClient, topic: str, transaction: BatchTransaction
) -> None:
    transaction.send(iter([rows(b"a"), END]))
    kafka_admin.delete_topics([topic])[topic].result()
    deadline = time.monotonic() + 30
    while topic in kafka_admin.list_topics(timeout=5).topics:
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)
    create(kafka_admin, topic)
    assert transaction.send(iter([rows(b"a"), END]))[1] is False
    assert values(kafka, topic) == [b"a"]


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
        batch = WrittenBatch(
            stream=stream,
            context=BatchContext.of(stream.name, T, 10_000, attempt),
            batch_time_ms=T,
            attempt=attempt,
            manifest_uri="",
            from_kafka=False,
            target=target,
            undecodable={},
            out=io.StringIO(),
            progress=lambda _: None,
        )
        return KafkaWriter(output.model_copy(update=fields)).write(frame, batch)

    return write


@pytest.fixture
def log(spark: SparkSession, written_log: Any, make_records: Any) -> DataFrame:
    """Three records as the log has them."""
    written_log.add(make_records([b"one", None, b"\xff"]))
    return spark.read.format("wal").options(manifests=json.dumps([written_log.manifest()]), input="records").load()


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


def test_a_repeat_counts_and_sends_nothing_also_with_another_transform(
    spark: SparkSession, kafka: str, topic: str, write: Write
) -> None:
    frame = spark.range(0, 30_000, 1, 4).selectExpr("CAST(id AS STRING) AS key", "struct(id AS n) AS value")
    assert write(frame)["messages"] == 30_000
    assert write(frame.limit(7), attempt=2) == {"messages": 0, "repeated": 30_000, "bytes": 0}
    found = read(kafka, topic)
    assert len(found) == 30_000
    assert json.loads(found[0].value()) == {"n": int(found[0].key())}


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
