"""Tracks up to which time everything that Kafka had of a partition is stored, so that batches by timestamp do not wait
for idle partitions.

Kafka is asked for the end offsets of the partitions. Its answer describes a moment after the request. So once a
partition's stored position reaches that end, everything that Kafka had at the request is stored, whatever happened in
between: an idle partition, a full queue, a refused fetch. Without a broker's answer nothing new is reported. An empty
fetch proves less: librdkafka reports the end of a partition once and then stays silent, whether the broker still
answers or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from confluent_kafka import IsolationLevel, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from headrace.blocks import TopicPartition

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Topic and partition."""

# The interval of the requests, one to each broker, which answers from memory.
ASK_EVERY_MS = 1_000
_QUESTION_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ends:
    """The end offsets of partitions as the input's consumers see them, and the errors of the other partitions."""

    offsets: Mapping[Key, int]
    failures: Mapping[Key, BaseException] = field(default_factory=dict)


class EndOffsets(Protocol):
    """Asks Kafka for the end offsets of partitions."""

    def ask(self, partitions: Collection[Key]) -> Callable[[], Ends | None]:
        """Send the request without waiting. The returned function does not wait either; None while unanswered."""
        ...


class AdminEndOffsets:
    """``EndOffsets`` that uses an AdminClient. For read_committed consumers a partition ends where its first open
    transaction begins, for others where its log ends."""

    def __init__(self, admin: Any, isolation: IsolationLevel) -> None:
        self._admin = admin
        self._isolation = isolation

    def ask(self, partitions: Collection[Key]) -> Callable[[], Ends | None]:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        futures = self._admin.list_offsets(
            {KafkaPartition(*key): latest for key in partitions},
            isolation_level=self._isolation,
            request_timeout=_QUESTION_SECONDS,
        )

        def answer() -> Ends | None:
            if not all(future.done() for future in futures.values()):
                return None
            offsets: dict[Key, int] = {}
            failures: dict[Key, BaseException] = {}
            for each, future in futures.items():
                failure = future.exception()
                if failure is None:
                    offsets[each.topic, each.partition] = int(future.result().offset)
                else:
                    failures[each.topic, each.partition] = failure
            return Ends(offsets, failures)

        return answer


@dataclass(frozen=True, slots=True)
class _End:
    """At ``asked_ms`` of the ledger's clock, or a little later, the partition ended at ``offset``."""

    asked_ms: int
    offset: int


class EndOffsetTracker:
    """Finds up to which time each partition is drained: everything that Kafka had then is stored.

    Used by the pushing thread.

    ``stored`` returns the ledger's position of each of the receiver's partitions, ``now_ms`` the ledger's time.

    Kafka is asked once a second, ``lateness_ms`` after each full second: so the answer is new at the moment from which
    a batch no longer waits.
    """

    def __init__(
        self,
        ends: EndOffsets,
        stored: Callable[[], Mapping[TopicPartition, int]],
        now_ms: Callable[[], int],
        *,
        lateness_ms: int,
    ) -> None:
        self._ends = ends
        self._stored = stored
        self._now_ms = now_ms
        self._lateness_ms = lateness_ms
        self._asked_turn: int | None = None
        self._asked_ms = 0
        self._asked_at: Mapping[TopicPartition, int] = {}
        self._answer: Callable[[], Ends | None] | None = None
        self._to_reach: dict[TopicPartition, _End] = {}
        self._drained: dict[TopicPartition, int] = {}
        self._reported: dict[TopicPartition, int] = {}

    def look(self) -> bool:
        """Send a request when it is due, or take its answer, without waiting. Returns whether an answer that has just
        come drained a partition up to a later time."""
        if self._answer is not None:
            return self._hear(self._answer)
        now_ms = self._now_ms()
        turn = (now_ms - self._lateness_ms) // ASK_EVERY_MS
        if turn == self._asked_turn:
            return False
        self._asked_turn, self._asked_ms, self._asked_at = turn, now_ms, dict(self._stored())
        if self._asked_at:
            try:
                self._answer = self._ends.ask([(each.topic, each.partition) for each in self._asked_at])
            except KafkaException as error:
                logger.warning("Kafka does not answer with the end offsets of partitions: %s", error)
        return False

    def drained(self) -> dict[TopicPartition, int]:
        """Return, for each partition, the ledger's time up to which everything that Kafka had is stored. Only times
        that are later than the reported ones."""
        stored = self._stored()
        self._settle(stored)
        return {
            partition: drained_ms
            for partition, drained_ms in self._drained.items()
            if partition in stored and drained_ms > self._reported.get(partition, 0)
        }

    def reported(self, drained: Mapping[TopicPartition, int]) -> None:
        """Note that ``drained`` was reported to the ledger."""
        self._reported.update(drained)

    def _settle(self, stored: Mapping[TopicPartition, int]) -> None:
        for partition, end in list(self._to_reach.items()):
            if stored.get(partition, -1) >= end.offset:
                self._drained[partition] = end.asked_ms
                del self._to_reach[partition]

    def _hear(self, answer: Callable[[], Ends | None]) -> bool:
        ends = answer()
        if ends is None:
            return False
        self._answer = None
        stored = self._stored()
        self._settle(stored)
        for partition, position in self._asked_at.items():
            end = ends.offsets.get((partition.topic, partition.partition))
            awaited = self._to_reach.get(partition)
            # Records are stored some time after they are read, and an end that moves with every answer is never
            # reached. So the first end stays, unless the log was truncated below it. An end below the position at the
            # time of the request belongs to another topic of this name, or to a truncated log.
            if end is not None and end >= position and (awaited is None or end < awaited.offset):
                self._to_reach[partition] = _End(self._asked_ms, end)
        for known in (self._to_reach, self._drained, self._reported):
            for partition in known.keys() - stored.keys():
                del known[partition]
        return bool(self.drained())
