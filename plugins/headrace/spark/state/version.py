"""A version of the state: the table after one batch, described by a document that lists its files.

All files are in the stream's folder below ``state/``. Each name begins with the batch time and the attempt that wrote
the file:

    versions/<batch time>-<attempt>-<since>.json   a version, with a checksum (`headrace.batch.manifest`)
    data/<batch time>-<attempt>-<random>.parquet   rows: the columns of ``fields`` and the two hidden ones
    drafts/, reports/                              temporary files of a running update

A version exists only by its document in ``versions``, which is written last; no version lists the files that a crash
left behind. Names are never reused: a later attempt writes its own version, and the highest attempt's version counts.

A version's ``table`` lists all files that are needed to read the whole table, back to the newest whole table, which was
written at the batch time ``since``. So a reader needs only one document, and pruning needs only the names. The list of
files begins again with a version whose changes are the whole table, and with the whole table that is written after
``snapshot_every`` versions. So the thousandth batch costs the same as the tenth.

`StateStore` lists, reads, writes and prunes the versions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headrace.batch.manifest import DocumentDamagedError, decode_document, encode_document
from headrace.clock import time_text
from headrace.errors import Failure, HeadraceError
from headrace.wal.errors import StoredFileExistsError, StoredFileMissingError
from headrace.wal.log_storage import LogStorage
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.stream import Stream


FORMAT_VERSION = 1
VERSIONS = "versions"
DATA = "data"
DRAFTS = "drafts"
REPORTS = "reports"

CHANGED_MS = "_headrace_changed_ms"
"""The hidden column with the batch time that last changed the row. The newest row of a key is the valid one."""
REMOVED = "_headrace_removed"
"""The hidden column that is true if the key was removed; the row has its last values."""

_NAME = re.compile(rf"^{VERSIONS}/(\d+)-(\d+)-(\d+)\.json$")
_OWN_FILE = re.compile(r"^[a-z]+/(\d+)-\d+-[^/]+$")


class Outcome(StrEnum):
    """What a batch did to a key, or what is wrong with the key."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"
    TIMED_OUT = "timed_out"
    NULL_KEY = "null_key"
    DOUBLE_KEY = "double_key"


@dataclass(frozen=True, slots=True, order=True)
class VersionName:
    """The parts of the name of a version's document; sorts by batch time, then attempt."""

    batch_time_ms: int
    attempt: int
    since_ms: int

    @property
    def path(self) -> str:
        """The document's path. Times have 13 digits, which sort like numbers until the year 2286."""
        return f"{VERSIONS}/{stem(self.batch_time_ms, self.attempt)}-{self.since_ms:013d}.json"

    @classmethod
    def parse(cls, path: str) -> VersionName | None:
        """Parse a path; None if it is not a version's."""
        match = _NAME.match(path)
        return None if match is None else cls(*(int(part) for part in match.groups()))


def stem(batch_time_ms: int, attempt: int) -> str:
    """The prefix of the names of an attempt's files."""
    return f"{batch_time_ms:013d}-{attempt}"


def batch_time_of(path: str) -> int | None:
    """The batch time that wrote a file of the state; None for a file that is not the state's."""
    match = _OWN_FILE.match(path)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A Parquet file; ``path`` is below the state's folder, ``size`` in bytes."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True)
class Version:
    """The table after the update of ``batch_time_ms``.

    ``based_on``: batch time and attempt of the version with which the update began, None for the first one.
    ``first_ms``: the first batch time whose records are in the table. ``changes``: the files with the changed and
    removed rows. ``table``: the files of the whole table, written by ``chain`` versions. ``rows``: the number of the
    table's keys. ``schema``: Spark's JSON of the columns.
    """

    stream: str
    batch_time_ms: int
    attempt: int
    based_on: tuple[int, int] | None
    first_ms: int
    since_ms: int
    chain: int
    rows: int
    keys: tuple[str, ...]
    schema: Mapping[str, Any]
    changes: tuple[StoredFile, ...]
    table: tuple[StoredFile, ...]

    @property
    def name(self) -> VersionName:
        return VersionName(self.batch_time_ms, self.attempt, self.since_ms)

    @property
    def is_snapshot(self) -> bool:
        """Whether the table can be read without files of older versions."""
        return self.chain == 1

    def to_bytes(self) -> bytes:
        """The document's bytes. A file that is in both ``changes`` and ``table`` is listed once."""
        files = list(dict.fromkeys((*self.table, *self.changes)))
        place = {file: index for index, file in enumerate(files)}
        return encode_document(
            {
                "version": FORMAT_VERSION,
                "stream": self.stream,
                "batch_time_ms": self.batch_time_ms,
                "attempt": self.attempt,
                "kind": "snapshot" if self.is_snapshot else "delta",
                "based_on": self.based_on,
                "first_ms": self.first_ms,
                "since_ms": self.since_ms,
                "chain": self.chain,
                "rows": self.rows,
                "keys": self.keys,
                "schema": self.schema,
                "files": [[file.path, file.rows, file.size] for file in files],
                "changes": [place[file] for file in self.changes],
                "table": [place[file] for file in self.table],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Version:
        """Parse what `to_bytes` wrote; ``where`` is the document's location for error texts.

        Raises:
            StateDamagedError: the bytes are damaged, or have a format version that this headrace does not read.
        """
        try:
            fields = decode_document(data)
        except DocumentDamagedError as error:
            raise StateDamagedError(f"The state's version {where} is damaged: {error}.") from error
        if fields.get("version") != FORMAT_VERSION:
            raise StateDamagedError(
                f"The state's version {where} has the format {fields.get('version')}, "
                f"this headrace reads {FORMAT_VERSION}."
            )
        if _has_user_type(fields["schema"]):
            # Spark would import its class, or load the pickle beside its name: the folder supplies data, never code.
            raise StateDamagedError(
                f"The state's version {where} has a column of a user-defined type, which headrace writes in no state."
            )
        files = [StoredFile(*file) for file in fields["files"]]
        based_on = fields["based_on"]
        return cls(
            stream=fields["stream"],
            batch_time_ms=fields["batch_time_ms"],
            attempt=fields["attempt"],
            based_on=None if based_on is None else (based_on[0], based_on[1]),
            first_ms=fields["first_ms"],
            since_ms=fields["since_ms"],
            chain=fields["chain"],
            rows=fields["rows"],
            keys=tuple(fields["keys"]),
            schema=fields["schema"],
            changes=tuple(files[index] for index in fields["changes"]),
            table=tuple(files[index] for index in fields["table"]),
        )


def _has_user_type(schema: Any) -> bool:
    """Whether a type in Spark's JSON of a schema names a class of Python or Java."""
    if isinstance(schema, dict):
        return schema.get("type") == "udt" or any(map(_has_user_type, schema.values()))
    return isinstance(schema, list) and any(map(_has_user_type, schema))


@dataclass
class WriteReport:
    """The files of a write, the number of keys by outcome, and an example key (as JSON) for each problem."""

    files: list[StoredFile] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The total size of the files in bytes."""
        return sum(file.size for file in self.files)

    def write(self, storage: LogStorage, path: str) -> None:
        """Write the report, durable on return."""
        files = [[file.path, file.rows, file.size] for file in self.files]
        storage.write_atomically(
            path, encode_document({"files": files, "outcomes": dict(self.outcomes), "examples": self.examples})
        )

    @classmethod
    def read(cls, storage: LogStorage, path: str) -> WriteReport:
        """Read a report. Raises StateDamagedError if it is missing or damaged."""
        try:
            fields = decode_document(storage.read(path))
        except (StoredFileMissingError, DocumentDamagedError) as error:
            raise StateDamagedError(
                f"The report of the state's write, {storage.url}/{path}, is missing or damaged: {error}",
                remedy="Make sure that Spark sees the stream's storage where it runs, and run the batch again.",
            ) from error
        return cls([StoredFile(*file) for file in fields["files"]], Counter(fields["outcomes"]), fields["examples"])


def next_version(
    base: Version | None,
    written: WriteReport,
    *,
    stream_name: str,
    batch_time_ms: int,
    attempt: int,
    keys: tuple[str, ...],
    schema: Mapping[str, Any],
    first_ms: int | None = None,
) -> Version:
    """The version that follows ``base`` (None: an empty table) with the changes in ``written``.

    ``first_ms``: the first batch time whose records are in the table, if it is not this version's.
    """
    changes = tuple(sorted(written.files, key=lambda file: file.path))
    live = written.outcomes[Outcome.ADDED] + written.outcomes[Outcome.CHANGED]
    gone = written.outcomes[Outcome.REMOVED] + written.outcomes[Outcome.TIMED_OUT]
    rows = (0 if base is None else base.rows) + written.outcomes[Outcome.ADDED] - gone
    version = Version(
        stream=stream_name,
        batch_time_ms=batch_time_ms,
        attempt=attempt,
        based_on=None if base is None else (base.batch_time_ms, base.attempt),
        first_ms=(first_ms or batch_time_ms) if base is None else base.first_ms,
        since_ms=batch_time_ms,
        chain=1,
        rows=rows,
        keys=keys,
        schema=schema,
        changes=changes,
        table=changes,
    )
    if base is None or live == rows:
        # The changes contain every row, so they are the whole table.
        return version
    return replace(version, since_ms=base.since_ms, chain=base.chain + 1, table=(*base.table, *changes))


def is_cut_due(version: Version, snapshot_every: int) -> bool:
    """Whether the version's whole table must be written to its own files."""
    return version.chain > snapshot_every


def cut(version: Version, table: Sequence[StoredFile]) -> Version:
    """The version with its whole table in the files ``table``.

    Raises:
        StateError: the files have another number of rows than the table.
    """
    rows = sum(file.rows for file in table)
    if rows != version.rows:
        raise StateError(
            f"The state of batch {time_text(version.batch_time_ms)} has {rows} rows where {version.rows} were counted.",
            remedy="This is a defect of headrace: please report it. The version was not written.",
        )
    ordered = tuple(sorted(table, key=lambda file: file.path))
    return replace(version, since_ms=version.batch_time_ms, chain=1, table=ordered)


FOLDER = "state"


class StateStore:
    """The state in ``storage``, the folder ``state`` of a stream."""

    def __init__(self, storage: LogStorage) -> None:
        self.storage = storage

    @classmethod
    def of(cls, stream: Stream) -> StateStore:
        """The store of the stream."""
        return cls(open_storage(stream.folder_url).below(FOLDER))

    @property
    def url(self) -> str:
        """The storage's URL, with which other processes open it; contains no secret."""
        return self.storage.url

    def names(self) -> list[VersionName]:
        """The version of each batch time, from its highest attempt; oldest first."""
        newest = {name.batch_time_ms: name for name in sorted(self._all_names())}
        return [newest[time] for time in sorted(newest)]

    def base_of(self, batch_time_ms: int) -> Version | None:
        """The version from which a batch's update starts: the newest before it, or None for an empty table.

        Raises:
            StateMissingError: that version has been pruned.
        """
        names = self.names()
        before = [name for name in names if name.batch_time_ms < batch_time_ms]
        if before:
            return self.read(before[-1])
        if names and self.read(names[0]).based_on is not None:
            raise self._pruned(f"The state from before batch {time_text(batch_time_ms)}", names[0])
        return None

    def drop_unused_initial(self, base: Version) -> bool:
        """Delete the version of the initial table, if ``base`` is it and no batch has written a version since. Returns
        whether it is deleted.

        Then the first batch has failed, perhaps because of what the initial table was. The table's files stay, since a
        newer attempt than this one may be reading them; those of tables that were dropped before are deleted.
        """
        is_initial = base.based_on is None and base.first_ms > base.batch_time_ms
        if not is_initial or self.later_than(base.batch_time_ms) or not self.storage.delete(base.name.path):
            return False
        listed = {file.path for file in (*base.table, *base.changes)}
        for path in self.storage.paths(DATA):
            if batch_time_of(path) == base.batch_time_ms and path not in listed:
                self.storage.delete(path)
        return True

    def version_of(self, batch_time_ms: int) -> Version:
        """The version that a batch wrote.

        Raises:
            StateMissingError: it does not exist, or not any more.
        """
        names = self.names()
        for name in names:
            if name.batch_time_ms == batch_time_ms:
                return self.read(name)
        if names and batch_time_ms < names[0].batch_time_ms and self.read(names[0]).based_on is not None:
            raise self._pruned(f"The state of batch {time_text(batch_time_ms)}", names[0])
        raise StateMissingError(
            f"There is no state of batch {time_text(batch_time_ms)} in {self.url}.",
            remedy='Run the batch\'s step "state" first.',
        )

    def is_built_on(self, batch_time_ms: int, until_ms: int) -> bool | None:
        """Whether the version from which the update of ``until_ms`` starts was built on the one of ``batch_time_ms``.

        None if that is unknown, because the version has been pruned.
        """
        names = [name for name in self.names() if name.batch_time_ms < until_ms]
        if not names or batch_time_ms < names[0].batch_time_ms:
            return None
        times = [name.batch_time_ms for name in names]
        if batch_time_ms not in times:
            return False
        after = names[times.index(batch_time_ms) + 1 :]
        if not after:
            return True
        based_on = self.read(after[0]).based_on
        return based_on is not None and based_on[0] == batch_time_ms

    def later_than(self, batch_time_ms: int) -> int:
        """The number of later batches that have a version."""
        return sum(name.batch_time_ms > batch_time_ms for name in self.names())

    def read(self, name: VersionName) -> Version:
        """Read the version with this name. Raises StateDamagedError if it cannot be read."""
        return self.read_document(name.path)

    def read_document(self, path: str) -> Version:
        """Read a version or a draft. Raises StateDamagedError if it is missing or damaged."""
        where = f"{self.url}/{path}"
        try:
            return Version.from_bytes(self.storage.read(path), where)
        except StoredFileMissingError as error:
            raise StateDamagedError(f"The state's version {where} is gone.", remedy="Run the batch again.") from error

    def write_draft(self, version: Version) -> str:
        """Write a draft that lists the files of a future version. Returns its path; the caller deletes it."""
        path = version.name.path.replace(VERSIONS, DRAFTS, 1)
        self.storage.write_atomically(path, version.to_bytes())
        return path

    def write(self, version: Version) -> None:
        """Write the version atomically, durable on return.

        Raises:
            StateFencedError: this attempt, or a later one, has already written a version of the batch.
        """
        self.check_not_fenced(version.batch_time_ms, version.attempt)
        try:
            self.storage.write_atomically(version.name.path, version.to_bytes(), exclusive=True)
        except StoredFileExistsError:
            raise self._fenced(version.batch_time_ms, version.attempt) from None

    def check_not_fenced(self, batch_time_ms: int, attempt: int) -> None:
        """Raise StateFencedError if this attempt, or a later one, has already written a version of the batch.

        A version that is written after this check is harmless: the highest attempt's version counts.
        """
        if any(name.batch_time_ms == batch_time_ms and name.attempt >= attempt for name in self._all_names()):
            raise self._fenced(batch_time_ms, attempt)

    def prune(self, keep_from_ms: int) -> int:
        """Delete the files that no batch from ``keep_from_ms`` on needs. Returns the number of deleted files.

        The versions of these batches, the version from which the first of them starts, and all files of their tables
        are kept. Older files are deleted, the oldest versions first, so that a crash leaves no gap between versions.
        """
        paths = self.storage.paths()
        names = _version_names(paths)
        before = [name.batch_time_ms for name in names if name.batch_time_ms < keep_from_ms]
        if not before:
            return 0
        needed_from = min(name.since_ms for name in names if name.batch_time_ms >= max(before))
        old = [path for path in paths if (written := batch_time_of(path)) is not None and written < needed_from]
        versions = sorted(path for path in old if path.startswith(f"{VERSIONS}/"))
        rest = (path for path in old if not path.startswith(f"{VERSIONS}/"))
        return sum(self.storage.delete(path) for path in (*versions, *rest))

    def _all_names(self) -> list[VersionName]:
        return _version_names(self.storage.paths(VERSIONS))

    def _pruned(self, what: str, oldest: VersionName) -> StateMissingError:
        return StateMissingError(
            f"{what} has been deleted: the oldest one in {self.url} is that of {time_text(oldest.batch_time_ms)}.",
            remedy="state.remember says how long the state is kept (by default the stream's remember).",
        )

    def _fenced(self, batch_time_ms: int, attempt: int) -> StateFencedError:
        return StateFencedError(
            f"{self.url} already has a state of batch {time_text(batch_time_ms)} by attempt {attempt} or a later one.",
            remedy="A later attempt has replaced this one. Run the batch again if it is not completed.",
        )


def _version_names(paths: Iterable[str]) -> list[VersionName]:
    return [name for name in map(VersionName.parse, paths) if name is not None]


class StateError(HeadraceError):
    """The base class of the state's errors."""


class StateDefinitionError(StateError):
    """``fields`` or ``keys`` of the stream's state cannot be used, or do not fit the stored table."""

    failure = Failure.CODE


class StateRowsError(StateError):
    """The update's result is not a DataFrame, has other columns than the fields, a null in a key, or a key twice."""

    failure = Failure.CODE


class StateMissingError(StateError):
    """The state of a batch is not stored: its update has not run, or the version has been pruned."""


class StateFencedError(StateError):
    """A later attempt at the same batch has written its version of the state."""


class StateDamagedError(StateError):
    """A file of the state is missing, damaged or not readable."""

    failure = Failure.FINAL
