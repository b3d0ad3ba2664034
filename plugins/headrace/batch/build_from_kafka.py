"""Builds a batch for a time before its stream began, from offset ranges that Kafka finds by timestamp.

In each partition, the batch takes the offsets from the first record with a timestamp at or after the interval's begin
up to the first record with a timestamp at or after its end: the records whose running maximum of timestamps lies in
the interval. So neighbouring batches meet and never overlap, whatever the order of the timestamps. Offsets from a
partition's starting position on were received by the stream, and belong to its own batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from headrace.batch.allocation import Allocation, write_manifest
from headrace.batch.manifest import Manifest
from headrace.batch.set_back import open_for_writing
from headrace.blocks import InputPartition, TopicPartition
from headrace.clock import time_text
from headrace.errors import Failure, HeadraceError
from headrace.kafka.offsets import Kept, listed, since
from headrace.kafka.range_reader import OffsetsByTime
from headrace.kafka.ranges import RecordedRange
from headrace.kafka.topics import SeenTopic
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import BatchInputRow, BatchRow
from headrace.ledger.states import BatchState
from headrace.stream import KafkaInput, Stream
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)


class BatchBuildError(HeadraceError):
    """The batch cannot be built from Kafka: it is not allowed for this batch, or some of its records are gone."""

    failure = Failure.FINAL


class Offsets(Protocol):
    """The queries to one input's Kafka; `OffsetsByTime` implements them."""

    def close(self) -> None: ...

    def topics(self) -> tuple[list[SeenTopic], list[str]]: ...

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]: ...

    def kept(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Kept | None]: ...

    def first_at(self, untils: Mapping[TopicPartition, int], timestamp_ms: int) -> Mapping[TopicPartition, int]: ...

    def timestamp_of_first(self, partition: TopicPartition, begin: int, until: int) -> int | None: ...


def build_from_kafka(
    context: StreamContext,
    batch_time_ms: int,
    *,
    offsets_of: Callable[[KafkaInput], Offsets] = OffsetsByTime,
) -> Allocation:
    """Build the batch of a time at or before the stream's zero time, or return the batch that was built before.

    Records are not counted: the numbers in the rows and the manifest are upper bounds.

    Args:
        batch_time_ms: the end of an interval, in milliseconds since the epoch.

    Raises:
        BatchBuildError: the stream's batches build on earlier ones, or delete documents by key; the time is after its
            zero time or has blocks of its own; or Kafka may no longer have all of its records, then the text says since
            when Kafka has records.
        BatchTimeError: the time is not an interval end.
        RangesUnreadableError: Kafka does not answer.
        StorageError: the manifest cannot be written; nothing is allocated then.
    """
    stream, ledger = context.stream, context.ledger
    open_for_writing(context)
    existing = ledger.batches.find(stream.name, batch_time_ms)
    if existing is not None and existing.built:
        return _allocation(ledger, existing, fresh=False)
    _refuse(context, batch_time_ms, existing)
    neighbours = _Neighbours(context, batch_time_ms)
    built = {}
    for source in stream.kafka_inputs:
        with closing(offsets_of(source)) as offsets:
            built[source.id] = tuple(_InputBuilder(context, source, offsets, batch_time_ms).ranges(neighbours))
    if not any(built.values()):
        logger.warning(
            "Batch %s of stream %s is empty: Kafka has nothing of its interval from before where the stream began",
            time_text(batch_time_ms),
            stream.name,
        )
    manifest = Manifest(
        stream=stream.name,
        batch_time_ms=batch_time_ms,
        interval_ms=stream.batch_interval_ms,
        inputs={source.id: () for source in stream.inputs},
        folder_url=stream.folder_url,
        built=built,
    )
    manifest, sha256 = write_manifest(context, manifest)
    batch = ledger.allocations.allocate(
        stream.name,
        batch_time_ms,
        manifest_uri=manifest.uri,
        manifest_sha256=sha256,
        inputs=[
            BatchInputRow(
                stream.name,
                batch_time_ms,
                input_id,
                recorded.partition,
                recorded.from_offset,
                recorded.until_offset,
                records=recorded.weight,
                blocks=0,
            )
            for input_id, ranges in built.items()
            for recorded in ranges
        ],
        replace_empty=True,
    )
    context.storage.mark.leave()
    # A concurrent build may have allocated the batch first; then its ranges count.
    return _allocation(ledger, batch, fresh=batch.built and batch.manifest_uri == manifest.uri)


def _allocation(ledger: Ledger, batch: BatchRow, *, fresh: bool) -> Allocation:
    return Allocation(batch, tuple(ledger.batches.inputs(batch.stream, batch.batch_time_ms)), fresh)


def _refuse(context: StreamContext, batch_time_ms: int, existing: BatchRow | None) -> None:
    stream, ledger = context.stream, context.ledger
    zero_ms = ledger.streams.get(stream.name).zero_time_ms
    name = f"Batch {time_text(batch_time_ms)} of stream {stream.name!r}"
    builder = _why_in_order(stream)
    others = [source.id for source in stream.inputs if source not in stream.kafka_inputs]
    if others:
        raise BatchBuildError(
            f"{name} is not built from Kafka: input {', '.join(others)} is no Kafka input, and what was there before "
            "the stream began cannot be read.",
            remedy="Leave this time out: the stream's first own batch ends after its zero time.",
        )
    if builder is not None:
        raise BatchBuildError(
            f"{name} is not built from Kafka: {builder}, so batches cannot come before those that there are.",
            remedy="Define a stream of another name over the same topics, with batch_by='timestamp' and with "
            "starting_offsets from before that time: it runs all batches in their order.",
        )
    if batch_time_ms > zero_ms:
        raise BatchBuildError(
            f"{name} is not built from Kafka: the stream has its own batches after {time_text(zero_ms)}.",
            remedy="Run it as it is.",
        )
    if existing is not None and existing.state in (BatchState.ABSORBED, BatchState.ABANDONED):
        raise BatchBuildError(f"{name} is not built from Kafka: it was {existing.state.value}.")
    ledger.allocations.seal(stream.name, batch_time_ms)
    held = existing.blocks if existing is not None else len(ledger.allocations.blocks_of(stream.name, batch_time_ms))
    if held:
        raise BatchBuildError(
            f"{name} is not built from Kafka: it has {held:,} blocks that the stream received.",
            remedy="Run it as it is.",
        )


def _why_in_order(stream: Stream) -> str | None:
    if stream.state is not None:
        return "each batch starts from the state that the one before left"
    for output in stream.outputs:
        if output.window is not None:
            return f"output {output.id!r} has a window over earlier batches"
        if output.deletes_by_key:
            return f"output {output.id!r} deletes documents by key, and an older value would restore them"
    return None


class _Neighbours:
    """The ranges of the batches before and after. This batch must meet them, even if compaction has since removed the
    records by which their limits were found."""

    def __init__(self, context: StreamContext, batch_time_ms: int) -> None:
        self._batches = context.ledger.batches
        self._stream_name = context.name
        self._batch_time_ms = batch_time_ms
        interval_ms = context.stream.batch_interval_ms
        self._before = {key: row.until_offset for key, row in self._taken(batch_time_ms - interval_ms).items()}
        self._after = {key: row.from_offset for key, row in self._taken(batch_time_ms + interval_ms).items()}

    def fit(self, input_id: str, partition: TopicPartition, begin: int, until: int) -> tuple[int, int]:
        """Adjust the range to meet the neighbours' ranges and overlap no other batch's; returns (begin, until)."""
        key = (input_id, partition)
        begin = self._before.get(key, begin)
        until = max(begin, self._after.get(key, until))
        for offset in (begin, until - 1):
            other = self._batches.containing(self._stream_name, input_id, partition, offset)
            if begin >= until or other is None or other.batch_time_ms == self._batch_time_ms:
                continue
            if other.batch_time_ms < self._batch_time_ms:
                begin = min(until, max(begin, other.until_offset))
            else:
                until = max(begin, min(until, other.from_offset))
        return begin, until

    def _taken(self, batch_time_ms: int) -> dict[InputPartition, BatchInputRow]:
        batch = self._batches.find(self._stream_name, batch_time_ms)
        if batch is None or not batch.built:
            return {}
        return {(row.input_id, row.partition): row for row in self._batches.inputs(self._stream_name, batch_time_ms)}


@dataclass(frozen=True)
class _InputBuilder:
    """Finds one input's offset ranges."""

    context: StreamContext
    source: KafkaInput
    offsets: Offsets
    batch_time_ms: int

    def ranges(self, neighbours: _Neighbours) -> list[RecordedRange]:
        """The non-empty ranges. Raises BatchBuildError."""
        # A partition that the stream began at offset 0 has nothing before.
        starting = {partition: offset for partition, offset in sorted(self._starting().items()) if offset}
        begin_ms = self.batch_time_ms - self.context.stream.batch_interval_ms
        begins = self.offsets.first_at(starting, begin_ms)
        untils = self.offsets.first_at(starting, self.batch_time_ms)
        # This check comes last: what Kafka still has now, it also had during the queries by time.
        self._check_all_is_there(starting, begin_ms)
        built = []
        for partition, end in starting.items():
            begin, until = neighbours.fit(self.source.id, partition, begins[partition], untils[partition])
            if begin < until:
                built.append(RecordedRange(partition, begin, until, None))
            elif begin == end:
                logger.info(
                    "Batch %s takes nothing of %s: what may be of its interval the stream received itself, which "
                    "began there at offset %d",
                    time_text(self.batch_time_ms),
                    _name(partition),
                    end,
                )
        return built

    def _check_all_is_there(self, starting: Mapping[TopicPartition, int], begin_ms: int) -> None:
        """Raise BatchBuildError if records of the interval may be gone.

        Everything before the first kept record is gone. If that record is older than the interval, so was everything
        before it, and nothing is missing. If its timestamp equals the interval's begin, earlier records with the same
        timestamp may be gone.
        """
        kept = self.offsets.kept(starting)
        ids = self.offsets.topic_ids({partition.topic for partition in starting})
        problems = []
        for partition, end in starting.items():
            has = kept[partition]
            if has is None or ids[partition.topic] != partition.topic_id:
                problems.append(_deleted(partition))
            elif has.first > 0:
                first_ms = self.offsets.timestamp_of_first(partition, has.first, end)
                oldest_ms = has.first_timestamp_ms if first_ms is None else first_ms
                if oldest_ms is None or oldest_ms >= begin_ms:
                    problems.append(f"{_name(partition)}: {since(has)}")
        if problems:
            raise self._part_is_gone(problems)

    def _starting(self) -> dict[TopicPartition, int]:
        """The stream's starting offset in each partition that exists."""
        seen, missing = self.offsets.topics()
        if missing:
            raise self._part_is_gone([f"topic {topic} does not exist" for topic in missing])
        incarnations = {
            (row.topic, row.topic_id): row.incarnation
            for row in self.context.ledger.topics.all(self.context.name, self.source.id)
        }
        positions = {
            row.partition: row.starting_offset
            for row in self.context.ledger.positions.all(self.context.name)
            if row.input_id == self.source.id
        }
        there = {
            TopicPartition(topic.topic, topic.topic_id, number, incarnations.get((topic.topic, topic.topic_id), 0))
            for topic in seen
            for number in range(topic.partitions)
        }
        unknown = sorted(_name(partition) for partition in there - positions.keys())
        if unknown:
            undecided = BatchBuildError(
                f"Where stream {self.context.name!r} begins is not known of {listed(unknown)}, so the batches before "
                "it cannot be told from its own.",
                remedy="Start its receiver job, which finds out; then build the batch.",
            )
            undecided.failure = Failure.PASSING
            raise undecided
        deleted = [
            _deleted(partition)
            for partition, offset in sorted(positions.items())
            if offset and partition not in there and self.source.matches(partition.topic)
        ]
        if deleted:
            raise self._part_is_gone(deleted)
        return {partition: positions[partition] for partition in there}

    def _part_is_gone(self, problems: Collection[str]) -> BatchBuildError:
        return BatchBuildError(
            f"Batch {time_text(self.batch_time_ms)} of stream {self.context.name!r} cannot be built: Kafka may no "
            "longer have all "
            f"of it: {listed(sorted(problems))}.",
            remedy="Only batch times of which Kafka still has everything can be built.",
        )


def _deleted(partition: TopicPartition) -> str:
    return f"{_name(partition)}: the topic (id {partition.topic_id}) was deleted"


def _name(partition: TopicPartition) -> str:
    return f"{partition.topic}-{partition.partition}"
