"""The "wal" data source: the records of batches, read from the write-ahead log by the batches' manifests.

    spark.read.format("wal").option("manifests", json.dumps([uri])).option("input", "clicks").load()

Options (their names are case-insensitive): ``manifests``, the URIs of the batches' manifests as a JSON list, so that a
window is one scan however many batches it holds (none give no rows); ``input``, the id of the input whose records are
wanted; ``numPartitions``, about how many partitions to make (default: this machine's cores).
The columns are named as in Spark's Kafka source. It works in classic sessions and over Spark Connect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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

from headrace.batching.manifest import Manifest
from headrace.blocks import BlockHandle
from headrace.errors import HeadraceError
from headrace.spark.block_groups import ListedBlock, group_blocks
from headrace.wal.errors import WalError
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

# Blocks of 200 ms are often small; handed on in runs of about this many records, Spark's cost per Arrow batch vanishes.
_ROWS_PER_BATCH = 16_384
_BYTES_PER_BATCH = 16 * 1024 * 1024
_MANIFEST_READERS = 8
# Beyond these, milliseconds do not fit Spark's int64 microseconds. Kafka's producers may set any number.
_MAX_TIMESTAMP_MS = (2**63 - 1) // 1000


class WalOptionError(HeadraceError):
    """The "wal" data source was not told what to read, or an option has no sense."""


class UnreadableBlockError(HeadraceError):
    """A block that the batch was allocated cannot be read from the log."""


@dataclass
class WalPartition(InputPartition):
    """A run of blocks that one task reads; ``log_root`` is the URL of the log's root."""

    log_root: str
    blocks: tuple[ListedBlock, ...]

    def __init__(self, log_root: str, blocks: tuple[ListedBlock, ...]) -> None:
        super().__init__(None)
        self.log_root = log_root
        self.blocks = blocks


class WalDataSource(DataSource):
    """The data source as Spark knows it."""

    @classmethod
    def name(cls) -> str:
        return "wal"

    def schema(self) -> StructType:
        return RECORD_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - the records have one schema
        options = {key.lower(): value for key, value in self.options.items()}
        missing = [name for name in ("manifests", "input") if not options.get(name)]
        if missing:
            raise WalOptionError(f'The "wal" data source needs the option(s) {", ".join(missing)}.')
        partitions = _number_of_partitions(options.get("numpartitions"))
        return WalReader(_uris(options["manifests"]), options["input"], partitions)


class WalReader(DataSourceReader):
    """Plans the partitions where the plan is made, and reads one on an executor."""

    def __init__(self, manifest_uris: Sequence[str], input_id: str, partitions: int) -> None:
        self._manifest_uris = tuple(manifest_uris)
        self._input_id = input_id
        self._partitions = partitions

    def partitions(self) -> Sequence[InputPartition]:
        logs: dict[str, list[ListedBlock]] = {}
        for manifest in _load(self._manifest_uris):
            listed = [ListedBlock(*block) for block in manifest.blocks(self._input_id)]
            logs.setdefault(manifest.log_root, []).extend(listed)
        planned = [
            WalPartition(log_root, group)
            for log_root, blocks in logs.items()
            for group in group_blocks(blocks, self._partitions)
        ]
        # Spark takes no plan without a partition.
        return planned or [WalPartition("", ())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, WalPartition):
            raise TypeError(f"the wal source reads its own partitions, not {type(partition).__name__}")
        yield from read_partition(partition.log_root, partition.blocks)


def read_partition(log_root: str, blocks: Sequence[ListedBlock]) -> Iterator[pa.RecordBatch]:
    """The blocks' records as Arrow batches of ``RECORD_SCHEMA``; raises UnreadableBlockError naming the handle."""
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
    """A block's records with exactly the Arrow types that Spark expects for ``RECORD_SCHEMA``.

    A timestamp that Spark cannot hold (beyond the year 294,000) becomes null.
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


def _load(uris: Sequence[str]) -> list[Manifest]:
    """The manifests, several at a time: a window has one for each of its batches, and a store far away is slow."""
    if len(uris) < 2:
        return [Manifest.load(uri) for uri in uris]
    with ThreadPoolExecutor(_MANIFEST_READERS) as pool:
        return list(pool.map(Manifest.load, uris))


def _records(log_root: str, blocks: Sequence[ListedBlock]) -> Iterator[pa.RecordBatch]:
    # In the order in which read_blocks gives them, so that the block that cannot be read is the next one.
    ordered = sorted(blocks, key=lambda block: block.handle)
    place = 0
    try:
        for read in read_blocks(open_storage(log_root), [block.handle for block in ordered]):
            if read.batch.num_rows != ordered[place].records:
                raise UnreadableBlockError(
                    f"{_where(log_root, read.handle)} holds {read.batch.num_rows} records, "
                    f"its manifest says {ordered[place].records}."
                )
            yield read.batch
            place += 1
    except (WalError, OSError, pa.ArrowException) as error:
        raise UnreadableBlockError(f"{_where(log_root, ordered[place].handle)} cannot be read: {error}") from error


def _where(log_root: str, handle: BlockHandle) -> str:
    return f"The block at {log_root}/{handle.segment}, offset {handle.offset}, length {handle.length}"


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if len(batches) == 1:
        yield from batches
    elif batches:
        yield from pa.Table.from_batches(batches, schema).combine_chunks().to_batches()


def _uris(text: str) -> list[str]:
    try:
        uris = json.loads(text)
    except ValueError:
        uris = None
    if not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
        raise WalOptionError('The option manifests of the "wal" data source is a JSON list of URIs.')
    return uris


def _number_of_partitions(text: str | None) -> int:
    if text is None:
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise WalOptionError(f'The option numPartitions of the "wal" data source is a number from 1, not {text!r}.')
    return int(text)
