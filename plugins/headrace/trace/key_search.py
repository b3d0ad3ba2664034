"""Searches the stream's records for a key, newest batch first: in the log, and on request in Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headrace.batch.manifest import LOG_FOLDER, Manifest, ManifestError
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import in_order, joined
from headrace.ledger.batch_tables import BatchOrigin
from headrace.ledger.states import BatchState
from headrace.stream import KafkaInput
from headrace.stream_context import StreamContext
from headrace.trace.location import pages_of_waiting_times
from headrace.trace.models import KeyMatch, KeySearch, RecordPosition
from headrace.trace.record_reader import NotInKafkaError
from headrace.wal.reader import read_block

MAX_RECORDS = 1_000_000
"""How many records a search looks at by default."""
MAX_BATCHES = 10_000
"""How many batch times a search looks at by default, those without records included."""

_BATCHES_AT_ONCE = 100
_PROGRESS_RECORDS = 200_000
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
            found: list[KeyMatch] = []
            try:
                for records in part.read():
                    found += self._matching(part, records)
                    self._records += records.num_rows
            except HeadraceError as error:
                self._unreadable.append(str(error))
            self._matches += sorted(found, key=lambda match: match.position.offset, reverse=True)
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
        found = records.select(["topic", "partition", "offset", "incarnation"]).take(rows).to_pylist()
        timestamps = pc.cast(records.column("timestamp").take(rows), pa.int64()).to_pylist()
        sizes = pc.binary_length(records.column("value").take(rows)).to_pylist()
        known = {(r.partition.topic, r.partition.partition, r.partition.incarnation): r.partition for r in part.ranges}
        for row, timestamp, size in zip(found, timestamps, sizes, strict=True):
            named = (row["topic"], row["partition"], row["incarnation"])
            partition = known.get(named) or TopicPartition(named[0], "", named[1], named[2])
            position = RecordPosition(part.input_id, partition, row["offset"])
            yield KeyMatch(position, timestamp, size, part.batch_time_ms)

    def _report(self, batch_time_ms: int) -> None:
        if self._records - self._reported >= _PROGRESS_RECORDS:
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
            source = next((each for each in self._context.stream.inputs if each.id == input_id), None)
            if not recorded:
                return
            if source is None:
                raise NotInKafkaError(
                    f"Batch {time_text(manifest.batch_time_ms)} has records of input {input_id!r}, which the stream's "
                    "definition does not have any more."
                )
            if not isinstance(source, KafkaInput):
                raise NotInKafkaError(f"Input {input_id!r} is no Kafka input: only the log had its records.")
            left = max(1, self._max_records - self._records)
            with KafkaRangeReader(RangeClients.of(source).quiet(), stall_seconds=_STALL_SECONDS) as reader:
                for records in reader.read(joined(in_order(recorded))):
                    yield records
                    left -= records.num_rows
                    if left <= 0:
                        return

        return _Part(manifest.batch_time_ms, input_id, ranges, read)
