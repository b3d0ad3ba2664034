"""Cuts torn tails off segments, and keeps a copy of each."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace

from headrace.wal.errors import RepairRefusedError, StorageError, StoredFileMissingError
from headrace.wal.scan import SegmentScan, TornTail
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

QUARANTINE = "torn"  # A directory below the log's root; its files do not have the suffix of segments.
NOTES = "torn-unreported"  # A directory below the log's root: one note for each cut that is not reported yet.
COPIES_KEPT = 10  # Per receiver: a receiver that crashes every minute must not fill the disk with copies.


def quarantine_path(tail: TornTail) -> str:
    """The path of the copy of a torn tail."""
    return f"{QUARANTINE}/{tail.segment}-{tail.offset}.torn"


def note_path(tail: TornTail) -> str:
    """The path of the note that a torn tail was cut off and not reported yet."""
    return f"{NOTES}/{tail.segment}-{tail.offset}.json"


def unreported_cuts(storage: LogStorage, directory: str) -> tuple[TornTail, ...]:
    """The torn tails of a receiver (``directory``, below the log's root) that were cut off but not reported, for
    example because the process was killed in between."""
    found = []
    for path in storage.paths(f"{NOTES}/{directory}"):
        try:
            note = json.loads(storage.read(path))
            found.append(TornTail(note["segment"], note["offset"], note["length"], note["reason"], None, note["kept"]))
        except StoredFileMissingError:
            continue  # A writer that was replaced has reported it meanwhile.
        except (ValueError, LookupError, TypeError):
            # This must not stop the receiver: the copy exists, and this line is logged each time.
            logger.exception("The note %s of a torn tail that was cut off cannot be read.", path)
    return tuple(found)


def cut_is_reported(storage: LogStorage, tail: TornTail) -> None:
    """Delete the note of a cut; to be called when the cut has been reported."""
    storage.delete(note_path(tail))


def cut_off(storage: LogStorage, scan: SegmentScan, tail: TornTail) -> TornTail:
    """Cut off the torn tail that a finished scan found. Returns the tail with the path of its copy (``kept``).

    ``storage`` is rooted at the log, and the segment's writer must be fenced. A segment without a whole header is
    deleted. The last ``COPIES_KEPT`` copies of a receiver are kept. May be repeated after a crash.

    A note of the cut is written before the cut and stays until ``cut_is_reported``: if this process is killed in
    between, the next one finds the note (``unreported_cuts``).

    Raises RepairRefusedError when a writer still has the local file open, and StorageError. The segment is then
    unchanged.
    """
    with storage.open(tail.segment) as file:
        torn = file.read_at(tail.offset, file.size - tail.offset)
    path = quarantine_path(tail)
    storage.write_atomically(path, torn)
    cut = replace(tail, kept=path)
    reported = {
        "segment": cut.segment,
        "offset": cut.offset,
        "length": cut.length,
        "reason": cut.reason,
        "kept": cut.kept,
    }
    storage.write_atomically(note_path(tail), json.dumps(reported).encode())
    try:
        storage.truncate(tail.segment, tail.offset)
    except (RepairRefusedError, StorageError, OSError):
        with contextlib.suppress(StorageError, OSError):
            cut_is_reported(storage, tail)
        raise
    with contextlib.suppress(StorageError, OSError):
        # The segment is cut already: an empty file or a surplus copy that stays is no reason to fail.
        if scan.opening is None:
            storage.delete(tail.segment)
        for old in storage.paths(path.rpartition("/")[0])[:-COPIES_KEPT]:
            storage.delete(old)
    return cut
