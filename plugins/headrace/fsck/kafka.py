"""Checks what Kafka has of each partition against what the ledger says was received."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from headrace.blocks import InputPartition, TopicPartition
from headrace.errors import HeadraceError
from headrace.fsck.coverage import Hole, partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.kafka.client import open_consumer
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.offsets import Kept
from headrace.kafka.range_reader import OffsetsByTime, RangeClients
from headrace.ledger.receiving.tables import PositionRow
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import PartitionState
from headrace.stream import KafkaInput, Stream

_ANSWER_SECONDS = 20.0
# Kafka's client raises its errors; its log of refused connections adds nothing.
_quietly = partial(OffsetsByTime, quiet=True)


class Offsets(Protocol):
    """The queries to one input's Kafka; `OffsetsByTime` implements them."""

    def close(self) -> None: ...

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]: ...

    def kept(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Kept | None]: ...

    def timestamp_of_first(self, partition: TopicPartition, begin: int, until: int) -> int | None: ...


@dataclass
class KafkaObservation:
    """Kafka's answers between two snapshots of the ledger. ``notes`` are questions that have no answer."""

    ids: dict[tuple[str, str], str | None] = field(default_factory=dict)
    kept: dict[InputPartition, Kept | None] = field(default_factory=dict)
    committed: dict[InputPartition, int] = field(default_factory=dict)
    passed_over: list[Hole] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def judge(self, snapshot: StreamSnapshot) -> Iterator[Finding]:
        """The findings by this snapshot."""
        for position in snapshot.positions:
            key = (position.input_id, position.partition)
            topic = (position.input_id, position.partition.topic)
            if position.state is PartitionState.ENDED or topic not in self.ids:
                continue
            current = self.ids[topic]
            if current not in (None, position.partition.topic_id):
                what = f"Its topic id is {position.partition.topic_id} in the ledger and {current} in Kafka."
                yield Finding(Problem.KAFKA_TOPIC_REPLACED, partition_text(key), what)
            else:
                yield from self._position(key, position)
        for hole in self.passed_over:
            yield Finding(Problem.OFFSETS_MISSING, str(hole), "Kafka has records in this range.")

    def _position(self, key: InputPartition, position: PositionRow) -> Iterator[Finding]:
        kept, name = self.kept.get(key), partition_text(key)
        if kept is not None and position.next_offset > kept.end:
            what = f"Its position is {position.next_offset}, but Kafka's log ends at {kept.end}."
            yield Finding(Problem.KAFKA_LOG_CUT, name, what)
        elif kept is not None and position.next_offset < kept.first:
            what = f"Its position is {position.next_offset}, but the first offset that Kafka has is {kept.first}."
            yield Finding(Problem.KAFKA_RECORDS_GONE, name, what)
        if self.committed.get(key, 0) > position.next_offset:
            what = f"Its position is {position.next_offset}, but the committed offset is {self.committed[key]}."
            yield Finding(Problem.COMMITTED_TOO_FAR, name, what)


def observe_kafka(
    stream: Stream,
    snapshot: StreamSnapshot,
    holes: Iterable[Hole],
    *,
    offsets_of: Callable[[KafkaInput], Offsets] = _quietly,
) -> KafkaObservation:
    """Ask Kafka about every partition that is still read, and about ``holes``: offsets in no block, batch or gap."""
    observation = KafkaObservation()
    wanted = list(holes)
    for source in stream.kafka_inputs:
        try:
            with closing(offsets_of(source)) as offsets:
                _ask(source, offsets, snapshot, [hole for hole in wanted if hole.input_id == source.id], observation)
            _ask_for_commits(source, stream.group_of(source), observation)
        except (HeadraceError, KafkaException) as error:
            observation.unchecked.append(f"Kafka, for input {source.id!r}: {error}")
    known = {source.id for source in stream.inputs}
    others = known - {source.id for source in stream.kafka_inputs}
    for hole in (hole for hole in wanted if hole.input_id in others):
        observation.notes.append(
            f"{hole}: these offsets are in no block, batch or gap. Only the log has this input's records."
        )
    for input_id in sorted({row.input_id for row in snapshot.positions} - known):
        observation.notes.append(
            f"Input {input_id!r} is no longer in the stream's definition: its topics in Kafka were not checked."
        )
    return observation


def _ask(
    source: KafkaInput, offsets: Offsets, snapshot: StreamSnapshot, holes: list[Hole], observation: KafkaObservation
) -> None:
    read = [row for row in snapshot.positions if row.input_id == source.id and row.state is not PartitionState.ENDED]
    ids = offsets.topic_ids({row.partition.topic for row in read})
    observation.ids |= {(source.id, topic): topic_id for topic, topic_id in ids.items()}
    for topic in sorted(topic for topic, topic_id in ids.items() if topic_id is None):
        observation.notes.append(f"Kafka no longer has topic {topic!r} of input {source.id!r}.")
    there = [row.partition for row in read if ids[row.partition.topic] == row.partition.topic_id]
    kept = offsets.kept(there) if there else {}
    observation.kept |= {(source.id, tp): offset_range for tp, offset_range in kept.items()}
    for hole in holes:
        has = kept.get(hole.partition)
        if has is None or has.first >= hole.until:
            observation.notes.append(
                f"{hole}: these offsets are in no block, batch or gap, and Kafka no longer has them."
            )
            continue
        try:
            if offsets.timestamp_of_first(hole.partition, max(hole.start, has.first), hole.until) is not None:
                observation.passed_over.append(hole)
            elif has.first > hole.start:
                observation.notes.append(
                    f"{hole}: these offsets are in no block, batch or gap. Kafka has none before {has.first}."
                )
        except RangesGoneError as error:
            observation.notes.append(f"{hole}: these offsets are in no block, batch or gap. {error.what}")


def _ask_for_commits(source: KafkaInput, group: str, observation: KafkaObservation) -> None:
    try:
        reported = _committed(source, group, [tp for input_id, tp in observation.kept if input_id == source.id])
    except KafkaException as error:
        if error.args[0].code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise
        observation.notes.append(f"The committed offsets of group {group} cannot be read: {error.args[0].str()}.")
    else:
        observation.committed |= {(source.id, tp): offset for tp, offset in reported.items()}


def _committed(source: KafkaInput, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The group's committed offsets. Uses a consumer that does not join the group: librdkafka's admin client may abort
    the process if the group's coordinator is not available."""
    if not partitions:
        return {}
    by_key = {(tp.topic, tp.partition): tp for tp in partitions}
    consumer = open_consumer({**RangeClients.of(source).quiet().consumer, "group.id": group})
    try:
        answer = consumer.committed([KafkaPartition(*key) for key in by_key], timeout=_ANSWER_SECONDS)
    finally:
        consumer.close()
    reported = {by_key[committed.topic, committed.partition]: committed for committed in answer}
    return {
        tp: committed.offset for tp, committed in reported.items() if committed.error is None and committed.offset >= 0
    }
