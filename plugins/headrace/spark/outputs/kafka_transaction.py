"""Sends one batch to one Kafka topic in one transaction; repeated attempts have the effect of one.

A batch's transaction commits, together with its messages, an offset in the batch's own consumer group: the *marker*.
So Kafka itself shows whether a batch was sent, even if the sender died before it could report it. After that the *sent
record* is written to the stream's folder, where it stays as long as the batch can run again, and the group is deleted.
The record is needed because a broker deletes offsets after some time (offsets.retention.minutes, a week), and a batch
may run again later. If both are lost, the batch is sent again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from headrace.elasticsearch.columns import HEADERS, KEY, PARTITION, VALUE
from headrace.errors import HeadraceError
from headrace.kafka.client import open_admin, open_consumer, open_producer
from headrace.kafka.producers import PRODUCER_SETTINGS, KafkaOutputError, reported, topic_id
from headrace.spark.outputs.writer import AttemptReplacedError, OutputError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage


class TransactionTimedOutError(KafkaOutputError):
    """The batch took longer than the transaction timeout, and Kafka has aborted it."""


class RowsCutOffError(OutputError):
    """Spark's rows ended without the end marker: the job failed elsewhere, was cancelled, or its JVM died."""


logger = logging.getLogger(__name__)

_GROUP_SECONDS = 10.0
# The errors of a group's coordinator while it moves or is being created.
_COORDINATOR_BUSY = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A sent batch: the topic's id, the attempt, the number of messages, and the bytes of their keys and values."""

    topic_id: str
    attempt: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SentRecords:
    """The sent records of one batch: for each topic's id, a file at ``folder``/``<topic id>``/``name`` in a storage.

    The topic's id is used because a topic of the same name on another cluster, or one that was created again, does not
    have the messages.
    """

    folder: str
    name: str

    def find(self, topic_id: str) -> Sent | None:
        """The record for this topic; None if nothing was sent to it. Raises HeadraceError if the record is invalid."""
        try:
            fields: dict[str, Any] = json.loads(open_storage(self.folder).read(self._path(topic_id)))
            return Sent(**{name: fields[name] for name in Sent.__slots__})
        except StoredFileMissingError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise HeadraceError(
                f"{self.folder}/{self._path(topic_id)} is not a valid record of a sent batch: {error!r}.",
                remedy="Check whether the topic has the batch, and delete the file.",
            ) from None

    def write(self, sent: Sent) -> None:
        """Write the record, durable on return."""
        document = json.dumps({"version": 1, **asdict(sent)}).encode()
        open_storage(self.folder).write_atomically(self._path(sent.topic_id), document)

    def remove(self, topic_id: str) -> None:
        """Delete the record for this topic, if there is one."""
        open_storage(self.folder).delete(self._path(topic_id))

    def _path(self, topic_id: str) -> str:
        return f"{quote(topic_id, safe='')}/{self.name}"


@dataclass(frozen=True, slots=True)
class TopicSenders:
    """The outputs of a stream that have sent to a topic, as files at ``folder``/``<topic id>``/``<output>.json``.

    They are known without the ledger, which may be older than the topic. ``name`` is the output, of a replay with its
    name. ``present`` are all outputs that the definition has at the topic, this one too: none of them is a former id of
    another, then or later.
    """

    folder: str
    name: str
    present: tuple[str, ...]

    def note(self, topic_id: str) -> None:
        """Keep this output, before it sends."""
        beside = self._beside(topic_id, self.name)
        if not beside.issuperset(self.present):
            document = json.dumps({"version": 1, "outputs": sorted(beside.union(self.present))}).encode()
            open_storage(self.folder).write_atomically(self._path(topic_id, self.name), document)

    def former(self, topic_id: str) -> list[str]:
        """The outputs that have sent to the topic and that the definition no longer has there.

        None if it has several there: only the ledger knows which of them has taken the place of another.
        """
        if len(self.present) > 1:
            return []
        files = open_storage(self.folder).paths(quote(topic_id, safe=""))
        names = {unquote(path.rpartition("/")[2].removesuffix(".json")) for path in files}
        replay = self.name.partition(".")[2]
        return sorted(
            name
            for name in names.difference(self.present)
            if name.partition(".")[2] == replay and self.name not in self._beside(topic_id, name)
        )

    def _beside(self, topic_id: str, name: str) -> set[str]:
        try:
            return set(json.loads(open_storage(self.folder).read(self._path(topic_id, name)))["outputs"])
        except StoredFileMissingError:
            return set()

    def _path(self, topic_id: str, name: str) -> str:
        return f"{quote(topic_id, safe='')}/{quote(name, safe='')}.json"


class Marker:
    """The marker of a batch: an offset in its own consumer group, for partition 0 of the topic."""

    def __init__(self, config: Mapping[str, Any], group: str, topic: str, *, timeout_seconds: float) -> None:
        self._config = config
        self._group = group
        self._topic = topic
        self._timeout_seconds = timeout_seconds
        self._consumer = open_consumer(
            {**config, "group.id": group, "enable.auto.commit": False, "allow.auto.create.topics": False}
        )

    def close(self) -> None:
        self._consumer.close()

    def add(self, producer: Producer, sent: Sent) -> None:
        """Make the marker part of the producer's transaction. Raises KafkaException."""
        metadata = json.dumps({"attempt": sent.attempt, "bytes": sent.bytes})
        offset = TopicPartition(self._topic, 0, sent.messages, metadata=metadata)
        producer.send_offsets_to_transaction([offset], self._consumer.consumer_group_metadata(), self._timeout_seconds)

    def find(self, topic_id: str) -> Sent | None:
        """The marker, if a transaction has committed one. Waits during a commit; raises KafkaException."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                (committed,) = self._consumer.committed([TopicPartition(self._topic, 0)], timeout=_GROUP_SECONDS)
                if committed.error is not None:
                    raise KafkaException(committed.error)
                break
            except KafkaException as error:
                if error.args[0].code() not in _COORDINATOR_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        if committed.offset < 0:
            return None
        fields: dict[str, Any] = {"attempt": 0, "bytes": 0}
        with contextlib.suppress(ValueError):
            fields.update(json.loads(committed.metadata or ""))
        return Sent(topic_id, int(fields["attempt"]), committed.offset, int(fields["bytes"]))

    def remove(self, topic_id: str) -> None:
        """Delete the group. If that fails, it stays until the broker lets it expire."""
        try:
            # Waits until the transaction's offsets are committed: otherwise they would reappear after the deletion.
            self.find(topic_id)
            admin = open_admin(self._config)
            admin.delete_consumer_groups([self._group])[self._group].result(_GROUP_SECONDS)
        except (KafkaException, TimeoutError) as error:
            logger.info("The group %s stays until Kafka lets it expire: %s", self._group, error)


_TIMEOUT_SECONDS = 60.0
_FENCED = (
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.INVALID_TXN_STATE,
)
_POLL_EVERY = 1_000
END = "_end"
"""The column that is true only in the row after the last message; that row's other columns are null."""


@dataclass(frozen=True, slots=True)
class FormerName:
    """The name and records by which the batch was sent under a former id of the output."""

    name: str
    records: SentRecords


@dataclass(frozen=True)
class BatchTransaction:
    """What a task needs to send a batch. ``config`` may contain secrets and is not in ``repr``.

    ``name`` is unique for the batch and equal for all its attempts. It is the marker's group and the transactional id,
    so a new attempt fences the earlier ones. An attempt under one of the ``former`` names may have sent the batch too.
    """

    config: Mapping[str, Any] = field(repr=False)
    topic: str
    name: str
    attempt: int
    timeout_seconds: float
    records: SentRecords
    former: tuple[FormerName, ...] = ()

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
        known = self._recorded(topic)
        if known is not None:
            return known, True
        producer = self._producer(self.name)
        marker = Marker(self.config, self.name, self.topic, timeout_seconds=_TIMEOUT_SECONDS)
        sending = _Sending(producer, self)
        try:
            # Fences earlier attempts: an open transaction is aborted, one that is being committed is completed.
            producer.init_transactions(_TIMEOUT_SECONDS)
            # The record is checked again: it may have been written, and the marker deleted, since the first check.
            known = marker.find(topic) or self._sent_as_former(topic) or self._recorded(topic)
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

    def _recorded(self, topic: str) -> Sent | None:
        """The batch's record. A former output's becomes this one's, so that it stands for one output only."""
        if (known := self.records.find(topic)) is not None:
            return known
        for former in self.former:
            if (known := former.records.find(topic)) is not None:
                self.records.write(known)
                former.records.remove(topic)
                return known
        return None

    def _sent_as_former(self, topic: str) -> Sent | None:
        """The marker of an attempt under a former name that died before it wrote its record. One that still sends is
        fenced. Before a batch's first attempt there was none."""
        for former in self.former if self.attempt > 1 else ():
            self._producer(former.name).init_transactions(_TIMEOUT_SECONDS)
            marker = Marker(self.config, former.name, self.topic, timeout_seconds=_TIMEOUT_SECONDS)
            try:
                if (known := marker.find(topic)) is not None:
                    self.records.write(known)
                    marker.remove(topic)
                    return known
            finally:
                marker.close()
        return None

    def _producer(self, name: str) -> Producer:
        timeout_ms = int(self.timeout_seconds * 1000)
        return open_producer(
            {
                **PRODUCER_SETTINGS,
                **self.config,
                "transactional.id": name,
                "transaction.timeout.ms": timeout_ms,
            }
        )

    def _reported(self, error: KafkaError, sending: _Sending) -> Exception:
        sending.poll()
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

    def poll(self) -> None:
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
