"""The Parquet output: writes a folder for each batch, which is complete or missing.

`ParquetWriter` writes by the "headrace_parquet" data source. Its options: ``claim``, the `Claim` as JSON;
``compression``; ``report``, the URI for the counts. It works in classic sessions and over Spark Connect. The files'
schema is one that Spark, pandas and DuckDB can all read.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.spark.arrow_types import arrow_schema
from headrace.spark.outputs.batch_folder import Claim, OutputFolderError, WrittenFile, claim_gone
from headrace.spark.outputs.writer import OutputOptionsError, OutputRowsError, counted, leave_counts
from headrace.wal.storage import sync_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import ParquetOutput


PARTITION_COLUMN = "batch_time"

# Spark's names of types that Parquet does not have, or that Spark itself does not read back.
_WITHOUT_TYPE = ("void", "interval", "variant", "geometry", "geography")


def check_columns(schema: StructType, output: str) -> None:
    """Raise OutputRowsError for columns that cannot be in the files of the output with this id."""
    names = Counter(name.lower() for name in schema.names)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise OutputRowsError(
            f"The rows for output {output!r} have several columns named {', '.join(map(repr, twice))} (Spark "
            "ignores upper and lower case).",
            remedy="Give each column its own name in the transform.",
        )
    if PARTITION_COLUMN in names:
        raise OutputRowsError(
            f"The rows for output {output!r} have a column {PARTITION_COLUMN!r}, which is the name of the batch's "
            "folder: readers of the files get it as a column.",
            remedy="Drop or rename it.",
        )
    if not names:
        raise OutputRowsError(f"The rows for output {output!r} have no columns.")
    for field in schema.fields:
        for kind in _types(field.dataType):
            if kind.simpleString().startswith(_WITHOUT_TYPE):
                raise OutputRowsError(
                    f"The column {field.name!r} for output {output!r} has the type {kind.simpleString()}, for which "
                    "Parquet has no type that other programs read.",
                    remedy="Cast it, for example to a string, or drop it.",
                )


def file_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of the files for rows with this schema.

    Times with a zone are in UTC, whatever the session's zone is, and every column is nullable, so the files of all
    batches have the same types.
    """
    return pa.schema([pa.field(field.name, _file_type(field.type)) for field in schema])


def _file_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=None if kind.tz is None else "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _file_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_file_type(kind.key_type), _file_type(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", _file_type(kind.value_type)))
    return kind


def _types(kind: DataType) -> Iterator[DataType]:
    """Yield the type and all types nested in it."""
    from pyspark.sql.types import ArrayType, MapType

    yield kind
    inner: list[DataType] = []
    if isinstance(kind, StructType):
        inner = [field.dataType for field in kind.fields]
    elif isinstance(kind, ArrayType):
        inner = [kind.elementType]
    elif isinstance(kind, MapType):
        inner = [kind.keyType, kind.valueType]
    for inner_type in inner:
        yield from _types(inner_type)


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
            schema = arrow_schema(self._schema)
            files = [_write_file(iter(()), schema, self._claim, task=0, compression=self._compression)]
        self._claim.publish(files)
        leave_counts(
            self._report,
            {"rows": sum(file.rows for file in files), "files": len(files), "bytes": sum(file.size for file in files)},
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


class ParquetWriter:
    """Writes ``<path>/batch_time=<T>/part-….parquet``, one file for each Spark task with rows.

    A batch that runs again replaces its folder by one atomic rename, or by two if the file system (NFS) cannot do that.
    The new files have other names, so a reader that listed the old files finds them missing, and never reads a mixture.
    If the transform gives no rows, the batch is one file with the columns and no rows.
    """

    def __init__(self, output: ParquetOutput) -> None:
        self._output = output

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Publish the rows. Returns the counts ``rows``, ``files`` and ``bytes``.

        Without a frame the columns are unknown: nothing is published, and what was published before stays.
        Raises OutputRowsError; within Spark AttemptReplacedError and OutputFolderError.
        """
        if frame is None:
            return {"rows": 0, "files": 0, "bytes": 0}

        check_columns(frame.schema, self._output.id)
        frame.sparkSession.dataSource.register(ParquetDataSource)
        options = {"claim": json.dumps(asdict(self._claim(batch))), "compression": self._output.compression}

        def save(report: str) -> None:
            frame.write.format(FORMAT).options(**options, report=report).mode("append").save()

        return counted(save, batch, self._output.id)

    def _claim(self, batch: WrittenBatch) -> Claim:
        parts = urlsplit(self._output.path)
        return Claim(
            path=unquote(parts.path) if parts.scheme == "file" else self._output.path,
            stream=batch.stream.name,
            output=self._output.step,
            target=batch.target,
            batch_time_ms=batch.batch_time_ms,
            attempt=batch.attempt,
            token=secrets.token_hex(4),
        )
