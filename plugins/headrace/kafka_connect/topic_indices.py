"""The index of each topic's records, as a connector's properties and routers name it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.formats.index_names import parse_index
from headrace.kafka_connect.connector import Answer, Connector, Family, undecided
from headrace.kafka_connect.message_transforms import ANY_TOPIC, RECORD_TIME, Chain
from headrace.stream.outputs import problem_of_deletions

GIVE_TOPICS = "give --topics with the names of the topics"
_MAPPINGS = {
    "topic.to.external.resource.mapping": "external.resource.usage",
    "topic.to.existing.resource.mapping": "existing.resource.type",
    "topic.to.resource.mapping": None,
}
"""Properties that map topics to indices, and that which has to name a resource for them to count."""
# A pattern that asks for capital letters, and one that begins with what the connectors leave out of an index.
_CAPITALS = re.compile(r"(?<!\\)[A-Z]|\(\?[a-z]*i")
_DROPPED_FIRST = re.compile(r"[\^(]*[-_]")


class TopicIndices:
    """The index of each topic's records, or of any topic's if they are not known.

    ``answers`` are those to properties about indices that depend on others. ``no_deletions`` says why records without a
    value cannot delete from these indices; None if they can.
    """

    def __init__(self, connector: Connector, topics: Sequence[str], chain: Chain) -> None:
        self._connector, self._given = connector, connector.properties
        self._topics, self._chain = topics, chain
        self.answers: dict[str, Answer] = {}
        self._mapped = self._read_mappings()
        if not topics:
            self._check_pattern()
        self.no_deletions = self._check_indices()

    def routed(self, topic: str) -> str:
        """The topic of the records after the transforms."""
        return self._chain.topic_names.get(topic, topic)

    def of(self, topic: str) -> str:
        """The index of a topic's records: the name that the connector made, with a placeholder for their time."""
        routed = self.routed(topic)
        name = self._mapped.get(routed) or _index_name(routed)
        time = f"{{timestamp:{self._chain.time_format}}}"
        return name.replace(ANY_TOPIC, "{topic}").replace(RECORD_TIME, time)

    def of_all(self) -> str | dict[str, str]:
        """The index of all topics; by topic where no name with ``{topic}`` is that of each."""
        first, *others = self._topics or [""]
        if not others:
            return self.of(first)
        indices = {topic: self.of(topic) for topic in self._topics}
        pattern = indices[first].replace(first, "{topic}")
        is_of_all = all(pattern.replace("{topic}", topic) == index for topic, index in indices.items())
        return pattern if is_of_all else indices

    def _check_pattern(self) -> None:
        """What the connector did with the topics that it found, and an index can do only if they are known."""
        given, index = self._given["topics.regex"], self.of("")
        if "{topic}" in index and (_CAPITALS.search(given) or (index[0] == "{" and _DROPPED_FIRST.match(given))):
            self.answers["topics.regex"] = undecided(
                "the connector made small letters of capital ones, and left out a - or _ at the beginning; here the "
                f"records of such a topic are dead letters: {GIVE_TOPICS} for a mapping"
            )
        for name in self._index_mappings():
            if self._pairs(name):
                self.answers[name] = undecided(f"it names indices of some topics that are found: {GIVE_TOPICS}")

    def _check_indices(self) -> str | None:
        """Why records without a value cannot delete from these indices."""
        try:
            return problem_of_deletions(parse_index(self.of_all()))
        except ValueError as error:
            self.answers["topics" if "topics" in self._given else "topics.regex"] = undecided(
                f"its index {error}. Name another"
            )
            return None

    def _index_mappings(self) -> list[str]:
        """The properties that map topics to indices, and that the connector reads."""
        read = [
            name
            for name, condition in _MAPPINGS.items()
            if condition is None or self._given.get(condition, "none").lower() not in ("none", "disabled")
        ]
        return [*read, *(["topic.index.map"] if self._connector.family is Family.AIVEN else [])]

    def _read_mappings(self) -> dict[str, str]:
        """The indices that the properties name for topics."""
        given = self._given
        mapped = {
            given[f"index{number}.topic"].strip(): given.get(f"index{number}.name", "").strip()
            for number in range(1, 6)
            if f"index{number}.topic" in given
        }
        for name in self._index_mappings():
            mapped |= self._pairs(name)
        if self._connector.family is Family.AIVEN:
            return mapped
        for topic, index in self._pairs("topic.index.map").items():
            if index != mapped.get(topic, _index_name(topic)):
                why = f"the connector has not read it since its version 11: {topic!r} went to {_index_name(topic)!r}"
                self.answers["topic.index.map"] = undecided(f"{why}, as here")
        return mapped

    def _pairs(self, name: str) -> dict[str, str]:
        pairs = [pair.rsplit(":", 1) for pair in self._given.get(name, "").split(",")]
        return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}

    def are_aliases(self) -> bool:
        """Whether the connector writes to aliases only."""
        usage = ("external.resource.usage", "existing.resource.type", "resource.type")
        return any(self._given.get(name, "").strip().lower() in ("alias_index", "index_alias") for name in usage)

    def exist(self) -> bool:
        """Whether the connector creates none."""
        existing = [self._given.get(name, "") for name in ("external.resource.usage", "existing.resource.type")]
        named = any(each.strip().lower() in ("index", "alias_index", "index_alias") for each in existing)
        return named or self._given.get("auto.create", "true").strip().lower() != "true"


def _index_name(topic: str) -> str:
    """The index that the connectors make of a topic's name."""
    name = topic.lower()[:255]
    return name[1:] if name.startswith(("-", "_")) else name
