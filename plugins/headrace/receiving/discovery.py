"""All that the tracker asks Kafka about one input, in one go and off its loop: no question delays a lease's renewal."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from headrace.errors import HeadraceError
from headrace.receiving.group_watch import foreign_members
from headrace.receiving.kafka_config import admin_config
from headrace.receiving.starting_offsets import resolve, unknown_partitions
from headrace.receiving.topic_watch import SeenTopic, TopicWatch
from headrace.stream.inputs import KafkaInput

logger = logging.getLogger(__name__)

PartitionKey = tuple[str, str, int]
"""Topic, topic id, partition."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found. ``starting`` has an offset for each partition that was not known; ``problems`` are sentences
    for a person; ``foreign`` is None where it could not be found out."""

    topics: tuple[SeenTopic, ...]
    missing: tuple[str, ...] = ()
    starting: dict[PartitionKey, int] = field(default_factory=dict)
    foreign: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()


class Discoverer(Protocol):
    """Asks about one input. Called in a thread of its own, one call at a time."""

    def discover(self, known: Collection[PartitionKey], *, is_first: bool) -> Discovery:
        """``known`` partitions have a position in the ledger; ``is_first``: the input never had one before."""
        ...


class KafkaDiscoverer:
    """``Discoverer`` by an AdminClient."""

    def __init__(self, source: KafkaInput, group: str, admin: Any = None) -> None:
        self._source = source
        self._group = group
        self._admin = admin

    def discover(self, known: Collection[PartitionKey], *, is_first: bool) -> Discovery:
        if self._admin is None:
            self._admin = AdminClient(admin_config(self._source))
        topics, missing = TopicWatch(self._admin, self._source).look()
        problems = [
            f"starting_offsets of input {self._source.id} names {topic}-{partition}, which does not exist"
            for topic, partition in unknown_partitions(self._source, {seen.topic: seen.partitions for seen in topics})
        ]
        starting: dict[PartitionKey, int] = {}
        for seen in topics:
            new = [(seen.topic, number) for number in range(seen.partitions)]
            new = [each for each in new if (seen.topic, seen.topic_id, each[1]) not in known]
            try:
                offsets = resolve(self._admin, self._source, new, appeared=not is_first)
            except (KafkaException, HeadraceError) as error:
                problems.append(f"where to begin in {seen.topic} is not known: {error}")
                continue
            starting.update({(topic, seen.topic_id, number): offset for (topic, number), offset in offsets.items()})
        return Discovery(tuple(topics), tuple(missing), starting, self._foreign(), tuple(problems))

    def _foreign(self) -> tuple[str, ...] | None:
        try:
            return tuple(foreign_members(self._admin, self._group))
        except (KafkaException, TimeoutError) as error:
            logger.debug("group %s cannot be described: %s", self._group, error)
            return None
