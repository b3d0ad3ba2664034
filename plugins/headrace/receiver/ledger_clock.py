"""Estimates the ledger's clock: batch times come from it (rule 4), and asking it per block costs a round trip."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from headrace.clock import Clock

# The sample with the shortest round trip is used: half of it bounds the error. With 16 samples, one per heartbeat, a
# stepped or drifting clock is corrected within seconds.
_SAMPLES = 16
# An estimate that is earlier by more than this is no error of estimation: the ledger's clock was ahead.
_WAS_AHEAD_MS = 5_000


class LedgerClock:
    """Returns the ledger's time in epoch milliseconds without asking the ledger. It goes back only if the ledger's
    clock was ahead.

    ``sample()`` asks the ledger and notes the difference to the local monotonic clock. The middle of the round trip
    counts as the moment of the answer. Thread-safe.
    """

    def __init__(self, read: Callable[[], int], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._latest_ms = 0

    def sample(self) -> None:
        """Ask the ledger for its time, in one round trip. Raises what the ledger raises."""
        before = self._clock.monotonic()
        ledger_ms = self._read()
        self.observe(before, ledger_ms)

    def observe(self, asked_at: float, ledger_ms: int) -> None:
        """Add a sample that has just arrived; ``asked_at`` is the local ``monotonic()`` at the request."""
        answered_at = self._clock.monotonic()
        with self._lock:
            self._samples.append((answered_at - asked_at, ledger_ms - (asked_at + answered_at) * 500.0))

    def now_ms(self) -> int:
        """Return the estimated ledger time. Raises RuntimeError before the first sample."""
        with self._lock:
            if not self._samples:
                raise RuntimeError("the ledger's clock was never sampled")
            _, offset_ms = min(self._samples)
            estimate_ms = int(self._clock.monotonic() * 1000.0 + offset_ms)
            if not 0 < self._latest_ms - estimate_ms <= _WAS_AHEAD_MS:
                self._latest_ms = estimate_ms
            return self._latest_ms
