"""Reads exact offset ranges from Kafka again, without a consumer group, and finds the offset of a time.

The end of a range is detected by the consumer's position, never by the last offset: aborted transactions, compaction
and control records leave offsets without a record.

Kafka's own lookup by time also counts offsets that no consumer sees: transaction markers, which carry the broker's time
whatever the records' timestamps are, and records of aborted transactions. The offset it returns is never too late. So
records are read from there until one has a late enough timestamp; usually that is the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from headrace.blocks import TopicPartition
from headrace.kafka.client import AskingAdmin, ClientConfig, admin_config, consumer_config, open_consumer
from headrace.kafka.client_errors import KeptError
from headrace.kafka.errors import RangesUnreadableError, RecordsDifferError, RecordsReplacedError
from headrace.kafka.offsets import ANSWER_SECONDS, RUN_AGAIN, Kept, OffsetQuestions, check_available, gone, listed
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.kafka.records import (
    FIRST_RECORDS,
    MAX_RECORDS,
    OUT_OF_RANGE,
    Converted,
    Cursor,
    EpochRecords,
    consume,
    convert,
)
from headrace.kafka.topics import SeenTopic
from headrace.stream.inputs import KafkaInput
from headrace.stream.settings import Limits

STALL_SECONDS = 60.0
"""How long Kafka may make no progress before reading fails."""
PREFETCH_BYTES = 32 * 1024 * 1024

_BATCH_BYTES = 4 * 1024 * 1024
# consume() waits this long for the requested number of messages, even if no more will come.
_CONSUME_SECONDS = 0.05
# How long a refused log-in is tried again: by then another broker, or a new token, would have been accepted.
_REFUSED_SECONDS = 5.0
# The pause before a partition is fetched again after an error.
_AGAIN_SECONDS = 0.1

_ANY_EPOCH = int(np.iinfo(np.int64).max)

_FINAL = frozenset(
    {
        KafkaError._BAD_MSG,
        KafkaError._BAD_COMPRESSION,
        KafkaError._FATAL,
        KafkaError.INVALID_MSG,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)


@dataclass(frozen=True)
class RangeClients:
    """The settings of the clients that read an input's ranges. They hold secrets: may be pickled, never shown."""

    consumer: ClientConfig = field(repr=False)
    admin: ClientConfig = field(repr=False)

    @classmethod
    def of(
        cls, source: KafkaInput, *, prefetch_bytes: int = PREFETCH_BYTES, environ: Mapping[str, str] | None = None
    ) -> Self:
        """Resolve the input's connection in ``environ``, by default this process's environment.

        Raises ClientSettingError, ConnectionNotFoundError or ConnectionFormatError.
        """
        limits = Limits(prefetch_bytes=prefetch_bytes)
        # Nothing is ever committed for the group; librdkafka requires one.
        config = consumer_config(source, group=source.group or "headrace-replay", limits=limits, environ=environ)
        return cls(config, admin_config(source, environ))

    def for_offsets(self, offsets: int) -> Self:
        """These settings for reading so many offsets: few messages beyond them are fetched."""
        most = int(self.consumer["queued.min.messages"])
        return replace(self, consumer={**self.consumer, "queued.min.messages": max(1, min(most, offsets))})

    def quiet(self) -> Self:
        """These settings, but librdkafka writes nothing to standard error."""
        silence = {"log_level": 0}
        return replace(self, consumer={**self.consumer, **silence}, admin={**self.admin, **silence})

    def questions(self, *, answer_seconds: float = ANSWER_SECONDS) -> OffsetQuestions:
        """Create a client for queries."""
        return OffsetQuestions(AskingAdmin(self.admin), answer_seconds=answer_seconds)


def check_ranges(clients: RangeClients, runs: Sequence[RangeRun]) -> None:
    """Check that Kafka still has all of ``runs``. Raises RangesGoneError or RangesUnreadableError."""
    if runs:
        check_available(clients.questions(), runs)


@dataclass(slots=True)
class _Reading:
    """The progress of reading a run; ``seen`` counts the records of each of its ranges.

    ``leader_epochs`` are those recorded for its ranges, the highest possible number where none is.

    ``is_anew``: the client has fetched the partition before, for another run or before an error, and has no result of
    this run yet, so it may still report its old position. ``end`` is the partition's end as the client last reported
    it.
    """

    run: RangeRun
    next_offset: int
    seen: np.ndarray[Any, Any]
    untils: np.ndarray[Any, Any]
    leader_epochs: np.ndarray[Any, Any]
    end: int | None = None
    is_anew: bool = False

    @classmethod
    def of(cls, run: RangeRun) -> Self:
        untils = np.array(run.untils, dtype=np.int64)
        epochs = [_ANY_EPOCH if epoch is None else epoch for epoch in run.leader_epochs]
        return cls(run, run.from_offset, np.zeros(len(untils), dtype=np.int64), untils, np.array(epochs))

    def count(self, offsets: np.ndarray[Any, Any]) -> None:
        self.seen += np.bincount(np.searchsorted(self.untils, offsets, side="right"), minlength=len(self.untils))

    def refuse_later(self, records: EpochRecords) -> None:
        """Refuse records of a later leader epoch than the last record of their range had when it was received.

        Offsets ascend with leader epochs, and a log that was truncated goes on in a later one (KIP-101).

        Raises:
            RecordsReplacedError: Kafka has given the offsets to other records.
        """
        first, last = np.searchsorted(self.untils, (records.first_offset, records.until_offset - 1), side="right")
        (later,) = np.nonzero(self.leader_epochs[first : last + 1] < records.leader_epoch)
        if len(later):
            place = int(first + later[0])
            raise RecordsReplacedError(
                f"{self.run.ranges()[place]} ended in leader epoch {self.leader_epochs[place]}, and Kafka has records "
                f"of leader epoch {records.leader_epoch} from offset {records.first_offset} on"
            )

    @property
    def is_done(self) -> bool:
        return self.next_offset >= self.run.until_offset

    def differences(self) -> list[tuple[RecordedRange, int]]:
        """The ranges with another number of records than their count, each with the number read."""
        return [
            (recorded, seen)
            for recorded, seen in zip(self.run.ranges(), self.seen.tolist(), strict=True)
            if recorded.records not in (None, seen)
        ]


class KafkaRangeReader:
    """Reads ranges with one consumer. Not thread-safe. Must be closed."""

    def __init__(
        self,
        clients: RangeClients,
        *,
        stall_seconds: float = STALL_SECONDS,
        consumer_factory: Callable[[ClientConfig], Any] = open_consumer,
        questions: OffsetQuestions | None = None,
    ) -> None:
        self._clients = clients
        self._stall_seconds = stall_seconds
        self._questions = questions
        self._records_at_once = FIRST_RECORDS
        self._last_error = KeptError(clients.consumer)
        self._fetched: set[tuple[str, int]] = set()
        self._consumer = consumer_factory({**clients.consumer, "error_cb": self._last_error.note})

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, runs: Sequence[RangeRun]) -> Generator[pa.RecordBatch, None, None]:
        """Read the records of ``runs``, as batches of ``headrace.wal.frame.RECORD_SCHEMA`` in order within each run.

        Errors may be raised as late as after the last record, so the caller must not rely on any batch before the end.

        Raises:
            RecordsDifferError: a counted range holds more or fewer records than its count.
            RecordsReplacedError: Kafka has other records in a range than the received ones. Raised before it returns
                any of them.
            RangesGoneError: Kafka no longer has an offset, or the topic was created again meanwhile, of which no record
                is returned.
            RangesUnreadableError: there was no progress for ``stall_seconds``, or a record cannot be read.
        """
        differences: list[tuple[RecordedRange, int]] = []
        for wave in _waves(runs):
            readings = [_Reading.of(run) for run in wave]
            yield from self._read(readings)
            for reading in readings:
                differences += reading.differences()
        # Each record that was read is of its topic. Where all were read, nothing is left to ask.
        unsure = [run for run in runs if differences or None in run.counts]
        if unsure:
            self._check_topics(unsure)
        if differences:
            raise self._differ(differences)

    def check(self, runs: Sequence[RangeRun]) -> None:
        """Check that Kafka still has all of ``runs``. Raises RangesGoneError or RangesUnreadableError."""
        if runs:
            check_available(self._ask(), runs)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _check_topics(self, runs: Sequence[RangeRun]) -> None:
        """Check that the records read are of the topics with the ids in ``runs``: librdkafka reads by name. A topic
        that still has its id had it when they were read.

        Raises RangesGoneError or RangesUnreadableError.
        """
        ids = self._topic_ids({run.partition.topic for run in runs})
        # A topic that was deleted since (None) has no other id, so the records read are its own.
        other = [run for run in runs if ids[run.partition.topic] not in (None, run.partition.topic_id)]
        if other:
            raise gone([f"{run}: while it was read the topic was deleted and created again" for run in other])

    def _topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        """The topics' ids. A broker that is away meanwhile may take as long as one that brings no records."""
        until = time.monotonic() + self._stall_seconds
        while True:
            try:
                return self._ask().topic_ids(topics)
            except RangesUnreadableError as error:
                cause = error.__cause__
                is_final = isinstance(cause, KafkaException) and cause.args[0].code() in _FINAL
                if is_final or time.monotonic() >= until:
                    raise
                time.sleep(_AGAIN_SECONDS)

    def _read(self, readings: Sequence[_Reading]) -> Iterator[pa.RecordBatch]:
        open_runs = {reading.run.key: reading for reading in readings}
        for key, reading in open_runs.items():
            reading.is_anew = key in self._fetched
        self._fetched.update(open_runs)
        self._consumer.incremental_assign(
            [KafkaPartition(*key, reading.next_offset) for key, reading in open_runs.items()]
        )
        try:
            progressed_at = time.monotonic()
            while open_runs:
                batch, progressed = self._some(open_runs)
                if batch is not None:
                    # First, since the caller may write it anywhere.
                    self._check_topics([reading.run for reading in readings])
                    yield batch
                silent_seconds = time.monotonic() - progressed_at
                if progressed:
                    progressed_at = time.monotonic()
                    self._last_error.connected()
                elif (
                    self._last_error.is_refused
                    and silent_seconds > _REFUSED_SECONDS
                    and (refused := self._last_error.examined()) is not None
                ):
                    raise RangesUnreadableError(f"Kafka refuses the log-in: {refused.text}.", remedy=refused.remedy)
                elif silent_seconds > self._stall_seconds:
                    raise self._stalled(list(open_runs.values()))
                done = [key for key, reading in open_runs.items() if reading.is_done]
                for key in done:
                    del open_runs[key]
                if done:
                    self._consumer.incremental_unassign([KafkaPartition(*key) for key in done])
        finally:
            # Also when the caller stops early, or after an error.
            if open_runs:
                self._consumer.incremental_unassign([KafkaPartition(*key) for key in open_runs])

    def _some(self, open_runs: dict[tuple[str, int], _Reading]) -> tuple[pa.RecordBatch | None, bool]:
        """The records of one consume(), and whether any run has progressed."""
        held: set[tuple[str, int]] = set()
        separate_errors = partial(self._separate_errors, open_runs=open_runs, held=held)
        left = sum(reading.run.until_offset - reading.next_offset for reading in open_runs.values())
        try:
            columns = consume(
                self._consumer, min(self._records_at_once, left), _CONSUME_SECONDS, separate_errors=separate_errors
            )
        except KafkaException as error:
            raise RangesUnreadableError(f"Kafka's client failed: {error}.") from error
        cursors = {key: Cursor(reading.run.partition, reading.next_offset) for key, reading in open_runs.items()}
        converted = convert(columns, cursors)
        batch = self._count(converted, open_runs)
        progressed = False
        for key, position in self._positions(converted, open_runs, held).items():
            reading = open_runs[key]
            progressed = progressed or position > reading.next_offset
            reading.next_offset = max(position, reading.next_offset)
        self._fetch_again([open_runs[key] for key in held])
        return batch, progressed

    def _count(self, converted: Converted, open_runs: dict[tuple[str, int], _Reading]) -> pa.RecordBatch | None:
        """Count the records, and leave out those beyond their run's end."""
        batch = converted.batch
        if batch is None:
            return None
        average = max(1, batch.nbytes // batch.num_rows)
        self._records_at_once = max(1, min(MAX_RECORDS, _BATCH_BYTES // average))
        offsets = batch.column("offset").to_numpy()
        keep = np.ones(batch.num_rows, dtype=bool)
        for partition, last in converted.positions.items():
            reading = open_runs[partition.topic, partition.partition]
            mine = _rows_of(batch, reading.run) if len(converted.positions) > 1 else slice(None)
            if last > reading.run.until_offset:
                beyond = offsets >= reading.run.until_offset
                keep &= ~(beyond & mine) if not isinstance(mine, slice) else ~beyond
            for records in converted.epochs[partition]:
                reading.refuse_later(records)
            of_run = offsets[mine]
            reading.count(of_run[of_run < reading.run.until_offset])
        if keep.all():
            return batch
        kept = batch.filter(pa.array(keep))
        return kept if kept.num_rows else None

    def _positions(
        self, converted: Converted, open_runs: dict[tuple[str, int], _Reading], held: Collection[tuple[str, int]]
    ) -> dict[tuple[str, int], int]:
        """The client's positions: after control records and compacted offsets, but not after an error."""
        positions = {
            (partition.topic, partition.partition): position for partition, position in converted.positions.items()
        }
        for key in positions:
            open_runs[key].is_anew = False
        asked = [key for key, reading in open_runs.items() if key not in held and not reading.is_anew]
        for reported in self._consumer.position([KafkaPartition(*key) for key in asked]) if asked else ():
            key = (reported.topic, reported.partition)
            positions[key] = max(positions.get(key, 0), reported.offset, open_runs[key].end or 0)
        return positions

    # -- errors ----------------------------------------------------------------------------------------------------

    def _separate_errors(
        self, messages: Sequence[Any], open_runs: dict[tuple[str, int], _Reading], held: set[tuple[str, int]]
    ) -> list[Any]:
        """The records among ``messages``, for each partition up to its first error; adds its key to ``held`` then.

        The end of a partition is no error. Records after an error are dropped: the client may have skipped others
        before them. Raises RangesGoneError and RangesUnreadableError for errors that do not pass.
        """
        good: list[Any] = []
        for message in messages:
            error, key = message.error(), (message.topic(), message.partition())
            if key in held:
                continue
            if error is None:
                good.append(message)
                continue
            reading = open_runs.get(key)
            if error.code() == KafkaError._PARTITION_EOF:
                if reading is not None:
                    reading.end, reading.is_anew = message.offset(), False
            elif reading is not None and error.code() in OUT_OF_RANGE:
                # Retention removed offsets meanwhile: query what is left.
                check_available(self._ask(), [reading.run for reading in open_runs.values()])
                raise gone([f"{reading.run}: Kafka has no offset {reading.next_offset} any more"])
            elif error.code() in _FINAL:
                where = f"{message.topic()}-{message.partition()}, offset {message.offset()}"
                raise RangesUnreadableError(f"Kafka's {where} cannot be read: {error.name()}: {error.str()}.")
            else:
                self._last_error.note(error)
                if reading is not None:
                    held.add(key)
        return good

    def _fetch_again(self, readings: Sequence[_Reading]) -> None:
        """Fetch each of them again from its position; records that the client has prefetched are dropped."""
        if not readings:
            return
        # A lasting error ends in the stall timeout. Until then the pause keeps the load on the broker low.
        time.sleep(_AGAIN_SECONDS)
        self._consumer.incremental_unassign([KafkaPartition(*reading.run.key) for reading in readings])
        self._consumer.incremental_assign(
            [KafkaPartition(*reading.run.key, reading.next_offset) for reading in readings]
        )
        for reading in readings:
            reading.is_anew = True

    def _stalled(self, readings: Sequence[_Reading]) -> RangesUnreadableError:
        missing = []
        for reading in readings:
            end = "" if reading.end is None else f", where Kafka says that it ends at {reading.end}"
            missing.append(f"{reading.run} from offset {reading.next_offset} on{end}")
        last = self._last_error.examined()
        reported = f" The client's last error: {last.text}." if last is not None else ""
        return RangesUnreadableError(
            f"Kafka brought nothing for {self._stall_seconds:.0f} s; missing is {listed(missing)}.{reported}",
            remedy=f"{last.remedy} Then run it again." if last is not None and last.is_real else RUN_AGAIN,
        )

    def _differ(self, differences: Sequence[tuple[RecordedRange, int]]) -> RecordsDifferError:
        recorded = sum(recorded.weight for recorded, _ in differences)
        read = sum(seen for _, seen in differences)
        texts = [f"{recorded}: {recorded.records:,} recorded, {seen:,} read" for recorded, seen in differences]
        if read >= recorded:
            return RecordsDifferError(
                f"Kafka has more records in the ranges than were counted: {listed(texts)}.",
                remedy="Was the input's isolation.level another one when the batch was received?",
            )
        compacted = sorted(
            topic
            for topic in {recorded.partition.topic for recorded, _ in differences}
            if self._ask().is_compacted(topic)
        )
        why = f" Compacted, so that Kafka removes records of their middle: {', '.join(compacted)}." if compacted else ""
        return RecordsDifferError(
            f"{recorded - read:,} of {recorded:,} records are gone from Kafka: {listed(texts)}.{why}",
            remedy="What is gone from the log and from Kafka cannot be had any more.",
        )

    def _ask(self) -> OffsetQuestions:
        if self._questions is None:
            self._questions = self._clients.questions()
        return self._questions


def _rows_of(records: pa.RecordBatch, run: RangeRun) -> np.ndarray[Any, Any]:
    topic, partition = run.key
    mine = pc.and_(pc.equal(records.column("partition"), partition), pc.equal(records.column("topic"), topic))
    return mine.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _waves(runs: Sequence[RangeRun]) -> list[list[RangeRun]]:
    """Group the runs so that no group has a partition twice: a client has one position per partition."""
    waves: list[list[RangeRun]] = []
    placed: dict[tuple[str, int], int] = {}
    for run in runs:
        number = placed.get(run.key, -1) + 1
        placed[run.key] = number
        if number == len(waves):
            waves.append([])
        waves[number].append(run)
    return waves


# Usually the first record is enough, otherwise one of the next.
_OFFSETS_AHEAD = 5_000


class OffsetsByTime:
    """Queries and reads one input's Kafka, with the input's isolation level. Resolves the connection in this process's
    environment. Must be closed.

    Its methods raise RangesUnreadableError when Kafka does not answer, RangesGoneError when offsets are gone meanwhile.
    """

    def __init__(self, source: KafkaInput, *, quiet: bool = False) -> None:
        """``quiet``: librdkafka writes nothing to standard error; errors that matter are raised."""
        self._source = source
        self._clients = RangeClients.of(source).for_offsets(_OFFSETS_AHEAD)
        if quiet:
            self._clients = self._clients.quiet()
        self._questions: OffsetQuestions = self._clients.questions()
        self._reader: KafkaRangeReader | None = None

    def close(self) -> None:
        """Close the consumer."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def topics(self) -> tuple[list[SeenTopic], list[str]]:
        """The input's topics, and the named ones that do not exist. Raises TopicsNotFoundError as well."""
        return self._questions.topics(self._source)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        """Each topic's id, None for a topic that does not exist."""
        return self._questions.topic_ids(topics)

    def kept(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Kept | None]:
        """What Kafka has of each partition, None where there is no such partition."""
        offsets = self._questions.kept([_key(partition) for partition in partitions])
        return {partition: offsets[_key(partition)] for partition in partitions}

    def first_at(self, untils: Mapping[TopicPartition, int], timestamp_ms: int) -> dict[TopicPartition, int]:
        """For each partition, the first offset below its ``until`` whose record has this timestamp or a later one;
        ``until`` if there is none."""
        reported = self._questions.first_at([_key(partition) for partition in untils], timestamp_ms)
        result = {}
        for partition, until in untils.items():
            begin = reported[_key(partition)]
            result[partition] = until if begin is None else self._first(partition, begin, until, timestamp_ms)
        return result

    def timestamp_of_first(self, partition: TopicPartition, begin: int, until: int) -> int | None:
        """The timestamp (ms) of the first record in [begin, until), None if there is no record."""
        for batch in self._records(partition, begin, until):
            return int(_times(batch)[0])
        return None

    def _first(self, partition: TopicPartition, begin: int, until: int, timestamp_ms: int) -> int:
        for batch in self._records(partition, begin, until):
            young = np.flatnonzero(_times(batch) >= timestamp_ms)
            if len(young):
                return int(batch.column("offset")[int(young[0])].as_py())
        return until

    def _records(self, partition: TopicPartition, begin: int, until: int) -> Iterator[pa.RecordBatch]:
        if begin >= until:
            return
        if self._reader is None:
            self._reader = KafkaRangeReader(self._clients, questions=self._questions)
        # Closed with this generator, also when the caller stops after the first batch.
        with closing(self._reader.read([RangeRun.of([RecordedRange(partition, begin, until, None)])])) as reading:
            yield from reading


def _key(partition: TopicPartition) -> tuple[str, int]:
    return partition.topic, partition.partition


def _times(records: pa.RecordBatch) -> np.ndarray[Any, Any]:
    return records.column("timestamp").cast(pa.int64()).to_numpy()  # type: ignore[no-any-return]
