"""Kafka and a consumer in memory, for tests without a server: headrace's own and those of its users."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from headrace.kafka.topics import SeenTopic
from headrace.receiver.event_times import Ends
from headrace.receiver.partitioning import Discovery, Known

Key = tuple[str, int]

_FIRST_TIMESTAMP_MS = 1_700_000_000_000

# A consumer wakes when values are appended; it finds everything else that a test changes after this time.
_LONGEST_WAIT_SECONDS = 0.02


@dataclass(slots=True)
class FakeEntry:
    """One offset of a partition.

    A consumer never sees entries of the kinds ``control`` (transaction markers), ``aborted`` (of aborted transactions)
    and ``gone`` (lost by the broker), but they take an offset. ``timestamp_ms`` is by default a time in 2023 plus the
    offset in milliseconds; -1 for none.
    """

    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, str | bytes | None]] | None = None
    kind: Literal["data", "control", "aborted", "gone", "damaged"] = "data"
    timestamp_ms: int | None = None
    base_offset: int | None = None
    """For a damaged entry, the offset that the client reports as the start of its batch; by default its own offset."""
    leader_epoch: int = 0
    """The epoch of the leader that wrote it; `FakeKafka.produce` sets it."""


@dataclass(slots=True)
class FakeLog:
    """A partition: ``entries[i]`` has offset ``low + i``."""

    low: int = 0
    entries: list[FakeEntry] = field(default_factory=list)
    leader_epoch: int = 0

    @property
    def high(self) -> int:
        return self.low + len(self.entries)

    def end_of_epoch(self, leader_epoch: int) -> int:
        """The first offset of a later leader epoch, or the log's end."""
        later = (self.low + place for place, each in enumerate(self.entries) if each.leader_epoch > leader_epoch)
        return next(later, self.high)


class FakeKafka:
    """Topics in memory, shared by any number of `FakeConsumer` objects. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.appended = threading.Condition(self.lock)
        self.logs: dict[Key, FakeLog] = {}
        self.topic_ids: dict[str, str] = {}
        self.committed: dict[Key, int] = {}
        self.fail_commits: KafkaError | None = None
        self._made = 0

    def create(self, topic: str, partitions: int) -> str:
        """Create the topic, or delete it and create it again. Returns its topic id."""
        with self.lock:
            for key in [key for key in self.logs if key[0] == topic]:
                del self.logs[key]
            self._made += 1
            self.topic_ids[topic] = f"id-{topic}-{self._made}"
            for number in range(partitions):
                self.logs[topic, number] = FakeLog()
            return self.topic_ids[topic]

    def grow(self, topic: str, partitions: int) -> None:
        with self.lock:
            for number in range(partitions):
                self.logs.setdefault((topic, number), FakeLog())

    def partitions(self, topic: str) -> int:
        with self.lock:
            return sum(key[0] == topic for key in self.logs)

    def produce(self, topic: str, partition: int, *values: bytes | FakeEntry | None) -> int:
        """Append values; returns the next offset."""
        with self.lock:
            log = self.logs[topic, partition]
            entries = [value if isinstance(value, FakeEntry) else FakeEntry(value) for value in values]
            log.entries.extend(replace(entry, leader_epoch=log.leader_epoch) for entry in entries)
            self.appended.notify_all()
            return log.high

    def elect(self, topic: str, partition: int, high: int | None = None) -> None:
        """Elect another leader. With ``high`` it lacks the offsets from ``high`` on, as after an unclean election."""
        with self.lock:
            log = self.logs[topic, partition]
            log.leader_epoch += 1
            if high is not None:
                del log.entries[max(0, high - log.low) :]

    def expire(self, topic: str, partition: int, low: int) -> None:
        """Delete the offsets below ``low``, as retention does."""
        with self.lock:
            log = self.logs[topic, partition]
            del log.entries[: low - log.low]
            log.low = low

    def consumer(self, config: Mapping[str, Any]) -> FakeConsumer:
        """Create a consumer; serves as the consumer factory of `KafkaReceiver`."""
        return FakeConsumer(self, config)


class FakeConsumer:
    """The part of confluent_kafka.Consumer that `KafkaReceiver` uses, over a `FakeKafka`."""

    def __init__(self, kafka: FakeKafka, config: Mapping[str, Any]) -> None:
        self._kafka = kafka
        self._on_commit: Callable[[Any, list[Any]], None] = config.get("on_commit", lambda *_: None)
        self._positions: dict[Key, int] = {}
        self._read: dict[Key, int] = {}
        self._reported_end: dict[Key, int] = {}
        self._silent: set[Key] = set()
        self._returned = False
        self._pending: list[tuple[KafkaError | None, list[Any]]] = []
        self.events: list[Message] = []
        """Returned by the next consume() before anything else."""
        self.closed = False

    def incremental_assign(self, partitions: Iterable[Any]) -> None:
        for partition in partitions:
            key = (partition.topic, partition.partition)
            if key in self._positions:
                raise KafkaException(KafkaError(KafkaError._CONFLICT, f"{key} is assigned"))
            self._positions[key] = partition.offset
            self._silent.discard(key)
            self._reported_end.pop(key, None)

    def seek(self, partition: Any) -> None:
        """Set the position. If the leader epoch given ends before the offset, the next consume() reports truncation."""
        key = (partition.topic, partition.partition)
        if key not in self._positions:
            raise KafkaException(KafkaError(KafkaError._STATE, "not assigned"))
        self._positions[key] = partition.offset
        with self._kafka.lock:
            log = self._kafka.logs.get(key)
            end = None if log is None else log.end_of_epoch(partition.leader_epoch)
        if end is not None and end < partition.offset:
            self._silent.add(key)
            text = f"Partition log truncation detected at offset {partition.offset}: broker end offset is {end}"
            self.events.append(self._event(key, partition.offset, KafkaError._AUTO_OFFSET_RESET, text))

    def incremental_unassign(self, partitions: Iterable[Any]) -> None:
        for partition in partitions:
            if self._positions.pop((partition.topic, partition.partition), None) is None:
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "not assigned"))
            self._read.pop((partition.topic, partition.partition), None)

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        pending, self._pending = self._pending, []
        for error, partitions in pending:
            self._on_commit(error, partitions)
        found, self.events = self.events, []
        with self._kafka.lock:
            for key in list(self._positions):
                found += self._consume(key, num_messages - len(found))
            self._returned = bool(found)
            if not found and timeout:
                self._kafka.appended.wait(min(timeout, _LONGEST_WAIT_SECONDS))
        return found

    @property
    def assigned(self) -> set[Key]:
        """The partitions that it reads."""
        return set(self._positions)

    @property
    def is_idle(self) -> bool:
        """Whether its user has all records of its partitions, and has come back for more."""
        with self._kafka.lock:
            return not self._returned and not self.events and all(map(self._is_at_end, self.assigned - self._silent))

    def _is_at_end(self, key: Key) -> bool:
        log = self._kafka.logs.get(key)
        return log is None or self._positions[key] == log.high

    def _consume(self, key: Key, most: int) -> list[Message]:
        log = self._kafka.logs.get(key)
        if log is None or key in self._silent:
            return []
        position = self._positions[key]
        if not log.low <= position <= log.high:
            self._silent.add(key)
            return [self._event(key, position, KafkaError._AUTO_OFFSET_RESET)]
        found: list[Message] = []
        while position < log.high and len(found) < most:
            entry = log.entries[position - log.low]
            if entry.kind == "data":
                found.append(_message(key, position, entry))
            elif entry.kind == "damaged":
                base = position if entry.base_offset is None else entry.base_offset
                found.append(self._event(key, base, KafkaError._BAD_MSG))
            position += 1
        if position == log.high and self._reported_end.get(key) != position and len(found) < most:
            self._reported_end[key] = position
            found.append(self._event(key, position, KafkaError._PARTITION_EOF))
        self._positions[key] = self._read[key] = position
        return found

    def _event(self, key: Key, offset: int, code: int, text: str = "from the fake") -> Message:
        return Message(topic=key[0], partition=key[1], offset=offset, error=KafkaError(code, text))

    def position(self, partitions: Iterable[Any]) -> list[Any]:
        return [KafkaPartition(p.topic, p.partition, self._read.get((p.topic, p.partition), -1001)) for p in partitions]

    def get_watermark_offsets(self, partition: Any, **_: object) -> tuple[int, int]:
        with self._kafka.lock:
            log = self._kafka.logs.get((partition.topic, partition.partition))
            if log is None:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, "no such topic"))
            return log.low, log.high

    def commit(self, *, offsets: list[Any], asynchronous: bool) -> None:
        if not asynchronous:
            raise NotImplementedError("a receiver commits asynchronously")
        error = self._kafka.fail_commits
        if error is None:
            self._kafka.committed.update({(offset.topic, offset.partition): offset.offset for offset in offsets})
        self._pending.append((error, offsets))

    def close(self) -> None:
        self.closed = True


def _message(key: Key, offset: int, entry: FakeEntry) -> Message:
    timestamp_ms = _FIRST_TIMESTAMP_MS + offset if entry.timestamp_ms is None else entry.timestamp_ms
    return Message(
        topic=key[0],
        partition=key[1],
        offset=offset,
        key=entry.key,
        value=entry.value,
        headers=entry.headers,
        timestamp=(0 if timestamp_ms < 0 else 1, timestamp_ms),
        leader_epoch=entry.leader_epoch,
    )


class FakeTopicIds:
    """Implements ``TopicIds`` for a `FakeKafka`."""

    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka

    def ask(self, topics: Collection[str]) -> Callable[[float], Mapping[str, str | None] | None]:
        with self._kafka.lock:
            ids = {topic: self._kafka.topic_ids.get(topic) for topic in topics}
        return lambda _: ids


class FakeDiscoverer:
    """Implements ``Discoverer`` for a `FakeKafka`: finds all of its topics, or raises ``failure`` if it is set."""

    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka
        self.foreign: tuple[str, ...] = ()
        self.missing: tuple[str, ...] = ()
        self.failure: Exception | None = None

    def discover(self, known: Known) -> Discovery:
        if self.failure is not None:
            raise self.failure
        with self._kafka.lock:
            topics = tuple(
                SeenTopic(topic, topic_id, self._kafka.partitions(topic))
                for topic, topic_id in sorted(self._kafka.topic_ids.items())
            )
        keys = [(seen.topic, seen.topic_id, number) for seen in topics for number in range(seen.partitions)]
        return Discovery(topics, self.missing, {key: 0 for key in keys if key not in known.partitions}, self.foreign)


class FakeEndOffsets:
    """Implements ``EndOffsets`` for a `FakeKafka`. With ``silent`` it answers nothing, as when no broker does;
    ``refused`` are topics that may not be described."""

    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka
        self.silent = False
        self.refused: set[str] = set()

    def ask(self, partitions: Collection[Key]) -> Callable[[], Ends | None]:
        if self.silent:
            return lambda: Ends({})
        refusal = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "from the fake"))
        with self._kafka.lock:
            ends = {key: log.high for key, log in self._kafka.logs.items() if key in partitions}
        refused = {key: refusal for key in ends if key[0] in self.refused}
        return lambda: Ends({key: end for key, end in ends.items() if key not in refused}, refused)
