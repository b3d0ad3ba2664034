"""Recovery by a new epoch's writer: inspects the last segments of earlier writers and cuts torn tails off."""

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
    """Earlier segments that no later header names yet, oldest first, with the torn tails and the damage found in them.

    A torn tail's ``kept`` is None where it could not be cut off."""

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
    """Reads the newest of ``names`` (in the order of writing) and cuts its torn tail off. Continues with older segments
    until one has a readable header, which names its own predecessors. The writers of ``names`` must be fenced.

    ``accepted`` returns the blocks that the ledger has accepted in a segment. Their bytes are never cut off.
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
                # This writer does not repair damage. The whole length is declared, so that every reader finds it too.
                length = max(storage.size(name.path), known.accepted_end)
                logger.error("The log of earlier writers is damaged: %s", error)
                damage.append(error)
            if scan.torn_tail is not None:
                torn_tails.append(_cut_off(storage, scan, scan.torn_tail))
            elif length:
                # A killed writer's last frame may never have been synced; the next header declares it as durable.
                storage.sync(name.path)
        except (SegmentMissingError, StoredFileMissingError):
            continue  # Cleanup has deleted it, before the file was opened or between two reads.
        segments.append(PreviousSegment(name.path, length, PreviousState.INHERITED))
        if scan.opening is not None:
            break
    return LogRecovery(tuple(reversed(segments)), tuple(reversed(torn_tails)), tuple(reversed(damage)))


def _read_through(
    storage: LogStorage, path: str, known: KnownOfSegment, progress: Callable[[], None]
) -> tuple[SegmentScan, DamagedFrameError | None]:
    """Scan a segment to its end or to the first damage. Bytes that the disk does not read in ``READ_TRIES`` tries are
    damage too: otherwise no writer could continue."""
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
                # The file is read in large pieces, so more than the bad sector is reported as lost.
                lost = known.accepted_between(scan.valid_bytes, None)
                return scan, DamagedFrameError(path, scan.valid_bytes, error.what.rstrip("."), lost, exact=False)
            logger.warning("%s It is read again.", error)
        else:
            return scan, None


def _cut_off(storage: LogStorage, scan: SegmentScan, tail: TornTail) -> TornTail:
    try:
        tail = cut_off(storage, scan, tail)
    except (RepairRefusedError, StorageError, OSError) as error:
        # The next header holds the segment's length, so readers ignore a tail that was not cut off.
        logger.warning("%s It could not be cut off: %s", tail, error)
    else:
        logger.warning("%s", tail)
    return tail
