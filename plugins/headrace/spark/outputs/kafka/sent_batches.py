"""Records which batches were sent to a topic: in Kafka by a marker, and in the stream's storage by a sent record.

A batch's transaction commits, together with its messages, an offset in the batch's own consumer group: the *marker*.
So Kafka itself shows whether a batch was sent, even if the sender died before it could report it. After that the *sent
record* is written to the stream's folder, where it stays forever, and the group is deleted. The record is needed
because a broker deletes offsets after some time (offsets.retention.minutes, a week), and a batch may run again later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.errors import HeadraceError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

logger = logging.getLogger(__name__)

_QUESTION_SECONDS = 10.0
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

    def _path(self, topic_id: str) -> str:
        return f"{quote(topic_id, safe='')}/{self.name}"


class Marker:
    """The marker of a batch: an offset in its own consumer group, for partition 0 of the topic."""

    def __init__(self, config: Mapping[str, Any], group: str, topic: str, *, timeout_seconds: float) -> None:
        self._config = config
        self._group = group
        self._topic = topic
        self._timeout_seconds = timeout_seconds
        self._consumer = Consumer(
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
                (found,) = self._consumer.committed([TopicPartition(self._topic, 0)], timeout=_QUESTION_SECONDS)
                if found.error is not None:
                    raise KafkaException(found.error)
                break
            except KafkaException as error:
                if error.args[0].code() not in _COORDINATOR_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        if found.offset < 0:
            return None
        fields: dict[str, Any] = {"attempt": 0, "bytes": 0}
        with contextlib.suppress(ValueError):
            fields.update(json.loads(found.metadata or ""))
        return Sent(topic_id, int(fields["attempt"]), found.offset, int(fields["bytes"]))

    def remove(self, topic_id: str) -> None:
        """Delete the group. If that fails, it stays until the broker lets it expire."""
        try:
            # Waits until the transaction's offsets are committed: otherwise they would reappear after the deletion.
            self.find(topic_id)
            admin = AdminClient(dict(self._config))
            admin.delete_consumer_groups([self._group])[self._group].result(_QUESTION_SECONDS)
        except (KafkaException, TimeoutError) as error:
            logger.info("The group %s stays until Kafka lets it expire: %s", self._group, error)
