"""A stream's folder in its storage. Nothing is written, replaced or deleted in it for a ledger that is behind it (rule
10 of the design).

A ledger that was restored from an older copy looks as good as the one that it replaced, and would use batch times,
attempts and epochs again that are used. So the folder has a mark, a file that names the newest event that the stream's
ledger had when the mark was left, and the last block that it had accepted from each receiver. A ledger that does not
have this event, or fewer blocks, is not the one that wrote the folder.

Marks are left once a batch is allocated, before an attempt writes anything, once results are written, and by the
receiver job with its sign of life. What happens between two marks is as if the process had been killed there: the next
one finds an unused manifest, or an attempt whose lease runs out. So a copy from in between does no harm.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.blocks import BlockHandle
from headrace.errors import Failure, HeadraceError
from headrace.ledger.states import EventKind
from headrace.wal.errors import SegmentMissingError, StoredFileMissingError
from headrace.wal.scan import RecoveryMode, ScannedFrame, scan_segment

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.events import Standing
    from headrace.wal.log_storage import Data, LogStorage, RandomAccessFile, SegmentFile

MARK_PATH = "ledger-mark.json"
"""Below the stream's folder."""

CHECKED_SECONDS = 10.0
"""How long one check of a process is good for all of its writes. A receiver writes to an object store five times a
second."""

logger = logging.getLogger(__name__)


class LedgerSetBackError(HeadraceError):
    """A file of the stream is ahead of its ledger."""

    failure = Failure.FINAL


def set_back(stream_name: str, storage_url: str, file_url: str, ahead: str) -> LedgerSetBackError:
    """The error for a ledger that is older than this file of the stream. ``ahead`` says by what."""
    return LedgerSetBackError(
        f"{file_url} is ahead of the ledger of stream {stream_name!r}: {ahead}. The ledger was replaced by an older "
        "copy, or a process with another ledger writes to this folder.",
        remedy="Name the ledger that the stream had last. If it is lost, keep this one aside, name a new and empty "
        f"one, and rebuild it: `headrace streams recover {stream_name} --storage {storage_url}`.",
    )


def unknown_block(stream_name: str, ledger: Ledger, log: LogStorage, path: str) -> str | None:
    """The first block in a receiver's newest segment that the ledger had accepted, by a later frame of the segment, and
    that the ledger does not have now; None if there is none. Unlike epochs, this shows a copy that was restored under a
    running job, which schedules its receivers again.

    Raises:
        LogVersionError: the segment is of a version that this headrace does not read.
        StorageError: the storage cannot be read.
    """
    scan = scan_segment(log, path, newest=True, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
    proven = dict[BlockHandle, str]()
    before: ScannedFrame | None = None
    try:
        for frame in scan:
            accepted = frame.header.last_accepted_sequence
            # As `LogScan.settled`: only the next frame of the same file shows it.
            if before is not None and accepted is not None and before.header.sequence <= accepted:
                header = before.header
                proven[before.handle] = f"block {header.sequence} of receiver {header.receiver} in epoch {header.epoch}"
            before = frame
    except (SegmentMissingError, StoredFileMissingError):
        return None
    known = {block.info.handle for block in ledger.blocks.of_segment(stream_name, path)}
    unknown = next((what for handle, what in proven.items() if handle not in known), None)
    # Cleanup deletes a segment's file before the rows of its blocks.
    return unknown if unknown is not None and log.exists(path) else None


@dataclass(frozen=True, slots=True)
class Mark:
    """What a ledger had when it left the mark: its newest event of the stream (events of blocks do not count), and the
    epoch and the last accepted block of each receiver, by its input and index. ``attempt`` is the highest number that
    an attempt at a batch has had, by whatever ledger: a rebuilt one has to be above it."""

    event_id: int
    at_ms: int
    kind: str
    attempt: int = 0
    receivers: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The mark as plain JSON."""
        return {
            "event_id": self.event_id,
            "at_ms": self.at_ms,
            "kind": self.kind,
            "attempt": self.attempt,
            "receivers": [[*receiver, *accepted] for receiver, accepted in sorted(self.receivers.items())],
        }

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Mark:
        """Read what `to_json` gave. Raises LookupError, TypeError or ValueError for anything else."""
        receivers = {
            (str(input_id), int(index)): (int(epoch), int(sequence))
            for input_id, index, epoch, sequence in fields.get("receivers", ())
        }
        event = int(fields["event_id"]), int(fields["at_ms"]), str(fields["kind"])
        return cls(*event, int(fields.get("attempt", 0)), receivers)

    @property
    def event(self) -> tuple[int, int, str]:
        """The event by its id, time and kind. A ledger that was set back gives the same ids to other events."""
        return self.event_id, self.at_ms, self.kind


def read_mark(folder: LogStorage) -> Mark | None:
    """The mark in a stream's folder. None: there is none, or it is damaged.

    Raises:
        StorageError: the storage cannot be read.
    """
    try:
        return Mark.of_json(json.loads(folder.read(MARK_PATH)))
    except StoredFileMissingError:
        return None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        logger.warning("The mark %s/%s is damaged and does not count: %r", folder.url, MARK_PATH, error)
        return None


class LedgerMark:
    """The mark in one stream's folder, and one ledger. Safe across threads."""

    def __init__(self, stream_name: str, ledger: Ledger, folder: LogStorage) -> None:
        """``folder`` is the stream's folder, as it was opened."""
        self._stream_name = stream_name
        self._ledger = ledger
        self._folder = folder
        self._lock = threading.Lock()
        self._checked_at: float | None = None

    def check(self) -> Mark | None:
        """Return the mark in the folder; None if there is none.

        Raises:
            LedgerSetBackError: the ledger lacks what the mark names.
            StorageError: the storage cannot be read.
        """
        return self._check()[0]

    def _check(self) -> tuple[Mark | None, Standing]:
        # The file first: a ledger that is in use gets ahead of it meanwhile, and never behind.
        mark = read_mark(self._folder)
        standing = self._ledger.events.standing(self._stream_name, 0 if mark is None else mark.event_id)
        if mark is not None and (ahead := self._ahead(mark, standing)) is not None and self._holds_data():
            root = self._folder.url.rpartition("/")[0]
            raise set_back(self._stream_name, root, f"{self._folder.url}/{MARK_PATH}", ahead)
        self._checked_at = time.monotonic()
        return mark, standing

    def check_if_due(self) -> None:
        """Check, unless this process has done so within `CHECKED_SECONDS`."""
        with self._lock:
            if self._checked_at is None or time.monotonic() - self._checked_at > CHECKED_SECONDS:
                self.check()

    def leave(self, *, attempt: int = 0) -> None:
        """Check, then leave a mark of what the ledger has now, unless the one in the folder says the same.

        Args:
            attempt: the number of an attempt that begins or has ended.

        Raises:
            LedgerSetBackError: as `check`.
            StorageError: the mark cannot be written.
        """
        before, standing = self._check()
        if standing.newest is None:
            return
        # The first mark, of a stream of an earlier version for example, has the numbers of all attempts before.
        known = self._ledger.attempts.highest(self._stream_name) if before is None else before.attempt
        mark = Mark(*standing.newest, max(attempt, known), standing.receivers)
        if mark != before:
            self._folder.write_atomically(MARK_PATH, json.dumps(mark.to_json()).encode())

    def _ahead(self, mark: Mark, standing: Standing) -> str | None:
        """What the ledger lacks; None if it has all that the mark names."""
        if standing.found != mark.event and not self._is_rebuilt_from(mark):
            return f"it names event {mark.event_id}, {mark.kind}, which the ledger does not have"
        for (input_id, index), (epoch, sequence) in mark.receivers.items():
            known = standing.receivers.get((input_id, index), (0, -1))
            if known < (epoch, sequence):
                return (
                    f"block {sequence} of receiver {self._stream_name}/{input_id}/{index} in epoch {epoch} was "
                    f"accepted, and the ledger's last one is {known[1]} in epoch {known[0]}"
                )
        return None

    def _is_rebuilt_from(self, mark: Mark) -> bool:
        """Whether the ledger was rebuilt from the folder as it was with this mark."""
        rebuilt = self._ledger.events.latest(self._stream_name, [EventKind.LEDGER_REBUILT], 1)
        return any(event.payload.get("mark") == mark.to_json() for event in rebuilt)

    def _holds_data(self) -> bool:
        """Whether there is anything in the folder that a ledger could be behind of. A stream that received nothing may
        begin again with an empty ledger."""
        return any(self._folder.paths(folder) for folder in ("checkpoints", "manifests", "log"))


class StreamFolder:
    """A stream's folder, or one below it, in which a ledger that is behind it cannot write: each writing call of
    `headrace.wal.log_storage.LogStorage` checks the mark first, if that is due, and may raise LedgerSetBackError."""

    def __init__(self, storage: LogStorage, mark: LedgerMark) -> None:
        self._storage = storage
        self.mark = mark
        self.url = storage.url
        self.appends = storage.appends

    def below(self, path: str) -> StreamFolder:
        return StreamFolder(self._storage.below(path), self.mark)

    def create_segment(self, path: str) -> SegmentFile:
        self.mark.check_if_due()
        return self._storage.create_segment(path)

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        self.mark.check_if_due()
        self._storage.write_atomically(path, data, exclusive=exclusive)

    def delete(self, path: str) -> bool:
        self.mark.check_if_due()
        return self._storage.delete(path)

    def truncate(self, path: str, length: int) -> None:
        self.mark.check_if_due()
        self._storage.truncate(path, length)

    def remove_partial_writes(self, older_than_s: float) -> int:
        self.mark.check_if_due()
        return self._storage.remove_partial_writes(older_than_s)

    def read(self, path: str) -> bytes:
        return self._storage.read(path)

    def open(self, path: str) -> RandomAccessFile:
        return self._storage.open(path)

    def size(self, path: str) -> int:
        return self._storage.size(path)

    def exists(self, path: str) -> bool:
        return self._storage.exists(path)

    def paths(self, prefix: str = "") -> list[str]:
        return self._storage.paths(prefix)

    def sync(self, path: str) -> None:
        self._storage.sync(path)
