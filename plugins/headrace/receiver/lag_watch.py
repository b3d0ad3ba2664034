"""`LagWatch` asks Kafka for the end offsets of all partitions in one request to each broker.

The answer also proves that a silent partition is empty: librdkafka does not report a broker that does not answer its
fetches.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from headrace.blocks import TopicPartition
from headrace.clock import Clock
from headrace.kafka.topics import error_text
from headrace.receiver.event_times import EndOffsets, Ends, Key
from headrace.receiver.record_source import FetchState, PartitionStatus

logger = logging.getLogger(__name__)

# Flink's sinks, for example, keep a transaction open from one checkpoint to the next.
_OPEN_TRANSACTION_MS = 60_000
_MAX_TRANSACTIONS = 20
ASK_SECONDS = 2.0
_GONE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})


@dataclass(frozen=True, slots=True)
class Lag:
    """``records`` is the number of offsets between the stored position and the end of Kafka's log, which is beyond what
    open transactions let a consumer read. Everything that Kafka had at ``drained_ms`` of the ledger's clock is stored.
    None means unknown."""

    records: int | None
    drained_ms: int | None


class LagWatch:
    """The consuming thread calls `poll`, the pushing thread the rest."""

    def __init__(
        self,
        ends: EndOffsets,
        partitions: Callable[[], Collection[TopicPartition]],
        now_ms: Callable[[], int],
        clock: Clock,
        *,
        readable_ends: EndOffsets | None = None,
    ) -> None:
        """``ends`` are those of the log, ``readable_ends`` those of the input's consumers if they may be others: before
        the first open transaction."""
        self._ends = ends
        self._readable_ends = readable_ends
        self._partitions = partitions
        self._now_ms = now_ms
        self._clock = clock
        self._next_question = 0.0
        self._question: tuple[int, Collection[TopicPartition], Callable[[], tuple[Ends, Ends] | None]] | None = None
        # Replaced as a whole, so that both threads may read it.
        self._asked: Mapping[TopicPartition, _Asked] = {}
        self._to_reach: dict[TopicPartition, tuple[int, int]] = {}
        self._drained: dict[TopicPartition, int] = {}
        self._unread_since: dict[TopicPartition, int] = {}
        # Where the readable end is before the log's end: this end, and since when it is there.
        self._held_back: dict[TopicPartition, tuple[int, int]] = {}

    def poll(self) -> None:
        """Send a query when it is due, and take its answer, without waiting."""
        if self._question is not None:
            asked_ms, partitions, answer = self._question
            ends = answer()
            if ends is not None:
                self._question = None
                self._asked = {partition: self._heard(partition, ends, asked_ms) for partition in partitions}
                self._watch_transactions(asked_ms)
            return
        now = self._clock.monotonic()
        mine = self._partitions()
        if now < self._next_question or not mine:
            return
        self._next_question = now + ASK_SECONDS
        asked_ms = self._now_ms()
        try:
            self._question = (
                asked_ms,
                mine,
                self._ask([(partition.topic, partition.partition) for partition in mine]),
            )
        except KafkaException as error:
            logger.warning("Kafka did not return the end offsets of the partitions: %s", error)
            failed = Ends({}, {(partition.topic, partition.partition): error for partition in mine})
            self._asked = {partition: self._heard(partition, (failed, failed), asked_ms) for partition in mine}

    def _ask(self, keys: Collection[Key]) -> Callable[[], tuple[Ends, Ends] | None]:
        log = self._ends.ask(keys)
        readable = log if self._readable_ends is None else self._readable_ends.ask(keys)

        def answer() -> tuple[Ends, Ends] | None:
            first, second = log(), readable()
            return None if first is None or second is None else (first, second)

        return answer

    def _heard(self, partition: TopicPartition, ends: tuple[Ends, Ends], asked_ms: int) -> _Asked:
        key: Key = (partition.topic, partition.partition)
        end, readable = (each.offsets.get(key) for each in ends)
        if end is not None and readable is not None:
            return _Asked(end, asked_ms, readable_end=readable)
        before = self._asked.get(partition)
        failure = next((each.failures[key] for each in ends if key in each.failures), None)
        # The last known end stays true for a topic that is gone; otherwise the end may have moved since.
        kept = before.end if before is not None and _code(failure) in _GONE else None
        why = "no answer" if failure is None else error_text(failure)
        return _Asked(kept, asked_ms if before is None else before.asked_ms, why)

    def _watch_transactions(self, asked_ms: int) -> None:
        held_back: dict[TopicPartition, tuple[int, int]] = {}
        for partition, asked in self._asked.items():
            if asked.end is not None and asked.readable_end is not None and asked.readable_end < asked.end:
                before = self._held_back.get(partition)
                if before is not None and before[0] == asked.readable_end:
                    held_back[partition] = before
                else:
                    held_back[partition] = (asked.readable_end, asked_ms)
        self._held_back = held_back

    def open_transactions(self) -> list[dict[str, Any]]:
        """The partitions of which nothing more can be read for a minute or longer, since a transaction is open at
        ``offset``: with ``since_ms`` of the ledger's clock, when that was first seen, and the offsets ``behind`` it."""
        now_ms, asked = self._now_ms(), self._asked
        found = []
        for partition, (offset, since_ms) in sorted(self._held_back.items(), key=lambda item: item[1][1]):
            end = known.end if (known := asked.get(partition)) is not None else None
            if now_ms - since_ms >= _OPEN_TRANSACTION_MS and end is not None:
                where = {"topic": partition.topic, "partition": partition.partition, "offset": offset}
                found.append({**where, "since_ms": since_ms, "behind": end - offset})
        return found[:_MAX_TRANSACTIONS]

    def lags(self, stored: Mapping[TopicPartition, int]) -> dict[TopicPartition, Lag]:
        """Return the lag of each partition, given its position in the ledger."""
        asked = self._asked
        for known in (self._to_reach, self._drained, self._unread_since):
            for partition in known.keys() - stored.keys():
                del known[partition]
        return {
            partition: self._lag(partition, position, asked.get(partition)) for partition, position in stored.items()
        }

    def _lag(self, partition: TopicPartition, position: int, asked: _Asked | None) -> Lag:
        awaited = self._to_reach.get(partition)
        if awaited is not None and position >= awaited[0]:
            self._drained[partition] = awaited[1]
            del self._to_reach[partition]
        if asked is None or asked.end is None:
            return Lag(None, self._drained.get(partition))
        if asked.error is None and partition not in self._to_reach:
            if position >= asked.end:
                self._drained[partition] = asked.asked_ms
            else:
                # Records are stored some time after they are read: this end stays until it is reached.
                self._to_reach[partition] = (asked.end, asked.asked_ms)
        return Lag(max(0, asked.end - position), self._drained.get(partition))

    def unreadable_topics(
        self, lags: Mapping[TopicPartition, Lag], statuses: Collection[PartitionStatus], client_error: str | None
    ) -> list[dict[str, Any]]:
        """Return the topics with partitions that cannot be queried or read, for the receiver's stats.

        ``asked_ms`` in an entry is the last time at which that worked. ``client_error`` is the client's last error
        about its brokers. Failed partitions are not included: the ledger has their state.
        """
        asked = self._asked
        errors_of: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for status in statuses:
            if status.state is FetchState.FAILED:
                continue
            number, known, lag = (
                status.partition.partition,
                asked.get(status.partition),
                lags.get(status.partition),
            )
            unread = status.error is not None and (lag is None or lag.records != 0)
            if not unread:
                self._unread_since.pop(status.partition, None)
            if known is not None and known.error is not None:
                error = f"cannot be asked about ({client_error or known.error})"
                errors_of[status.partition.topic].append((number, known.asked_ms, error))
            elif unread:
                since_ms = self._unread_since.setdefault(status.partition, self._now_ms())
                errors_of[status.partition.topic].append((number, since_ms, f"cannot be read ({status.error})"))
        return [_reported(topic, sorted(problems)) for topic, problems in sorted(errors_of.items())]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The last answer about one partition: its ``end`` at ``asked_ms`` of the ledger's clock. ``error`` says why there
    is no newer answer."""

    end: int | None
    asked_ms: int
    error: str | None = None
    readable_end: int | None = None


def _reported(topic: str, problems: list[tuple[int, int, str]]) -> dict[str, Any]:
    number, _, error = problems[0]
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    asked_ms = min(since_ms for _, since_ms, _ in problems)
    return {"topic": topic, "asked_ms": asked_ms, "error": f"partition {number}{more} {error}"}


def _code(error: BaseException | None) -> int | None:
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else None
    return inner.code() if isinstance(inner, KafkaError) else None
