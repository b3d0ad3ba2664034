"""Clocks, and times as text. Every component that needs the time gets a clock, so that a test can control it.

Batch times come from the ledger's clock (rule 4 of the design); these clocks time loops and estimate the ledger's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
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
