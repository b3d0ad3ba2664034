"""Which offsets Kafka may pass over, and which are records that are lost (rule 2 of the design).

A consumer is given what comes next, wherever that is: a segment that is gone from a broker's disk is passed over
without a word. Compaction and transactions leave offsets without a record, too, so a jump is asked after before it
counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from headrace.blocks import TopicPartition
from headrace.receiving.kafka_ranges import KafkaRangeReader, RangeClients
from headrace.receiving.offset_questions import OffsetQuestions
from headrace.receiving.offset_ranges import RangeRun
from headrace.receiving.replay_errors import RangesGoneError

logger = logging.getLogger(__name__)

Offsets = tuple[int, int]
"""``[from, until)`` of one partition."""

# Each transactional producer may leave one control record in a row of them, as when all tasks of a job commit at once.
_MOST_CONTROL_RECORDS = 1_000
_ANSWER_SECONDS = 5.0
_PREFETCH_BYTES = 8 * 1024 * 1024


class Evidence(Protocol):
    """What Kafka knows about jumps. Each raises HeadraceError where it does not answer."""

    def compaction(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None where that may not be known."""
        ...

    def has_transactions(self) -> bool:
        """Whether anyone ever used a transaction in this cluster."""
        ...

    def record_offsets(self, partition: TopicPartition, offsets: Offsets) -> np.ndarray[Any, Any]:
        """The offsets of all records in the range, those of aborted transactions too.

        Raises RangesGoneError where they cannot be read any more.
        """
        ...


class KafkaEvidence:
    """``Evidence`` by clients of its own, made when there is something to ask."""

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


class Jumps:
    """Tells losses from jumps that have a reason; the consuming thread's, which waits for Kafka's answers."""

    def __init__(self, evidence: Callable[[], Evidence], *, committed_only: bool = True) -> None:
        """``committed_only``: the consumer leaves out the records of aborted transactions."""
        self._make_evidence = evidence
        self._committed_only = committed_only
        self._evidence: Evidence | None = None
        self._compacted: set[tuple[str, str]] = set()
        self._has_transactions = False

    def lost(self, partition: TopicPartition, jumps: Sequence[Offsets]) -> list[Offsets]:
        """Those of ``jumps``, or parts of them, that neither compaction nor transactions explain.

        Raises HeadraceError where Kafka does not answer.
        """
        topic = (partition.topic, partition.topic_id)
        if topic in self._compacted:
            return []
        if self._has_transactions and all(until - begin <= _MOST_CONTROL_RECORDS for begin, until in jumps):
            return []
        if self._evidence is None:
            self._evidence = self._make_evidence()
        # None: who may not ask whether a topic is compacted has to take it that it is.
        if self._evidence.compaction(partition.topic) is not False:
            self._compacted.add(topic)
            return []
        self._has_transactions = self._has_transactions or self._evidence.has_transactions()
        if not self._has_transactions:
            return list(jumps)
        return [part for jump in jumps for part in self._without_aborted(partition, jump, self._evidence)]

    def _without_aborted(self, partition: TopicPartition, jump: Offsets, evidence: Evidence) -> list[Offsets]:
        parts = [jump]
        if self._committed_only and jump[1] - jump[0] > _MOST_CONTROL_RECORDS:
            try:
                parts = jumps_between(evidence.record_offsets(partition, jump), *jump)
            except RangesGoneError as error:
                logger.warning("what %s passed over can no longer be looked at: %s", partition, error)
        return [(begin, until) for begin, until in parts if until - begin > _MOST_CONTROL_RECORDS]


class JumpJudge(Protocol):
    """See `Jumps`."""

    def lost(self, partition: TopicPartition, jumps: Sequence[Offsets]) -> list[Offsets]: ...


def kafka_jumps(clients: Callable[[], RangeClients], *, committed_only: bool) -> Jumps:
    """Jumps that are asked after by clients of their own."""
    return Jumps(lambda: KafkaEvidence(clients()), committed_only=committed_only)


def jumps_between(offsets: np.ndarray[Any, Any], from_offset: int, until_offset: int) -> list[Offsets]:
    """The stretches of ``[from_offset, until_offset)`` without any of ``offsets``, which ascend."""
    edges = np.concatenate(([from_offset - 1], offsets, [until_offset]))
    wide = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[each]) + 1, int(edges[each + 1])) for each in wide.tolist()]
