"""Finds the topics that an input reads, with each topic's id and number of partitions."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection

from headrace.kafka.errors import TopicsNotFoundError
from headrace.stream.inputs import KafkaInput

_ANSWER_SECONDS = 10.0
_GONE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_ID})


@dataclass(frozen=True, slots=True, order=True)
class SeenTopic:
    """A topic as Kafka describes it now. ``partitions`` is their number; they are numbered from 0."""

    topic: str
    topic_id: str
    partitions: int


class TopicWatch:
    """Queries Kafka. A query may take seconds, so don't call it in a loop that renews a lease."""

    def __init__(
        self,
        admin: Any,
        source: KafkaInput,
        wait: Callable[[Collection[concurrent.futures.Future[Any]], float], None] | None = None,
    ) -> None:
        """``wait(futures, seconds)`` waits for the answers, for about so many seconds."""
        self._admin = admin
        self._source = source
        self._wait = wait or _wait

    def look(self, refused: dict[str, TopicsNotFoundError] | None = None) -> tuple[list[SeenTopic], list[str]]:
        """The input's topics in order of their names, and the named ones that do not exist.

        With ``refused``, the errors of topics that may not be described are put there, and do not stop the others.

        Raises:
            KafkaException: Kafka does not answer.
            TopicsNotFoundError: a topic may not be described, and ``refused`` is None.
        """
        names = self._names()
        if not names:
            return [], []
        futures = self._admin.describe_topics(
            TopicCollection(topic_names=names), include_authorized_operations=False, request_timeout=_ANSWER_SECONDS
        )
        self._wait(futures.values(), _ANSWER_SECONDS)
        seen, missing = [], []
        for topic in names:
            try:
                described = _described(topic, futures[topic])
            except TopicsNotFoundError as error:
                if refused is None:
                    raise
                refused[topic] = error
                continue
            if described is None:
                missing.append(topic)
            # Kafka's internal topics may match a name pattern too; they are left out.
            elif not described.is_internal:
                seen.append(SeenTopic(topic, str(described.topic_id), len(described.partitions)))
        return seen, missing

    def _names(self) -> list[str]:
        if self._source.topic_pattern is None:
            return sorted(set(self._source.topics))
        metadata = self._admin.list_topics(timeout=_ANSWER_SECONDS)
        return sorted(topic for topic in metadata.topics if self._source.matches(topic))


def _wait(futures: Collection[concurrent.futures.Future[Any]], seconds: float) -> None:
    concurrent.futures.wait(futures, timeout=seconds + 5)


def _described(topic: str, future: concurrent.futures.Future[Any]) -> Any:
    """The topic's description, None when there is no such topic."""
    try:
        return future.result(timeout=0)
    except concurrent.futures.TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"describing {topic}")) from None
    except KafkaException as error:
        kafka_error = error.args[0]
        if kafka_error.code() in _GONE:
            return None
        if kafka_error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise TopicsNotFoundError(
                f"Topic {topic} may not be described: {kafka_error.str()}.",
                remedy="Let the connection's user DESCRIBE and READ it.",
            ) from error
        raise
