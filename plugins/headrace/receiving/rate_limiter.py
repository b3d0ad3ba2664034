"""Bounds the rate of a receiver, as Spark's RateLimiter; blocks that wait to be stored slow it down besides."""

from __future__ import annotations

import threading

from headrace.clock import Clock

# How much unused rate may be caught up with at once. Short, so that a limit holds per block too.
_BURST_SECONDS = 0.2


class RateLimiter:
    """A token bucket of records. ``grant()`` says how many records may be taken now; safe for several threads."""

    def __init__(self, max_rate: float | None, clock: Clock) -> None:
        """``max_rate`` in records/s; None for no limit."""
        if max_rate is not None and max_rate <= 0:
            raise ValueError(f"max_rate is a positive number of records/s, got {max_rate}")
        self._rate = max_rate
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = 1.0
        self._filled = clock.monotonic()

    def grant(self, wanted: int) -> int:
        """How many of ``wanted`` records may be taken now, at least 0; what is taken is told to ``spend``."""
        with self._lock:
            if self._rate is None:
                return wanted
            self._fill(self._rate)
            return max(0, min(wanted, int(self._tokens)))

    def spend(self, records: int) -> None:
        """Account for ``records`` that were taken."""
        with self._lock:
            self._tokens -= records

    def delay(self) -> float:
        """Seconds until at least one record may be taken."""
        with self._lock:
            if self._rate is None:
                return 0.0
            self._fill(self._rate)
            return max(0.0, (1.0 - self._tokens) / self._rate)

    def _fill(self, rate: float) -> None:
        now = self._clock.monotonic()
        most = max(1.0, rate * _BURST_SECONDS)
        self._tokens = min(most, self._tokens + (now - self._filled) * rate)
        self._filled = now
