"""The "headrace_parquet" data source: writes a DataFrame as one batch's files, which appear together or not at all.

Options: ``claim``, the `Claim` as JSON; ``compression``; ``report``, the URI for the counts. It works in classic
sessions and over Spark Connect.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headrace.spark.outputs.errors import OutputFolderError, OutputOptionsError
from headrace.spark.outputs.parquet.batch_folder import Claim, WrittenFile, claim_gone
from headrace.spark.outputs.parquet.columns import file_schema
from headrace.spark.outputs.report_files import leave_counts
from headrace.wal.local_storage import sync_file

FORMAT = "headrace_parquet"

# The size of a row group, which is held in memory: this many rows, or this many bytes in Arrow's form.
_GROUP_ROWS = 1_000_000
_GROUP_BYTES = 64 * 1024 * 1024


class ParquetDataSource(DataSource):
    """The data source that Spark registers; it is write-only."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> ParquetSink:  # noqa: ARG002 - a batch always replaces
        """Claim the batch. Raises AttemptReplacedError, OutputFolderError, OutputOptionsError."""
        try:
            claim = Claim(**json.loads(self.options["claim"]))
            sink = ParquetSink(claim, self.options["compression"], self.options["report"], schema)
        except (KeyError, ValueError, TypeError) as error:
            raise OutputOptionsError(
                f"An option of the {FORMAT} data source is missing or invalid: {error!r}."
            ) from None
        claim.take()
        return sink


@dataclass
class TaskFiles(WriterCommitMessage):
    """One task's commit message."""

    files: list[WrittenFile]


class ParquetSink(DataSourceArrowWriter):
    """The writer. It is pickled to every task and to the process that commits."""

    def __init__(self, claim: Claim, compression: str, report: str, schema: StructType) -> None:
        self._claim = claim
        self._compression = compression
        self._report = report
        self._schema = schema

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one task's rows. On return the file is synced, and not yet visible to readers."""
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        return TaskFiles(_write_rows(iterator, self._claim, task=task, compression=self._compression))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Called after all tasks have succeeded: publish their files in place of an earlier attempt's files."""
        files = [file for message in messages if isinstance(message, TaskFiles) for file in message.files]
        if not files:
            # A reader of only this batch gets its columns and no rows, not an error.
            schema = to_arrow_schema(self._schema, timezone="UTC")
            files = [_write_file(iter(()), schema, self._claim, task=0, compression=self._compression)]
        self._claim.publish(files)
        leave_counts(
            self._report,
            {"rows": sum(each.rows for each in files), "files": len(files), "bytes": sum(each.size for each in files)},
        )

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Remove the claim; files that an earlier attempt published stay."""
        self._claim.drop()

    def __repr__(self) -> str:
        return f"ParquetSink({str(self._claim.published)!r})"


def _write_rows(batches: Iterator[pa.RecordBatch], claim: Claim, *, task: int, compression: str) -> list[WrittenFile]:
    """Write a task's rows to a file in the claim's folder. Returns the synced file, or nothing if there are no rows.

    Raises AttemptReplacedError if the claim's folder is gone, OutputFolderError for other errors, such as a full disk.
    """
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return []
    return [_write_file(_chained(first, batches), first.schema, claim, task=task, compression=compression)]


def _write_file(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, claim: Claim, *, task: int, compression: str
) -> WrittenFile:
    """Like `_write_rows`, but writes a file even if there are no rows."""
    name = f"part-{task:05d}-{secrets.token_hex(8)}.{compression}.parquet"
    wanted = file_schema(schema)
    rows = 0
    try:
        with claim.unpublished(name).open("xb") as file:
            with pq.ParquetWriter(file, wanted, compression=compression) as writer:
                for table in _row_groups(batches, schema):
                    writer.write_table(table.cast(wanted), row_group_size=max(1, table.num_rows))
                    rows += table.num_rows
            file.flush()
            sync_file(file.fileno())
            return WrittenFile(name, rows, file.tell())
    except FileNotFoundError as error:
        raise claim_gone(claim) from error
    except OSError as error:
        what = f"The file {claim.unpublished(name)} cannot be written: {error.strerror or error}."
        raise OutputFolderError(what) from error


def _chained(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others


def _row_groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.Table.from_batches(held, schema)
            held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held, schema)
