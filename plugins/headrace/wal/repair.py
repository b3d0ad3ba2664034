"""Cutting a torn tail off, with a copy of it kept."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace

from headrace.wal.errors import RepairRefusedError, StorageError, StoredFileMissingError
from headrace.wal.lost_ranges import KnownOfSegment
from headrace.wal.scan import SegmentScan, TornTail, scan_segment
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

QUARANTINE = "torn"  # A directory below the log's root; its files do not end like segments do.
NOTES = "torn-untold"  # Another one: a note for each cut, until somebody was told of it.
COPIES_KEPT = 10  # Of each receiver: a receiver that crashes every minute must not fill the disk with them.


def quarantine_path(tail: TornTail) -> str:
    """Where the bytes of a torn tail are kept."""
    return f"{QUARANTINE}/{tail.segment}-{tail.offset}.torn"


def note_path(tail: TornTail) -> str:
    """Where it stands that a torn tail was cut off and nobody was told yet."""
    return f"{NOTES}/{tail.segment}-{tail.offset}.json"


def untold_cuts(storage: LogStorage, directory: str) -> tuple[TornTail, ...]:
    """The torn tails of a receiver (``directory``, below the log's root) that were cut off and of which nobody was
    told: who cut them was killed, or had no one to tell."""
    found = []
    for path in storage.paths(f"{NOTES}/{directory}"):
        try:
            note = json.loads(storage.read(path))
            found.append(TornTail(note["segment"], note["offset"], note["length"], note["reason"], None, note["kept"]))
        except StoredFileMissingError:
            continue  # A writer that was replaced has told of it meanwhile.
        except (ValueError, LookupError, TypeError):
            # No reason to receive nothing: the copy is there, and this line is said each time.
            logger.exception("The note %s of a torn tail that was cut off cannot be read.", path)
    return tuple(found)


def cut_is_reported(storage: LogStorage, tail: TornTail) -> None:
    """To be called when it is: the note of it goes."""
    storage.delete(note_path(tail))


def repair_torn_tail(storage: LogStorage, segment: str, *, known: KnownOfSegment | None = None) -> TornTail | None:
    """Cut the torn tail of ``segment``, the last of its writer, after copying it aside; what was cut, None if nothing.

    ``storage`` is rooted at the log. With ``known`` nothing is cut on which the ledger relies. A segment without even
    a whole header is removed. The writer must be fenced, and a local file that is still open in one is refused
    (RepairRefusedError), and nothing is cut. DamagedFrameError when the damage is no torn tail: that is not repaired
    here. May be repeated after a crash. The last ``COPIES_KEPT`` copies of a receiver are kept.
    """
    scan = scan_segment(storage, segment, newest=True, known=known)
    for _ in scan:
        pass
    return None if scan.torn_tail is None else cut_off(storage, scan, scan.torn_tail)


def cut_off(storage: LogStorage, scan: SegmentScan, tail: TornTail) -> TornTail:
    """Cut off what a finished scan found; the tail with the place of its copy. Raises RepairRefusedError and
    StorageError, and then the segment is as it was.

    A note of the cut is there before it, and stays until ``cut_is_told``: whoever is killed between the two leaves it
    to the next one (``untold_cuts``).
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
        # The segment is cut: an empty file, or a copy too many, is no failure of that.
        if scan.opening is None:
            storage.delete(tail.segment)
        for old in storage.paths(path.rpartition("/")[0])[:-COPIES_KEPT]:
            storage.delete(old)
    return cut
