"""A batch's result file: what became of the batch, beside the manifest that says what is in it.

It is a document with a checksum (`headrace.batch.manifest`). It holds the batch's row, the counts that its outputs
recorded with the revisions of the definitions that wrote them, its replays, and the Airflow runs that its time was
assigned to. It is written when the batch has completed, failed or was abandoned, and again after each later change: a
repetition, a replay. A batch is checkpointed once the file with its completion is durable, and only then may its log be
deleted.

The name holds the batch time and the change that the file holds (`BatchRow.change`). Nothing is overwritten, and of
several files of a batch the one with the highest change counts. So writers need no lock: one that was late leaves an
older file, which does no harm.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tenacity

from headrace.batch.manifest import DocumentDamagedError, encode_document, read_document
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger.batches.results import LAST_MS
from headrace.ledger.batches.tables import BatchRow, FiledReplay
from headrace.stream_context import StreamContext
from headrace.stream_folder import set_back
from headrace.wal.errors import StorageError, StoredFileExistsError, StoredFileMissingError
from headrace.wal.log_storage import LogStorage

VERSION = 1
FOLDER = "results"
_NAME = re.compile(rf"{FOLDER}/(\d+)-(\d+)\.json")
_AT_ONCE = 500
# The run of a batch writes at most this many results of other batches.
_OTHERS = 100
# An object store takes 10 ms or more for each file.
_WRITERS = 8
_READERS = 16

retry_write = tenacity.retry(
    retry=tenacity.retry_if_exception(
        lambda error: isinstance(error, StorageError | OSError) and not isinstance(error, StoredFileExistsError)
    ),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_exponential(multiplier=0.2, max=2),
    reraise=True,
)
"""Tries a write of a small file three times."""


class ResultError(HeadraceError):
    """A result file is damaged, missing, or of another version."""


@dataclass(frozen=True)
class StoredResult:
    """What a result file holds. ``outputs`` has the counts of the recorded outputs by id, ``revisions`` the revisions
    of the definitions that wrote them, as far as they are known. ``runs`` are ids of Airflow runs."""

    row: BatchRow
    outputs: Mapping[str, Mapping[str, Any]]
    revisions: Mapping[str, int]
    replays: tuple[FiledReplay, ...]
    runs: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """The file's bytes, the same for the same result."""
        return encode_document({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, url: str) -> StoredResult:
        """Parse the bytes of `to_bytes`, which were read from ``url``.

        Raises:
            ResultError: the bytes are damaged, or of a version that this headrace does not read.
        """
        try:
            fields = read_document(data, VERSION, f"The result file {url}", ResultVersionError)
        except DocumentDamagedError as error:
            raise ResultError(f"The result file {url} is damaged: {error}.", remedy=_RESTORE) from None
        return load_row(cls, fields)


_RESTORE = (
    "With the ledger there, `headrace streams recover` writes it again; else restore it from a copy. Without a copy, "
    "delete it: the batch is run again."
)


class ResultVersionError(ResultError):
    """A result file is of a version that this headrace does not read."""


def result_path(batch_time_ms: int, change: int) -> str:
    """The path, below the stream's folder, of the result file that holds this change of the batch."""
    return f"{FOLDER}/{batch_time_ms}-{change}.json"


def result_name(path: str) -> tuple[int, int] | None:
    """The batch time and the change in the name of a result file; None if it is no result file's."""
    parts = _NAME.fullmatch(path)
    return None if parts is None else (int(parts[1]), int(parts[2]))


def write_results(context: StreamContext, *, after_ms: int = 0, until_ms: int = LAST_MS) -> int:
    """Write the result files that are behind, of batches of the times ``(after_ms, until_ms]``, and mark their batches;
    returns their number.

    May be repeated after a crash, and run beside itself.

    Raises:
        StorageError: a file could not be written, in three tries; its batch is not marked.
    """
    results, number = context.ledger.results, 0
    while rows := results.behind(context.name, _AT_ONCE, after_ms=after_ms, until_ms=until_ms):
        _write_all(context, rows)
        number += len(rows)
        after_ms = rows[-1].batch_time_ms
    return number


def write_own_result(context: StreamContext, batch_time_ms: int) -> int:
    """Write the batch's result file if it is behind, then the oldest 100 others that are; returns their number.

    So a batch does not wait for the results of a long range, and later batches write the results that are left.

    Raises:
        StorageError: a file could not be written, in three tries; its batch is not marked.
    """
    number = write_results(context, after_ms=batch_time_ms - 1, until_ms=batch_time_ms)
    rows = context.ledger.results.behind(context.name, _OTHERS)
    _write_all(context, rows)
    return number + len(rows)


def results_of(context: StreamContext, rows: Sequence[BatchRow]) -> Iterator[StoredResult]:
    """The results of these batches, as the ledger has them. A batch that has completed is checkpointed in its file."""
    ledger, name = context.ledger, context.name
    times = [row.batch_time_ms for row in rows]
    recorded = ledger.attempts.recorded(name, times)
    replays, runs = ledger.results.replays_of(name, times), ledger.results.runs_of(name, times)
    now_ms = ledger.now_ms()
    for row in rows:
        time_ms, path = row.batch_time_ms, result_path(row.batch_time_ms, row.change)
        written = recorded[time_ms]
        yield StoredResult(
            row.filed(f"{context.stream.folder_url}/{path}", now_ms),
            {output: each.counts for output, each in written.items()},
            {output: each.revision for output, each in written.items() if each.revision is not None},
            tuple(replays[time_ms]),
            tuple(runs[time_ms]),
        )


def _write_all(context: StreamContext, rows: Sequence[BatchRow]) -> None:
    """Write the results of these batches, mark those that are written, then delete the files that they replace."""
    if not rows:
        return
    folder = context.storage
    written, replaced, errors = list[BatchRow](), list[str](), list[BaseException]()
    with ThreadPoolExecutor(_WRITERS) as pool:
        results = list(results_of(context, rows))
        writes = [pool.submit(_write, context, result) for result in results]
        for before, result, write in zip(rows, results, writes, strict=True):
            if (error := write.exception()) is not None:
                errors.append(error)
                continue
            written.append(result.row)
            if before.result:
                replaced.append(result_path(before.batch_time_ms, before.result))
        context.ledger.batches.mark_checkpointed(context.name, written)
        if written:
            folder.mark.leave(attempt=max(row.attempt for row in written))
        list(pool.map(folder.delete, replaced))
    if errors:
        raise errors[0]


def _write(context: StreamContext, result: StoredResult) -> None:
    folder, path, data = context.storage, result_path(result.row.batch_time_ms, result.row.change), result.to_bytes()
    try:
        retry_write(partial(folder.write_atomically, exclusive=True))(path, data)
    except StoredFileExistsError:
        try:
            there = read_result(folder, path)
        except ResultVersionError:
            raise
        except ResultError:
            # Damaged, or deleted meanwhile because a later change has its file.
            pass
        else:
            if _outcome(there) != _outcome(result):
                raise set_back(
                    context.name,
                    context.stream.storage.url,
                    f"{folder.url}/{path}",
                    f"change {result.row.change} of batch {time_text(result.row.batch_time_ms)} is another one in the "
                    "ledger",
                ) from None
        # Written before, by a process that was killed before it marked the batch, or by one that runs beside this one.
        retry_write(folder.write_atomically)(path, data)


def _outcome(result: StoredResult) -> tuple[object, ...]:
    """What a change of a batch made of it. It is the same in each file that one ledger writes of the change."""
    row = result.row
    return row.state, row.completed_at_ms, row.error, row.manifest_sha256, row.steps, dict(row.abandoned_steps)


def read_result(folder: LogStorage, path: str) -> StoredResult:
    """Read a result file.

    Raises:
        ResultError: it is missing, damaged, or of another version.
    """
    try:
        data = folder.read(path)
    except StoredFileMissingError:
        raise ResultError(f"The result file {folder.url}/{path} does not exist.", remedy=_RESTORE) from None
    return StoredResult.from_bytes(data, f"{folder.url}/{path}")


@dataclass(frozen=True)
class FoundResults:
    """The newest readable result of each batch, by batch time, and what is wrong with newer files, by path."""

    by_time: Mapping[int, StoredResult]
    damaged: Mapping[str, str]


def read_results(folder: LogStorage, paths: Iterable[str]) -> FoundResults:
    """Read the newest result file of each batch; an earlier one where it is damaged.

    Raises:
        ResultVersionError: a file is of a version that this headrace does not read.
    """
    files: dict[int, list[int]] = {}
    for path in paths:
        if (named := result_name(path)) is not None:
            files.setdefault(named[0], []).append(named[1])
    damaged: dict[str, str] = {}

    def newest(time_ms: int) -> StoredResult | None:
        for change in sorted(files[time_ms], reverse=True):
            path = result_path(time_ms, change)
            try:
                return read_result(folder, path)
            except ResultVersionError:
                raise
            except ResultError as error:
                damaged[path] = error.what
        return None

    with ThreadPoolExecutor(_READERS) as pool:
        found = zip(files, pool.map(newest, files), strict=True)
        return FoundResults({time_ms: result for time_ms, result in found if result is not None}, damaged)


def lost_results(folder: LogStorage, written: Mapping[int, int]) -> dict[int, str]:
    """Which of these result files (change by batch time) cannot be read: what is wrong, by batch time."""

    def problem(time_ms: int) -> str | None:
        try:
            read_result(folder, result_path(time_ms, written[time_ms]))
        except ResultError as error:
            return error.what
        return None

    with ThreadPoolExecutor(_READERS) as pool:
        problems = zip(written, pool.map(problem, written), strict=True)
        return {time_ms: what for time_ms, what in problems if what is not None}


Row = TypeVar("Row")


def load_row(kind: type[Row], fields: Mapping[str, Any]) -> Row:
    """Read a dataclass from a document's fields, each by its type.

    A field that the document lacks takes its default, and one that the class lacks is ignored. So a row can get a new
    field without a new version of the format.
    """
    converters = _converters(kind)  # type: ignore[arg-type]
    return kind(**{name: converters[name](value) for name, value in fields.items() if name in converters})


@cache
def _converters(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind)
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(kind)}


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a value of this type of its JSON."""
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (_converter(part) for part in get_args(hint) if part is not NoneType)
        return lambda value: None if value is None else inner(value)
    if get_origin(hint) is tuple:
        each = _converter(get_args(hint)[0])
        return lambda values: tuple(each(value) for value in values)
    if dataclasses.is_dataclass(hint):
        return partial(load_row, hint)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    return lambda value: value
