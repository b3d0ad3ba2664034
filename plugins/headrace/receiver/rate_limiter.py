"""Limits the rate of a receiver, as Spark's RateLimiter. (A full block queue slows a receiver down too.)"""

from __future__ import annotations

import threading

from headrace.clock import Clock

# How much unused rate may be used at once. Short, so that the limit also holds per block.
_BURST_SECONDS = 0.2


class RateLimiter:
    """A token bucket of records. ``grant()`` returns how many records may be taken now. Thread-safe."""

    def __init__(self, max_rate: float | None, clock: Clock) -> None:
        """``max_rate`` in records/s; None for no limit."""
        if max_rate is not None and max_rate <= 0:
            raise ValueError(f"max_rate is a positive number of records/s, got {max_rate}")
        self._max_rate = max_rate
        self._rate = max_rate
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = 1.0
        self._filled = clock.monotonic()

    @property
    def rate(self) -> float | None:
        """The rate in force, in records/s; None for no limit."""
        with self._lock:
            return self._rate

    def update(self, wanted: float | None) -> None:
        """Set the rate to ``wanted`` records/s, at most ``max_rate``; None means ``max_rate`` alone.

        A value that is not above 0 changes nothing.
        """
        if wanted is not None and wanted <= 0:
            return
        given = [rate for rate in (self._max_rate, wanted) if rate is not None]
        rate = min(given, default=None)
        with self._lock:
            if rate == self._rate:
                return
            if self._rate is None:
                # Nothing was counted without a limit, so records taken before do not count now.
                self._tokens, self._filled = 1.0, self._clock.monotonic()
            else:
                self._fill(self._rate)
            self._rate = rate

    def grant(self, wanted: int) -> int:
        """Return how many of ``wanted`` records may be taken now, at least 0. The caller reports them to ``spend``."""
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
        """Return the seconds until at least one record may be taken."""
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
