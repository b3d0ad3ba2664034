"""The log as DataFrames: its blocks as rows that Spark can distribute.

    blocks = LogBlocks.of([Manifest.load(uri)], "clicks")
    records = blocks.frame(spark, tasks=8)

A row is the number of a record. A task gets some of the numbers, and reads the blocks whose first record is among them.
So each block is read once however Spark cuts the rows into tasks and batches.

The columns are named as in Spark's Kafka source. It works in classic sessions and over Spark Connect. A Python data
source would do the same, but Spark starts a new Python process for each step of its planning. In a small batch these
were most of the time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.blocks import BlockHandle
from headrace.errors import Failure, HeadraceError
from headrace.processes import freeze_imports
from headrace.spark.records.arrow_types import arrow_schema
from headrace.spark.records.record_columns import RECORD_SCHEMA
from headrace.wal.errors import DamagedFrameError, FrameTooLongError, LogVersionError, PayloadError, WalError
from headrace.wal.local_copies import BlockCopies, CopyCounts, CopySettings
from headrace.wal.reader import read_blocks
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.batch.manifest import Manifest
    from headrace.spark.attempts.shared_jobs import BlockTask
    from headrace.spark.records.decoding import RecordDecoding

# Blocks of 200 ms are often small. Combined into batches of this many records, Spark's cost per Arrow batch is small.
_ROWS_PER_BATCH = 16_384
_BYTES_PER_BATCH = 16 * 1024 * 1024
# For fewer bytes a second task costs more than it saves: starting a task takes about 10 ms, and half a megabyte of
# compressed records takes Elasticsearch about 0.1 s.
_MIN_TASK_BYTES = 512 * 1024
# A larger batch is worth more tasks than one.
_MAX_SMALL_BYTES = 8 * 1024 * 1024
# Spark estimates the size of a frame by its rows and the types of what it is made of: about 200 bytes for each number
# with this column, which is null. Without it a million records would look like 8 MB, and be sent whole to every task of
# a join. A struct, since a null map or array costs 5 microseconds a row on the way to Python, and a null struct 0.1.
_SIZED_AS_A_RECORD = "STRUCT<a: BINARY, b: BINARY, c: BINARY, d: BINARY>"
# Larger values in milliseconds do not fit Spark's int64 microseconds. Kafka's producers may set any number.
_MAX_TIMESTAMP_MS = (2**63 - 1) // 1000


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A block in a manifest. ``records`` is their number, ``payload_bytes`` the size as stored."""

    handle: BlockHandle
    records: int
    payload_bytes: int


class UnreadableBlockError(HeadraceError):
    """A block that the batch was allocated cannot be read from the log."""


class DamagedBlockError(UnreadableBlockError):
    """The log has other bytes at the block's position, or the block is damaged."""

    failure = Failure.FINAL


class UnknownVersionError(UnreadableBlockError):
    """The log was written by a newer version of headrace than the executor's; upgrade the executor."""


@dataclass(frozen=True, slots=True)
class LogBlocks:
    """The blocks of one input in one or more batches, each with the URL of its log's root, in the order of the log.

    ``copies``: the settings of the blocks' local copies, which tasks read if they are on their host; None: only the log
    is read.
    """

    blocks: tuple[tuple[str, ListedBlock], ...]
    copies: CopySettings | None = None

    @classmethod
    def of(cls, manifests: Iterable[Manifest], input_id: str, copies: CopySettings | None = None) -> LogBlocks:
        """The blocks of an input that these manifests list."""
        listed = [
            (manifest.log_root, ListedBlock(*block)) for manifest in manifests for block in manifest.blocks(input_id)
        ]
        return cls(tuple(sorted(listed, key=lambda located: (located[0], located[1].handle))), copies)

    @property
    def records(self) -> int:
        """The number of records in all blocks."""
        return sum(block.records for _, block in self.blocks)

    @property
    def weight(self) -> int:
        """The number of records."""
        return self.records

    @property
    def numbers(self) -> int:
        """A number is a record."""
        return self.records

    @property
    def is_small(self) -> bool:
        """Whether one task is enough to read them."""
        return self.payload_bytes <= _MAX_SMALL_BYTES

    @property
    def payload_bytes(self) -> int:
        """The size of all blocks as stored."""
        return sum(block.payload_bytes for _, block in self.blocks)

    def number_of_tasks(self, tasks: int) -> int:
        """How many tasks read the records, of at most this many."""
        return max(1, min(tasks, len(self.blocks), self.payload_bytes // _MIN_TASK_BYTES))

    def numbered(self, spark: SparkSession, tasks: int) -> DataFrame:
        """The numbers of the records, for at most this many tasks."""
        return spark.range(0, self.records, 1, self.number_of_tasks(tasks))

    def run(self, spark: SparkSession, tasks: int, task: BlockTask, schema: str) -> pa.Table:
        """The results of the task, with this schema (as DDL), for all records."""
        task = task.among(self.number_of_tasks(tasks))
        return self.numbered(spark, tasks).mapInArrow(task.run, schema).toArrow()

    def frame(self, spark: SparkSession, tasks: int, decoding: RecordDecoding | None = None) -> DataFrame:
        """The records (``RECORD_SCHEMA``, or decoded), read by at most this many tasks."""
        numbers = self.numbered(spark, tasks).selectExpr("id", f"CAST(NULL AS {_SIZED_AS_A_RECORD}) AS size")
        if decoding is None:
            return numbers.mapInArrow(self.read, RECORD_SCHEMA)
        return numbers.mapInArrow(lambda batches: decoding.run(self.read(batches)), decoding.schema)

    def read(self, numbers: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records of the blocks whose first record is among these numbers, which ascend without holes.

        Raises UnreadableBlockError.
        """
        freeze_imports()
        starts = np.cumsum([0, *(block.records for _, block in self.blocks)])[:-1]
        copies: dict[str, BlockCopies] = {}
        for batch in numbers:
            if not batch.num_rows:
                continue
            first, last = batch.column(0)[0].as_py(), batch.column(0)[-1].as_py()
            begun = slice(*np.searchsorted(starts, [first, last + 1]))
            for log_root, blocks in itertools.groupby(self.blocks[begun], key=lambda located: located[0]):
                if self.copies is not None and log_root not in copies:
                    copies[log_root] = BlockCopies(log_root, self.copies)
                yield from read_partition(log_root, [block for _, block in blocks], copies.get(log_root))
        for log_root, used in copies.items():
            _report(log_root, used.counts)


def _report(log_root: str, counts: CopyCounts) -> None:
    """Write how many blocks the task read from copies. Spark's Python workers have no logging below warnings, and what
    they write to stderr is in the executor's log."""
    sys.stderr.write(
        f"headrace: {log_root}: {counts.hits} blocks ({counts.bytes_read} bytes) read from local copies; from the log "
        f"{counts.misses} without a copy, {counts.invalid} with an invalid one\n"
    )


def read_partition(
    log_root: str, blocks: Sequence[ListedBlock], copies: BlockCopies | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the blocks' records as Arrow batches of ``RECORD_SCHEMA``; raises UnreadableBlockError with the handle.

    With ``copies``, a block with a valid copy is read from it.
    """
    if not blocks:
        return
    target = arrow_schema(RECORD_SCHEMA)
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for records in _records(log_root, blocks, copies):
        batch = to_spark(records, target)
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _ROWS_PER_BATCH or size >= _BYTES_PER_BATCH:
            yield from _joined(waiting, target)
            waiting, rows, size = [], 0, 0
    yield from _joined(waiting, target)


def to_spark(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Convert a block's records to the exact Arrow types that Spark expects for ``RECORD_SCHEMA``.

    A timestamp that Spark cannot represent (beyond the year 294,000) becomes null.
    """
    columns = []
    for field in target:
        column = batch.column(batch.schema.get_field_index(field.name))
        if field.name == "timestamp":
            milliseconds = column.cast(pa.int64())
            held = pc.and_(
                pc.less_equal(milliseconds, _MAX_TIMESTAMP_MS), pc.greater_equal(milliseconds, -_MAX_TIMESTAMP_MS)
            )
            column = pc.if_else(held, column, pa.scalar(None, column.type))
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _records(log_root: str, blocks: Sequence[ListedBlock], copies: BlockCopies | None) -> Iterator[pa.RecordBatch]:
    # In the order of read_blocks, so that ``place`` is the unreadable block if reading fails.
    ordered = sorted(blocks, key=lambda block: block.handle)
    place = 0
    try:
        for read in read_blocks(open_storage(log_root), [block.handle for block in ordered], copies):
            if read.batch.num_rows != ordered[place].records:
                raise DamagedBlockError(
                    f"{_where(log_root, read.handle)} has {read.batch.num_rows} records, "
                    f"its manifest says {ordered[place].records}."
                )
            yield read.batch
            place += 1
    except (WalError, OSError, pa.ArrowException) as error:
        # A missing file is not damage: it may come back with its file system or from a copy.
        damaged = isinstance(error, DamagedFrameError | FrameTooLongError | PayloadError | pa.ArrowException)
        kind = DamagedBlockError if damaged else UnreadableBlockError
        if isinstance(error, LogVersionError):
            kind = UnknownVersionError
        raise kind(f"{_where(log_root, ordered[place].handle)} cannot be read: {error}") from error


def _where(log_root: str, handle: BlockHandle) -> str:
    return f"The block at {log_root}/{handle.segment}, offset {handle.offset}, length {handle.length}"


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if len(batches) == 1:
        yield from batches
    elif batches:
        yield from pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
