"""Bounds the rate of a receiver: ``min(max_rate, what the rate controller estimated)``, as Spark's RateLimiter."""

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
    def current_limit(self) -> float | None:
        """Records/s now, None when unlimited."""
        with self._lock:
            return self._rate

    def update(self, rate: float | None) -> None:
        """Take a new estimate in records/s (None: only ``max_rate`` holds). Zero or less is no rate: ignored."""
        if rate is not None and rate <= 0:
            return
        with self._lock:
            self._fill()
            if rate is None:
                self._rate = self._max_rate
            else:
                self._rate = rate if self._max_rate is None else min(rate, self._max_rate)

    def grant(self, wanted: int) -> int:
        """How many of ``wanted`` records may be taken now, at least 0; what is taken is told to ``spend``."""
        with self._lock:
            if self._rate is None:
                return wanted
            self._fill()
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
            self._fill()
            return max(0.0, (1.0 - self._tokens) / self._rate)

    def _fill(self) -> None:
        now = self._clock.monotonic()
        if self._rate is None:
            self._tokens = 1.0
        else:
            most = max(1.0, self._rate * _BURST_SECONDS)
            self._tokens = min(most, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
