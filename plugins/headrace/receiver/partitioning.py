"""Maintains one input's partitions in the ledger: which exist, and which receiver reads each.

They are assigned evenly, with as few moves as possible. The queries to Kafka (its topics, starting offsets and foreign
group members) run outside the tracker's loop, so they never delay the renewal of a lease.

A stream is stopped when offsets can no longer serve as the versions of keys (rule 7 of the design). When a topic gets
more partitions, or is created again, keys start again at low offsets. Elasticsearch would refuse their new values as
older than the ones it has. So nothing more is received until the stream names a better version.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from confluent_kafka import KafkaException

from headrace.blocks import TopicPartition
from headrace.errors import HeadraceError
from headrace.kafka.errors import TopicsNotFoundError
from headrace.kafka.offsets import resolve, unknown_partitions
from headrace.kafka.topics import AdminQuestions, SeenTopic, TopicWatch
from headrace.ledger.errors import LeaseHeldError
from headrace.ledger.receiving.tables import PositionRow, TopicRow
from headrace.ledger.states import PartitionState
from headrace.ledger.tables import JobLease
from headrace.receiver.receiver import KeyVersionsError
from headrace.stream import Stream
from headrace.stream.inputs import Input, KafkaInput
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)


P = TypeVar("P")


def assign(partitions: Collection[P], receivers: Collection[int], current: Mapping[P, int]) -> dict[P, int]:
    """Assign each of ``partitions`` to one of the live ``receivers`` (indexes); their counts differ by at most one.

    ``current`` assignments stay as far as evenness allows, so the fewest possible partitions move. Deterministic.
    Without receivers the result is empty.
    """
    if not receivers:
        return {}
    ordered = sorted(partitions)  # type: ignore[type-var]
    held: dict[int, list[P]] = {receiver: [] for receiver in sorted(receivers)}
    for partition in ordered:
        owner = current.get(partition)
        if owner in held:
            held[owner].append(partition)
    least, with_one_more = divmod(len(ordered), len(held))
    # The receivers that hold most keep the larger shares, so the fewest partitions move.
    by_load = sorted(held, key=lambda receiver: (-len(held[receiver]), receiver))
    share = {receiver: least + (rank < with_one_more) for rank, receiver in enumerate(by_load)}
    result = {partition: receiver for receiver in held for partition in held[receiver][: share[receiver]]}
    open_places = [receiver for receiver in sorted(held) for _ in range(share[receiver] - len(held[receiver]))]
    waiting = [partition for partition in ordered if partition not in result]
    result.update(zip(waiting, _interleaved(open_places), strict=True))
    return result


def _interleaved(places: list[int]) -> list[int]:
    """Round robin over the receivers, so that neighbouring partitions of a topic go to different ones."""
    seen: dict[int, int] = {}
    turns = []
    for receiver in places:
        seen[receiver] = seen.get(receiver, 0) + 1
        turns.append((seen[receiver], receiver))
    return [receiver for _, receiver in sorted(turns)]


def check_key_versions(stream: Stream, topics: Collection[TopicRow]) -> None:
    """Raise if outputs use offsets as key versions and keys of ``topics`` (of one input) may have moved.

    ``topics`` come from the ledger, so every later job finds what one job has found.

    Raises:
        KeyVersionsError: a topic has grown since it was first seen, or was created again.
    """
    outputs = stream.versioned_by_offsets
    moved = _moved(topics) if outputs else []
    if not moved:
        return
    raise KeyVersionsError(
        f"Output {', '.join(outputs)} of stream {stream.name!r} uses a record's offset as the version of its key, "
        f"and {'; '.join(moved)}: keys begin again at low offsets, and the search server would refuse their new values "
        "as older than what it has. Nothing more is received.",
        remedy="Name a column that grows with every change of a key in version_from, its values above the offsets so "
        "far, or index the topic again into another index, by a stream of another name.",
    )


def _moved(topics: Collection[TopicRow]) -> list[str]:
    """Return what happened to the topics, one clause each."""
    grown = [
        f"topic {row.topic} has grown from {row.first_partitions} to {row.partitions} partitions"
        for row in topics
        if row.partitions > row.first_partitions
    ]
    # The incarnation does not serve here: it also counts topics of the same name in other inputs.
    seen = Counter(row.topic for row in topics)
    return grown + [f"topic {topic} was created again" for topic, times in seen.items() if times > 1]


def end_removed_inputs(context: StreamContext, job_lease: JobLease) -> None:
    """End the partitions of inputs that the stream no longer declares: nobody reads them, nothing waits for them, and
    their failures are over. If the input is declared again, they go on at their positions."""
    ledger, declared = context.ledger, {source.id for source in context.stream.inputs}
    removed: dict[str, list[TopicPartition]] = {}
    for row in ledger.positions.all(context.name, live=True):
        if row.input_id not in declared:
            removed.setdefault(row.input_id, []).append(row.partition)
    for input_id, partitions in removed.items():
        logger.warning("input %s was removed from the definition: %s end", input_id, partitions)
        error = "the input was removed from the definition"
        ledger.positions.set_state(job_lease, input_id, partitions, PartitionState.ENDED, error)
        ledger.positions.request_release(job_lease, input_id, partitions)


_ANSWER_SECONDS = 10.0

PartitionKey = tuple[str, str, int]
"""Topic, topic id, partition."""


# The topics are noted after the first discovery, which may take long if a broker does not answer. Records of that time
# are received rather than left out.
_FIRST_DISCOVERY_MS = 60_000


@dataclass(frozen=True, slots=True)
class FirstSeen:
    """A topic when it was first seen: its ``partitions`` then, and the time of the ledger's clock. ``at_start``:
    it existed when the input began."""

    partitions: int
    seen_ms: int
    at_start: bool = True


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger knows about an input before Kafka is queried.

    ``partitions`` have a position. ``topics`` are the topics seen, by name and id. ``began`` is true once the input has
    been discovered for the first time.
    """

    partitions: frozenset[PartitionKey] = frozenset()
    topics: Mapping[tuple[str, str], FirstSeen] = field(default_factory=dict)
    began: bool = False

    def appeared(self, topic: str, topic_id: str, partition: int) -> bool:
        """Return whether the partition appeared after the input began."""
        seen = self.topics.get((topic, topic_id))
        if seen is None:
            return self.began
        return not seen.at_start or partition >= seen.partitions

    def came_later(self, topic: str, topic_id: str, partition: int) -> bool:
        """Return whether the topic was created again, or has grown by the partition, since it was first seen."""
        seen = self.topics.get((topic, topic_id))
        if seen is not None:
            return partition >= seen.partitions
        return any(name == topic and known_id != topic_id for name, known_id in self.topics)

    def began_ms(self, topic: str, topic_id: str) -> int | None:
        """When the input began, if the topic existed then; None if it did not, or if the input has not begun."""
        seen = self.topics.get((topic, topic_id))
        return seen.seen_ms - _FIRST_DISCOVERY_MS if seen is not None and seen.at_start else None


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of a discovery.

    ``starting`` has an offset for each partition that was not known. ``problems`` are sentences for people.
    ``foreign`` lists foreign members of the consumer group; None if unknown. ``refused`` maps each topic that
    this client may not describe to the reason; such a topic may or may not exist. ``servers`` are the
    brokers that were queried.
    """

    topics: tuple[SeenTopic, ...]
    missing: tuple[str, ...] = ()
    starting: dict[PartitionKey, int] = field(default_factory=dict)
    foreign: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    servers: str = ""


class Discoverer(Protocol):
    """Queries Kafka about one input. Called in its own thread, one call at a time."""

    def discover(self, known: Known) -> Discovery: ...


class KafkaDiscoverer:
    """``Discoverer`` that uses an AdminClient."""

    def __init__(self, source: KafkaInput, group: str, admin: Any = None) -> None:
        self._source = source
        self._group = group
        self._admin = admin
        self._questions: AdminQuestions | None = None

    def discover(self, known: Known) -> Discovery:
        """Query Kafka. Raises KafkaNotAskedError without an answer, and the errors of a wrong connection."""
        if self._questions is None:
            self._questions = AdminQuestions(self._source, self._admin)
        asking = self._questions
        refused: dict[str, TopicsNotFoundError] = {}
        try:
            topics, missing = TopicWatch(asking.admin, self._source).topics(refused)
        except KafkaException as error:
            raise asking.not_asked(error) from error
        problems = [str(error) for error in refused.values()]
        if self._source.topic_pattern is not None and not topics:
            problems.append(
                f"no topic at {asking.servers} matches the pattern {self._source.topic_pattern!r} of input "
                f"{self._source.id}"
            )
        problems += [
            f"starting_offsets of input {self._source.id} names {topic}-{partition}, which does not exist"
            for topic, partition in unknown_partitions(self._source, {seen.topic: seen.partitions for seen in topics})
        ]
        starting: dict[PartitionKey, int] = {}
        for seen in topics:
            new = [(seen.topic, number) for number in range(seen.partitions)]
            new = [added for added in new if (seen.topic, seen.topic_id, added[1]) not in known.partitions]
            appeared = {added for added in new if known.appeared(seen.topic, seen.topic_id, added[1])}
            later = {added for added in new if known.came_later(seen.topic, seen.topic_id, added[1])}
            began_ms = known.began_ms(seen.topic, seen.topic_id)
            try:
                resolved = resolve(
                    asking.admin, self._source, new, appeared=appeared, came_later=later, began_ms=began_ms
                )
            except (KafkaException, HeadraceError) as error:
                problems.append(f"where to begin in {seen.topic} is not known: {error}")
                continue
            for (topic, number), offset in resolved.offsets.items():
                starting[topic, seen.topic_id, number] = offset
            for (topic, number), failure in resolved.failures.items():
                problems.append(f"where to begin in {topic}-{number} is not known yet: {failure or 'no answer'}")
        return Discovery(
            topics=tuple(topics),
            missing=tuple(missing),
            starting=starting,
            foreign=self._foreign(asking.admin),
            problems=tuple(problems),
            refused={topic: error.what for topic, error in refused.items()},
            servers=asking.servers,
        )

    def _foreign(self, admin: Any) -> tuple[str, ...] | None:
        try:
            return tuple(foreign_members(admin, self._group))
        except (KafkaException, TimeoutError) as error:
            logger.debug("group %s cannot be described: %s", self._group, error)
            return None


class ReceiverDiscoverer:
    """``Discoverer`` of a custom receiver's input: one topic, with a partition for each receiver, from offset 0."""

    def __init__(self, source: Input) -> None:
        self._source = source

    def discover(self, known: Known) -> Discovery:
        """Return the input's partitions. Nothing is queried."""
        source = self._source
        keys = [(source.id, source.topic_id, index) for index in range(source.receivers)]
        return Discovery(
            topics=(SeenTopic(source.id, source.topic_id, source.receivers),),
            starting={key: 0 for key in keys if key not in known.partitions},
        )


def discoverer_of(source: Input, stream: Stream) -> Discoverer:
    """Return the discoverer for an input of the stream."""
    if (kafka := source.in_kafka) is None:
        return ReceiverDiscoverer(source)
    return KafkaDiscoverer(kafka, stream.group_of(kafka))


def foreign_members(admin: Any, group: str) -> list[str]:
    """Return the active members of ``group``, as "client id at host"; a receiver is never one of them.

    headrace assigns partitions itself and commits offsets only for lag tools. A member that subscribes with the same
    group makes those commits fail, and its own offsets are overwritten. What headrace stores does not depend on it.

    Raises KafkaException when Kafka does not answer or the group may not be described.
    """
    # Not describe_consumer_groups: if the coordinator goes away during that request, librdkafka 2.16 ends the process
    # (an assertion in rd_kafka_admin_coord_request). list_groups asks each broker for the groups that it coordinates.
    groups = [described for described in admin.list_groups(group, timeout=_ANSWER_SECONDS) if described.id == group]
    for described in groups:
        if described.error is not None:
            raise KafkaException(described.error)
    return sorted(f"{member.client_id} at {member.client_host}" for described in groups for member in described.members)


# A topic counts as deleted after it is missing from this many discoveries in a row: metadata may be stale.
_POLLS_UNTIL_DELETED = 3


class Partitioning:
    """Writes discoveries and rebalances to the ledger; the tracker's loop calls it."""

    def __init__(self, context: StreamContext, source: Input, job_lease: JobLease, *, grace_ms: int) -> None:
        """A receiver that was live less than ``grace_ms`` ago keeps its partitions, since it is likely to return."""
        self._stream = context.stream
        self._source = source
        # Each partition is one receiver's own.
        self._of_receivers = source.in_kafka is None
        self._ledger = context.ledger
        self._lease = job_lease
        self._grace_ms = grace_ms
        self._looked = False
        self._first_ms: int | None = None
        self._seen_ms: dict[int, int] = {}
        self._absent_polls: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """Reactivate failed partitions. A new job calls this once, before it starts receivers.

        The cause of a failure may be gone, or the settings changed; otherwise the partition fails again and is
        reported again.

        Raises:
            KeyVersionsError: the stream must not continue; see `check_key_versions`.
        """
        check_key_versions(self._stream, self._topics())
        failed = [row for row in self._live() if row.state is PartitionState.FAILED]
        for row in failed:
            logger.warning("input %s: %s is tried again; it had failed: %s", self._source.id, row.partition, row.error)
        if failed:
            partitions = [row.partition for row in failed]
            self._ledger.positions.set_state(self._lease, self._source.id, partitions, PartitionState.ACTIVE)

    def known(self) -> Known:
        """Return what the ledger knows, for a discoverer."""
        topics = {
            (row.topic, row.topic_id): FirstSeen(row.first_partitions, row.first_seen_ms, row.at_start)
            for row in self._topics()
        }
        partitions = frozenset(_key(row.partition) for row in self._rows())
        return Known(partitions, topics, began=self._looked or bool(topics))

    def apply(self, discovery: Discovery) -> None:
        """Record topics, set the starting position of new partitions, and end the partitions of topics that are gone.

        Raises:
            KeyVersionsError: the stream must not continue. The topics are recorded; no new partition has a position.
        """
        observed = self._ledger.topics.observe(
            self._lease,
            self._source.id,
            [(seen.topic, seen.topic_id, seen.partitions) for seen in discovery.topics],
            appeared=self._looked,
        )
        self._looked = True
        check_key_versions(self._stream, self._topics())
        incarnations = {(row.topic, row.topic_id): row.incarnation for row in observed}
        starting = {
            TopicPartition(topic, topic_id, number, incarnations[topic, topic_id]): offset
            for (topic, topic_id, number), offset in discovery.starting.items()
        }
        if starting:
            self._ledger.positions.ensure_all(self._lease, self._source.id, starting)
        self._end_gone(set(incarnations), discovery.refused)
        if self._of_receivers:
            self._end_without_receiver()

    def rebalance(self, live: Collection[int], now_ms: int) -> None:
        """Assign partitions to ``live`` receivers (indexes), evenly, with the fewest moves; fence dead receivers."""
        receivers = self._receivers(live, now_ms)
        if not receivers:
            return
        rows = self._live()
        current = {row.partition: _holder(row) for row in rows}
        if self._of_receivers:
            # A custom receiver's position says nothing to another receiver.
            wanted = {partition: partition.partition for partition in current if partition.partition in receivers}
        else:
            held = {partition: holder for partition, holder in current.items() if holder is not None}
            wanted = assign([row.partition for row in rows], receivers, held)
        moves = {
            row.partition: wanted[row.partition]
            for row in rows
            if row.partition in wanted and row.wanted_receiver_index != wanted[row.partition]
        }
        if moves:
            logger.info("input %s: %d partitions get a receiver: %s", self._source.id, len(moves), moves)
            self._ledger.positions.assign(self._lease, self._source.id, moves)
        self._fence(
            row.partition for row in rows if row.receiver_index is not None and row.receiver_index not in receivers
        )

    def _receivers(self, live: Collection[int], now_ms: int) -> set[int]:
        """Return the live receivers and those seen within the grace period.

        Empty until every receiver has been seen once or the grace period is over.
        """
        if self._first_ms is None and live:
            self._first_ms = now_ms
        # No later than now: the clock may have been ahead.
        self._seen_ms = {index: min(seen_ms, now_ms) for index, seen_ms in self._seen_ms.items()}
        self._seen_ms.update(dict.fromkeys(live, now_ms))
        all_came = len(self._seen_ms) >= self._source.receivers or self._of_receivers
        if not live or (not all_came and now_ms - (self._first_ms or now_ms) < self._grace_ms):
            return set()
        return {index for index, seen_ms in self._seen_ms.items() if now_ms - seen_ms < self._grace_ms}

    def _fence(self, partitions: Iterable[TopicPartition]) -> None:
        taken = list(partitions)
        if not taken:
            return
        try:
            self._ledger.positions.force_release(self._lease, self._source.id, taken)
            logger.warning("input %s: taken from dead receivers: %s", self._source.id, taken)
        except LeaseHeldError as error:
            logger.info("not yet taken over: %s", error)

    def _end_gone(self, seen: set[tuple[str, str]], refused: Collection[str]) -> None:
        names = {topic: topic_id for topic, topic_id in seen}
        ended: dict[str, list[TopicPartition]] = {}
        for row in self._rows():
            topic = (row.partition.topic, row.partition.topic_id)
            if topic in seen:
                self._absent_polls.pop(topic, None)
                if row.state is PartitionState.ENDED and not self._has_no_receiver(row):
                    self._resume(row)
            elif row.state is PartitionState.ENDED:
                continue
            elif row.partition.topic in names:
                ended.setdefault(f"created again as {names[row.partition.topic]}", []).append(row.partition)
            else:
                self._absent_polls.setdefault(topic, 0)
        for topic in self._absent_polls:
            self._absent_polls[topic] += topic[0] not in refused
        gone = {topic for topic, polls in self._absent_polls.items() if polls >= _POLLS_UNTIL_DELETED}
        for row in self._live() if gone else ():
            if (row.partition.topic, row.partition.topic_id) in gone:
                how = "deleted" if self._source.matches(row.partition.topic) else "removed from the definition"
                ended.setdefault(how, []).append(row.partition)
        for how, partitions in ended.items():
            logger.warning("input %s: the topic was %s: %s end", self._source.id, how, partitions)
            error = f"the topic was {how}"
            self._ledger.positions.set_state(self._lease, self._source.id, partitions, PartitionState.ENDED, error)
            self._ledger.positions.request_release(self._lease, self._source.id, partitions)

    def _has_no_receiver(self, row: PositionRow) -> bool:
        """Whether the partition was that of a custom receiver, and the input now has fewer."""
        return self._of_receivers and row.partition.partition >= self._source.receivers

    def _end_without_receiver(self) -> None:
        gone = [row.partition for row in self._live() if self._has_no_receiver(row)]
        if gone:
            error = f"the input now has {self._source.receivers} receiver(s)"
            logger.warning("input %s: %s: %s end", self._source.id, error, gone)
            self._ledger.positions.set_state(self._lease, self._source.id, gone, PartitionState.ENDED, error)
            self._ledger.positions.request_release(self._lease, self._source.id, gone)

    def _resume(self, row: PositionRow) -> None:
        self._ledger.positions.set_state(self._lease, self._source.id, [row.partition], PartitionState.ACTIVE)

    def _rows(self) -> list[PositionRow]:
        return self._ledger.positions.all(self._stream.name, self._source.id)

    def _live(self) -> list[PositionRow]:
        return self._ledger.positions.all(self._stream.name, self._source.id, live=True)

    def _topics(self) -> list[TopicRow]:
        return self._ledger.topics.all(self._stream.name, self._source.id)


def _holder(row: PositionRow) -> int | None:
    return row.wanted_receiver_index if row.wanted_receiver_index is not None else row.receiver_index


def _key(partition: TopicPartition) -> PartitionKey:
    return partition.topic, partition.topic_id, partition.partition
