"""The trigger of BlocksReadySensor."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.hooks.readiness import blocks_ready
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.stream import Stream

# A batch may wait for hours while a receiver is down: its task's log says why, but not five times a second.
_TELL_SECONDS = 60.0


class BlocksReadyTrigger(LedgerTrigger):
    """Fires once no block is to be waited for at a batch time."""

    # Receivers seal several times a second; a batch should not wait for the poll.
    POLL_SECONDS = 0.2

    def __init__(
        self, *, ledger: str, stream: str, batch_time_ms: int, grace_ms: int, poll_interval: float | None = None
    ) -> None:
        super().__init__(
            ledger=ledger,
            stream=stream,
            poll_interval=poll_interval,
            batch_time_ms=batch_time_ms,
            grace_ms=grace_ms,
        )
        self._tell_at = 0.0

    @classmethod
    def of(
        cls, stream: Stream, batch_time_ms: int, *, grace: timedelta | None = None, poll_interval: float | None = None
    ) -> BlocksReadyTrigger:
        """The trigger for a batch time of a stream; ``grace`` is by default the stream's ``limits.seal_grace``."""
        return cls(
            ledger=stream.ledger,
            stream=stream.name,
            batch_time_ms=batch_time_ms,
            grace_ms=(stream.limits.seal_grace if grace is None else grace) // timedelta(milliseconds=1),
            poll_interval=poll_interval,
        )

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        found = blocks_ready(ledger, self.stream, **self.parameters)
        if found.ready:
            return {"reason": found.reason, "complete": found.complete}
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_SECONDS
            self.log.info("Not ready: %s.", found.reason)
        return None
