"""Batches as Kafka transactions: all or nothing, once, whatever dies in between."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient
from tests.integration.spark.kafka_output.conftest import create, groups, read, values

from headrace.kafka.producers import KafkaRefusedError, MessageRefusedError, TopicMissingError
from headrace.spark.outputs.kafka_transaction import (
    BatchTransaction,
    FormerName,
    RowsCutOffError,
    Sent,
    SentRecords,
    TransactionTimedOutError,
)
from headrace.spark.outputs.writer import AttemptReplacedError


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


def test_kafka_knows_the_commit_whose_record_a_crash_prevented(
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


@pytest.fixture
def renamed(transaction: BatchTransaction) -> BatchTransaction:
    """The next attempt at the batch, of an output with another id for the same topic."""
    former = FormerName(transaction.name, transaction.records)
    records = replace(transaction.records, folder=f"{transaction.records.folder}-renamed")
    return replace(transaction, name=f"{transaction.name}-renamed", attempt=2, records=records, former=(former,))


@pytest.mark.parametrize("died", [False, True], ids=["recorded", "died before its record"])
def test_an_output_with_a_new_id_finds_the_batch_sent_before(
    kafka: str,
    kafka_admin: AdminClient,
    topic: str,
    transaction: BatchTransaction,
    renamed: BatchTransaction,
    *,
    died: bool,
) -> None:
    if died:
        assert killed(transaction, "SentRecords.write = lambda *_: os.kill(os.getpid(), 9)") == -signal.SIGKILL
    else:
        transaction.send(iter([rows(b"one"), rows(b"two"), END]))
    sent, before = renamed.send(iter([rows(b"one"), rows(b"two"), END]))
    assert (sent.messages, sent.attempt, before) == (2, 1, True)
    assert values(kafka, topic) == [b"one", b"two"]
    assert renamed.records.find(sent.topic_id) == sent
    assert groups(kafka_admin, transaction.name) == []
    assert renamed.send(iter([END])) == (sent, True)


def test_a_former_output_cannot_commit_after_the_new_one_began(
    kafka: str, topic: str, transaction: BatchTransaction, renamed: BatchTransaction
) -> None:
    def overtaken() -> Iterator[pa.RecordBatch]:
        yield rows(b"zombie")
        renamed.send(iter([rows(b"living"), END]))
        yield rows(b"zombie")
        yield END

    with pytest.raises(AttemptReplacedError):
        transaction.send(overtaken())
    assert values(kafka, topic) == [b"living"]


def test_a_killed_attempt_is_aborted_by_the_next_at_once(kafka: str, topic: str, transaction: BatchTransaction) -> None:
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
from headrace.spark.outputs import kafka_transaction as transaction
from headrace.spark.outputs.kafka_transaction import Sent, SentRecords
from headrace.spark.outputs.kafka_transaction import BatchTransaction

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


def test_an_attempt_cannot_commit_after_a_later_one_began(
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


def test_a_late_replaced_attempt_finds_the_batch_sent(kafka: str, topic: str, transaction: BatchTransaction) -> None:
    replace(transaction, attempt=2).send(iter([rows(b"living"), END]))
    assert transaction.send(iter([rows(b"zombie"), END]))[1]
    assert values(kafka, topic) == [b"living"]


def test_a_replaced_attempt_that_checked_too_early_sends_nothing(
    kafka: str, topic: str, transaction: BatchTransaction
) -> None:
    """It looked before the later attempt had sent the batch."""

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


def test_failing_rows_leave_no_messages_and_block_no_consumers(
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


def test_a_batch_that_outlasts_its_transaction_names_the_remedy(
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


def test_a_missing_topic_and_too_long_a_timeout_are_errors(transaction: BatchTransaction) -> None:
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
