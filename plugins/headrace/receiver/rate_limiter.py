"""Limits the rate of a receiver, as Spark's RateLimiter. (A full block queue slows a receiver down too.)"""

from __future__ import annotations

import threading

from headrace.clock import Clock

# How much unused rate may be used at once. Short, so that the limit also holds per block.
_BURST_SECONDS = 0.2


class RateLimiter:
    """A token bucket of records. ``grant()`` returns how many records may be taken now. Thread-safe."""

    def __init__(self, max_rate: float | None, clock: Clock, *, initial_rate: float | None = None) -> None:
        """Rates in records/s; None for no limit. ``initial_rate`` is in force, below ``max_rate``, until `update`."""
        for rate in (max_rate, initial_rate):
            if rate is not None and rate <= 0:
                raise ValueError(f"a rate is a positive number of records/s, got {rate}")
        self._max_rate = max_rate
        self._initial_rate = initial_rate
        self._rate = self._at_most(initial_rate)
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
        """Set the rate to ``wanted`` records/s, at most ``max_rate``; None means ``initial_rate``.

        A value that is not above 0 changes nothing.
        """
        if wanted is not None and wanted <= 0:
            return
        rate = self._at_most(self._initial_rate if wanted is None else wanted)
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
            # Unused rate up to now is bounded before, so that the end of a long pause gives no burst.
            if self._rate is not None:
                self._fill(self._rate)
            self._tokens -= records

    def delay(self) -> float:
        """Return the seconds until at least one record may be taken."""
        with self._lock:
            if self._rate is None:
                return 0.0
            self._fill(self._rate)
            return max(0.0, (1.0 - self._tokens) / self._rate)

    def _at_most(self, rate: float | None) -> float | None:
        return min((each for each in (self._max_rate, rate) if each is not None), default=None)

    def _fill(self, rate: float) -> None:
        now = self._clock.monotonic()
        most = max(1.0, rate * _BURST_SECONDS)
        self._tokens = min(most, self._tokens + (now - self._filled) * rate)
        self._filled = now
