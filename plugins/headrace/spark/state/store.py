"""The versions of a stream's state: which there are, what a batch starts from, and which may go."""

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
    """The state below ``storage``, the folder ``state`` of a stream."""

    def __init__(self, storage: LogStorage) -> None:
        self.storage = storage

    @classmethod
    def of(cls, stream: Stream) -> StateStore:
        """The stream's own."""
        return cls(open_storage(stream.folder_url).below(FOLDER))

    @property
    def url(self) -> str:
        """Opens the same storage elsewhere; holds no secret."""
        return self.storage.url

    def names(self) -> list[VersionName]:
        """Each batch time's version, that of its highest attempt; oldest first."""
        newest = {name.batch_time_ms: name for name in sorted(self._all_names())}
        return [newest[time] for time in sorted(newest)]

    def base_of(self, batch_time_ms: int) -> Version | None:
        """The version that the update of a batch starts from: the newest before it, or None for an empty table.

        Raises:
            StateMissingError: it has been pruned.
        """
        names = self.names()
        before = [name for name in names if name.batch_time_ms < batch_time_ms]
        if before:
            return self.read(before[-1])
        if names and self.read(names[0]).based_on is not None:
            raise self._pruned(f"The state from before batch {time_text(batch_time_ms)}", names[0])
        return None

    def version_of(self, batch_time_ms: int) -> Version:
        """The version that a batch left.

        Raises:
            StateMissingError: there is none (any more).
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
        """Whether what the update of ``until_ms`` starts from was built on the version of an earlier batch time.

        None where that has been pruned, so that nobody knows.
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
        """How many batches after this one have a version."""
        return sum(name.batch_time_ms > batch_time_ms for name in self.names())

    def read(self, name: VersionName) -> Version:
        """The version of that name; StateDamagedError when it cannot be read."""
        return self.read_document(name.path)

    def read_document(self, path: str) -> Version:
        """A version, or a draft of one."""
        where = f"{self.url}/{path}"
        try:
            return Version.from_bytes(self.storage.read(path), where)
        except StoredFileMissingError as error:
            raise StateDamagedError(f"The state's version {where} is gone.", remedy="Run the batch again.") from error

    def write_draft(self, version: Version) -> str:
        """Tell of files that are no version yet; the draft's path, which the caller deletes."""
        path = version.name.path.replace(VERSIONS, DRAFTS, 1)
        self.storage.write_atomically(path, version.to_bytes())
        return path

    def write(self, version: Version) -> None:
        """Make the version exist: durable on return, or not there.

        Raises:
            StateFencedError: this attempt, or a later one, has a version of the batch already.
        """
        self.check_not_fenced(version.batch_time_ms, version.attempt)
        try:
            self.storage.write_atomically(version.name.path, version.to_bytes(), exclusive=True)
        except StoredFileExistsError:
            raise self._fenced(version.batch_time_ms, version.attempt) from None

    def check_not_fenced(self, batch_time_ms: int, attempt: int) -> None:
        """Raises StateFencedError when an attempt's version would come too late.

        What comes after this check all the same does no harm: the highest attempt's version is the batch's.
        """
        if any(name.batch_time_ms == batch_time_ms and name.attempt >= attempt for name in self._all_names()):
            raise self._fenced(batch_time_ms, attempt)

    def prune(self, keep_from_ms: int) -> int:
        """Delete what no batch from ``keep_from_ms`` on needs; the number of files deleted.

        Kept are these batches' versions, the one that the first of them starts from, and whatever their tables are
        made of. All older files go, oldest versions first, so that a crash half-way leaves an unbroken row of versions.
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
            f"{what} has been removed: the oldest that is kept in {self.url} is that of "
            f"{time_text(oldest.batch_time_ms)}.",
            remedy="How far back the state is kept is state.remember (by default the stream's remember).",
        )

    def _fenced(self, batch_time_ms: int, attempt: int) -> StateFencedError:
        return StateFencedError(
            f"Batch {time_text(batch_time_ms)} has a state of attempt {attempt} or a later one already in {self.url}.",
            remedy="This attempt came too late; run the batch again if it is not completed.",
        )


def _version_names(paths: Iterable[str]) -> list[VersionName]:
    return [name for name in map(VersionName.parse, paths) if name is not None]
