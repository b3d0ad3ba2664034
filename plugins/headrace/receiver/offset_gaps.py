"""Distinguishes lost records from offsets that Kafka may skip (rule 2 of the design).

A consumer gets the next record, wherever it is: it skips a segment that is missing from a broker's disk without an
error. Compaction and transactions leave offsets without a record too. So each jump is checked with Kafka before it
counts as a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from headrace.blocks import TopicPartition
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.offset_questions import OffsetQuestions, unreadable
from headrace.kafka.offset_ranges import RangeRun
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients

logger = logging.getLogger(__name__)

Offsets = tuple[int, int]
"""``[from, until)`` of one partition."""

# The longest run of control records. Several transactional producers may each leave one in a row, as when all tasks of
# a job commit at once.
_MOST_CONTROL_RECORDS = 1_000
# Transactions are looked for this many offsets around a jump, and shown by this many places without a record.
_LOOK_AROUND = 2_000
_FEWEST_PLACES = 3
_ANSWER_SECONDS = 5.0
_PREFETCH_BYTES = 8 * 1024 * 1024


class Evidence(Protocol):
    """What Kafka knows about jumps. Each method raises HeadraceError if Kafka does not answer."""

    def compaction(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None if this client may not know."""
        ...

    def has_transactions(self) -> bool:
        """Whether transactions were ever used in this cluster."""
        ...

    def kept(self, partition: TopicPartition) -> Offsets:
        """The first offset that Kafka has of the partition, and the end."""
        ...

    def has_open_transaction(self, partition: TopicPartition) -> bool:
        """Whether a transaction writes to the partition at this moment."""
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

    def kept(self, partition: TopicPartition) -> Offsets:
        key = (partition.topic, partition.partition)
        found = self._ask().kept([key])[key]
        if found is None:
            raise unreadable(f"does not know {partition}")
        return found.first, found.end

    def has_open_transaction(self, partition: TopicPartition) -> bool:
        return self._ask().has_open_transaction((partition.topic, partition.partition))

    def record_offsets(self, partition: TopicPartition, offsets: Offsets) -> np.ndarray[Any, Any]:
        from_offset, until_offset = offsets
        run = RangeRun(partition, from_offset, (until_offset,), (None,))
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
    """Distinguishes losses from explained jumps. Used by the consuming thread, which waits for Kafka's answers."""

    def __init__(self, evidence: Callable[[], Evidence], *, committed_only: bool = True) -> None:
        """``committed_only``: the consumer skips the records of aborted transactions."""
        self._make_evidence = evidence
        self._committed_only = committed_only
        self._evidence: Evidence | None = None
        self._compacted: dict[tuple[str, str], bool | None] = {}
        self._has_transactions = False
        self._transactional: set[tuple[str, str]] = set()
        self.excused = 0
        """Offsets without a record that were counted as control records, or as removed by compaction from a topic that
        this client may not describe. There is no proof for each single offset."""

    def lost(self, partition: TopicPartition, jumps: Sequence[Offsets]) -> list[Offsets]:
        """Return those of ``jumps``, or parts of them, that neither compaction nor transactions explain.

        The caller continues after the first of them, so offsets are counted in ``excused`` only up to there.
        Raises HeadraceError if Kafka does not answer.
        """
        topic = (partition.topic, partition.topic_id)
        if topic in self._transactional and all(until - begin <= _MOST_CONTROL_RECORDS for begin, until in jumps):
            return self._reported([], jumps)
        if self._evidence is None:
            self._evidence = self._make_evidence()
        if topic not in self._compacted:
            compacted = self._evidence.compaction(partition.topic)
            if compacted is False:
                return self._lost(partition, jumps, self._evidence)
            # None: a topic counts as compacted if this client may not ask.
            self._compacted[topic] = compacted
        return [] if self._compacted[topic] else self._reported([], jumps)

    def _lost(self, partition: TopicPartition, jumps: Sequence[Offsets], evidence: Evidence) -> list[Offsets]:
        """As `lost`, for a topic that is not compacted."""
        topic = (partition.topic, partition.topic_id)
        self._has_transactions = self._has_transactions or evidence.has_transactions()
        if not self._has_transactions:
            return list(jumps)
        parts = [part for jump in jumps for part in self._without_aborted(partition, jump, evidence)]
        suspect = [jump for jump in parts if 1 < jump[1] - jump[0] <= _MOST_CONTROL_RECORDS]
        most = _MOST_CONTROL_RECORDS
        if parts != list(jumps) or (suspect and self._shows_transactions(partition, suspect[0], evidence)):
            self._transactional.add(topic)
        elif topic not in self._transactional:
            most = 1
        return self._reported([part for part in parts if part[1] - part[0] > most], parts)

    def _reported(self, lost: list[Offsets], parts: Sequence[Offsets]) -> list[Offsets]:
        until = lost[0][0] if lost else None
        excused = sum(part[1] - part[0] for part in parts if until is None or part[1] <= until)
        self.excused += excused
        if excused:
            logger.info("%d offsets without a record were taken for what transactions or compaction leave", excused)
        return lost

    def _without_aborted(self, partition: TopicPartition, jump: Offsets, evidence: Evidence) -> list[Offsets]:
        topic = (partition.topic, partition.topic_id)
        most = _MOST_CONTROL_RECORDS if topic in self._transactional else 1
        if self._committed_only and jump[1] - jump[0] > most:
            try:
                return gaps_between(evidence.record_offsets(partition, jump), *jump)
            except RangesGoneError as error:
                logger.warning("what %s passed over can no longer be looked at: %s", partition, error)
        return [jump]

    def _shows_transactions(self, partition: TopicPartition, jump: Offsets, evidence: Evidence) -> bool:
        """Return whether there are other signs of transactions around this jump. A lost segment is a single jump."""
        if evidence.has_open_transaction(partition):
            return True
        first, end = evidence.kept(partition)
        places: list[Offsets] = []
        records = 0
        for begin, until in (
            (max(first, jump[0] - _LOOK_AROUND), jump[0]),
            (jump[1], min(end, jump[1] + _LOOK_AROUND)),
        ):
            if begin >= until:
                continue
            try:
                offsets = evidence.record_offsets(partition, (begin, until))
            except RangesGoneError as error:
                logger.warning("what is around %s of %s cannot be looked at: %s", jump, partition, error)
                continue
            records += len(offsets)
            places += gaps_between(offsets, begin, until)
        empty = sum(until - begin for begin, until in [*places, jump])
        # Each transaction that leaves a control record wrote a record; some of them may be outside the range checked.
        return records * 2 >= empty and len(places) >= min(_FEWEST_PLACES, jump[1] - jump[0] - 1)


class GapJudge(Protocol):
    """See `OffsetGaps`."""

    excused: int

    def lost(self, partition: TopicPartition, jumps: Sequence[Offsets]) -> list[Offsets]: ...


def kafka_offset_gaps(clients: Callable[[], RangeClients], *, committed_only: bool) -> OffsetGaps:
    """Return an OffsetGaps that queries Kafka with its own clients."""
    return OffsetGaps(lambda: KafkaEvidence(clients()), committed_only=committed_only)


def gaps_between(offsets: np.ndarray[Any, Any], from_offset: int, until_offset: int) -> list[Offsets]:
    """Return the ranges of ``[from_offset, until_offset)`` that contain none of ``offsets`` (ascending)."""
    edges = np.concatenate(([from_offset - 1], offsets, [until_offset]))
    wide = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[each]) + 1, int(edges[each + 1])) for each in wide.tolist()]
