"""Sends one batch to one topic in one transaction; repeated attempts have the effect of one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from headrace.elasticsearch.columns import HEADERS, KEY, PARTITION, VALUE
from headrace.spark.outputs.errors import (
    AttemptReplacedError,
    KafkaOutputError,
    RowsCutOffError,
    TransactionTimedOutError,
)
from headrace.spark.outputs.kafka.client import reported, topic_id
from headrace.spark.outputs.kafka.message_columns import END
from headrace.spark.outputs.kafka.sent_batches import Marker, Sent, SentRecords

_SETTINGS: Mapping[str, Any] = {
    "enable.idempotence": True,
    "compression.type": "zstd",
    "linger.ms": 20,
    # Java's partitioner, so that a key goes to the partition where Kafka Connect and others put it.
    "partitioner": "murmur2_random",
    # The topic limits the size of a message, not the producer.
    "message.max.bytes": 1_000_000_000,
    # Limits the memory to the larger of these bytes and one message.
    "queue.buffering.max.kbytes": 64 * 1024,
    "queue.buffering.max.messages": 200_000,
    "delivery.report.only.error": True,
}
_TIMEOUT_SECONDS = 60.0
_FENCED = (
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.INVALID_TXN_STATE,
)
_POLL_EVERY = 1_000


@dataclass(frozen=True)
class BatchTransaction:
    """What a task needs to send a batch. ``config`` may contain secrets and is not in ``repr``.

    ``name`` is unique for the batch and equal for all its attempts. It is the marker's group and the transactional id,
    so a new attempt fences the earlier ones.
    """

    config: Mapping[str, Any] = field(repr=False)
    topic: str
    name: str
    attempt: int
    timeout_seconds: float
    records: SentRecords

    def send(self, batches: Iterator[pa.RecordBatch]) -> tuple[Sent, bool]:
        """Send the rows of `in_one_partition`. Returns what was sent, and whether an earlier attempt had sent it.

        A batch that was sent before is not sent again, and its rows are not read.

        Raises:
            AttemptReplacedError: another attempt at the batch began.
            TransactionTimedOutError: reading and sending the rows took longer than ``timeout_seconds``.
            RowsCutOffError: the rows ended without the end marker; Spark failed or was cancelled and reports why.
            KafkaOutputError, or a subclass: Kafka did not accept the rows. None of them is visible.
        """
        topic = topic_id(self.config, self.topic)
        known = self.records.find(topic)
        if known is not None:
            return known, True
        producer = self._producer()
        marker = Marker(self.config, self.name, self.topic, timeout_seconds=_TIMEOUT_SECONDS)
        sending = _Sending(producer, self)
        try:
            # Fences earlier attempts: an open transaction is aborted, one that is being committed is completed.
            producer.init_transactions(_TIMEOUT_SECONDS)
            # The record is checked again: it may have been written, and the marker deleted, since the first check.
            known = marker.find(topic) or self.records.find(topic)
            sent = known or sending.send(batches, marker, topic)
            if sent.messages:
                self.records.write(sent)
                marker.remove(topic)
            return sent, known is not None
        except (KafkaException, SystemError) as error:
            raise self._reported(_kafka_error(error), sending) from error
        finally:
            sending.abort()
            marker.close()

    def _producer(self) -> Producer:
        timeout_ms = int(self.timeout_seconds * 1000)
        return Producer(
            {
                **_SETTINGS,
                **self.config,
                "transactional.id": self.name,
                "transaction.timeout.ms": timeout_ms,
            }
        )

    def _reported(self, error: KafkaError, sending: _Sending) -> Exception:
        sending.look()
        if sending.refused is not None:
            return sending.refused
        seconds = sending.seconds
        if error.code() in (*_FENCED, KafkaError._TIMED_OUT, KafkaError._INCONSISTENT) and (
            seconds >= self.timeout_seconds
        ):
            return TransactionTimedOutError(
                f"The batch's transaction to topic {self.topic!r} was open for {seconds:.0f} s, of the "
                f"{self.timeout_seconds:g} s that it may last; Kafka has aborted it.",
                remedy="Raise transaction_timeout_seconds of the output (and the brokers' transaction.max.timeout.ms, "
                "15 minutes), or make the batches smaller.",
            )
        if error.code() in _FENCED:
            return AttemptReplacedError(
                f"Another attempt at the batch has replaced attempt {self.attempt} in topic {self.topic!r}."
            )
        return reported(error, self.topic)


def _kafka_error(error: KafkaException | SystemError) -> KafkaError:
    """Kafka's error. The client raises a fatal error between two callbacks, and Python wraps it in SystemErrors."""
    cause: BaseException | None = error
    while isinstance(cause, SystemError):
        cause = cause.__cause__
    if not isinstance(cause, KafkaException):
        raise error
    fatal: KafkaError = cause.args[0]
    return fatal


class _Sending:
    """The transaction of one call."""

    def __init__(self, producer: Producer, batch: BatchTransaction) -> None:
        self.refused: KafkaOutputError | None = None
        self._producer = producer
        self._batch = batch
        self._began: float | None = None
        self._open = False
        self._messages = 0
        self._bytes = 0

    @property
    def seconds(self) -> float:
        """The seconds since the transaction began; 0 before."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def send(self, batches: Iterator[pa.RecordBatch], marker: Marker, topic: str) -> Sent:
        ended = False
        for batch in batches:
            rows = batch
            if batch.num_rows and batch.column(END)[-1].as_py():
                ended, rows = True, batch.slice(0, batch.num_rows - 1)
            if rows.num_rows:
                self._begin()
                self._produce(rows)
        if not ended:
            raise RowsCutOffError("Spark's rows ended before the end marker; nothing of the batch was sent.")
        sent = Sent(topic, self._batch.attempt, self._messages, self._bytes)
        if self._open:
            self._deliver()
            marker.add(self._producer, sent)
            self._commit()
        return sent

    def look(self) -> None:
        """Process delivery reports, so that ``refused`` is up to date."""
        with contextlib.suppress(KafkaException, SystemError):
            self._producer.poll(0)

    def abort(self) -> None:
        """Abort an open transaction at once: until its timeout it would block the topic's consumers."""
        if self._open:
            # If Kafka does not answer now, the next attempt fences this producer.
            with contextlib.suppress(KafkaException, SystemError):
                self._producer.abort_transaction(_TIMEOUT_SECONDS)

    def _begin(self) -> None:
        if not self._open:
            self._producer.begin_transaction()
            self._open = True
            self._began = time.monotonic()

    def _deliver(self) -> None:
        """Wait until Kafka has accepted all messages or refused one: the commit's error would be less specific."""
        while self._producer.flush(1) and self.refused is None and self.seconds < self._batch.timeout_seconds:
            continue
        if self.refused is not None:
            raise self.refused

    def _commit(self) -> None:
        while True:
            try:
                self._producer.commit_transaction(_TIMEOUT_SECONDS)
                break
            except KafkaException as error:
                # It is unknown whether the transaction is committed, so the commit is repeated.
                if not error.args[0].retriable() or self.seconds > 2 * self._batch.timeout_seconds + _TIMEOUT_SECONDS:
                    raise
        self._open = False

    def _produce(self, rows: pa.RecordBatch) -> None:
        columns = {name: rows.column(name) for name in rows.schema.names}
        self._messages += rows.num_rows
        lengths = (pc.sum(pc.binary_length(columns[name])) for name in (VALUE, KEY) if name in columns)
        self._bytes += sum(length.as_py() or 0 for length in lengths)
        nothing = [None] * rows.num_rows
        values, keys, headers, partitions = (
            columns[name].to_pylist() if name in columns else nothing for name in (VALUE, KEY, HEADERS, PARTITION)
        )
        for number, (value, key, pairs, partition) in enumerate(zip(values, keys, headers, partitions, strict=True)):
            self._produce_one(value, key, pairs, partition)
            if number % _POLL_EVERY == 0:
                self._producer.poll(0)
                if self.refused is not None:
                    raise self.refused

    def _produce_one(self, value: bytes | None, key: bytes | None, pairs: Any, partition: int | None) -> None:
        more: dict[str, Any] = {}
        if pairs is not None:
            more["headers"] = [(pair["key"], pair["value"]) for pair in pairs]
        if partition is not None:
            more["partition"] = partition
        while True:
            try:
                self._producer.produce(self._batch.topic, value, key, on_delivery=self._undelivered, **more)
                return
            except BufferError:
                self._producer.poll(0.1)
                if self.refused is not None:
                    raise self.refused from None
            except KafkaException as error:
                self._refuse(error.args[0], value, key)
                raise

    def _undelivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._refuse(error, message.value(), message.key())

    def _refuse(self, error: KafkaError, value: bytes | None, key: bytes | None) -> None:
        # Only the first error has the reason: later messages fail because of it.
        if self.refused is None and error.code() not in (*_FENCED, *_CONSEQUENCES):
            size = len(value or b"") + len(key or b"")
            self.refused = reported(
                error, self._batch.topic, message=f"a message of {size:,} bytes with key {key!r:.80}"
            )


# Errors of messages that are dropped because the transaction is aborted or took too long.
_CONSEQUENCES = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._MSG_TIMED_OUT, KafkaError._STATE)
