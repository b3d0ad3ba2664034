"""The topics of an input: which there are, their ids and numbers of partitions, and whether one was created again.

librdkafka continues to read by name: if a topic was deleted and created again, and has already reached the old
position, its records would pass for those of the old one. So the ids of a block's topics are queried after its last
record was read and before it is stored (one query per block, about a millisecond). If they are still the positions'
ids, every record is of that topic.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, TopicCollection

from headrace.blocks import TopicPartition
from headrace.kafka.client import AskingAdmin, admin_config
from headrace.kafka.client_errors import SERVERS_REMEDY, Explained, plain
from headrace.kafka.errors import KafkaNotAskedError, TopicsNotFoundError
from headrace.stream.inputs import KafkaInput

logger = logging.getLogger(__name__)

_QUESTION_SECONDS = 10.0
_WAIT_SECONDS = 0.2
_WAITS_UNTIL_ASKED_AGAIN = 10
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
        futures = self._request(topics)

        def answer(seconds: float) -> Mapping[str, str | None] | None:
            concurrent.futures.wait(futures.values(), timeout=seconds)
            return _ids_of(futures)

        return answer

    def within(self, topics: Collection[str], seconds: float) -> Mapping[str, str | None] | None:
        """The answer, or None if there is none after about ``seconds`` (`wait_for`). Raises as ``ask`` does."""
        futures = self._request(topics)
        wait_for(self._admin, futures.values(), seconds)
        return _ids_of(futures)

    def _request(self, topics: Collection[str]) -> Mapping[str, concurrent.futures.Future[Any]]:
        futures: Mapping[str, concurrent.futures.Future[Any]] = self._admin.describe_topics(
            TopicCollection(topic_names=list(topics)), request_timeout=_QUESTION_SECONDS
        )
        return futures


def _ids_of(futures: Mapping[str, concurrent.futures.Future[Any]]) -> Mapping[str, str | None] | None:
    if not all(future.done() for future in futures.values()):
        return None
    return {topic: _id_of(future) for topic, future in futures.items()}


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

    def to_drop(self, partitions: Sequence[TopicPartition]) -> Foreign:
        """Those of ``partitions`` whose records must not be stored. A deleted topic has no other id, so the records
        read are its own. Waits until Kafka answers; ``wait`` raises to give up."""
        topics = {partition.topic for partition in partitions}
        if not topics:
            return Foreign()
        current = self._current(topics)
        unauthorized = tuple(partition for partition in partitions if current[partition.topic] == _NOT_DESCRIBED)
        recreated = tuple(
            partition
            for partition in partitions
            if current[partition.topic] not in (None, _NOT_DESCRIBED, partition.topic_id)
        )
        for dropped, why in ((recreated, "was created again"), (unauthorized, "may not be described")):
            for partition in dropped:
                logger.error(
                    "%s-%d %s; the records that were read under its name are dropped",
                    partition.topic,
                    partition.partition,
                    why,
                )
        return Foreign(recreated, unauthorized)

    def _current(self, topics: Collection[str]) -> Mapping[str, str | None]:
        while True:
            try:
                return self._first_answer(topics)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    # One such topic must not prevent the others' records from being stored, so query them singly.
                    if len(topics) == 1:
                        return dict.fromkeys(topics, _NOT_DESCRIBED)
                    return {topic: reported for name in topics for topic, reported in self._current([name]).items()}
                logger.warning("Kafka does not answer with the topics' ids, and is asked again: %s", error)
                self._wait(1.0)

    def _first_answer(self, topics: Collection[str]) -> Mapping[str, str | None]:
        """Ask another time while there is no answer, since a question may have gone to a broker that hangs."""
        asked: list[Callable[[float], Mapping[str, str | None] | None]] = []
        waits = 0
        while True:
            if waits % _WAITS_UNTIL_ASKED_AGAIN == 0:
                asked.append(self._ids.ask(topics))
            for answer in tuple(asked):
                try:
                    current = answer(_WAIT_SECONDS / len(asked))
                except KafkaException:
                    asked.remove(answer)
                    if not asked:
                        raise
                else:
                    if current is not None:
                        return current
            self._wait(0.0)
            waits += 1


class RecreatedTopics:
    """Determines without waiting whether a topic was created again. Not thread-safe."""

    def __init__(self, ids: TopicIds) -> None:
        self._ids = ids
        self._questions: dict[str, Callable[[float], Mapping[str, str | None] | None]] = {}

    def is_recreated(self, partition: TopicPartition) -> bool | None:
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


class AdminQuestions:
    """An admin client of an input's cluster. Not thread-safe."""

    def __init__(self, source: KafkaInput, admin: Any = None, *, quiet: bool = False) -> None:
        """``quiet``: librdkafka writes nothing to standard error; `not_asked` has its last error.

        Raises ClientSettingError, ConnectionNotFoundError, ConnectionFormatError or TokenError.
        """
        self.source = source
        config: dict[str, Any] = dict(admin_config(source)) if admin is None else {}
        if quiet:
            config["log_level"] = 0
        self.servers = str(config.get("bootstrap.servers") or source.bootstrap_servers or source.connection)
        self.admin = AskingAdmin(config, gives_up_early=True) if admin is None else admin

    def not_asked(self, error: BaseException) -> KafkaNotAskedError:
        """The error that names the servers that did not answer, and why."""
        known = why_silent(self.admin)
        text, remedy = (error_text(error), SERVERS_REMEDY) if known is None else (known.text, known.remedy)
        if self.source.connection:
            remedy = remedy.replace("the connection", f"connection {self.source.connection!r}")
        return KafkaNotAskedError(f"Kafka at {self.servers} cannot be asked: {text}.", remedy=remedy)


def wait_for(admin: Any, futures: Collection[concurrent.futures.Future[Any]], seconds: float) -> None:
    """Wait until all are done, as `AskingAdmin.wait` does; with another client, for ``seconds`` and a little."""
    if isinstance(admin, AskingAdmin):
        admin.wait(futures, seconds)
    else:
        concurrent.futures.wait(futures, timeout=seconds + 5)


def why_silent(admin: Any) -> Explained | None:
    """The last real error of the client's connections, if it is known."""
    return admin.last_error() if isinstance(admin, AskingAdmin) else None


def error_text(error: BaseException) -> str:
    """A Kafka error's name and text, any other's text."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    return plain(inner) if isinstance(inner, KafkaError) else str(error) or type(error).__name__


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

    def __init__(self, admin: Any, source: KafkaInput) -> None:
        self._admin = admin
        self._source = source

    def topics(self, refused: dict[str, TopicsNotFoundError] | None = None) -> tuple[list[SeenTopic], list[str]]:
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
        wait_for(self._admin, futures.values(), _ANSWER_SECONDS)
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
