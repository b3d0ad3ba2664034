"""The folder of one batch below a Parquet output's path: written to a hidden folder, then published as a whole.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.clock import time_text
from headrace.spark.outputs.writer import AttemptReplacedError, OutputError
from headrace.wal.storage import sync_file


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

    ``path`` is the output's folder, an absolute path. `take` and `publish` raise OutputFolderError if an operation of
    the file system fails.
    """

    path: str
    stream: str
    output: str
    target: str
    batch_time_ms: int
    attempt: int
    token: str

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
        if (record["stream"], record["output"]) != (self.stream, self.output):
            raise OutputFolderError(
                f"{self.published} belongs to output {record['output']!r} of stream {record['stream']!r}.",
                remedy="Give each output its own path.",
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
