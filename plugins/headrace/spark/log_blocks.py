"""The log's blocks as rows that Spark can distribute: a row is the number of a record.

A task gets some of the numbers, and reads the blocks whose first record is among them. So each block is read once
however Spark cuts the rows into tasks and batches, and Spark estimates a batch's size by its records: a frame of a few
rows would look small enough to be sent whole to every task of a join.

A data source (``wal_source``) would do the same, but Spark starts a new Python process for each step of its planning.
In a small batch these were most of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.spark.wal_source import MIN_GROUP_BYTES, RECORD_SCHEMA, ListedBlock, read_partition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from headrace.batch.manifest import Manifest


@dataclass(frozen=True, slots=True)
class LogBlocks:
    """The blocks of one input in one or more batches, each with the URL of its log's root, in the order of the log."""

    blocks: tuple[tuple[str, ListedBlock], ...]

    @classmethod
    def of(cls, manifests: Iterable[Manifest], input_id: str) -> LogBlocks:
        """The blocks of an input that these manifests list."""
        listed = [
            (manifest.log_root, ListedBlock(*block)) for manifest in manifests for block in manifest.blocks(input_id)
        ]
        return cls(tuple(sorted(listed, key=lambda each: (each[0], each[1].handle))))

    @property
    def records(self) -> int:
        """The number of records in all blocks."""
        return sum(block.records for _, block in self.blocks)

    def numbers(self, spark: SparkSession, tasks: int) -> DataFrame:
        """The numbers of the records, for at most this many tasks."""
        size = sum(block.payload_bytes for _, block in self.blocks)
        return spark.range(0, self.records, 1, max(1, min(tasks, len(self.blocks), size // MIN_GROUP_BYTES)))

    def frame(self, spark: SparkSession, tasks: int) -> DataFrame:
        """The records (``wal_source.RECORD_SCHEMA``), read by at most this many tasks."""
        return self.numbers(spark, tasks).mapInArrow(self.read, RECORD_SCHEMA)

    def read(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the records of the blocks whose first record is among these numbers, which ascend without holes.

        Raises UnreadableBlockError.
        """
        starts = np.cumsum([0, *(block.records for _, block in self.blocks)])[:-1]
        for batch in numbers:
            if not batch.num_rows:
                continue
            first, last = batch.column(0)[0].as_py(), batch.column(0)[-1].as_py()
            begun = slice(*np.searchsorted(starts, [first, last + 1]))
            for log_root, blocks in itertools.groupby(self.blocks[begun], key=lambda each: each[0]):
                yield from read_partition(log_root, [block for _, block in blocks])
