"""Where to begin in partitions of which the ledger has no position; resolved to offsets before they are assigned."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from headrace.receiving.errors import StartingOffsetsError
from headrace.receiving.kafka_config import isolation_level
from headrace.receiving.offset_requests import EARLIEST, LATEST, request_offsets
from headrace.stream.inputs import KafkaInput, StartingOffsets, StartingTimestamp

Partition = tuple[str, int]

_ANSWER_SECONDS = 10.0


def resolve(
    admin: Any, source: KafkaInput, partitions: Collection[Partition], *, appeared: bool
) -> dict[Partition, int]:
    """A concrete offset for each of ``partitions``, as the input's ``starting_offsets`` says.

    ``appeared``: the partitions came to be while the stream was known already (a topic has grown, or is new under a
    pattern). "latest" means the latest when the stream began, so these begin at their earliest: nothing in them is
    older than the stream.

    Raises:
        StartingOffsetsError: an offset lies beyond the partition's end, or Kafka cannot resolve one.
        KafkaException: Kafka does not answer.
    """
    if not partitions:
        return {}
    wish, asking = source.starting_offsets, _Asking(admin, isolation_level(source))
    if isinstance(wish, StartingTimestamp):
        return _at_timestamp(asking, partitions, wish.timestamp_ms)
    if isinstance(wish, StartingOffsets):
        return _as_given(asking, partitions, wish.offsets)
    latest = wish == "latest" and not appeared
    return asking.ask(dict.fromkeys(partitions, LATEST if latest else EARLIEST))


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

    def ask(self, specs: Mapping[Partition, Any]) -> dict[Partition, int]:
        answers = request_offsets(self.admin, specs, isolation=self.isolation, seconds=_ANSWER_SECONDS)
        return {each: int(future.result(timeout=0).offset) for each, future in answers.items()}


def _at_timestamp(asking: _Asking, partitions: Collection[Partition], timestamp_ms: int) -> dict[Partition, int]:
    found = asking.ask(dict.fromkeys(partitions, OffsetSpec.for_timestamp(timestamp_ms)))
    # -1: no record is as young as that, so the next one is the first.
    ends = asking.ask({each: LATEST for each, offset in found.items() if offset < 0})
    return {**found, **ends}


def _as_given(
    asking: _Asking, partitions: Collection[Partition], offsets: Mapping[str, Mapping[int, int]]
) -> dict[Partition, int]:
    given = {each: offsets[each[0]][each[1]] for each in partitions if each[1] in offsets.get(each[0], {})}
    ends = asking.ask(dict.fromkeys(given, LATEST))
    for (topic, partition), offset in given.items():
        if offset > ends[topic, partition]:
            raise StartingOffsetsError(
                f"starting_offsets begins {topic}-{partition} at {offset}, beyond its end {ends[topic, partition]}.",
                remedy='Name an offset that exists, or "latest".',
            )
    rest = [each for each in partitions if each not in given]
    return {**given, **asking.ask(dict.fromkeys(rest, EARLIEST))}
