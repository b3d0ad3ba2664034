"""The trigger of BlocksReadySensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.hooks.readiness import blocks_ready
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from headrace.ledger import Ledger


class BlocksReadyTrigger(LedgerTrigger):
    """Fires once no block is to be waited for at a batch time."""

    def __init__(
        self, *, ledger: str, stream: str, batch_time_ms: int, grace_ms: int, poll_interval: float = 0.2
    ) -> None:
        super().__init__(
            ledger=ledger,
            stream=stream,
            poll_interval=poll_interval,
            batch_time_ms=batch_time_ms,
            grace_ms=grace_ms,
        )

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        found = blocks_ready(ledger, self.stream, **self.parameters)
        return {"reason": found.reason, "complete": found.complete} if found.ready else None
