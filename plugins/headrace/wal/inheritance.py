"""What a new epoch's writer finds of the writers before it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.wal.errors import DamagedFrameError, SegmentMissingError, StoredFileMissingError
from headrace.wal.headers import PreviousSegment, PreviousState
from headrace.wal.scan import TornTail, scan_segment
from headrace.wal.segments import SegmentName
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Earlier segments that no later header speaks of yet, oldest first; the bytes that a crash left behind them, and
    what is damaged in them."""

    segments: tuple[PreviousSegment, ...] = ()
    torn_tails: tuple[TornTail, ...] = ()
    damage: tuple[DamagedFrameError, ...] = ()


def find_inheritance(storage: LogStorage, names: list[SegmentName]) -> Inheritance:
    """Looks at the newest of ``names`` (in the order of writing), and at those before it as long as they have no
    header that could speak of their own predecessors."""
    segments: list[PreviousSegment] = []
    torn_tails: list[TornTail] = []
    damage: list[DamagedFrameError] = []
    for name in reversed(names):
        scan = scan_segment(storage, name.path, newest=True)
        try:
            try:
                for _ in scan:
                    pass
                length = scan.valid_bytes
            except DamagedFrameError as error:
                # Not this writer's to mend. All of it is declared, so that every reader meets the damage too.
                length = storage.size(name.path)
                logger.error("The log is damaged where this writer goes on: %s", error)
                damage.append(error)
        except (SegmentMissingError, StoredFileMissingError):
            continue  # Cleanup was faster: before the file was opened, or between two reads of it.
        if scan.torn_tail is not None:
            logger.warning("%s", scan.torn_tail)
            torn_tails.append(scan.torn_tail)
        segments.append(PreviousSegment(name.path, length, PreviousState.INHERITED))
        if scan.opening is not None:
            break
    return Inheritance(tuple(reversed(segments)), tuple(reversed(torn_tails)), tuple(reversed(damage)))
