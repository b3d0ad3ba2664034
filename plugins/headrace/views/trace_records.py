"""Reads a single record from its block in the log or from Kafka, and searches records for a key, newest batch first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headrace.batch.manifest import LOG_FOLDER, Manifest, ManifestError
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.kafka.offsets import since
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RangeRun, RecordedRange, in_order, joined
from headrace.ledger.batches.tables import BatchOrigin
from headrace.ledger.states import BatchState
from headrace.stream_context import StreamContext
from headrace.views.trace_location import pages_of_waiting_times
from headrace.views.traced import Header, KeyMatch, KeySearch, Record, RecordPosition, TracedBlock
from headrace.wal.reader import read_block

# A person waits for the answer.
ANSWER_SECONDS = 5.0
STALL_SECONDS = 10.0


class NotInKafkaError(HeadraceError):
    """Kafka does not have the offset: not yet, not any more, or the topic is another one."""


class RecordUnreadableError(HeadraceError):
    """The log's block is missing or damaged, and the record cannot be read from Kafka."""


class RecordReader:
    """Reads single records of a stream. ``environ``: where connections are looked up, by default the process's
    environment."""

    def __init__(self, context: StreamContext, environ: Mapping[str, str] | None = None) -> None:
        self._context = context
        self._environ = environ

    def read(self, position: RecordPosition, block: TracedBlock | None) -> Record | None:
        """The record from its block if the log has it, otherwise from Kafka.

        None: the block was read and does not hold the offset; or the log does not have the block, and Kafka has no
        record at the offset (any more).

        Raises:
            HeadraceError: neither has it, or both cannot be read.
        """
        if block is None or not block.in_log:
            return self.from_kafka(position)
        try:
            return self.from_log(BlockHandle(block.segment, block.offset, block.length), position)
        except HeadraceError as damage:
            try:
                record = self.from_kafka(position)
            except HeadraceError as error:
                raise RecordUnreadableError(f"{damage} In Kafka: {error}") from error
            if record is None:
                # Kafka may have compacted it since, so the offset may have had a record.
                raise RecordUnreadableError(
                    f"{damage} In Kafka: there is no record at the offset any more."
                ) from damage
            return record

    def from_log(self, handle: BlockHandle, position: RecordPosition) -> Record | None:
        """The record from its block; None if the block has no record at this offset.

        Raises:
            WalError: the segment is missing or damaged.
        """
        _, records = read_block(self._context.storage.below(LOG_FOLDER), handle)
        return _record(records, position, "log")

    def from_kafka(self, position: RecordPosition) -> Record | None:
        """The record from Kafka; None if Kafka has no record at this offset (a transaction marker, compaction).

        Raises:
            NotInKafkaError: Kafka does not have the offset, or the stream has no such input any more.
            HeadraceError: Kafka does not answer, or its connection cannot be used.
        """
        source = {source.id: source for source in self._context.stream.inputs}.get(position.input_id)
        if source is None:
            raise NotInKafkaError(f"The stream's definition has no input {position.input_id!r} any more.")
        kafka = source.in_kafka
        if kafka is None:
            raise NotInKafkaError(f"Input {position.input_id!r} is no Kafka input: only the log has its records.")
        clients = RangeClients.of(kafka, environ=self._environ).for_offsets(1).quiet()
        partition, questions = position.partition, clients.questions(answer_seconds=ANSWER_SECONDS)
        topic_id = questions.topic_ids({partition.topic})[partition.topic]
        if topic_id is None:
            raise NotInKafkaError(f"Topic {partition.topic!r} does not exist in Kafka any more.")
        if topic_id != partition.topic_id:
            raise NotInKafkaError(f"Topic {partition.topic!r} was deleted and created again since.")
        kept = questions.kept([(partition.topic, partition.partition)])[partition.topic, partition.partition]
        if kept is None:
            raise NotInKafkaError(f"Kafka has no partition {partition.partition} of topic {partition.topic!r}.")
        if position.offset >= kept.end:
            raise NotInKafkaError(f"Kafka has no such offset yet: the partition ends at {kept.end}.")
        if position.offset < kept.first:
            raise NotInKafkaError(f"Kafka has deleted it: {since(kept)}.")
        run = RangeRun.of([RecordedRange(partition, position.offset, position.offset + 1, None)])
        with KafkaRangeReader(clients, stall_seconds=STALL_SECONDS, questions=questions) as reader:
            for records in reader.read([run]):
                record = _record(records, position, "kafka")
                if record is not None:
                    return record
        return None


def _record(records: pa.RecordBatch, position: RecordPosition, read_from: str) -> Record | None:
    partition = position.partition
    wanted = pc.and_(
        pc.and_(
            pc.equal(records.column("offset"), position.offset),
            pc.equal(records.column("partition"), partition.partition),
        ),
        pc.and_(
            pc.equal(records.column("topic"), partition.topic),
            pc.equal(records.column("incarnation"), partition.incarnation),
        ),
    )
    rows = pc.indices_nonzero(wanted).to_pylist()
    if not rows:
        return None
    row = records.slice(rows[0], 1)
    timestamps = pc.cast(row.column("timestamp"), pa.int64())
    (fields,) = row.drop_columns(["timestamp"]).to_pylist()
    return Record(
        timestamp_ms=timestamps[0].as_py(),
        timestamp_type=fields["timestampType"],
        key=fields["key"],
        value=fields["value"],
        headers=tuple(Header(key=header["key"], value=header["value"]) for header in fields["headers"] or ()),
        read_from=read_from,
    )


MAX_RECORDS = 1_000_000
"""The most records that a search reads by default."""
MAX_BATCHES = 10_000
"""The most batch times that a search reads by default, including those without records."""

_BATCHES_AT_ONCE = 100
PROGRESS_RECORDS = 200_000
"""A search reports its progress after so many records."""
_STALL_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class _Part:
    """Records of one batch time that are read together. ``ranges`` say which incarnation a partition's records are
    of."""

    batch_time_ms: int
    input_id: str
    ranges: tuple[OffsetRange, ...]
    read: Callable[[], Iterable[pa.RecordBatch]]


def search_key(
    context: StreamContext,
    key: bytes,
    *,
    limit: int = 10,
    max_records: int = MAX_RECORDS,
    max_batches: int = MAX_BATCHES,
    max_seconds: float | None = None,
    from_kafka: bool = False,
    progress: Callable[[str], None] | None = None,
) -> KeySearch:
    """Search for records whose key has exactly these bytes.

    The search ends after ``limit`` matches, ``max_records`` records, ``max_batches`` batch times or ``max_seconds``
    (None: no limit), whichever comes first, at the end of a block.

    Args:
        from_kafka: also read the batches that the log no longer has from Kafka.
        progress: receives a line of text after each 200,000 records.
    """
    search = _Search(
        context,
        key,
        limit=limit,
        max_records=max_records,
        max_batches=max_batches,
        max_seconds=max_seconds,
        from_kafka=from_kafka,
        progress=progress or (lambda _: None),
    )
    search.run()
    return search.result()


class _Search:
    def __init__(
        self,
        context: StreamContext,
        key: bytes,
        *,
        limit: int,
        max_records: int,
        max_batches: int,
        max_seconds: float | None,
        from_kafka: bool,
        progress: Callable[[str], None],
    ) -> None:
        self._context = context
        self._key = key
        self._limit = limit
        self._max_records = max_records
        self._max_batches = max_batches
        self._max_seconds = max_seconds
        self._deadline = None if max_seconds is None else context.clock.monotonic() + max_seconds
        self._from_kafka = from_kafka
        self._progress = progress
        self._matches: list[KeyMatch] = []
        self._times: set[int] = set()
        self._batches = 0
        # Segment and offset: a block that waits may be in a batch when the search comes to the batches.
        self._blocks: set[tuple[str, int]] = set()
        self._records = 0
        self._reported = 0
        self._not_in_log: list[int] = []
        self._unreadable: list[str] = []
        self._stopped: str | None = None

    def run(self) -> None:
        for part in self._parts():
            self._times.add(part.batch_time_ms)
            matches: list[KeyMatch] = []
            try:
                for records in part.read():
                    matches += self._matching(part, records)
                    self._records += records.num_rows
            except HeadraceError as error:
                self._unreadable.append(str(error))
            self._matches += sorted(matches, key=lambda match: match.position.offset, reverse=True)
            self._report(part.batch_time_ms)
            if len(self._matches) >= self._limit:
                self._stopped = f"It ended at {self._limit} record(s): --limit finds more."
            elif self._records >= self._max_records:
                self._stopped = f"It ended after {self._max_records:,} records: --max-records searches more."
            if self._stopped is not None or self._is_out_of_time():
                return

    def result(self) -> KeySearch:
        notes = [self._stopped or "It ended at the oldest batch."]
        if self._not_in_log:
            newest, oldest = time_text(self._not_in_log[0]), time_text(self._not_in_log[-1])
            notes.append(
                f"The log no longer has {len(self._not_in_log):,} batch(es) from {oldest} to {newest}, which were not "
                "searched: --kafka also reads them from Kafka."
            )
        if self._unreadable:
            notes.append(f"{len(self._unreadable):,} part(s) could not be read, the first: {self._unreadable[0]}")
        return KeySearch(
            stream=self._context.name,
            key=self._key,
            matches=tuple(self._matches[: self._limit]),
            searched_records=self._records,
            searched_batches=len(self._times),
            from_ms=min(self._times, default=None),
            until_ms=max(self._times, default=None),
            complete=len(notes) == 1 and self._stopped is None,
            ended=" ".join(notes),
        )

    def _matching(self, part: _Part, records: pa.RecordBatch) -> Iterator[KeyMatch]:
        rows = pc.indices_nonzero(pc.equal(records.column("key"), pa.scalar(self._key, pa.binary())))
        if not len(rows):
            return
        places = records.select(["topic", "partition", "offset", "incarnation"]).take(rows).to_pylist()
        timestamps = pc.cast(records.column("timestamp").take(rows), pa.int64()).to_pylist()
        sizes = pc.binary_length(records.column("value").take(rows)).to_pylist()
        known = {(r.partition.topic, r.partition.partition, r.partition.incarnation): r.partition for r in part.ranges}
        for row, timestamp, size in zip(places, timestamps, sizes, strict=True):
            named = (row["topic"], row["partition"], row["incarnation"])
            partition = known.get(named) or TopicPartition(named[0], "", named[1], named[2])
            position = RecordPosition(part.input_id, partition, row["offset"])
            yield KeyMatch(
                position=position, timestamp_ms=timestamp, value_bytes=size, batch_time_ms=part.batch_time_ms
            )

    def _report(self, batch_time_ms: int) -> None:
        if self._records - self._reported >= PROGRESS_RECORDS:
            self._reported = self._records
            self._progress(
                f"{self._records:,} records searched, back to batch {time_text(batch_time_ms)}: "
                f"{len(self._matches)} found"
            )

    def _parts(self) -> Iterator[_Part]:
        """The parts of all batch times, newest first: those that wait for a batch, then the batches."""
        yield from self._waiting_parts()
        if self._stopped is not None:
            return
        before_ms: int | None = None
        states = [state for state in BatchState if state is not BatchState.ABSORBED]
        ledger, name = self._context.ledger, self._context.name
        while page := ledger.batches.page(name, _BATCHES_AT_ONCE, states, before_ms=before_ms):
            before_ms = page[-1].batch_time_ms
            times = [batch.batch_time_ms for batch in page if batch.records]
            origins = ledger.batches.origins(name, times, abandoned=True)
            for batch in page:
                if self._is_at_last_batch():
                    return
                if batch.batch_time_ms in origins:
                    yield from self._batch_parts(origins[batch.batch_time_ms])

    def _waiting_parts(self) -> Iterator[_Part]:
        ledger, name = self._context.ledger, self._context.name
        times = [time_ms for page in pages_of_waiting_times(self._context) for time_ms in page]
        for time_ms in reversed(times):
            if self._is_at_last_batch():
                return
            for block in reversed(ledger.blocks.of_times(name, [time_ms])):
                info = block.info
                yield from self._block_parts(time_ms, info.receiver.input_id, info.handle, info.ranges)

    def _is_at_last_batch(self) -> bool:
        """Count a batch time; true if it is one too many, or the time is up."""
        if self._batches >= self._max_batches:
            self._stopped = f"It ended after {self._max_batches:,} batch times: --max-batches searches more."
            return True
        if self._is_out_of_time():
            return True
        self._batches += 1
        return False

    def _is_out_of_time(self) -> bool:
        if self._deadline is None or self._context.clock.monotonic() < self._deadline:
            return False
        self._stopped = (
            f"It ended after {self._max_seconds:g} s: the command `headrace trace NAME --key KEY` searches longer."
        )
        return True

    def _batch_parts(self, origin: BatchOrigin) -> Iterator[_Part]:
        if origin.source == "kafka" and not self._from_kafka:
            self._not_in_log.append(origin.batch_time_ms)
            return
        try:
            manifest = Manifest.load(origin.manifest_uri, sha256=origin.manifest_sha256)
        except ManifestError as error:
            self._unreadable.append(str(error))
            return
        for input_id in dict.fromkeys([*manifest.inputs, *manifest.built]):
            if origin.source == "kafka":
                yield self._kafka_part(manifest, input_id)
                continue
            for block in reversed(manifest.inputs[input_id]):
                yield from self._block_parts(origin.batch_time_ms, input_id, block.handle, block.ranges)

    def _block_parts(
        self, batch_time_ms: int, input_id: str, handle: BlockHandle, ranges: tuple[OffsetRange, ...]
    ) -> Iterator[_Part]:
        """The block, unless it was searched already."""
        if (handle.segment, handle.offset) in self._blocks:
            return
        self._blocks.add((handle.segment, handle.offset))
        log = self._context.storage.below(LOG_FOLDER)
        yield _Part(batch_time_ms, input_id, ranges, lambda: [read_block(log, handle)[1]])

    def _kafka_part(self, manifest: Manifest, input_id: str) -> _Part:
        recorded = manifest.ranges(input_id)
        ranges = tuple(OffsetRange(r.partition, r.from_offset, r.until_offset, 0) for r in recorded)

        def read() -> Iterator[pa.RecordBatch]:
            source = {source.id: source for source in self._context.stream.inputs}.get(input_id)
            if not recorded:
                return
            if source is None:
                raise NotInKafkaError(
                    f"Batch {time_text(manifest.batch_time_ms)} has records of input {input_id!r}, which the stream's "
                    "definition does not have any more."
                )
            kafka = source.in_kafka
            if kafka is None:
                raise NotInKafkaError(f"Input {input_id!r} is no Kafka input: only the log had its records.")
            left = max(1, self._max_records - self._records)
            with KafkaRangeReader(RangeClients.of(kafka).quiet(), stall_seconds=_STALL_SECONDS) as reader:
                for records in reader.read(joined(in_order(recorded))):
                    yield records
                    left -= records.num_rows
                    if left <= 0:
                        return

        return _Part(manifest.batch_time_ms, input_id, ranges, read)
