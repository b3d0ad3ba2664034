"""Determines when a stream began to receive; before that no batch can hold records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.ledger import Ledger

LONG_AGO_MS = 0


@dataclass(frozen=True, slots=True)
class Beginning:
    """When the stream's first receiver began, in milliseconds since the epoch; None if it has not, with the ``reason``.

    ``LONG_AGO_MS`` if the current receiver job is not the stream's first, or one of its receivers has been restarted.
    """

    at_ms: int | None
    reason: str = ""


def find_beginning(ledger: Ledger, stream: str) -> Beginning:
    """When the stream began to receive."""
    job = ledger.jobs.current(stream)
    if job is None:
        return Beginning(
            None, f"stream {stream!r} has no receiver job yet: its receiver DAG starts it, unless that is paused"
        )
    receivers = ledger.receivers.all(stream)
    if receivers:
        first_ms = min(receiver.registered_at_ms for receiver in receivers)
        # A receiver's row describes its newest instance, and has the time at which that one registered.
        is_first = job.epoch == 1 and not any(receiver.restarts for receiver in receivers)
        return Beginning(first_ms if is_first else LONG_AGO_MS)
    if job.alive(ledger.now_ms()):
        return Beginning(None, f"the receiver job (epoch {job.epoch}) is {job.state.value} and has no receivers yet")
    why = f": {job.error}" if job.error else ""
    return Beginning(None, f"the receiver job (epoch {job.epoch}) ended before its receivers began{why}")
