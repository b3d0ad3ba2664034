"""Which incarnation of its topic a row is of, where the transform dropped the column: by the batch's offset ranges.

A topic that was deleted and created again has the same offsets once more, and so has a topic of the same name in
another cluster; the incarnation tells their records apart. The batch's manifest has it for every range of offsets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace.blocks import TopicPartition
from headrace.elasticsearch import columns
from headrace.stream.outputs import ElasticsearchOutput, KeyIds, RecordIds

if TYPE_CHECKING:
    from headrace.batch.manifest import Manifest
    from headrace.stream import Output

Range = tuple[TopicPartition, int, int]
"""A partition and offsets of it, from and until."""


class BatchIncarnations:
    """The incarnations of a batch's records, by topic, partition and offset."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._topics: dict[str, dict[int, dict[int, tuple[int, int]]]] = {}
        for where, start, until in ranges:
            partitions = self._topics.setdefault(where.topic, {}).setdefault(where.incarnation, {})
            known_start, known_until = partitions.get(where.partition, (start, until))
            partitions[where.partition] = (min(start, known_start), max(until, known_until))

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> BatchIncarnations:
        """Those of all inputs of these batches."""
        return cls(
            (each.partition, each.from_offset, each.until_offset)
            for manifest in manifests
            for input_id in sorted({*manifest.inputs, *manifest.built})
            for each in manifest.ranges(input_id)
        )

    @property
    def numbers(self) -> list[int]:
        """All incarnations of any topic."""
        return sorted({number for incarnations in self._topics.values() for number in incarnations})

    @property
    def ambiguous(self) -> list[str]:
        """The topics of which the same offsets may stand for records of several incarnations."""
        return sorted(topic for topic, incarnations in self._topics.items() if _overlap(incarnations))

    def expression(self) -> str:
        """The incarnation as Spark's SQL makes it of topic, partition and offset; null where the batch has no such
        record. Of no use for topics that are ``ambiguous``."""
        names: dict[int, list[str]] = {}
        cases = []
        for topic, incarnations in sorted(self._topics.items()):
            if len(incarnations) == 1:
                names.setdefault(next(iter(incarnations)), []).append(topic)
                continue
            cases += [
                f"WHEN topic = {_text(topic)} AND partition = {partition} AND offset >= {start} AND offset < {until} "
                f"THEN {number}"
                for number, partitions in sorted(incarnations.items())
                for partition, (start, until) in sorted(partitions.items())
            ]
        cases += [f"WHEN topic IN ({', '.join(map(_text, topics))}) THEN {number}" for number, topics in names.items()]
        return f"CASE {' '.join(cases)} END" if cases else "CAST(NULL AS INT)"


def lacks_incarnation(names: Collection[str]) -> bool:
    """Whether rows with these columns have coordinates but no incarnation."""
    return columns.INCARNATION not in names and all(name in names for name in columns.COORDINATES)


def needs_incarnation(output: Output) -> bool:
    """Whether the ids or versions of the output's documents are right only by the incarnation. For others it only helps
    to find the record of a dead letter."""
    if not isinstance(output, ElasticsearchOutput):
        return False
    ids = output.document_ids
    return isinstance(ids, RecordIds) or (isinstance(ids, KeyIds) and ids.version_from is None)


def _overlap(incarnations: dict[int, dict[int, tuple[int, int]]]) -> bool:
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for partitions in incarnations.values():
        for partition, offsets in partitions.items():
            by_partition.setdefault(partition, []).append(offsets)
    return any(
        earlier[1] > later[0] for offsets in by_partition.values() for earlier, later in pairwise(sorted(offsets))
    )


def _text(topic: str) -> str:
    return "'" + topic.replace("\\", "\\\\").replace("'", "\\'") + "'"
