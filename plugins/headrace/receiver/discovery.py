"""Discovers the partitions of one input; queries Kafka about its topics, starting offsets and foreign group members.

The queries run outside the tracker's loop, so they never delay the renewal of a lease.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from confluent_kafka import KafkaException

from headrace.errors import HeadraceError
from headrace.kafka.client import TopicsNotFoundError
from headrace.kafka.offsets import resolve, unknown_partitions
from headrace.kafka.topics import AdminQuestions, SeenTopic, TopicWatch
from headrace.stream import Stream
from headrace.stream.inputs import Input, KafkaInput, ReceiverInput

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0

PartitionKey = tuple[str, str, int]
"""Topic, topic id, partition."""


# The topics are noted after the first discovery, which may take long if a broker does not answer. Records of that time
# are received rather than left out.
_FIRST_DISCOVERY_MS = 60_000


@dataclass(frozen=True, slots=True)
class AtStart:
    """A topic that existed when the input began: its ``partitions`` then, and the time of the ledger's clock."""

    partitions: int
    seen_ms: int


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger knows about an input before Kafka is queried.

    ``partitions`` have a position. ``topics`` are the topics seen (name and id), None for those that appeared after the
    input began. ``began`` is true once the input has been discovered for the first time.
    """

    partitions: frozenset[PartitionKey] = frozenset()
    topics: Mapping[tuple[str, str], AtStart | None] = field(default_factory=dict)
    began: bool = False

    def appeared(self, topic: str, topic_id: str, partition: int) -> bool:
        """Return whether the partition appeared after the input began."""
        if (topic, topic_id) not in self.topics:
            return self.began
        at_start = self.topics[topic, topic_id]
        return at_start is None or partition >= at_start.partitions

    def began_ms(self, topic: str, topic_id: str) -> int | None:
        """When the input began, if the topic existed then; None if it did not, or if the input has not begun."""
        at_start = self.topics.get((topic, topic_id))
        return None if at_start is None else at_start.seen_ms - _FIRST_DISCOVERY_MS


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of a discovery.

    ``starting`` has an offset for each partition that was not known. ``problems`` are sentences for people.
    ``foreign`` lists foreign group members; None if unknown. ``refused`` maps each topic that this client may not
    describe to the reason; such a topic may or may not exist. ``servers`` are the brokers that were queried.
    """

    topics: tuple[SeenTopic, ...]
    missing: tuple[str, ...] = ()
    starting: dict[PartitionKey, int] = field(default_factory=dict)
    foreign: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    servers: str = ""


class Discoverer(Protocol):
    """Queries Kafka about one input. Called in its own thread, one call at a time."""

    def discover(self, known: Known) -> Discovery: ...


class KafkaDiscoverer:
    """``Discoverer`` that uses an AdminClient."""

    def __init__(self, source: KafkaInput, group: str, admin: Any = None) -> None:
        self._source = source
        self._group = group
        self._admin = admin
        self._questions: AdminQuestions | None = None

    def discover(self, known: Known) -> Discovery:
        """Query Kafka. Raises KafkaNotAskedError without an answer, and the errors of a wrong connection."""
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
            appeared = {each for each in new if known.appeared(seen.topic, seen.topic_id, each[1])}
            began_ms = known.began_ms(seen.topic, seen.topic_id)
            try:
                resolved = resolve(asking.admin, self._source, new, appeared=appeared, began_ms=began_ms)
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


class ReceiverDiscoverer:
    """``Discoverer`` of a custom receiver's input: one topic, with a partition for each receiver, from offset 0."""

    def __init__(self, source: ReceiverInput) -> None:
        self._source = source

    def discover(self, known: Known) -> Discovery:
        """Return the input's partitions. Nothing is queried."""
        source = self._source
        keys = [(source.id, source.topic_id, index) for index in range(source.receivers)]
        return Discovery(
            topics=(SeenTopic(source.id, source.topic_id, source.receivers),),
            starting={key: 0 for key in keys if key not in known.partitions},
        )


def discoverer_of(source: Input, stream: Stream) -> Discoverer:
    """Return the discoverer for an input of the stream."""
    if isinstance(source, ReceiverInput):
        return ReceiverDiscoverer(source)
    return KafkaDiscoverer(source, stream.group_of(source))


def foreign_members(admin: Any, group: str) -> list[str]:
    """Return the active members of ``group``, as "client id at host"; a receiver is never one of them.

    headrace assigns partitions itself and commits offsets only for lag tools. A member that subscribes with the same
    group makes those commits fail, and its own offsets are overwritten. What headrace stores does not depend on it.

    Raises KafkaException when Kafka does not answer or the group may not be described.
    """
    # Not describe_consumer_groups: if the coordinator goes away during that request, librdkafka 2.16 ends the process
    # (an assertion in rd_kafka_admin_coord_request). list_groups asks each broker for the groups that it coordinates.
    found = [each for each in admin.list_groups(group, timeout=_ANSWER_SECONDS) if each.id == group]
    for each in found:
        if each.error is not None:
            raise KafkaException(each.error)
    return sorted(f"{member.client_id} at {member.client_host}" for each in found for member in each.members)
