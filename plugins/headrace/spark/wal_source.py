"""The "wal" data source: reads the records of batches from the write-ahead log, by the batches' manifests.

    spark.read.format("wal").option("manifests", json.dumps([uri])).option("input", "clicks").load()

Options (their names are case-insensitive): ``manifests``, the URIs of the batches' manifests as a JSON list, so that a
window of any number of batches is one scan (an empty list gives no rows); ``input``, the id of the input to read;
``numPartitions``, the approximate number of partitions (default: this machine's cores).
The columns are named as in Spark's Kafka source. It works in classic sessions and over Spark Connect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headrace.blocks import BlockHandle
from headrace.errors import Failure, HeadraceError
from headrace.spark.source_options import SourceOptions
from headrace.wal.errors import DamagedFrameError, FrameTooLongError, LogVersionError, PayloadError, WalError
from headrace.wal.reader import read_blocks
from headrace.wal.storage import open_storage

RECORD_SCHEMA = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField(
            "headers",
            ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
        ),
        StructField("incarnation", IntegerType()),
    ]
)

# Blocks of 200 ms are often small. Combined into batches of this many records, Spark's cost per Arrow batch is small.
_ROWS_PER_BATCH = 16_384
_BYTES_PER_BATCH = 16 * 1024 * 1024
# For fewer bytes a second task costs more than it saves: starting a task takes about 10 ms, and half a megabyte of
# compressed records takes Elasticsearch about 0.1 s.
MIN_GROUP_BYTES = 512 * 1024
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


@dataclass
class WalPartition(InputPartition):
    """The blocks that one task reads; ``log_root`` is the URL of the log's root."""

    log_root: str
    blocks: tuple[ListedBlock, ...]

    def __init__(self, log_root: str, blocks: tuple[ListedBlock, ...]) -> None:
        super().__init__(None)
        self.log_root = log_root
        self.blocks = blocks


class WalDataSource(DataSource):
    """The data source that Spark registers."""

    @classmethod
    def name(cls) -> str:
        return "wal"

    def schema(self) -> StructType:
        return RECORD_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - the records have one schema
        return WalReader(SourceOptions.of("wal", self.options))


class WalReader(DataSourceReader):
    """Plans the partitions in the planning process, and reads a partition on an executor."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        logs: dict[str, list[ListedBlock]] = {}
        for manifest in self._options.load():
            listed = [ListedBlock(*block) for block in manifest.blocks(self._options.input_id)]
            logs.setdefault(manifest.log_root, []).extend(listed)
        planned = [
            WalPartition(log_root, group)
            for log_root, blocks in logs.items()
            for group in group_blocks(blocks, self._options.partitions)
        ]
        # Spark requires at least one partition.
        return planned or [WalPartition("", ())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, WalPartition):
            raise TypeError(f"the wal source reads its own partitions, not {type(partition).__name__}")
        yield from read_partition(partition.log_root, partition.blocks)


def group_blocks(blocks: Sequence[ListedBlock], groups: int) -> list[tuple[ListedBlock, ...]]:
    """Distribute the blocks over at most ``groups`` groups of about equal bytes.

    Each group has consecutive blocks, so it reads few segments in offset order. Blocks are never split. There are fewer
    groups if they would otherwise be smaller than ``MIN_GROUP_BYTES``.
    """
    if groups < 1:
        raise ValueError(f"blocks need at least one group, got {groups}")
    ordered = sorted(blocks, key=lambda block: block.handle)
    total = sum(block.payload_bytes for block in ordered)
    wanted = max(1, min(groups, len(ordered), total // MIN_GROUP_BYTES or 1))
    result: list[tuple[ListedBlock, ...]] = []
    current: list[ListedBlock] = []
    dealt = 0
    for position, block in enumerate(ordered):
        current.append(block)
        dealt += block.payload_bytes
        remaining = len(ordered) - position - 1
        missing = wanted - len(result) - 1
        # Close the group at its share of the whole, or when just enough blocks remain to fill the other groups.
        if missing and (dealt * wanted >= total * (len(result) + 1) or remaining == missing):
            result.append(tuple(current))
            current = []
    if current:
        result.append(tuple(current))
    return result


def read_partition(log_root: str, blocks: Sequence[ListedBlock]) -> Iterator[pa.RecordBatch]:
    """Yield the blocks' records as Arrow batches of ``RECORD_SCHEMA``; raises UnreadableBlockError with the handle."""
    if not blocks:
        return
    target = to_arrow_schema(RECORD_SCHEMA, timezone="UTC")
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for records in _records(log_root, blocks):
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


def _records(log_root: str, blocks: Sequence[ListedBlock]) -> Iterator[pa.RecordBatch]:
    # In the order of read_blocks, so that ``place`` is the unreadable block if reading fails.
    ordered = sorted(blocks, key=lambda block: block.handle)
    place = 0
    try:
        for read in read_blocks(open_storage(log_root), [block.handle for block in ordered]):
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
