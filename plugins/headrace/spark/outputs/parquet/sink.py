"""The "headrace_parquet" data source: writes a DataFrame as one batch's files, which appear together or not at all.

Options: ``claim``, the `Claim` as JSON; ``compression``; ``report``, the URI for the counts. It works in classic
sessions and over Spark Connect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headrace.spark.outputs.counts_report import leave_counts
from headrace.spark.outputs.errors import OutputOptionsError
from headrace.spark.outputs.parquet.batch_folder import Claim, WrittenFile
from headrace.spark.outputs.parquet_files import write_file, write_rows

FORMAT = "headrace_parquet"


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
            raise OutputOptionsError(f"The {FORMAT} data source lacks or misreads an option: {error!r}.") from None
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
        return TaskFiles(write_rows(iterator, self._claim, task=task, compression=self._compression))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Called after all tasks have succeeded: publish their files in place of an earlier attempt's files."""
        files = [file for message in messages if isinstance(message, TaskFiles) for file in message.files]
        if not files:
            # A reader of only this batch gets its columns and no rows, not an error.
            schema = to_arrow_schema(self._schema, timezone="UTC")
            files = [write_file(iter(()), schema, self._claim, task=0, compression=self._compression)]
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
