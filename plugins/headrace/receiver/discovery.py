"""All that the tracker asks Kafka about one input, in one go and off its loop: no question delays a lease's renewal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from confluent_kafka import KafkaException

from headrace.errors import HeadraceError
from headrace.kafka.admin_questions import AdminQuestions
from headrace.kafka.errors import TopicsNotFoundError
from headrace.kafka.starting_offsets import resolve, unknown_partitions
from headrace.kafka.topic_watch import SeenTopic, TopicWatch
from headrace.receiver.group_watch import foreign_members
from headrace.stream.inputs import KafkaInput

logger = logging.getLogger(__name__)

PartitionKey = tuple[str, str, int]
"""Topic, topic id, partition."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger knows of an input before it is asked about.

    ``partitions`` have a position. ``topics`` were seen (name and id), and whether they were there when the input
    ``began``, which it has once it was looked at.
    """

    partitions: frozenset[PartitionKey] = frozenset()
    topics: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    began: bool = False

    def appeared(self, topic: str, topic_id: str) -> bool:
        """Whether new partitions of the topic came to be after the input began. Its own partitions and the ledger's
        note of it tell, not other topics': where to begin in one may become known later than in another."""
        if any(key[:2] == (topic, topic_id) for key in self.partitions):
            return True
        return not self.topics.get((topic, topic_id), not self.began)


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found. ``starting`` has an offset for each partition that was not known; ``problems`` are sentences
    for a person; ``foreign`` is None where it could not be found out. ``refused`` says why of topics of which nothing
    may be known, not even whether they are there. ``servers`` were asked."""

    topics: tuple[SeenTopic, ...]
    missing: tuple[str, ...] = ()
    starting: dict[PartitionKey, int] = field(default_factory=dict)
    foreign: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    servers: str = ""


class Discoverer(Protocol):
    """Asks about one input. Called in a thread of its own, one call at a time."""

    def discover(self, known: Known) -> Discovery: ...


class KafkaDiscoverer:
    """``Discoverer`` by an AdminClient."""

    def __init__(self, source: KafkaInput, group: str, admin: Any = None) -> None:
        self._source = source
        self._group = group
        self._admin = admin
        self._questions: AdminQuestions | None = None

    def discover(self, known: Known) -> Discovery:
        """Ask. Raises KafkaNotAskedError where there is no answer, and what a wrong connection raises."""
        if self._questions is None:
            self._questions = AdminQuestions(self._source, self._admin)
        asking = self._questions
        refused: dict[str, TopicsNotFoundError] = {}
        try:
            topics, missing = TopicWatch(asking.admin, self._source, asking.wait).look(refused)
        except KafkaException as error:
            raise asking.not_asked(error) from error
        problems = [str(error) for error in refused.values()]
        if self._source.topic_pattern is not None and not topics:
            problems.append(
                f"no topic at {asking.servers} matches the pattern {self._source.topic_pattern!r} of input "
                f"{self._source.id}"
            )
        problems += [
            f"starting_offsets of input {self._source.id} names {topic}-{partition}, which does not exist"
            for topic, partition in unknown_partitions(self._source, {seen.topic: seen.partitions for seen in topics})
        ]
        starting: dict[PartitionKey, int] = {}
        for seen in topics:
            new = [(seen.topic, number) for number in range(seen.partitions)]
            new = [each for each in new if (seen.topic, seen.topic_id, each[1]) not in known.partitions]
            try:
                appeared = known.appeared(seen.topic, seen.topic_id)
                resolved = resolve(asking.admin, self._source, new, appeared=appeared)
            except (KafkaException, HeadraceError) as error:
                problems.append(f"where to begin in {seen.topic} is not known: {error}")
                continue
            for (topic, number), offset in resolved.offsets.items():
                starting[topic, seen.topic_id, number] = offset
            for (topic, number), failure in resolved.failures.items():
                problems.append(f"where to begin in {topic}-{number} is not known yet: {failure or 'no answer'}")
        return Discovery(
            topics=tuple(topics),
            missing=tuple(missing),
            starting=starting,
            foreign=self._foreign(asking.admin),
            problems=tuple(problems),
            refused={topic: error.what for topic, error in refused.items()},
            servers=asking.servers,
        )

    def _foreign(self, admin: Any) -> tuple[str, ...] | None:
        try:
            return tuple(foreign_members(admin, self._group))
        except (KafkaException, TimeoutError) as error:
            logger.debug("group %s cannot be described: %s", self._group, error)
            return None
