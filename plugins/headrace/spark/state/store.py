"""Lists, reads, writes and prunes the versions of a stream's state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace.clock import time_text
from headrace.spark.state.errors import StateDamagedError, StateFencedError, StateMissingError
from headrace.spark.state.version import DRAFTS, VERSIONS, Version, VersionName, batch_time_of
from headrace.wal.errors import StoredFileExistsError, StoredFileMissingError
from headrace.wal.storage import LogStorage, open_storage

if TYPE_CHECKING:
    from headrace.stream import Stream

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
