"""Resolves the starting offsets of partitions for which the ledger has no position, before they are assigned."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from headrace.kafka.client_settings import isolation_level
from headrace.kafka.errors import StartingOffsetsError
from headrace.kafka.offset_questions import EARLIEST, LATEST, request_offsets
from headrace.stream.inputs import KafkaInput, StartingOffsets, StartingTimestamp

Partition = tuple[str, int]

_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Resolved:
    """The ``offsets`` of the partitions that were resolved, and the errors of the others."""

    offsets: dict[Partition, int]
    failures: dict[Partition, Exception]


def resolve(
    admin: Any,
    source: KafkaInput,
    partitions: Collection[Partition],
    *,
    appeared: Collection[Partition] = (),
    began_ms: int | None = None,
) -> Resolved:
    """Resolve an offset for each of ``partitions``, by the input's ``starting_offsets``.

    "latest" means the latest when the stream began. So those that ``appeared`` later (a topic has grown, or a new one
    matches the pattern) start at their earliest offset: nothing in them is older than the stream. ``began_ms``: the
    stream began then, and these partitions did not answer; they start at the first record with a later timestamp.

    A partition for which Kafka reports no offset, for example without a leader, does not stop the others.

    Raises:
        StartingOffsetsError: an offset lies beyond its partition's end.
        KafkaException: the request cannot be made.
    """
    wish, asking = source.starting_offsets, _Asking(admin, isolation_level(source))
    if isinstance(wish, StartingTimestamp):
        found = _at_timestamp(asking, partitions, wish.timestamp_ms)
    elif isinstance(wish, StartingOffsets):
        found = _as_given(asking, partitions, wish.offsets)
    else:
        latest = {each for each in partitions if wish == "latest" and each not in appeared}
        found = asking.ask(dict.fromkeys((each for each in partitions if each not in latest), EARLIEST))
        if began_ms is None:
            found |= asking.ask(dict.fromkeys(latest, LATEST))
        else:
            found |= _at_timestamp(asking, latest, began_ms)
    return Resolved(found, asking.failures)


def unknown_partitions(source: KafkaInput, topics: Mapping[str, int]) -> list[Partition]:
    """The partitions that ``starting_offsets`` names and that ``topics`` (name to number of partitions) do not have."""
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
    """Queries offsets with the input's isolation level, and collects the failures."""

    admin: Any
    isolation: IsolationLevel
    failures: dict[Partition, Exception] = field(default_factory=dict)

    def ask(self, specs: Mapping[Partition, Any]) -> dict[Partition, int]:
        """The offset of each partition that has an answer; the errors of the others go to ``failures``."""
        answers = request_offsets(self.admin, specs, isolation=self.isolation, seconds=_ANSWER_SECONDS)
        found = {}
        for each, future in answers.items():
            try:
                found[each] = int(future.result(timeout=0).offset)
            except (KafkaException, concurrent.futures.TimeoutError) as error:
                self.failures[each] = error
        return found


def _at_timestamp(asking: _Asking, partitions: Collection[Partition], timestamp_ms: int) -> dict[Partition, int]:
    # First, so that a record that comes between the two questions is not left out.
    ends = asking.ask(dict.fromkeys(partitions, LATEST))
    found = asking.ask(dict.fromkeys(ends, OffsetSpec.for_timestamp(timestamp_ms)))
    # -1: no record has this timestamp or a later one, so the partition starts at its end.
    return {each: ends[each] if offset < 0 else offset for each, offset in found.items()}


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
