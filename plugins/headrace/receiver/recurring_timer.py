"""Calls a function at every multiple of a period, in its own thread, as Spark's RecurringTimer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.clock import Clock


class RecurringTimer:
    """Calls ``callback(time_ms)`` at each multiple of ``period_ms`` of ``now_ms``, by default its clock's time.

    A callback that takes longer than the period delays the next ones. Missed periods are made up for, unless there are
    more than 50. The callback must not raise.
    """

    def __init__(
        self,
        clock: Clock,
        period_ms: int,
        callback: Callable[[int], None],
        name: str,
        *,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        if period_ms <= 0:
            raise ValueError(f"a timer's period is positive, got {period_ms} ms")
        self._clock = clock
        self._now_ms = now_ms or clock.now_ms
        self._period_ms = period_ms
        self._callback = callback
        self._stopped = threading.Event()
        self._interrupted = False
        self._next_ms = 0
        self._last_ms = -1
        self._thread = threading.Thread(target=self._run, name=f"headrace-timer-{name}", daemon=True)

    def start(self) -> int:
        """Start; returns the time of the first callback in ms."""
        self._next_ms = (self._now_ms() // self._period_ms + 1) * self._period_ms
        first = self._next_ms
        self._thread.start()
        return first

    def stop(self, *, interrupt: bool = True) -> int:
        """Stop and wait for the thread. Returns the time of the last callback in ms, or -1 if there was none.

        With ``interrupt=False`` the next callback is still made, at once.
        """
        self._interrupted = interrupt
        self._stopped.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return self._last_ms

    def _run(self) -> None:
        while not self._stopped.is_set():
            wait_ms = self._next_ms - self._now_ms()
            if wait_ms > 2 * self._period_ms:
                # The wall clock was set back: do not wait until it has caught up.
                self._next_ms -= (wait_ms // self._period_ms) * self._period_ms
                continue
            if self._clock.wait(self._stopped, wait_ms / 1000):
                break
            self._fire()
        if not self._interrupted:
            self._fire()

    def _fire(self) -> None:
        self._callback(self._next_ms)
        self._last_ms = self._next_ms
        # After a long jump of the wall clock, missed periods are skipped.
        behind = (self._now_ms() - self._next_ms) // self._period_ms
        self._next_ms += self._period_ms * max(1, behind if behind > _CATCH_UP else 1)


_CATCH_UP = 50
