"""Adds up what a stream's receivers report, and keeps it over time as samples in the ledger."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.ledger.models import ReceiverRow, SampleRow
from headrace.stream_context import StreamContext

SAMPLE_SECONDS = 10.0
"""One row each ten seconds is 8,640 a day, some 700 KB."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What live receivers report, together. ``lag`` leaves out ``lag_unknown`` partitions; ``input_rate`` is in records
    per second. None: not known."""

    input_rate: float
    lag: int | None
    lag_unknown: int
    lag_seconds: float | None
    queue_bytes: int
    paused: bool


def numbers(receivers: Collection[ReceiverRow], now_ms: int) -> Numbers:
    """The sums over the live receivers."""
    live = [each for each in receivers if each.alive(now_ms)]
    stats = [each.stats for each in live if "total_lag" in each.stats]
    seconds = [each.get("lag_seconds") for each in stats]
    known = [each for each in seconds if each is not None]
    lags = [each["total_lag"] for each in stats if each["total_lag"] is not None]
    return Numbers(
        input_rate=round(sum(each.get("rate", 0.0) for each in stats), 1),
        lag=sum(lags) if lags else None,
        lag_unknown=sum(each.get("lag_unknown", 0) for each in stats),
        lag_seconds=max(known) if known and len(known) == len(seconds) else None,
        queue_bytes=sum(each.get("queued_bytes", 0) for each in stats),
        paused=any(each.paused_reason for each in live),
    )


class Sampler:
    """Adds a sample each ten seconds. Used by the tracker's loop."""

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self._next = 0.0

    def look(self, receivers: Collection[ReceiverRow], now_ms: int) -> None:
        """Add a sample if one is due. Raises LedgerUnavailableError; the next one is then due ten seconds later."""
        now = self._context.clock.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        ledger, name = self._context.ledger, self._context.name
        found = numbers(receivers, now_ms)
        ledger.samples.add(
            SampleRow(
                stream=name,
                at_ms=now_ms,
                input_rate=found.input_rate,
                # The lag of some partitions would look like the lag of all.
                lag=None if found.lag_unknown else found.lag,
                lag_seconds=found.lag_seconds,
                queue_bytes=found.queue_bytes,
                paused=found.paused,
                log_bytes=ledger.segments.stored_bytes(name),
            )
        )
