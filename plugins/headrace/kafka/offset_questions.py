"""Queries about partitions and topics in Kafka: first and end offsets, the first offset at a time, compaction."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]

from headrace.kafka.errors import RangesUnreadableError
from headrace.kafka.topic_ids import AdminTopicIds
from headrace.kafka.topic_watch import SeenTopic, TopicWatch
from headrace.stream.inputs import KafkaInput

Partition = tuple[str, int]
"""Topic and partition."""

EARLIEST: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_NO_SUCH_PARTITION = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
    }
)
_NOT_ALLOWED = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_TRANSACTIONS = "__transaction_state"
ANSWER_SECONDS = 10.0
# How long an answer may take through librdkafka after its timeout.
_SLACK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Kept:
    """The offsets ``[first, end)`` that Kafka has of a partition. ``first_timestamp_ms`` is the timestamp of its first
    record, None if it has no record with one."""

    first: int
    end: int
    first_timestamp_ms: int | None


class OffsetQuestions:
    """Queries by an AdminClient. The wait for each answer is bounded."""

    def __init__(self, admin: Any, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._admin = admin
        self._seconds = answer_seconds

    def look(self, source: KafkaInput) -> tuple[list[SeenTopic], list[str]]:
        """The input's topics, and the named ones that do not exist. Raises RangesUnreadableError or
        TopicsNotFoundError."""
        try:
            return TopicWatch(self._admin, source).look()
        except KafkaException as error:
            raise unreadable(f"does not answer with the topics of input {source.id!r}: {error}") from error

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        """Each topic's id, None for a topic that does not exist. Raises RangesUnreadableError."""
        if not topics:
            return {}
        try:
            answer = AdminTopicIds(self._admin).ask(topics)(self._seconds)
        except KafkaException as error:
            raise unreadable(f"does not describe {', '.join(sorted(topics))}: {error}") from error
        if answer is None:
            raise unreadable(f"did not describe {', '.join(sorted(topics))} within {self._seconds:.0f} s")
        return answer

    def kept(self, partitions: Collection[Partition]) -> dict[Partition, Kept | None]:
        """What Kafka has of each partition, None where there is no such partition. Raises RangesUnreadableError.

        The end is the high watermark, so it includes open transactions.
        """
        firsts = self._ask(dict.fromkeys(partitions, EARLIEST))
        ends = self._ask(dict.fromkeys(partitions, LATEST))
        # The answer to a query by time holds the timestamp of the record found: here, the first record.
        oldest = self._ask(dict.fromkeys(partitions, OffsetSpec.for_timestamp(0)))
        found: dict[Partition, Kept | None] = {}
        for each in partitions:
            first, end, record = firsts[each], ends[each], oldest[each]
            if first is None or end is None:
                found[each] = None
            else:
                timestamp = record.timestamp if record is not None and record.offset >= 0 else -1
                found[each] = Kept(int(first.offset), int(end.offset), timestamp if timestamp >= 0 else None)
        return found

    def first_at(self, partitions: Collection[Partition], timestamp_ms: int) -> dict[Partition, int | None]:
        """The first offset in each partition with this timestamp or a later one, None if there is none. Transaction
        markers and records of aborted transactions count. Raises RangesUnreadableError."""
        found = self._ask(dict.fromkeys(partitions, OffsetSpec.for_timestamp(timestamp_ms)))
        return {
            each: None if reported is None or reported.offset < 0 else int(reported.offset)
            for each, reported in found.items()
        }

    def is_compacted(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None if that cannot be determined, for example without the privilege."""
        try:
            return self.compaction(topic)
        except RangesUnreadableError:
            return None

    def compaction(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None without the privilege to query it. Raises RangesUnreadableError."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            future = self._admin.describe_configs([resource], request_timeout=self._seconds)[resource]
            return "compact" in str(future.result(timeout=self._seconds + _SLACK_SECONDS)["cleanup.policy"].value)
        except concurrent.futures.TimeoutError:
            raise unreadable(f"did not describe {topic} within {self._seconds:.0f} s") from None
        except KafkaException as error:
            if error.args[0].code() in _NOT_ALLOWED:
                return None
            raise unreadable(f"does not describe {topic}: {error}") from error

    def has_transactions(self) -> bool:
        """Whether the cluster has the topic of transaction states, which exists from the first transaction on. Raises
        RangesUnreadableError."""
        try:
            metadata = self._admin.list_topics(_TRANSACTIONS, timeout=self._seconds)
        except KafkaException as error:
            raise unreadable(f"does not answer with its topics: {error}") from error
        reported = metadata.topics.get(_TRANSACTIONS)
        return reported is not None and (reported.error is None or reported.error.code() not in _NO_SUCH_PARTITION)

    def _ask(self, specs: Mapping[Partition, Any]) -> dict[Partition, Any]:
        isolation = IsolationLevel.READ_UNCOMMITTED
        try:
            answers = request_offsets(self._admin, specs, isolation=isolation, seconds=self._seconds)
        except KafkaException as error:
            raise unreadable(f"does not answer with its offsets: {error}") from error
        return {each: self._answer(each, future) for each, future in answers.items()}

    def _answer(self, partition: Partition, future: concurrent.futures.Future[Any]) -> Any:
        name = "{}-{}".format(*partition)
        try:
            return future.result(timeout=0)
        except concurrent.futures.TimeoutError:
            raise unreadable(f"did not answer with the offsets of {name} within {self._seconds:.0f} s") from None
        except KafkaException as error:
            if error.args[0].code() in _NO_SUCH_PARTITION:
                return None
            raise unreadable(f"does not answer with the offsets of {name}: {error}") from error


def unreadable(what: str) -> RangesUnreadableError:
    """The error with the text "Kafka ``what``."."""
    return RangesUnreadableError(f"Kafka {what}.", remedy="Run it again once Kafka answers.")


def request_offsets(
    admin: Any, specs: Mapping[tuple[str, int], Any], *, isolation: IsolationLevel, seconds: float
) -> dict[tuple[str, int], concurrent.futures.Future[Any]]:
    """Request an offset of each (topic, partition) by its ``OffsetSpec``. Returns the futures of the answers; those
    that did not arrive in time are not done.

    Raises KafkaException when the request cannot be made; errors of single partitions are in their futures.
    """
    if not specs:
        return {}
    futures = admin.list_offsets(
        {KafkaPartition(topic, number): spec for (topic, number), spec in specs.items()},
        isolation_level=isolation,
        request_timeout=seconds,
    )
    concurrent.futures.wait(futures.values(), timeout=seconds + _SLACK_SECONDS)
    return {(each.topic, each.partition): future for each, future in futures.items()}
