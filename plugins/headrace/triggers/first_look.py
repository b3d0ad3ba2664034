"""Polls for a moment before a task defers: a deferral and resume costs 2.2 s, so a short wait in place is cheaper."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.triggers.base import LedgerTrigger

FIRST_LOOK_SECONDS = 1.0
"""How long to poll before deferring, in seconds."""
_LOOK_EVERY = 0.1


def look_before_deferring(
    trigger: LedgerTrigger, ledger: Ledger, seconds: float | None = None
) -> dict[str, Any] | None:
    """Poll the trigger's `look` for ``seconds`` (by default ``FIRST_LOOK_SECONDS``), at least once. Returns its
    payload, or None."""
    deadline = time.monotonic() + (FIRST_LOOK_SECONDS if seconds is None else seconds)
    while True:
        payload = trigger.look(ledger)
        if payload is not None or time.monotonic() > deadline:
            return payload
        time.sleep(_LOOK_EVERY)
