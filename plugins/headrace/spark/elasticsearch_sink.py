"""Writes rows as documents, in the tasks of one Spark job. Repeated writes give no duplicates.

The tasks (`IndexingTask`) index their rows, and return their counts and the digests of their ids. The calling process
checks the index before and after, and what the tasks returned. Records that nothing transforms are read from
the log by the task that indexes them, so that they do not pass through the JVM. A dead letter gets its original record
by the batch's manifest, from the log or from Kafka. It works in classic sessions and over Spark Connect.

Rows that delete documents are held back until all tasks have ended (`HeldDeletions`). The tasks
return them, and the calling process sends them. If they are too many for that, a second job reads the rows again.

A data source's writer would do the same with ``mapInArrow``, but Spark starts a new Python process for each of its
three steps (create the source, make the writer, commit). In a small batch these were most of the write's time.

The calling process and each task's worker look the connection up in their own environments. So its secrets are in no
option, no plan and no task.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from headrace.batch.manifest import Manifest
from headrace.blocks import BlockHandle
from headrace.clock import SystemClock
from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import document_column
from headrace.elasticsearch.columns import check_columns
from headrace.elasticsearch.concrete_index import ConcreteIndex, TargetIndex, check_known
from headrace.elasticsearch.counts import IndexingCounts, IndexingReport, warnings_beside
from headrace.elasticsearch.dead_letters import OriginalRecord, OriginalRecords
from headrace.elasticsearch.errors import DocumentsUnaccountedError, UnsuitableTargetError
from headrace.elasticsearch.indexer import Indexer, repeated_digests
from headrace.elasticsearch.options import KAFKA, IndexingOptions
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport
from headrace.errors import HeadraceError
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.processes import freeze_imports
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
    from headrace.spark.outputs.writer import RunBlocks
    from headrace.spark.shared_jobs import BatchBlocks
    from headrace.stream import ElasticsearchOutput
    from headrace.stream.inputs import KafkaInput


logger = logging.getLogger(__name__)

_RESULT = "counts STRING, digests BINARY, held BIGINT, deletions BINARY"
_RESULT_SCHEMA = pa.schema(
    [("counts", pa.string()), ("digests", pa.binary()), ("held", pa.int64()), ("deletions", pa.binary())]
)
# Each row of a result is at most about 3 MiB, with deletions: Spark Connect sends it in one message.
_DIGESTS_IN_A_ROW = 256 * 1024


def index_rows(rows: DataFrame, options: IndexingOptions) -> IndexingReport:
    """Index the rows, with the columns of ``headrace.elasticsearch.columns``. Returns when every row has its outcome.

    The caller must check the report for duplicate ids and foreign documents.

    Raises:
        UnsuitableRowsError: the ids need a column that the rows do not have. Nothing was written.
        UnsuitableTargetError: the index cannot be written to, or it was replaced during the write.
        IndexingError: within Spark, some row cannot get an outcome. Others may be indexed; write them all again.
    """
    check_columns(rows.columns, options)
    return _index(lambda task: rows.mapInArrow(task.run, _RESULT).toArrow(), options)


def index_blocks(run: RunBlocks, options: IndexingOptions, blocks: BatchBlocks) -> IndexingReport:
    """Index the records of the blocks as they are, by tasks that ``run`` runs. Otherwise as `index_rows`.

    Raises DocumentsUnaccountedError, if the tasks read other records than those of the blocks.
    """
    report = _index(lambda task: run(task, blocks, _RESULT), options, blocks)
    if blocks.records not in (None, report.counts.rows):
        raise DocumentsUnaccountedError(
            f"The tasks of the write read {report.counts.rows} records, the blocks of the batch have {blocks.records}.",
            remedy="Run the batch again.",
        )
    return report


def _index(
    run: Callable[[IndexingTask], pa.Table], options: IndexingOptions, blocks: BatchBlocks | None = None
) -> IndexingReport:
    target = TargetWatch(options)
    with warnings_beside(options.report):
        target.check_before()
    options = target.options()
    task = IndexingTask(options, secrets.randbits(64), blocks, Part.REST if options.deletes else Part.ALL)
    written = _Written.of(run(task))
    if written.held:
        written.add(_delete(run, task, written))
    counts = written.counts
    counts.check()
    concrete = target.check_after()
    duplicates = repeated_digests(written.digests)
    if options.refresh:
        target.refresh()
    logger.info("Indexed into %s: %s", options.index, counts.to_dict())
    return IndexingReport(options.index, concrete, counts, duplicates, target.uuid)


def _delete(run: Callable[[IndexingTask], pa.Table], task: IndexingTask, written: _Written) -> _Written:
    """Send the deletions that the tasks have held back."""
    if sum(part.num_rows for part in written.deletions) == written.held:
        sending = replace(task, part=Part.DELETIONS, blocks=None)
        deleted = _Written.of(pa.Table.from_batches(sending.run(iter(written.deletions)), _RESULT_SCHEMA))
    else:
        deleted = _Written.of(run(replace(task, part=Part.DELETIONS)))
    if deleted.counts.rows != written.held:
        raise DocumentsUnaccountedError(
            f"The tasks of the write found {written.held} rows without a document, which delete their key's document, "
            f"and {deleted.counts.rows} when they read the rows again to send them.",
            remedy="Let the transform give the same rows each time, and run the batch again.",
        )
    return deleted


class Part(Enum):
    """Which of its rows a task indexes."""

    ALL = auto()
    REST = auto()
    """Those that do not delete. The task returns the others, or their number if they are too many."""
    DELETIONS = auto()


@dataclass(frozen=True, slots=True)
class IndexingTask:
    """What a task does with its rows. ``seed`` is equal for all tasks (see ``DuplicateIdCheck``)."""

    options: IndexingOptions
    seed: int
    blocks: BatchBlocks | None = None
    part: Part = Part.ALL

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Index the task's rows. Yields its counts and digests when every dead letter is written."""
        freeze_imports()
        if self.blocks is None:
            yield from self._index(batches)
            return
        # If indexing fails, the error keeps the read, and so what it uses of the task's, until garbage is collected.
        with closing(self.blocks.read(batches)) as records:
            yield from self._index(records)

    def _index(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = HeldDeletions()
        if self.part is Part.REST:
            rows = held.rest_of(rows)
        elif self.part is Part.DELETIONS:
            rows = only_deletions(rows)
        options = self._options()
        originals = _originals(options)
        try:
            with closing(_transport(options, options.requests_in_flight)) as transport, warnings_beside(options.report):
                indexer = Indexer(transport, options, originals=originals, seed=self.seed)
                counts = indexer.index(rows)
        finally:
            if originals is not None:
                originals.close()
        yield from _result(counts, indexer.digests(), held)

    def _options(self) -> IndexingOptions:
        context = TaskContext.get()
        number, earlier_tries = (0, 0) if context is None else (context.partitionId(), context.attemptNumber())
        # Dead letters of the deletions are others than those of the same task's other rows.
        return self.options.for_task(-1 - number if self.part is Part.DELETIONS else number, earlier_tries)


def _result(counts: IndexingCounts, digests: np.ndarray[Any, Any], held: HeldDeletions) -> Iterator[pa.RecordBatch]:
    first: list[Any] = [json.dumps(counts.to_dict()), held.rows, held.to_bytes()]
    for start in range(0, max(1, len(digests)), _DIGESTS_IN_A_ROW):
        part = digests[start : start + _DIGESTS_IN_A_ROW].tobytes()
        text, rows, deletions = first
        values = ([text], [part], [rows], [deletions])
        yield pa.record_batch(
            [pa.array(*column) for column in zip(values, _RESULT_SCHEMA.types, strict=True)], schema=_RESULT_SCHEMA
        )
        first = [None, 0, None]


@dataclass(slots=True)
class _Written:
    """What the tasks of a job returned. ``held``: the number of deletions that they held back; ``deletions`` are these
    rows, or some of them."""

    counts: IndexingCounts = field(default_factory=IndexingCounts)
    digests: list[np.ndarray[Any, Any]] = field(default_factory=list)
    held: int = 0
    deletions: list[pa.RecordBatch] = field(default_factory=list)

    @classmethod
    def of(cls, results: pa.Table) -> _Written:
        """Raises DocumentsUnaccountedError if there are more digests than rows."""
        written = cls()
        for row in results.to_pylist():
            if row["counts"] is not None:
                written.counts.add(IndexingCounts.from_dict(json.loads(row["counts"])))
            written.digests.append(np.frombuffer(row["digests"], np.uint64))
            written.held += row["held"]
            written.deletions += held_rows(row["deletions"]) if row["deletions"] else []
        indexed = sum(len(part) for part in written.digests)
        if indexed > written.counts.rows:
            raise DocumentsUnaccountedError(
                f"The tasks of the write returned the digests of {indexed} rows, and counts of {written.counts.rows}.",
                remedy="Run the batch again.",
            )
        return written

    def add(self, other: _Written) -> None:
        self.counts.add(other.counts)
        self.digests += other.digests


def withdraw_letters(options: IndexingOptions) -> int:
    """Delete the dead letters of earlier attempts that this one did not write again. Returns their number."""
    if not options.withdraw_letters or options.batch_time_ms is None or options.attempt is None:
        return 0
    # Only a batch that was tried before has such letters, so other batches do not import this.
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex

    with Administration.of(
        Cluster.of(options),
        timeout_seconds=options.request_timeout_seconds,
        max_retry_seconds=options.max_retry_seconds,
    ) as administration:
        return DeadLetterIndex(administration, options).withdraw(options.batch_time_ms, options.attempt)


def check_unshared(options: IndexingOptions, others: Iterable[ElasticsearchOutput]) -> None:
    """Raise UnsuitableTargetError if one of the stream's other outputs writes into this index, by whatever name.

    ``others`` are those whose documents may have the same ids.
    """
    own: ConcreteIndex | None = None
    for other in others:
        own = own or TargetWatch(options).now()
        if own is None:
            return
        theirs = None
        # What is wrong with another output's index is its own error.
        with contextlib.suppress(HeadraceError):
            asking = IndexingOptions.of(other, stream_name=options.stream_name, batch_time_ms=None)
            theirs = TargetWatch(replace(asking, max_retry_seconds=0, request_timeout_seconds=5)).now()
        if theirs is not None and own.uuid is not None and own.uuid == theirs.uuid:
            raise UnsuitableTargetError(
                f"Output {other.id} writes into the same index, {own.name!r}, as {other.index!r}. Their documents have "
                "the same ids, so that those of one output are lost.",
                remedy="Give each output an index of its own.",
            )


class TargetWatch:
    """The index as it is before and after the tasks, for the calling process."""

    def __init__(self, options: IndexingOptions) -> None:
        self._options = options
        self._cluster = Cluster.of(options)
        self._before: ConcreteIndex | None = None
        self.uuid: str | None = None
        """The UUID of the index that `check_after` found."""

    def check_before(self) -> None:
        """Refuse a server that is not supported, an index in which ids are not unique, and one that is not the index of
        the output's earlier batches (`check_known`)."""
        with closing(_transport(self._options, 1, self._cluster)) as transport:
            target = TargetIndex(transport, self._options, clock=SystemClock())
            target.check_server(", ".join(map(str, self._cluster.nodes)))
            self._before = target.concrete()
        check_known(self._options, self._before)
        letters = self._options.dead_letter_index
        if self._before is not None and self._before.name == letters:
            raise UnsuitableTargetError(
                f"{self._options.index!r} is an alias of {letters!r}, the index of its own dead letters.",
                remedy="Name another dead_letter_index.",
            )

    def options(self) -> IndexingOptions:
        """The options for the tasks, by what `check_before` has found."""
        through_alias = self._before is not None and self._before.name != self._options.index
        return replace(
            self._options,
            through_alias=through_alias,
            first_alone=self._before is None or not self._options.known_indices,
        )

    def check_after(self) -> str | None:
        """The concrete index. Raises UnsuitableTargetError if it is not the one from before."""
        before, now = self._before, self.now()
        self.uuid = None if now is None else now.uuid
        if before is not None and now != before:
            if now is not None and now.name == before.name:
                what = f"{before.name!r} was deleted and created again; its earlier documents are gone"
            else:
                after = None if now is None else now.name
                what = (
                    f"{self._options.index!r} was moved from {before.name!r} to {after!r}; some of its documents "
                    "may be in both"
                )
            raise UnsuitableTargetError(
                f"While the batch was written {what}.",
                remedy="Write to one concrete index, and run the batch again.",
            )
        return None if now is None else now.name

    def refresh(self) -> None:
        """Make the documents visible to searches."""
        with closing(_transport(self._options, 1, self._cluster)) as transport:
            TargetIndex(transport, self._options, clock=SystemClock()).refresh()

    def now(self) -> ConcreteIndex | None:
        """The concrete index behind the name at present; None if there is none."""
        with closing(_transport(self._options, 1, self._cluster)) as transport:
            return TargetIndex(transport, self._options, clock=SystemClock()).concrete()


def _transport(options: IndexingOptions, connections: int, cluster: Cluster | None = None) -> ElasticsearchTransport:
    return ElasticsearchTransport(
        cluster or Cluster.of(options), connections=connections, timeout_seconds=options.request_timeout_seconds
    )


def _originals(options: IndexingOptions) -> BatchOriginalRecords | None:
    """Where the task finds the records of dead letters, if the options name manifests."""
    if not options.manifests:
        return None
    clients = {}
    if options.inputs:
        from headrace.stream.inputs import KafkaInput

        clients = KafkaOriginalRecords.clients_of([KafkaInput.model_validate(fields) for fields in options.inputs])
    return WindowOriginalRecords(
        [
            KafkaOriginalRecords(uri, clients) if place == KAFKA else ManifestOriginalRecords(uri)
            for place, uri in options.manifests
        ]
    )


BLOCKS_KEPT = 4
"""Dead letters come in the order of their records, so the next record is probably in the block of the last one."""
OFFSETS_AT_ONCE = 500
"""The number of offsets read from Kafka for one record: the neighbours of a rejected record are often rejected too."""


class BatchOriginalRecords(OriginalRecords, Protocol):
    """The records of one batch, for one task. Must be closed."""

    def close(self) -> None:
        """Close what was opened."""
        ...


class ManifestOriginalRecords:
    """Reads records from the log. The manifest is read at the first call, because most tasks have no dead letters."""

    def __init__(self, manifest_uri: str) -> None:
        self._manifest_uri = manifest_uri
        self._manifest: Manifest | None = None
        self._read = lru_cache(maxsize=BLOCKS_KEPT)(self._read_block)

    def close(self) -> None:
        """Do nothing: nothing is kept open."""

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record as Kafka gave it; None if the batch has no such record.

        Raises the log's errors if the block cannot be read: a dead letter must not be written without its record.
        """
        handle = self._find(topic, partition, offset, incarnation)
        if handle is None:
            return None
        records = self._read(handle)
        here = pc.and_(
            pc.equal(records.column("partition"), partition),
            pc.and_(
                pc.equal(records.column("incarnation"), incarnation),
                pc.equal(pc.cast(records.column("topic"), "string"), topic),
            ),
        )
        return _record_at(records, pc.and_(pc.equal(records.column("offset"), offset), here))

    def _find(self, topic: str, partition: int, offset: int, incarnation: int) -> BlockHandle | None:
        if self._manifest is None:
            self._manifest = Manifest.load(self._manifest_uri)
        for blocks in self._manifest.inputs.values():
            for block in blocks:
                for taken in block.ranges:
                    where = taken.partition
                    if (where.topic, where.partition, where.incarnation) == (topic, partition, incarnation) and (
                        taken.from_offset <= offset < taken.until_offset
                    ):
                        return block.handle
        return None

    def _read_block(self, handle: BlockHandle) -> Any:
        manifest = self._manifest or Manifest.load(self._manifest_uri)
        _, records = read_block(open_storage(manifest.log_root), handle)
        return records


class WindowOriginalRecords:
    """Searches several batches in the given order."""

    def __init__(self, batches: Sequence[BatchOriginalRecords]) -> None:
        self._batches = batches

    def close(self) -> None:
        """Close all of them."""
        for batch in self._batches:
            batch.close()

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record from the first batch that has it; None if no batch has it. Raises the errors of the batches."""
        for batch in self._batches:
            record = batch.fetch(topic, partition, offset, incarnation)
            if record is not None:
                return record
        return None


class KafkaOriginalRecords:
    """Reads records from Kafka by the manifest's ranges, if the log no longer has the batch or never had it.

    ``clients`` has the settings of the stream's inputs by their ids. Nothing is opened before the first call.
    """

    def __init__(self, manifest_uri: str, clients: Mapping[str, RangeClients]) -> None:
        self._manifest_uri = manifest_uri
        self._clients = clients
        self._ranges: list[tuple[str, RecordedRange]] | None = None
        self._readers: dict[str, KafkaRangeReader] = {}
        self._held: tuple[RecordedRange, pa.RecordBatch | None] | None = None

    @classmethod
    def clients_of(cls, inputs: list[KafkaInput]) -> dict[str, RangeClients]:
        """The inputs' settings, with connections resolved in this process's environment.

        Raises ClientSettingError, ConnectionNotFoundError or ConnectionFormatError.
        """
        from headrace.kafka.range_reader import RangeClients

        return {source.id: RangeClients.of(source).for_offsets(OFFSETS_AT_ONCE) for source in inputs}

    def close(self) -> None:
        """Close the readers."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record as Kafka gives it; None if the batch has no such offset.

        Raises RangesUnreadableError and RangesGoneError, also if compaction has removed the record since the batch read
        it: a dead letter must not be written without its record.
        """
        location = self._find(topic, partition, offset, incarnation)
        if location is None:
            return None
        input_id, taken = location
        if self._held is None or not _holds(self._held[0], taken, offset):
            self._held = self._read(input_id, taken, offset)
        records = self._held[1]
        record = None if records is None else _record_at(records, pc.equal(records.column("offset"), offset))
        if record is None:
            raise RangesGoneError(
                f"Kafka no longer has the record at offset {offset} of {topic}-{partition}, which the batch read: "
                "compaction removed it.",
                remedy="Its dead letter cannot be written. Correct the transform or the output, so that the record is "
                "accepted, and run the batch again; it reads what Kafka has.",
            )
        return record

    def _find(self, topic: str, partition: int, offset: int, incarnation: int) -> tuple[str, RecordedRange] | None:
        if self._ranges is None:
            manifest = Manifest.load(self._manifest_uri)
            ids = sorted({*manifest.inputs, *manifest.built})
            self._ranges = [(input_id, recorded) for input_id in ids for recorded in manifest.ranges(input_id)]
        for input_id, recorded in self._ranges:
            where = recorded.partition
            if (where.topic, where.partition, where.incarnation) == (topic, partition, incarnation) and (
                recorded.from_offset <= offset < recorded.until_offset
            ):
                return input_id, recorded
        return None

    def _read(self, input_id: str, taken: RecordedRange, offset: int) -> tuple[RecordedRange, pa.RecordBatch | None]:
        """Read the first records from ``offset`` on. Returns them with the offset range that they cover."""
        from headrace.kafka.range_reader import KafkaRangeReader

        until = min(taken.until_offset, offset + OFFSETS_AT_ONCE)
        run = RangeRun.of([RecordedRange(taken.partition, offset, until, None, taken.leader_epoch)])
        reader = self._readers.get(input_id)
        if reader is None:
            reader = self._readers[input_id] = KafkaRangeReader(self._clients[input_id])
        reading = reader.read([run])
        # Only the first batch, which is bounded in bytes; the rest of the run is not read.
        records = next(reading, None)
        reading.close()
        if records is not None:
            until = records.column("offset")[-1].as_py() + 1
        return RecordedRange(taken.partition, offset, until, None), records


def _holds(held: RecordedRange, taken: RecordedRange, offset: int) -> bool:
    return held.partition == taken.partition and held.from_offset <= offset < held.until_offset


def _record_at(records: pa.RecordBatch, here: Any) -> OriginalRecord | None:
    rows = pc.indices_nonzero(here).to_pylist()
    if not rows:
        return None
    row = records.slice(rows[0], 1)
    (record,) = row.select(["key", "value", "headers"]).to_pylist()
    headers = tuple((header["key"], header["value"]) for header in record["headers"] or ())
    timestamp_ms = pc.cast(row.column("timestamp"), "int64")[0].as_py()
    return OriginalRecord(record["key"], record["value"], headers, timestamp_ms)


MAX_KEPT_BYTES = 1024 * 1024
"""The most bytes of rows (about 10,000 records) that a task keeps for the process that sends them."""


class HeldDeletions:
    """The rows of one task that delete documents, held back so that they are sent after all tasks have ended.

    A batch's tasks run at the same time, and Elasticsearch forgets a deleted document's version after
    ``index.gc_deletes`` (a minute by default). An older value of the key, sent after that by a slower or a repeated
    task, would bring the document back. When deletions are sent last, no older value of the batch follows them. A newer
    value of the key is in the index by then, and its version refuses the deletion.

    If the rows are too many, they are only counted, and must be read again.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._kept: list[pa.RecordBatch] | None = []
        self._bytes = 0

    def rest_of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that do not delete, and hold back the others."""
        for batch in batches:
            mask = _deleting(batch)
            if mask is None:
                yield batch
                continue
            self._hold(batch.filter(mask))
            yield batch.filter(pc.invert(mask))

    def to_bytes(self) -> bytes | None:
        """The rows as an Arrow stream; None if there are none, or too many."""
        if not self._kept:
            return None
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, self._kept[0].schema) as writer:
            for batch in self._kept:
                writer.write_batch(batch)
        data: bytes = stream.getvalue().to_pybytes()
        return data

    def _hold(self, rows: pa.RecordBatch) -> None:
        self.rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._bytes > MAX_KEPT_BYTES:
            self._kept = None
        if self._kept is not None:
            self._kept.append(rows)


def held_rows(stream: bytes) -> list[pa.RecordBatch]:
    """The rows of ``HeldDeletions.to_bytes``."""
    with pa.ipc.open_stream(stream) as reader:
        return list(reader)


def only_deletions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows that delete."""
    for batch in batches:
        mask = _deleting(batch)
        if mask is not None:
            yield batch.filter(mask)


def _deleting(batch: pa.RecordBatch) -> Any | None:
    """The mask of the rows without a document that are not dead letters already; None if there are none."""
    documents = batch.column(document_column(batch))
    if not documents.null_count:
        return None
    mask = pc.is_null(documents)
    if columns.REJECTED_BECAUSE in batch.schema.names:
        mask = pc.and_(mask, pc.is_null(batch.column(columns.REJECTED_BECAUSE)))
    return mask if pc.any(mask).as_py() else None
