"""What a new epoch's writer finds of the writers before it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.wal.errors import DamagedFrameError, StoredFileMissingError
from headrace.wal.headers import PreviousSegment, PreviousState
from headrace.wal.scan import scan_segment
from headrace.wal.segments import SegmentName
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Earlier segments that no later header speaks of yet, oldest first, and the bytes a crash left behind them."""

    segments: tuple[PreviousSegment, ...]
    torn_tail_bytes: int


def find_inheritance(storage: LogStorage, names: list[SegmentName]) -> Inheritance:
    """Looks at the newest of ``names`` (in the order of writing), and at those before it as long as they have no
    header that could speak of their own predecessors."""
    found: list[PreviousSegment] = []
    torn = 0
    for name in reversed(names):
        scan = scan_segment(storage, name.path, newest=True)
        length = 0
        try:
            for _ in scan:
                pass
            length = scan.valid_bytes
        except StoredFileMissingError:
            continue  # Cleanup was faster.
        except DamagedFrameError as error:
            # Not this writer's to mend. All of it is declared, so that every reader meets the damage too.
            logger.error("The log is damaged where this writer goes on: %s", error)
            length = storage.size(name.path)
        if scan.torn_tail is not None:
            logger.warning("%s", scan.torn_tail)
            torn += scan.torn_tail.length
        found.append(PreviousSegment(name.path, length, PreviousState.INHERITED))
        if scan.opening is not None:
            break
    return Inheritance(tuple(reversed(found)), torn)
