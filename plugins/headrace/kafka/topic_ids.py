"""Detects, by the topic id, that a topic was deleted and created again under the same name.

librdkafka continues to read by name: if the new topic has already reached the old position, its records would pass for
those of the old one. So the ids of a block's topics are queried after its last record was read and before it is stored
(one query per block, about a millisecond). If they are still the positions' ids, every record is of that topic.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, TopicCollection

from headrace.blocks import TopicPartition

logger = logging.getLogger(__name__)

_QUESTION_SECONDS = 10.0
# Stands for the id of a topic that may not be described: no topic has it, so its records are not stored.
_NOT_DESCRIBED = ""


class TopicIds(Protocol):
    """Queries Kafka for topic ids."""

    def ask(self, topics: Collection[str]) -> Callable[[float], Mapping[str, str | None] | None]:
        """Start a query without waiting. Returns a function that waits up to the given seconds for the answer.

        It returns each topic's id, None for a topic that does not exist; or None instead of the mapping when there is
        no answer yet. Raises KafkaException when the query failed."""
        ...


class AdminTopicIds:
    """``TopicIds`` by an AdminClient."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin

    def ask(self, topics: Collection[str]) -> Callable[[float], Mapping[str, str | None] | None]:
        futures = self._admin.describe_topics(
            TopicCollection(topic_names=list(topics)), request_timeout=_QUESTION_SECONDS
        )

        def answer(seconds: float) -> Mapping[str, str | None] | None:
            concurrent.futures.wait(futures.values(), timeout=seconds)
            if not all(future.done() for future in futures.values()):
                return None
            return {topic: _id_of(future) for topic, future in futures.items()}

        return answer


def _id_of(future: concurrent.futures.Future[Any]) -> str | None:
    try:
        return str(future.result().topic_id)
    except KafkaException as error:
        if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            return None
        raise


@dataclass(frozen=True, slots=True)
class Foreign:
    """Partitions whose records must not be stored: their topic now has another id (``recreated``), or may not be
    described (``unauthorized``)."""

    recreated: tuple[TopicPartition, ...] = ()
    unauthorized: tuple[TopicPartition, ...] = ()


class IncarnationGuard:
    """Determines which partitions' records must not be stored. ``wait(seconds)`` is called while Kafka does not answer,
    so that heartbeats continue."""

    def __init__(self, ids: TopicIds, wait: Callable[[float], None]) -> None:
        self._ids = ids
        self._wait = wait

    def look(self, partitions: Sequence[TopicPartition]) -> Foreign:
        """Those of ``partitions`` whose records must not be stored. A deleted topic has no other id, so the records
        read are its own. Waits until Kafka answers; ``wait`` raises to give up."""
        topics = {partition.topic for partition in partitions}
        if not topics:
            return Foreign()
        current = self._current(topics)
        unauthorized = tuple(each for each in partitions if current[each.topic] == _NOT_DESCRIBED)
        recreated = tuple(
            each for each in partitions if current[each.topic] not in (None, _NOT_DESCRIBED, each.topic_id)
        )
        for found, why in ((recreated, "was created again"), (unauthorized, "may not be described")):
            for each in found:
                logger.error(
                    "%s-%d %s; the records that were read under its name are dropped", each.topic, each.partition, why
                )
        return Foreign(recreated, unauthorized)

    def _current(self, topics: Collection[str]) -> Mapping[str, str | None]:
        while True:
            answer = self._ids.ask(topics)
            try:
                current = answer(0.2)
                while current is None:
                    self._wait(0.0)
                    current = answer(0.2)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    # One such topic must not prevent the others' records from being stored, so query them singly.
                    if len(topics) == 1:
                        return dict.fromkeys(topics, _NOT_DESCRIBED)
                    return {topic: reported for each in topics for topic, reported in self._current([each]).items()}
                logger.warning("Kafka does not answer with the topics' ids, and is asked again: %s", error)
                self._wait(1.0)
            else:
                return current


class RecreatedTopics:
    """Determines without waiting whether a topic was created again. Not thread-safe."""

    def __init__(self, ids: TopicIds) -> None:
        self._ids = ids
        self._questions: dict[str, Callable[[float], Mapping[str, str | None] | None]] = {}

    def look(self, partition: TopicPartition) -> bool | None:
        """Whether the partition's topic was deleted or created again. None while Kafka has not answered yet; False also
        when the query failed."""
        topic = partition.topic
        try:
            answer = self._questions.get(topic)
            if answer is None:
                answer = self._questions[topic] = self._ids.ask([topic])
            reported = answer(0.0)
        except KafkaException:
            self._questions.pop(topic, None)
            return False
        if reported is None:
            return None
        del self._questions[topic]
        return reported[topic] != partition.topic_id
