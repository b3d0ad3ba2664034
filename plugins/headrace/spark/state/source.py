"""The "state_table" data source: reads the files of one version of a state, and writes the files of the next one.

    spark.read.format("state_table").schema(columns).options(folder=url, document=path, files="table").load()
    rows.write.format("state_table").options(folder=url, files="1700000010000-1", report=path, keys='["word"]') …

Reading needs ``folder`` (the URL of the state's folder), ``document`` (the path of a version or draft in it) and
``files`` ("table" or "changes"). The columns are the requested ones of the fields and the two hidden columns; a column
that a file does not have is null. The rows are returned as stored in the files: `headrace.spark.state.updating` selects
the valid row of each key.

Writing needs ``folder``, ``files`` (the prefix of the files' names), ``report`` (the path of the file that lists what
was written) and ``keys`` (JSON). It works in classic sessions and over Spark Connect. There the commit runs in the
server, so it only writes the report, and the caller makes the version from it.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headrace.spark.records.arrow_types import arrow_schema
from headrace.spark.state.version import (
    DATA,
    Outcome,
    StateDamagedError,
    StateError,
    StateStore,
    StoredFile,
    WriteReport,
)
from headrace.wal.errors import StorageError
from headrace.wal.storage import open_storage

FORMAT = "state_table"
OUTCOME = "_headrace_outcome"
"""The column with a key's outcome for the writer, which counts it and does not store it."""

# One task reads about this many compressed bytes, and no file gets much larger. In memory they are several times as
# large.
_BYTES_PER_TASK = 16 * 1024 * 1024
_ROWS_PER_BATCH = 65_536


class StateTableSource(DataSource):
    """The data source that Spark registers."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options("folder", "document", "files")
        return StateReader(options["folder"], options["document"], options["files"], schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002 - Spark's signature
        options = self._options("folder", "files", "report", "keys")
        return StateWriter(options["folder"], options["files"], options["report"], tuple(json.loads(options["keys"])))

    def _options(self, *names: str) -> dict[str, str]:
        options = {str(key).lower(): str(value) for key, value in self.options.items()}
        missing = [name for name in names if not options.get(name)]
        if missing:
            raise StateError(f'The "{FORMAT}" data source needs the option(s) {", ".join(missing)}.')
        return options


@dataclass
class StatePartition(InputPartition):
    """The files that one task reads."""

    files: tuple[StoredFile, ...]

    def __init__(self, files: tuple[StoredFile, ...]) -> None:
        super().__init__(None)
        self.files = files


class StateReader(DataSourceReader):
    """Plans the partitions in the planning process, and reads a partition on an executor."""

    def __init__(self, folder: str, document: str, files: str, schema: StructType) -> None:
        self._folder = folder
        self._document = document
        self._files = files
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        version = StateStore(open_storage(self._folder)).read_document(self._document)
        groups = group_files(version.changes if self._files == "changes" else version.table)
        return [StatePartition(group) for group in groups or [()]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, StatePartition):
            raise TypeError(f"the state's source reads its own partitions, not {type(partition).__name__}")
        target = arrow_schema(self._schema)
        for file in partition.files:
            yield from read_file(self._folder, file, target)


def group_files(files: Sequence[StoredFile]) -> list[tuple[StoredFile, ...]]:
    """Group the files, largest first, into one group per task."""
    groups: list[tuple[StoredFile, ...]] = []
    size = 0
    for file in sorted(files, key=lambda file: -file.size):
        if groups and size + file.size <= _BYTES_PER_TASK:
            groups[-1] += (file,)
            size += file.size
        else:
            groups.append((file,))
            size = file.size
    return groups


def read_file(folder: str, file: StoredFile, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the file's rows with the columns of ``target``; raises StateDamagedError with the file's name."""
    try:
        stored = pq.ParquetFile(pa.BufferReader(open_storage(folder).read(file.path)))
        if stored.metadata.num_rows != file.rows:
            raise StateDamagedError(
                f"{folder}/{file.path} has {stored.metadata.num_rows} rows, its version says {file.rows}."
            )
        names = [name for name in target.names if name in stored.schema_arrow.names]
        for batch in stored.iter_batches(batch_size=_ROWS_PER_BATCH, columns=names):
            yield _with_columns(batch, target)
    except (StorageError, OSError, pa.ArrowException) as error:
        raise StateDamagedError(
            f"The state's file {folder}/{file.path} cannot be read: {error}",
            remedy="Run the batch that wrote it again, if the version before it is still stored.",
        ) from error


def _with_columns(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    columns = []
    for wanted in target:
        place = batch.schema.get_field_index(wanted.name)
        if place < 0:
            columns.append(pa.nulls(batch.num_rows, wanted.type))
        else:
            columns.append(batch.column(place).cast(wanted.type))
    return pa.RecordBatch.from_arrays(columns, schema=target)


@dataclass
class TaskReport(WriterCommitMessage):
    """One task's commit message."""

    files: list[StoredFile] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


class StateWriter(DataSourceArrowWriter):
    """The writer. It is pickled to every task and to the process that commits."""

    def __init__(self, folder: str, files: str, report: str, keys: tuple[str, ...]) -> None:
        self._folder = folder
        self._files = files
        self._report = report
        self._keys = keys

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one task's rows to its own files, all durable on return."""
        done = TaskReport()
        out = _FileWriter(self._folder, self._files, done.files)
        for batch in iterator:
            out.append(self._counted(batch, done))
        out.finish()
        return done

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Called after all tasks have succeeded: report the files to the caller."""
        total = WriteReport()
        for message in messages:
            if not isinstance(message, TaskReport):
                raise StateError("A task that wrote the state did not report its rows.", remedy="Run the batch again.")
            total.files.extend(message.files)
            total.outcomes.update(message.outcomes)
            total.examples.update(message.examples)
        total.write(open_storage(self._folder), self._report)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: no version lists these files, and pruning removes them."""

    def __repr__(self) -> str:
        return f"StateWriter({self._files!r})"

    def _counted(self, batch: pa.RecordBatch, done: TaskReport) -> pa.RecordBatch:
        place = batch.schema.get_field_index(OUTCOME)
        if place < 0:
            return batch
        outcomes = batch.column(place).to_pylist()
        done.outcomes.update(outcomes)
        for problem in {Outcome.NULL_KEY.value, Outcome.DOUBLE_KEY.value}.intersection(outcomes):
            if problem not in done.examples:
                row = batch.slice(outcomes.index(problem), 1).select(list(self._keys))
                done.examples[problem] = json.dumps(row.to_pylist()[0], default=str, ensure_ascii=False)
        return batch.drop_columns([OUTCOME])


class _FileWriter:
    """Splits a task's rows into files, each of which is written in one operation."""

    def __init__(self, folder: str, prefix: str, files: list[StoredFile]) -> None:
        self._storage = open_storage(folder)
        self._prefix = prefix
        self._files = files
        self._buffer: Any = None
        self._parquet: Any = None
        self._rows = 0

    def append(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._parquet is None:
            self._buffer = pa.BufferOutputStream()
            self._parquet = pq.ParquetWriter(self._buffer, batch.schema, compression="zstd")
        self._parquet.write_batch(batch)
        self._rows += batch.num_rows
        if self._buffer.tell() >= _BYTES_PER_TASK:
            self.finish()

    def finish(self) -> None:
        if self._parquet is None:
            return
        self._parquet.close()
        data = self._buffer.getvalue()
        path = f"{DATA}/{self._prefix}-{secrets.token_hex(8)}.parquet"
        self._storage.write_atomically(path, data, exclusive=True)
        self._files.append(StoredFile(path, self._rows, data.size))
        self._buffer = self._parquet = None
        self._rows = 0
