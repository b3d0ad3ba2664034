"""Clocks, and times as text and as numbers. What needs the time gets a clock, so that a test can control it.

Batch times come from the ledger's clock (rule 4 of the design); these clocks time loops and estimate the ledger's.
"""

from __future__ import annotations

import calendar
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Protocol


def time_text(time_ms: int | None) -> str:
    """Epoch milliseconds as UTC in ISO 8601, with milliseconds unless they are zero. The bare number if it is outside
    the calendar's range, "-" for None."""
    if time_ms is None:
        return "-"
    try:
        at = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"
    return at.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds").replace("+00:00", "Z")


def times_text(times_ms: Iterable[int]) -> str:
    """Several times as `time_text`, separated by commas."""
    return ", ".join(map(time_text, times_ms))


def to_ms(at: datetime) -> int:
    """Milliseconds since the epoch, rounded down, in integer arithmetic; a time without a zone is in UTC. Accepts
    pendulum's dates too.

    Raises OverflowError for a time that is not between the years 1 and 9999 in UTC.
    """
    return calendar.timegm(at.utctimetuple()) * 1000 + at.microsecond // 1000


def parse_time(text: str) -> int:
    """Epoch milliseconds of a time in ISO 8601, in UTC if it names no zone.

    Raises:
        ValueError: it is none, or not between the years 1 and 9999 in UTC.
    """
    try:
        return to_ms(datetime.fromisoformat(text))
    except OverflowError:
        raise ValueError(f"{text!r} is outside the calendar's range") from None


def readable_seconds(seconds: float) -> str:
    """A duration as text, in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    for unit, name, part, part_name in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit} {name}" + (f" {rest} {part_name}" if rest else "")
    raise AssertionError(seconds)


class Clock(Protocol):
    """Reads the time, and waits."""

    def now_ms(self) -> int:
        """The wall time in milliseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, which never decrease; for durations."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until ``event`` is set or ``seconds`` have passed. Returns whether it is set."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(max(seconds, 0.0))


class ManualClock:
    """A clock that stands still until a test moves it. Waiting threads wake when their time is reached."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms
        self._set_back_ms = 0
        self._moved = threading.Condition()

    def now_ms(self) -> int:
        with self._moved:
            return self._now_ms

    def monotonic(self) -> float:
        with self._moved:
            return (self._now_ms + self._set_back_ms) / 1000

    def set_back(self, milliseconds: int) -> None:
        """Move the wall time back, as when a clock that was ahead is corrected."""
        with self._moved:
            self._now_ms -= milliseconds
            self._set_back_ms += milliseconds

    def advance(self, milliseconds: int) -> None:
        """Move the time forward and wake waiting threads."""
        if milliseconds < 0:
            raise ValueError(f"time does not go back, got {milliseconds} ms")
        with self._moved:
            self._now_ms += milliseconds
            self._moved.notify_all()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        with self._moved:
            until = self._now_ms + self._set_back_ms + seconds * 1000
            while not event.is_set() and self._now_ms + self._set_back_ms < until:
                # Other threads set the event without notifying this condition, so the real wait is short.
                self._moved.wait(0.005)
            return event.is_set()


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
