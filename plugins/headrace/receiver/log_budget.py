"""Keeps a stream's log within its byte budget: decides when receiving pauses and resumes.

Cleanup deletes only what no batch needs any more (rule 9 of the design). So when batches fall behind, the log grows,
and at ``Limits.max_log_bytes`` receivers pause: Kafka keeps the rest. Records already read are still stored, so the log
may exceed its budget by the receivers' queues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.clock import Clock
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.states import BatchState
from headrace.stream import Stream

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

    def __init__(
        self, stream: Stream, ledger: Ledger, max_bytes: int, own_bytes: Callable[[], int], clock: Clock
    ) -> None:
        """``own_bytes`` returns how many bytes this receiver has stored since it began."""
        self._stream = stream
        self._ledger = ledger
        self._max_bytes = max_bytes
        self._own_bytes = own_bytes
        self._clock = clock
        self._stored = 0
        self._own_then = 0
        self._next_look = 0.0
        self._exceeded = False

    def look(self) -> str | None:
        """Return why receiving has to pause; None while it may continue."""
        if self._clock.monotonic() >= self._next_look:
            try:
                self._ask()
            except LedgerUnavailableError as error:
                logger.warning("the log's size is not known, the ledger does not answer: %s", error)
        elif not self._exceeded and self._now() >= self._max_bytes:
            # Exceeded by its own count; the ledger has to confirm it.
            self._next_look = 0.0
            return self.look()
        return self._reason() if self._exceeded else None

    def _ask(self) -> None:
        own = self._own_bytes()
        name = self._stream.name
        self._stored = self._ledger.segments.stored_bytes(name)
        self._own_then = own
        self._next_look = self._clock.monotonic() + _LOOK_SECONDS
        bound = self._max_bytes * RESUME_AT if self._exceeded else self._max_bytes
        self._exceeded = self._stored >= bound and not only_receiving_helps(self._ledger, name, self._stream.batch_by)

    def _now(self) -> int:
        return self._stored + self._own_bytes() - self._own_then

    def _reason(self) -> str:
        return (
            f"the log holds {self._stored / _MIB:.1f} MiB of the {self._max_bytes / _MIB:.1f} MiB that it may "
            f"(limits.max_log_bytes); receiving goes on below {self._max_bytes * RESUME_AT / _MIB:.1f} MiB, when "
            "batches have completed and cleanup has deleted what they needed"
        )


def only_receiving_helps(ledger: Ledger, stream: str, batch_by: str) -> bool:
    """Return whether only receiving lets batches complete.

    Then receivers must not pause for lack of room: only a batch's cleanup frees room, so the pause would never end.

    With ``batch_by="timestamp"`` a batch waits for records that are still in Kafka. Unless another batch can be
    finished first, it must get them, or the log stays full. Raises LedgerUnavailableError.
    """
    if batch_by != "timestamp" or ledger.batches.page(stream, 1, _UNFINISHED):
        return False
    waiting_ms = ledger.batches.next_unclaimed(stream)
    return waiting_ms is None or bool(ledger.positions.unpassed(stream, waiting_ms))
