"""What lets a receiver of a test stall: a clock that can be paused, and a log whose writes can be held."""

from __future__ import annotations

import threading
from typing import Any

from headrace.clock import ManualClock
from headrace.wal.storage import LogStorage

_POLL_SECONDS = 0.005


class ThreadsClock:
    """The test's clock as the threads of a receiver or of the tracker see it: it can be paused, and knows who waits."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._paused_ms: int | None = None
        self._waits_until: dict[str, float] = {}

    @property
    def is_paused(self) -> bool:
        return self._paused_ms is not None

    def is_waited_for(self, thread: str) -> bool:
        """Whether a thread whose name begins with ``thread`` waits for a later time."""
        now = self.monotonic()
        return any(name.startswith(thread) and until > now for name, until in self._waits_until.copy().items())

    def pause(self) -> None:
        self._paused_ms = self._clock.now_ms()

    def resume(self) -> None:
        self._paused_ms = None

    def now_ms(self) -> int:
        paused_ms = self._paused_ms
        return self._clock.now_ms() if paused_ms is None else paused_ms

    def monotonic(self) -> float:
        return self.now_ms() / 1000

    def wait(self, event: threading.Event, seconds: float) -> bool:
        until = self.monotonic() + seconds
        thread = threading.current_thread().name
        self._waits_until[thread] = until
        while self.monotonic() < until:
            if event.wait(_POLL_SECONDS):
                break
        del self._waits_until[thread]
        return event.is_set()


class LogGate:
    """Lets writes wait while it is not ``opened``; ``waits`` while a write does."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.waits = False

    def pass_through(self) -> None:
        self.waits = not self.opened.is_set()
        self.opened.wait()
        self.waits = False


class GatedStorage:
    """A storage whose segments are written through a gate."""

    def __init__(self, storage: LogStorage, gate: LogGate) -> None:
        self._storage = storage
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> GatedStorage:
        return GatedStorage(self._storage.below(path), self._gate)

    def create_segment(self, path: str) -> Any:
        self._gate.pass_through()
        return _GatedFile(self._storage.create_segment(path), self._gate)


class _GatedFile:
    def __init__(self, file: Any, gate: LogGate) -> None:
        self._file = file
        self._gate = gate

    def append(self, parts: Any, *, sync: bool = True) -> None:
        self._gate.pass_through()
        self._file.append(parts, sync=sync)

    def close(self) -> None:
        self._file.close()
