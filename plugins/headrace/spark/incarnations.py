"""Determines a row's topic incarnation from the batch's offset ranges, if the transform dropped the column.

A topic that was deleted and created again reuses its offsets, and a topic of the same name in another cluster has the
same offsets; the incarnation distinguishes their records. The batch's manifest has it for every offset range.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace.blocks import TopicPartition
from headrace.elasticsearch import columns
from headrace.stream.outputs import ElasticsearchOutput, KeyIds, RecordIds

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from headrace.batch.manifest import Manifest
    from headrace.stream import Output

FOUND_INCARNATION = "_headrace_incarnation"
"""The column with the incarnation of rows whose transform dropped it, where it was found by other means."""

Range = tuple[TopicPartition, int, int]
"""A partition and an offset range: from (inclusive) and until (exclusive)."""


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
        """The incarnations of all inputs of these batches."""
        return cls(
            (each.partition, each.from_offset, each.until_offset)
            for manifest in manifests
            for input_id in sorted({*manifest.inputs, *manifest.built})
            for each in manifest.ranges(input_id)
        )

    @property
    def numbers(self) -> list[int]:
        """All incarnations that occur in any topic, ascending."""
        return sorted({number for incarnations in self._topics.values() for number in incarnations})

    @property
    def ambiguous(self) -> list[str]:
        """The topics in which one offset may belong to records of several incarnations."""
        return sorted(topic for topic, incarnations in self._topics.items() if _overlap(incarnations))

    def expression(self) -> str:
        """A Spark SQL expression that gives the incarnation for topic, partition and offset.

        It gives null for records that are not in the batch, and is not valid for ``ambiguous`` topics.
        """
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


def incarnation_column(schema: StructType) -> str | None:
    """The column that has the record's incarnation, if the rows have it: a transform's own ``incarnation`` is none."""
    from headrace.spark.record_columns import own_columns

    if FOUND_INCARNATION in schema.names:
        return FOUND_INCARNATION
    return columns.INCARNATION if columns.INCARNATION in own_columns(schema) else None


def lacks_incarnation(schema: StructType) -> bool:
    """Whether rows with these columns have coordinates but no incarnation."""
    return incarnation_column(schema) is None and all(name in schema.names for name in columns.COORDINATES)


def needs_incarnation(output: Output) -> bool:
    """Whether the ids or versions of the output's documents depend on the incarnation. For other outputs it only serves
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
