"""Where to begin in partitions of which the ledger has no position; resolved to offsets before they are assigned."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from headrace.kafka.client_settings import isolation_level
from headrace.kafka.errors import StartingOffsetsError
from headrace.kafka.offset_requests import EARLIEST, LATEST, request_offsets
from headrace.stream.inputs import KafkaInput, StartingOffsets, StartingTimestamp

Partition = tuple[str, int]

_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Resolved:
    """``offsets`` of the partitions of which Kafka told one, and why it did not of the others."""

    offsets: dict[Partition, int]
    failures: dict[Partition, Exception]


def resolve(admin: Any, source: KafkaInput, partitions: Collection[Partition], *, appeared: bool) -> Resolved:
    """A concrete offset for each of ``partitions``, as the input's ``starting_offsets`` says.

    ``appeared``: the partitions came to be while the stream was known already (a topic has grown, or is new under a
    pattern). "latest" means the latest when the stream began, so these begin at their earliest: nothing in them is
    older than the stream.

    A partition of which Kafka does not tell, for want of a leader say, holds up no other one.

    Raises:
        StartingOffsetsError: an offset lies beyond its partition's end.
        KafkaException: Kafka cannot be asked.
    """
    wish, asking = source.starting_offsets, _Asking(admin, isolation_level(source))
    if isinstance(wish, StartingTimestamp):
        found = _at_timestamp(asking, partitions, wish.timestamp_ms)
    elif isinstance(wish, StartingOffsets):
        found = _as_given(asking, partitions, wish.offsets)
    else:
        latest = wish == "latest" and not appeared
        found = asking.ask(dict.fromkeys(partitions, LATEST if latest else EARLIEST))
    return Resolved(found, asking.failures)


def unknown_partitions(source: KafkaInput, topics: Mapping[str, int]) -> list[Partition]:
    """Partitions that ``starting_offsets`` names and that topics (name to number of partitions) do not have."""
    wish = source.starting_offsets
    if not isinstance(wish, StartingOffsets):
        return []
    return [
        (topic, partition)
        for topic, offsets in wish.offsets.items()
        for partition in offsets
        if topic in topics and partition >= topics[topic]
    ]


@dataclass(frozen=True, slots=True)
class _Asking:
    """Ends are those that the input's consumers see."""

    admin: Any
    isolation: IsolationLevel
    failures: dict[Partition, Exception] = field(default_factory=dict)

    def ask(self, specs: Mapping[Partition, Any]) -> dict[Partition, int]:
        """Of each partition of which there is an answer; the others are in ``failures``."""
        answers = request_offsets(self.admin, specs, isolation=self.isolation, seconds=_ANSWER_SECONDS)
        found = {}
        for each, future in answers.items():
            try:
                found[each] = int(future.result(timeout=0).offset)
            except (KafkaException, concurrent.futures.TimeoutError) as error:
                self.failures[each] = error
        return found


def _at_timestamp(asking: _Asking, partitions: Collection[Partition], timestamp_ms: int) -> dict[Partition, int]:
    found = asking.ask(dict.fromkeys(partitions, OffsetSpec.for_timestamp(timestamp_ms)))
    # -1: no record is as young as that, so the next one is the first.
    ends = asking.ask({each: LATEST for each, offset in found.items() if offset < 0})
    return {**{each: offset for each, offset in found.items() if offset >= 0}, **ends}


def _as_given(
    asking: _Asking, partitions: Collection[Partition], offsets: Mapping[str, Mapping[int, int]]
) -> dict[Partition, int]:
    given = {each: offsets[each[0]][each[1]] for each in partitions if each[1] in offsets.get(each[0], {})}
    ends = asking.ask(dict.fromkeys(given, LATEST))
    for (topic, partition), end in ends.items():
        offset = given[topic, partition]
        if offset > end:
            raise StartingOffsetsError(
                f"starting_offsets begins {topic}-{partition} at {offset}, beyond its end {end}.",
                remedy='Name an offset that exists, or "latest".',
            )
    rest = [each for each in partitions if each not in given]
    return {**{each: given[each] for each in ends}, **asking.ask(dict.fromkeys(rest, EARLIEST))}
