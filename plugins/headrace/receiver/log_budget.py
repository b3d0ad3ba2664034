"""Keeps a stream's log within its byte budget: decides when receiving pauses and resumes.

Cleanup deletes only what no batch needs any more (rule 9 of the design). So when batches fall behind, the log grows,
and at ``Limits.max_log_bytes`` receivers pause: Kafka keeps the rest. Records already read are still stored, so the log
may exceed its budget by the receivers' queues.
"""

from __future__ import annotations

import logging

from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.states import BatchState
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

# Receiving resumes below this share of the budget, so that it does not pause and resume with every segment.
RESUME_AT = 0.9
_LOOK_SECONDS = 1.0
_MIB = 1024 * 1024
_UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)


class LogBudget:
    """One receiver's view of the stream's budget. Used by the pushing thread.

    All receivers read the same sum in the ledger, each about once a second; in between, each counts what it stores.
    """

    def __init__(self, context: StreamContext, max_bytes: int) -> None:
        self._context = context
        self._max_bytes = max_bytes
        self._in_ledger = 0
        self._stored_since = 0
        self._next_look = 0.0
        self._exceeded = False

    def stored(self, nbytes: int) -> None:
        """Count a block that this receiver has stored."""
        self._stored_since += nbytes

    def look(self) -> str | None:
        """Return why receiving has to pause; None while it may continue."""
        if self._context.clock.monotonic() >= self._next_look:
            try:
                self._ask()
            except LedgerUnavailableError as error:
                logger.warning("The ledger does not answer, so the log's size is unknown: %s", error)
        elif not self._exceeded and self._in_ledger + self._stored_since >= self._max_bytes:
            # Exceeded by its own count; the ledger has to confirm it.
            self._next_look = 0.0
            return self.look()
        return self._reason() if self._exceeded else None

    def _ask(self) -> None:
        self._in_ledger = self._context.ledger.segments.stored_bytes(self._context.name)
        self._stored_since = 0
        self._next_look = self._context.clock.monotonic() + _LOOK_SECONDS
        bound = self._max_bytes * RESUME_AT if self._exceeded else self._max_bytes
        self._exceeded = self._in_ledger >= bound and not only_receiving_helps(self._context)

    def _reason(self) -> str:
        return (
            f"the log holds {self._in_ledger / _MIB:.1f} MiB of the {self._max_bytes / _MIB:.1f} MiB that are allowed "
            f"(limits.max_log_bytes); receiving continues below {self._max_bytes * RESUME_AT / _MIB:.1f} MiB, when "
            "batches have completed and cleanup has deleted what they needed"
        )


def only_receiving_helps(context: StreamContext) -> bool:
    """Return whether only receiving lets batches complete.

    Then receivers must not pause for lack of room: only a batch's cleanup frees room, so the pause would never end.

    With ``batch_by="timestamp"`` a batch waits for records that are still in Kafka. Unless another batch can be
    finished first, it must get them, or the log stays full. Raises LedgerUnavailableError.
    """
    ledger, name = context.ledger, context.name
    if context.stream.batch_by != "timestamp" or ledger.batches.page(name, 1, _UNFINISHED):
        return False
    waiting_ms = ledger.batches.next_unclaimed(name)
    return waiting_ms is None or bool(ledger.positions.unpassed(name, waiting_ms))
