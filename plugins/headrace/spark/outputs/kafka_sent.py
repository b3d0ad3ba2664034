"""What Kafka and the stream's storage know of the batches that were sent to a topic.

A batch's transaction commits, together with its messages, an offset in a consumer group of the batch's own: the
*marker*. So whether a batch was sent is known from Kafka itself also when the sender died before it could tell anyone.
Then the *sent record* is written into the stream's folder, for ever, and the group is deleted: a broker forgets
offsets after a while (offsets.retention.minutes, a week), and a batch may be run again later than that.
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
# What a group's coordinator says while it moves, or is just being made.
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
    """A batch that was sent: by which attempt, how many messages, and their keys' and values' bytes."""

    topic_id: str
    attempt: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SentRecords:
    """The sent records of one batch: for each topic's id, a file at ``folder``/``<topic id>``/``name`` in a storage.

    By its id, since one of that name on another cluster, or one that was made anew, has none of the messages.
    """

    folder: str
    name: str

    def find(self, topic_id: str) -> Sent | None:
        """What was sent to this topic, if anything."""
        try:
            fields: dict[str, Any] = json.loads(open_storage(self.folder).read(self._path(topic_id)))
            return Sent(**{name: fields[name] for name in Sent.__slots__})
        except StoredFileMissingError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise HeadraceError(
                f"{self.folder}/{self._path(topic_id)} does not tell what was sent: {error!r}.",
                remedy="See whether the topic has the batch, and delete the file.",
            ) from None

    def write(self, sent: Sent) -> None:
        """Durable on return."""
        document = json.dumps({"version": 1, **asdict(sent)}).encode()
        open_storage(self.folder).write_atomically(self._path(sent.topic_id), document)

    def _path(self, topic_id: str) -> str:
        return f"{quote(topic_id, safe='')}/{self.name}"


class Marker:
    """The batch's offset in its own group, at partition 0 of the topic."""

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
        """The marker of a committed transaction. Waits while one is being committed; raises KafkaException."""
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
        """Delete the group. If that fails the broker forgets it in its own time."""
        try:
            # Until its transaction's offsets are settled they would come back after the deletion.
            self.find(topic_id)
            admin = AdminClient(dict(self._config))
            admin.delete_consumer_groups([self._group])[self._group].result(_QUESTION_SECONDS)
        except (KafkaException, TimeoutError) as error:
            logger.info("The group %s stays until Kafka lets it expire: %s", self._group, error)
