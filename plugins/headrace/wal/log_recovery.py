"""What a new epoch's writer finds of the writers before it, and what it mends of that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from headrace.wal.errors import (
    DamagedFrameError,
    RepairRefusedError,
    SegmentMissingError,
    StorageError,
    StoredFileMissingError,
    is_unreadable,
)
from headrace.wal.headers import PreviousSegment, PreviousState
from headrace.wal.log_scan import Accepted
from headrace.wal.lost_ranges import KnownOfSegment
from headrace.wal.repair import cut_off
from headrace.wal.scan import SegmentScan, TornTail, scan_segment
from headrace.wal.segments import SegmentName
from headrace.wal.storage import LogStorage
from headrace.wal.window import READ_TRIES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogRecovery:
    """Earlier segments that no later header speaks of yet, oldest first; the bytes that a crash left behind them, cut
    off where that was possible (``kept``), and what is damaged in them."""

    segments: tuple[PreviousSegment, ...] = ()
    torn_tails: tuple[TornTail, ...] = ()
    damage: tuple[DamagedFrameError, ...] = ()


def recover_log(
    storage: LogStorage,
    names: list[SegmentName],
    accepted: Accepted | None = None,
    *,
    progress: Callable[[], None] = lambda: None,
) -> LogRecovery:
    """Looks at the newest of ``names`` (in the order of writing), and at those before it as long as they have no
    header that could speak of their own predecessors; cuts torn tails off. Their writers must be fenced.

    ``accepted``: the blocks that the ledger has accepted in a segment. Bytes on which it relies are never cut off.
    ``progress`` is called after each frame that was read.
    """
    segments: list[PreviousSegment] = []
    torn_tails: list[TornTail] = []
    damage: list[DamagedFrameError] = []
    for name in reversed(names):
        known = KnownOfSegment(accepted=None if accepted is None else accepted(name.path))
        try:
            scan, error = _read_through(storage, name.path, known, progress)
            length = scan.valid_bytes
            if error is not None:
                # Not this writer's to mend. All of it is declared, so that every reader meets the damage too.
                length = max(storage.size(name.path), known.accepted_end)
                logger.error("The log is damaged where this writer goes on: %s", error)
                damage.append(error)
            if scan.torn_tail is not None:
                torn_tails.append(_cut_off(storage, scan, scan.torn_tail))
            elif length:
                # A killed writer's last frame may never have been synced; from here on it is said to be there.
                storage.sync(name.path)
        except (SegmentMissingError, StoredFileMissingError):
            continue  # Cleanup was faster: before the file was opened, or between two reads of it.
        segments.append(PreviousSegment(name.path, length, PreviousState.INHERITED))
        if scan.opening is not None:
            break
    return LogRecovery(tuple(reversed(segments)), tuple(reversed(torn_tails)), tuple(reversed(damage)))


def _read_through(
    storage: LogStorage, path: str, known: KnownOfSegment, progress: Callable[[], None]
) -> tuple[SegmentScan, DamagedFrameError | None]:
    """The scan of a segment, finished or ended by damage. What a disk refuses again and again to read is damage too:
    no writer could ever go on otherwise."""
    tries = 0
    while True:
        tries += 1
        scan = scan_segment(storage, path, newest=True, known=known)
        try:
            for _ in scan:
                progress()
        except DamagedFrameError as error:
            return scan, error
        except StorageError as error:
            if not is_unreadable(error):
                raise
            if tries == READ_TRIES:
                # It is read in large pieces: more than the sector that is bad is given as lost.
                lost = known.accepted_between(scan.valid_bytes, None)
                return scan, DamagedFrameError(path, scan.valid_bytes, error.what.rstrip("."), lost, exact=False)
            logger.warning("%s It is tried again.", error)
        else:
            return scan, None


def _cut_off(storage: LogStorage, scan: SegmentScan, tail: TornTail) -> TornTail:
    try:
        tail = cut_off(storage, scan, tail)
    except (RepairRefusedError, StorageError, OSError) as error:
        # The next header says how long the segment is, so readers pass over the tail where it stands too.
        logger.warning("%s It stays where it is: %s", tail, error)
    else:
        logger.warning("%s", tail)
    return tail
