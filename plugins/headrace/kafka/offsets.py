"""Queries about the offsets that Kafka has: first and end of partitions, complete ranges, where to start.

Offsets are committed by `headrace.receiver.kafka_source`.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]

from headrace.clock import time_text
from headrace.kafka.client import isolation_level
from headrace.kafka.errors import RangesGoneError, RangesUnreadableError, StartingOffsetsError
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.kafka.topics import AdminTopicIds, SeenTopic, TopicWatch, wait_for, why_silent
from headrace.stream.inputs import KafkaInput, StartingOffsets, StartingTimestamp

Partition = tuple[str, int]
"""Topic and partition."""

EARLIEST: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_NO_SUCH_PARTITION = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
    }
)
_NOT_ALLOWED = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_TRANSACTIONS = "__transaction_state"
ANSWER_SECONDS = 10.0
# How long an answer may take through librdkafka after its timeout.
_SLACK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Kept:
    """The offsets ``[first, end)`` that Kafka has of a partition. ``first_timestamp_ms`` is the timestamp of its first
    record, None if it has no record with one."""

    first: int
    end: int
    first_timestamp_ms: int | None


class OffsetQuestions:
    """Queries by an AdminClient. The wait for each answer is bounded."""

    def __init__(self, admin: Any, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._admin = admin
        self._seconds = answer_seconds

    def topics(self, source: KafkaInput) -> tuple[list[SeenTopic], list[str]]:
        """The input's topics, and the named ones that do not exist. Raises RangesUnreadableError or
        TopicsNotFoundError."""
        try:
            return TopicWatch(self._admin, source).topics()
        except KafkaException as error:
            raise self._unreadable(f"does not answer with the topics of input {source.id!r}: {error}") from error

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        """Each topic's id, None for a topic that does not exist. Raises RangesUnreadableError."""
        if not topics:
            return {}
        try:
            answer = AdminTopicIds(self._admin).within(topics, self._seconds)
        except KafkaException as error:
            raise self._unreadable(f"does not describe {', '.join(sorted(topics))}: {error}") from error
        if answer is None:
            raise self._unreadable(f"did not describe {', '.join(sorted(topics))} within {self._seconds:.0f} s")
        return answer

    def kept(self, partitions: Collection[Partition]) -> dict[Partition, Kept | None]:
        """What Kafka has of each partition, None where there is no such partition. Raises RangesUnreadableError.

        The end is the high watermark, so it includes open transactions.
        """
        firsts = self._ask(dict.fromkeys(partitions, EARLIEST))
        ends = self._ask(dict.fromkeys(partitions, LATEST))
        # The answer to a query by time holds the timestamp of the record found: here, the first record.
        oldest = self._ask(dict.fromkeys(partitions, OffsetSpec.for_timestamp(0)))
        offsets: dict[Partition, Kept | None] = {}
        for partition in partitions:
            first, end, record = firsts[partition], ends[partition], oldest[partition]
            if first is None or end is None:
                offsets[partition] = None
            else:
                timestamp = record.timestamp if record is not None and record.offset >= 0 else -1
                offsets[partition] = Kept(int(first.offset), int(end.offset), timestamp if timestamp >= 0 else None)
        return offsets

    def first_at(self, partitions: Collection[Partition], timestamp_ms: int) -> dict[Partition, int | None]:
        """The first offset in each partition with this timestamp or a later one, None if there is none. Transaction
        markers and records of aborted transactions count. Raises RangesUnreadableError."""
        answers = self._ask(dict.fromkeys(partitions, OffsetSpec.for_timestamp(timestamp_ms)))
        return {
            partition: None if reported is None or reported.offset < 0 else int(reported.offset)
            for partition, reported in answers.items()
        }

    def is_compacted(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None if that cannot be determined, for example without the privilege."""
        try:
            return self.compaction(topic)
        except RangesUnreadableError:
            return None

    def compaction(self, topic: str) -> bool | None:
        """Whether the topic is compacted; None without the privilege to query it. Raises RangesUnreadableError."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            future = self._admin.describe_configs([resource], request_timeout=self._seconds)[resource]
            return "compact" in str(future.result(timeout=self._seconds + _SLACK_SECONDS)["cleanup.policy"].value)
        except concurrent.futures.TimeoutError:
            raise unreadable(f"did not describe {topic} within {self._seconds:.0f} s") from None
        except KafkaException as error:
            if error.args[0].code() in _NOT_ALLOWED:
                return None
            raise unreadable(f"does not describe {topic}: {error}") from error

    def has_transactions(self) -> bool:
        """Whether the cluster has the topic of transaction states, which exists from the first transaction on. Raises
        RangesUnreadableError."""
        try:
            metadata = self._admin.list_topics(_TRANSACTIONS, timeout=self._seconds)
        except KafkaException as error:
            raise unreadable(f"does not answer with its topics: {error}") from error
        reported = metadata.topics.get(_TRANSACTIONS)
        return reported is not None and (reported.error is None or reported.error.code() not in _NO_SUCH_PARTITION)

    def _ask(self, specs: Mapping[Partition, Any]) -> dict[Partition, Any]:
        isolation = IsolationLevel.READ_UNCOMMITTED
        try:
            answers = request_offsets(self._admin, specs, isolation=isolation, seconds=self._seconds)
        except KafkaException as error:
            raise self._unreadable(f"does not answer with its offsets: {error}") from error
        return {partition: self._answer(partition, future) for partition, future in answers.items()}

    def _answer(self, partition: Partition, future: concurrent.futures.Future[Any]) -> Any:
        name = "{}-{}".format(*partition)
        try:
            return future.result(timeout=0)
        except concurrent.futures.TimeoutError:
            raise self._unreadable(f"did not answer with the offsets of {name} in {self._seconds:.0f} s") from None
        except KafkaException as error:
            if error.args[0].code() in _NO_SUCH_PARTITION:
                return None
            raise self._unreadable(f"does not answer with the offsets of {name}: {error}") from error

    def _unreadable(self, what: str) -> RangesUnreadableError:
        why = why_silent(self._admin)
        if why is None:
            return unreadable(what)
        again = f"{why.remedy} Then run it again." if why.is_real else RUN_AGAIN
        return unreadable(f"{what} (the client's last error: {why.text})", again)


RUN_AGAIN = "Run it again once Kafka answers."


def unreadable(what: str, remedy: str = RUN_AGAIN) -> RangesUnreadableError:
    """The error with the text "Kafka ``what``."."""
    return RangesUnreadableError(f"Kafka {what}.", remedy=remedy)


def request_offsets(
    admin: Any, specs: Mapping[tuple[str, int], Any], *, isolation: IsolationLevel, seconds: float
) -> dict[tuple[str, int], concurrent.futures.Future[Any]]:
    """Request an offset of each (topic, partition) by its ``OffsetSpec``. Returns the futures of the answers; those
    that did not arrive in time are not done.

    Raises KafkaException when the request cannot be made; errors of single partitions are in their futures.
    """
    if not specs:
        return {}
    futures = admin.list_offsets(
        {KafkaPartition(topic, number): spec for (topic, number), spec in specs.items()},
        isolation_level=isolation,
        request_timeout=seconds,
    )
    wait_for(admin, futures.values(), seconds)
    return {(asked.topic, asked.partition): future for asked, future in futures.items()}


SHOWN = 20
"""How many ranges an error names."""


def check_available(questions: OffsetQuestions, runs: Sequence[RangeRun]) -> None:
    """Check that Kafka has every offset of ``runs``, in topics with the same ids.

    Raises:
        RangesGoneError: offsets are gone; the text names them by partition, and what Kafka still has.
        RangesUnreadableError: Kafka does not answer.
    """
    ids = questions.topic_ids({run.partition.topic for run in runs})
    same = [run for run in runs if ids[run.partition.topic] == run.partition.topic_id]
    # A topic may be created again just now, since offsets are queried by name: its id is checked again after reading.
    kept = questions.kept(sorted({run.key for run in same}))
    problems: dict[tuple[str, int, int], list[str]] = {}
    for run in runs:
        problem = _other_topic(run, ids[run.partition.topic]) or _not_kept(run, kept.get(run.key))
        if problem is not None:
            where = run.partition
            problems.setdefault((where.topic, where.partition, where.incarnation), []).append(problem)
    if problems:
        raise gone([text for texts in problems.values() for text in texts])


def gone(problems: Sequence[str]) -> RangesGoneError:
    """The error with these problems, one text per range."""
    return RangesGoneError(
        f"Kafka no longer has what is to be read again: {listed(problems)}.",
        remedy="What is gone from the log and from Kafka cannot be had any more.",
    )


def listed(problems: Sequence[str]) -> str:
    """The first ``SHOWN`` texts in one, with the number of the others."""
    more = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def since(kept: Kept) -> str:
    """Text: the first offset that Kafka has of a partition, and the time of its first record."""
    if kept.first_timestamp_ms is None:
        return f"Kafka keeps offsets from {kept.first} on, and no record"
    return f"Kafka keeps offsets from {kept.first} on, records since {time_text(kept.first_timestamp_ms)}"


def _other_topic(run: RangeRun, topic_id: str | None) -> str | None:
    if topic_id == run.partition.topic_id:
        return None
    if topic_id is None:
        return f"{run}: the topic was deleted"
    return f"{run}: the topic was deleted and created again (its id was {run.partition.topic_id}, it is {topic_id})"


def _not_kept(run: RangeRun, kept: Kept | None) -> str | None:
    if kept is None:
        return f"{run}: there is no such partition any more"
    if run.until_offset > kept.end:
        return f"{run}: Kafka's log ends at {kept.end}, it was cut"
    lost = [recorded for recorded in run.ranges() if recorded.weight and recorded.from_offset < kept.first]
    if not lost:
        return None
    name = f"{run.partition.topic}-{run.partition.partition}"
    until = min(lost[-1].until_offset, kept.first)
    return f"{name} [{lost[0].from_offset}, {until}), {_records(lost)}, is gone: {since(kept)}"


def _records(ranges: Iterable[RecordedRange]) -> str:
    total, counted = 0, True
    for recorded in ranges:
        total += recorded.weight
        counted = counted and recorded.records is not None
    return f"of ranges with {total:,} records" if counted else f"of up to {total:,} records"


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
    came_later: Collection[Partition] = (),
    began_ms: int | None = None,
) -> Resolved:
    """Resolve an offset for each of ``partitions``, by the input's ``starting_offsets``.

    "latest" means the latest when the stream began. So partitions that ``appeared`` later (a topic has grown, was
    created again, or matches the pattern) start at their earliest offset: nothing in them is older than the stream.
    ``began_ms``: the stream began then, and these partitions did not answer; with "latest" they start at the first
    record with a later timestamp. Given offsets hold for a topic that is seen for the first time, however late; not for
    partitions that ``came_later`` (a topic has grown or was created again), which start at their earliest offset.

    A partition for which Kafka reports no offset, for example without a leader, does not stop the others.

    Raises:
        StartingOffsetsError: an offset lies beyond its partition's end.
        KafkaException: the request cannot be made.
    """
    wish, asking = source.starting_offsets, _Asking(admin, isolation_level(source))
    if isinstance(wish, StartingTimestamp):
        offsets = _at_timestamp(asking, partitions, wish.timestamp_ms)
    elif isinstance(wish, StartingOffsets):
        offsets = _as_given(asking, partitions, wish.offsets, came_later)
    else:
        latest = {partition for partition in partitions if wish == "latest" and partition not in appeared}
        offsets = asking.ask(
            dict.fromkeys((partition for partition in partitions if partition not in latest), EARLIEST)
        )
        if began_ms is None:
            offsets |= asking.ask(dict.fromkeys(latest, LATEST))
        else:
            offsets |= _at_timestamp(asking, latest, began_ms)
    return Resolved(offsets, asking.failures)


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
        offsets = {}
        for partition, future in answers.items():
            try:
                offset = int(future.result(timeout=0).offset)
            except (KafkaException, concurrent.futures.TimeoutError) as error:
                self.failures[partition] = error
                continue
            if offset == OFFSET_INVALID:
                # A stream that began while a leader hung had this as a position, which passes for lost offsets.
                missing = KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, "the answer has no offset")
                self.failures[partition] = KafkaException(missing)
            else:
                offsets[partition] = offset
        return offsets


def _at_timestamp(asking: _Asking, partitions: Collection[Partition], timestamp_ms: int) -> dict[Partition, int]:
    # First, so that a record that comes between the two questions is not left out.
    ends = asking.ask(dict.fromkeys(partitions, LATEST))
    first_at = asking.ask(dict.fromkeys(ends, OffsetSpec.for_timestamp(timestamp_ms)))
    # -1: no record has this timestamp or a later one, so the partition starts at its end.
    return {partition: ends[partition] if offset < 0 else offset for partition, offset in first_at.items()}


def _as_given(
    asking: _Asking,
    partitions: Collection[Partition],
    offsets: Mapping[str, Mapping[int, int]],
    came_later: Collection[Partition],
) -> dict[Partition, int]:
    given = {
        (topic, number): offsets[topic][number]
        for topic, number in partitions
        if (topic, number) not in came_later and number in offsets.get(topic, {})
    }
    ends = asking.ask(dict.fromkeys(given, LATEST))
    for (topic, partition), end in ends.items():
        offset = given[topic, partition]
        if offset > end:
            raise StartingOffsetsError(
                f"starting_offsets begins {topic}-{partition} at {offset}, beyond its end {end}.",
                remedy='Name an offset that exists, or "latest".',
            )
    rest = [partition for partition in partitions if partition not in given]
    return {**{partition: given[partition] for partition in ends}, **asking.ask(dict.fromkeys(rest, EARLIEST))}
