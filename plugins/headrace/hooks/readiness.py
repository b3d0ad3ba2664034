"""Whether a batch time has all the blocks that it can still get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Readiness:
    """``complete`` is False where the wait was given up: blocks that come later join the next open batch."""

    ready: bool
    reason: str
    complete: bool = True


def blocks_ready(ledger: Ledger, stream: str, *, batch_time_ms: int, grace_ms: int) -> Readiness:
    """Whether there is anything to wait for at ``batch_time_ms``, by the ledger's clock.

    Waiting makes a batch fuller; correctness does not rest on it (rule 4 of the design). So it ends with the
    first of these: the batch is allocated already, no receiver lives, every live one has stored all it cut up to
    the batch time, or ``grace_ms`` have passed since.
    """
    if ledger.batches.find(stream, batch_time_ms) is not None:
        return Readiness(True, "the batch is allocated already")
    now_ms = ledger.now_ms()
    if now_ms < batch_time_ms:
        return Readiness(False, f"the batch's interval ends in {batch_time_ms - now_ms} ms")
    live = [row for row in ledger.receivers.list(stream) if row.alive(now_ms)]
    if not live:
        return Readiness(True, "no receiver is alive, so there is nothing to wait for")
    late = [str(row.receiver_id) for row in ledger.receivers.unsealed(stream, batch_time_ms)]
    if not late:
        return Readiness(True, f"all {len(live)} live receiver(s) have stored their blocks")
    if now_ms >= batch_time_ms + grace_ms:
        return Readiness(True, f"{', '.join(late)} did not seal within {grace_ms} ms", complete=False)
    return Readiness(False, f"waiting for {', '.join(late)}")
