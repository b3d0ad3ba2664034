"""Finds offsets that Kafka skipped and does not explain (rule 2 of the design).

A consumer gets the next record, wherever it is: it skips a segment that is missing from a broker's disk without an
error. Compaction and transactions leave offsets without a record too. Those are counted. A hole is a loss if neither of
them can explain it: the topic is not compacted, and the cluster has no transactions or they leave no hole of this size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from headrace.blocks import TopicPartition
from headrace.errors import HeadraceError
from headrace.kafka.client import RangesGoneError
from headrace.kafka.offsets import OffsetQuestions
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.kafka.records import Converted, Cursor

logger = logging.getLogger(__name__)

Offsets = tuple[int, int]
"""``[from, until)`` of one partition."""

# A transaction ends with one control record. Many transactional producers may each leave one in a row, as when all
# tasks of a job commit at once. A longer run cannot be control records.
_MOST_CONTROL_RECORDS = 1_000
_ANSWER_SECONDS = 5.0
_SHOWN = 10


class Evidence(Protocol):
    """What Kafka knows about holes. Each method raises HeadraceError if Kafka does not answer."""

    def compaction(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None if this client may not know."""
        ...

    def has_transactions(self) -> bool:
        """Whether transactions were ever used in this cluster."""
        ...

    def record_offsets(self, partition: TopicPartition, offsets: Offsets) -> np.ndarray[Any, Any]:
        """The offsets of all records in the range, including those of aborted transactions.

        Raises RangesGoneError if they cannot be read any more.
        """
        ...


class KafkaEvidence:
    """``Evidence`` with its own clients, which are created on first use."""

    def __init__(self, clients: RangeClients) -> None:
        uncommitted = {**clients.consumer, "isolation.level": "read_uncommitted"}
        self._clients = replace(clients, consumer=uncommitted)
        self._questions: OffsetQuestions | None = None

    def compaction(self, topic: str) -> bool | None:
        return self._ask().compaction(topic)

    def has_transactions(self) -> bool:
        return self._ask().has_transactions()

    def record_offsets(self, partition: TopicPartition, offsets: Offsets) -> np.ndarray[Any, Any]:
        from_offset, until_offset = offsets
        run = RangeRun.of([RecordedRange(partition, from_offset, until_offset, None)])
        clients = self._clients.for_offsets(until_offset - from_offset)
        found = []
        with KafkaRangeReader(clients, stall_seconds=_ANSWER_SECONDS, questions=self._ask()) as reader:
            for batch in reader.read([run]):
                found.append(batch.column("offset").to_numpy())
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _ask(self) -> OffsetQuestions:
        if self._questions is None:
            self._questions = self._clients.questions(answer_seconds=_ANSWER_SECONDS)
        return self._questions


class OffsetGaps:
    """Used by the consuming thread, which waits for Kafka's answers."""

    def __init__(self, evidence: Callable[[], Evidence], *, committed_only: bool = True) -> None:
        """``evidence`` is called at the first hole. ``committed_only``: the consumer skips aborted records."""
        self._make_evidence = evidence
        self._committed_only = committed_only
        self._evidence: Evidence | None = None
        self._compacted: set[tuple[str, str]] = set()
        self._has_transactions = False
        self.explained = 0
        """The number of offsets without a record that are not lost: control records, records of aborted transactions,
        and what compaction removed. Also all holes of a topic that this client may not describe."""

    def find(
        self,
        converted: Converted,
        positions: Mapping[TopicPartition, int],
        cursors: Mapping[tuple[str, int], Cursor],
    ) -> dict[tuple[str, int], Offsets]:
        """Return the first lost range of each partition among ``converted``, which moves it to its new position.

        The caller fetches everything after it again. An empty range means: Kafka does not answer, so it is unknown
        whether the offsets from there on are lost.
        """
        found: dict[tuple[str, int], Offsets] = {}
        for partition, position in positions.items():
            key = (partition.topic, partition.partition)
            begin = cursors[key].next_offset
            if position - begin <= converted.counts.get(partition, 0):
                continue
            holes = holes_between(_offsets_of(converted, partition), begin, position)
            try:
                lost = self.first_lost(partition, holes)
            except HeadraceError as error:
                logger.warning("%s-%d skipped offsets %s, and the reason is unknown: %s", *key, holes[:_SHOWN], error)
                lost = (holes[0][0], holes[0][0])
            if lost is not None:
                found[key] = lost
        return found

    def first_lost(self, partition: TopicPartition, holes: Sequence[Offsets]) -> Offsets | None:
        """Return the first part of ``holes`` that is lost, or None. Counts the offsets before it as `explained`.

        Raises HeadraceError if Kafka does not answer.
        """
        lost = self._first_lost(partition, holes)
        self.explained += sum(
            min(until, until if lost is None else lost[0]) - begin
            for begin, until in holes
            if lost is None or begin < lost[0]
        )
        return lost

    def _first_lost(self, partition: TopicPartition, holes: Sequence[Offsets]) -> Offsets | None:
        topic = (partition.topic, partition.topic_id)
        long_holes = [hole for hole in holes if _is_long(hole)]
        if topic in self._compacted or (self._has_transactions and not long_holes):
            return None
        if self._evidence is None:
            self._evidence = self._make_evidence()
        if self._evidence.compaction(partition.topic) is not False:
            # A topic that this client may not describe counts as compacted.
            self._compacted.add(topic)
            return None
        self._has_transactions = self._has_transactions or self._evidence.has_transactions()
        if not self._has_transactions:
            return holes[0]
        parts = (part for hole in long_holes for part in self._without_aborted(partition, hole, self._evidence))
        return next((part for part in parts if _is_long(part)), None)

    def _without_aborted(self, partition: TopicPartition, hole: Offsets, evidence: Evidence) -> list[Offsets]:
        """Return the parts of ``hole`` that hold no records of aborted transactions either."""
        if self._committed_only:
            try:
                return holes_between(evidence.record_offsets(partition, hole), *hole)
            except RangesGoneError as error:
                logger.warning("offsets %s of %s, which were skipped, cannot be read: %s", hole, partition, error)
        return [hole]


def kafka_offset_gaps(clients: Callable[[], RangeClients], *, committed_only: bool) -> OffsetGaps:
    """Return an OffsetGaps that queries Kafka with its own clients."""
    return OffsetGaps(lambda: KafkaEvidence(clients()), committed_only=committed_only)


def holes_between(offsets: np.ndarray[Any, Any], from_offset: int, until_offset: int) -> list[Offsets]:
    """Return the ranges of ``[from_offset, until_offset)`` that contain none of ``offsets`` (ascending)."""
    edges = np.concatenate(([from_offset - 1], offsets, [until_offset]))
    wide = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[each]) + 1, int(edges[each + 1])) for each in wide.tolist()]


def _is_long(hole: Offsets) -> bool:
    return hole[1] - hole[0] > _MOST_CONTROL_RECORDS


def _offsets_of(converted: Converted, partition: TopicPartition) -> np.ndarray[Any, Any]:
    """Return the offsets of the partition's records, in order."""
    batch = converted.batch
    if batch is None or partition not in converted.counts:
        return np.empty(0, dtype=np.int64)
    offsets: np.ndarray[Any, Any] = batch.column("offset").to_numpy()
    if len(converted.counts) > 1:
        mine = batch.column("partition").to_numpy() == partition.partition
        mine &= np.array([topic == partition.topic for topic in batch.column("topic").to_pylist()])
        offsets = offsets[mine]
    return offsets
