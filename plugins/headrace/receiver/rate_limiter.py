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
        """Follow the rate control's ``wanted`` records/s as far as ``max_rate`` allows; None: ``max_rate`` alone.

        What is not above 0 is no rate, and changes nothing.
        """
        if wanted is not None and wanted <= 0:
            return
        given = [rate for rate in (self._max_rate, wanted) if rate is not None]
        rate = min(given, default=None)
        with self._lock:
            if rate == self._rate:
                return
            if self._rate is None:
                # Without a limit nothing was counted: what was taken since is not held against it.
                self._tokens, self._filled = 1.0, self._clock.monotonic()
            else:
                self._fill(self._rate)
            self._rate = rate

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
