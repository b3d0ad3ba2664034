"""The Parquet output: writes a folder for each batch, which is complete or missing.

`ParquetWriter` writes by the "headrace_parquet" data source. Its options: ``claim``, the `Claim` as JSON;
``compression``; ``report``, the URI for the counts. It works in classic sessions and over Spark Connect. The files'
schema is one that Spark, pandas and DuckDB can all read.

    <path>/batch_time=<T>/part-….parquet, _headrace.json      what readers see
    <path>/.headrace/<T>.<target>.<attempt>.<token>/          an attempt's own folder, the *claim*
    <path>/.headrace/trash.<seconds>.<token>/                 replaced files, kept for one minute

Spark, pandas and pyarrow ignore names that begin with "." or "_". DuckDB's ** does not, so files get the extension
".parquet" only when they are published.

An attempt claims the batch by creating its folder, and then moves the claims of earlier attempts away. Tasks write into
the claim and never create it, so they fail once it was moved away. Publishing is one rename out of the claim, so it
fails then too. Thus only the attempt with the last claim can publish, without a lock. The published folder has the
number of its attempt, so that an earlier attempt that continues late does not even claim.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.clock import time_text
from headrace.spark.outputs.writer import (
    AttemptReplacedError,
    OutputError,
    OutputOptionsError,
    OutputRowsError,
    counted,
    leave_counts,
)
from headrace.spark.records.arrow_types import arrow_schema
from headrace.spark.sessions import register_source
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
        register_source(frame.sparkSession, ParquetDataSource)
        options = {"claim": json.dumps(asdict(self._claim(batch))), "compression": self._output.compression}

        def save(report: str) -> None:
            frame.write.format(FORMAT).options(**options, report=report).mode("append").save()

        return counted(save, batch, self._output.id)

    def _claim(self, batch: WrittenBatch) -> Claim:
        return Claim(
            path=self._output.folder,
            stream=batch.stream.name,
            output=self._output.step,
            target=batch.target,
            batch_time_ms=batch.batch_time_ms,
            attempt=batch.attempt,
            token=secrets.token_hex(4),
            former=batch.former_steps,
        )


class OutputFolderError(OutputError):
    """The folder of a Parquet output cannot be written, or belongs to another output."""


HIDDEN = ".headrace"
RECORD = "_headrace.json"

_DAY_SECONDS = 86_400.0
# Replaced files are kept for readers that opened the folder before it was replaced: while files are being removed, they
# would list only some of them.
_LISTING_SECONDS = 60.0
_UNPUBLISHED = ".part"
_TRASH = "trash"
_READY = "ready"
# Of Linux's renameat2.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file in the claim, complete and synced. ``name`` is what readers see, ``size`` is in bytes."""

    name: str
    rows: int
    size: int


@dataclass(frozen=True)
class Claim:
    """One attempt at one batch of one output; ``token`` distinguishes two tries of the same attempt.

    ``path`` is the output's folder, an absolute path. ``former`` are the output's former steps, whose files it
    replaces. `take` and `publish` raise OutputFolderError if an operation of the file system fails.
    """

    path: str
    stream: str
    output: str
    target: str
    batch_time_ms: int
    attempt: int
    token: str
    former: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder to which tasks write."""
        return self._hidden / f"{self._series}{self.attempt}.{self.token}"

    @property
    def published(self) -> Path:
        """The folder that readers see."""
        return Path(self.path) / f"batch_time={self.batch_time_ms}"

    def unpublished(self, name: str) -> Path:
        """The path to which a task writes the file that is published under this name."""
        return self.folder / f"{name}{_UNPUBLISHED}"

    def take(self) -> None:
        """Claim the batch; may be repeated. Afterwards no earlier attempt can publish.

        Raises AttemptReplacedError if a later attempt has claimed or published the batch, and OutputFolderError if the
        published files belong to another output.
        """
        with self._reported("claim"):
            _make_directory(self._hidden)
            self.folder.mkdir(exist_ok=True)
            # Checked after creating the folder: of two simultaneous attempts, the earlier one then sees the later one.
            try:
                self._refuse_later_claims()
                self._refuse_other_records()
            except Exception:
                self.drop()
                raise
            for other in self._claims():
                # A later claim may have been made since the check; it stays.
                if other != self.folder and self._attempt_of(other) <= self.attempt:
                    self._discard(other)

    def publish(self, files: Sequence[WrittenFile]) -> None:
        """Publish these files of the claim in place of those published before; durable on return.

        Raises AttemptReplacedError if a later attempt has claimed the batch.
        """
        with self._reported("publish"):
            ready = self._prepare(files)
            replaced = self._put_in_place(ready)
            _sync_directory(Path(self.path))
            self._discard(self.folder, listed=replaced)
            self._sweep()

    def drop(self) -> None:
        """Give up the claim and remove its files."""
        self._discard(self.folder)

    @property
    def _hidden(self) -> Path:
        return Path(self.path) / HIDDEN

    @property
    def _series(self) -> str:
        """The common prefix of the names of this batch's claims. A replay's attempts have their own numbers."""
        return f"{self.batch_time_ms}.{quote(self.target, safe='').replace('.', '%2E')}."

    def _claims(self) -> list[Path]:
        return [path for path in self._hidden.iterdir() if path.name.startswith(self._series)]

    def _attempt_of(self, claim: Path) -> int:
        return int(claim.name.removeprefix(self._series).partition(".")[0])

    def _refuse_later_claims(self) -> None:
        for other in self._claims():
            if self._attempt_of(other) > self.attempt:
                raise self._replaced(self._attempt_of(other))

    def _refuse_other_records(self) -> None:
        record = self._published_record()
        if record is None:
            return
        if record["stream"] != self.stream or record["output"] not in (self.output, *self.former):
            raise OutputFolderError(
                f"{self.published} belongs to output {record['output']!r} of stream {record['stream']!r}.",
                remedy="Give each output its own path. If it is the same output under an earlier id, give this one "
                f"renamed_from={record['output']!r}.",
            )
        if self.target and not record["target"]:
            raise OutputFolderError(
                f"{self.published} has the files of stream {self.stream!r} itself, which the replay {self.target!r} "
                "would replace.",
                remedy="Give the replay's output its own path.",
            )
        if record["target"] == self.target and record["attempt"] > self.attempt:
            raise self._replaced(record["attempt"])

    def _published_record(self) -> Mapping[str, Any] | None:
        try:
            record: Mapping[str, Any] = json.loads((self.published / RECORD).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise OutputFolderError(
                f"{self.published / RECORD} is not valid JSON.", remedy="Delete the folder, and run the batch again."
            ) from None
        return record

    def _replaced(self, attempt: int) -> AttemptReplacedError:
        return AttemptReplacedError(
            f"Attempt {attempt} at batch {time_text(self.batch_time_ms)} has replaced attempt {self.attempt} in "
            f"{self.path}.",
            remedy=f"If the ledger was created again, so that attempts begin at 1 again, delete {RECORD} in "
            f"{self.published.name} and run the batch again.",
        )

    def _prepare(self, files: Sequence[WrittenFile]) -> Path:
        """Make the new folder, complete and synced, with only the listed files and not those of unsuccessful tasks."""
        ready = self.folder / _READY
        shutil.rmtree(ready, ignore_errors=True)
        ready.mkdir()
        for file in files:
            source = self.unpublished(file.name)
            if source.stat().st_size != file.size:
                raise OutputFolderError(
                    f"{source} has {source.stat().st_size} bytes instead of {file.size}.",
                    remedy="Make sure that all of Spark's hosts see the same folder, and run the batch again.",
                )
            source.rename(ready / file.name)
        record = {
            "version": 1,
            "stream": self.stream,
            "output": self.output,
            "target": self.target,
            "batch_time_ms": self.batch_time_ms,
            "attempt": self.attempt,
            "rows": sum(file.rows for file in files),
            "files": [asdict(file) for file in files],
        }
        with (ready / RECORD).open("xb") as out:
            out.write(json.dumps(record, indent=1).encode() + b"\n")
            out.flush()
            sync_file(out.fileno())
        _sync_directory(ready)
        return ready

    def _put_in_place(self, ready: Path) -> bool:
        """Make it the published folder. Returns whether there was one before; it is then in the claim."""
        if not self.published.exists():
            try:
                ready.rename(self.published)
                return False
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        if not _exchange(ready, self.published):
            # Without an atomic exchange (NFS), readers see nothing of the batch for a moment.
            self.published.rename(self.folder / "replaced")
            ready.rename(self.published)
        return True

    def _discard(self, folder: Path, *, listed: bool = False) -> None:
        """Remove a claim. If ``listed``, only move it away for later removal: readers may be listing its files."""
        # It is renamed first, so that no process finds half of a claim, and tasks that still write into it fail.
        trash = self._hidden / f"{_TRASH}.{time.time():.0f}.{secrets.token_hex(8)}"
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        if not listed:
            shutil.rmtree(trash, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove files that were replaced a minute ago or earlier, and claims without changes for a day."""
        now = time.time()
        for path in list(self._hidden.iterdir()):
            if path.name.startswith(f"{_TRASH}."):
                if int(path.name.split(".")[1]) < now - _LISTING_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            elif _last_change(path) < now - _DAY_SECONDS:
                self._discard(path)

    @contextlib.contextmanager
    def _reported(self, action: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise claim_gone(self) from error
        except OSError as error:
            raise OutputFolderError(
                f"Output {self.output!r} cannot {action} batch {time_text(self.batch_time_ms)} in {self.path}: "
                f"{error.strerror or error}."
            ) from error


def claim_gone(claim: Claim) -> AttemptReplacedError:
    """The error for a missing folder of a claim."""
    return AttemptReplacedError(
        f"The folder {claim.folder} of attempt {claim.attempt} is gone, or not visible on this host.",
        remedy="Either a later attempt replaced this one, or this host does not see the output's path: with several "
        "hosts it must be a shared folder.",
    )


def _last_change(folder: Path) -> float:
    """The last change of the folder or its entries, in seconds since the epoch; now if it is just being removed."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically. Returns False if the file system does not support this."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one))


def _make_directory(path: Path) -> None:
    """Create the directory and its parents, with each name durable in its parent."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make the names in the directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(fd)
    finally:
        os.close(fd)
