"""The ledger's clock, estimated: batch times come from it (rule 4), and asking it per block costs a round trip."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from headrace.clock import Clock

# The best of the last samples wins: half its round trip bounds the error. Sixteen samples at one a heartbeat
# forget a stepped or drifting clock within seconds.
_SAMPLES = 16


class LedgerClock:
    """Tells the ledger's time in epoch milliseconds without asking the ledger, never going back.

    ``sample()`` asks the ledger and notes the difference to the local monotonic clock, taking the middle of the
    round trip as the moment of the answer. Safe for several threads.
    """

    def __init__(self, read: Callable[[], int], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._latest_ms = 0

    def sample(self) -> None:
        """One round trip to the ledger; raises what the ledger raises."""
        before = self._clock.monotonic()
        ledger_ms = self._read()
        self.observe(before, ledger_ms)

    def observe(self, asked_at: float, ledger_ms: int) -> None:
        """Take an answer that has just come: ``asked_at`` is the local ``monotonic()`` when it was asked for."""
        answered_at = self._clock.monotonic()
        with self._lock:
            self._samples.append((answered_at - asked_at, ledger_ms - (asked_at + answered_at) * 500.0))

    def now_ms(self) -> int:
        """The ledger's time as estimated. Raises RuntimeError before the first sample."""
        with self._lock:
            if not self._samples:
                raise RuntimeError("the ledger's clock was never sampled")
            _, offset_ms = min(self._samples)
            self._latest_ms = max(self._latest_ms, int(self._clock.monotonic() * 1000.0 + offset_ms))
            return self._latest_ms
