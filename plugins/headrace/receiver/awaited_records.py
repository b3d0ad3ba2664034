"""Whether batches wait for records that only receivers can bring: receivers that pause for want of room would then
pause for good, since only a batch's cleanup makes room."""

from __future__ import annotations

from headrace.ledger import Ledger
from headrace.ledger.states import BatchState

_UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)


def only_receiving_helps(ledger: Ledger, stream: str, batch_by: str) -> bool:
    """By timestamp a batch waits for records that are still in Kafka: unless there is another one to be finished, it
    has to get them, or the log would stay as full as it is. Raises LedgerUnavailableError.
    """
    if batch_by != "timestamp" or ledger.batches.page(stream, 1, _UNFINISHED):
        return False
    waiting_ms = ledger.batches.next_unclaimed(stream)
    return waiting_ms is None or bool(ledger.positions.unpassed(stream, waiting_ms))
