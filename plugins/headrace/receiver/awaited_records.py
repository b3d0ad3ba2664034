"""Checks whether batches wait for records that only receivers can bring.

If so, receivers must not pause for lack of room: only a batch's cleanup frees room, so the pause would never end.
"""

from __future__ import annotations

from headrace.ledger import Ledger
from headrace.ledger.states import BatchState

_UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)


def only_receiving_helps(ledger: Ledger, stream: str, batch_by: str) -> bool:
    """Return whether only receiving lets batches complete.

    With ``batch_by="timestamp"`` a batch waits for records that are still in Kafka. Unless another batch can be
    finished first, it must get them, or the log stays full. Raises LedgerUnavailableError.
    """
    if batch_by != "timestamp" or ledger.batches.page(stream, 1, _UNFINISHED):
        return False
    waiting_ms = ledger.batches.next_unclaimed(stream)
    return waiting_ms is None or bool(ledger.positions.unpassed(stream, waiting_ms))
