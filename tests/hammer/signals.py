"""Sends signals to processes, and checks their effect."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable

import psutil
from tests.hammer.errors import TargetMissedError
from tests.hammer.target_processes import Group

_FELT_SECONDS = 15.0
_POLL_SECONDS = 0.02


def kill(group: Group) -> None:
    """Kill -9 all of them. Raises TargetMissedError unless this ends the first one."""
    first = group[0]
    if not _is_there(first):
        raise TargetMissedError(f"process {first.pid} had ended before the fault")
    for process in group:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if not _within(lambda: not _is_there(first)):
        raise TargetMissedError(f"process {first.pid} outlived kill -9")


def terminate(group: Group) -> None:
    """SIGTERM to the first one, without waiting for its end. Raises TargetMissedError if it had ended before."""
    try:
        if not _is_there(group[0]):
            raise psutil.NoSuchProcess(group[0].pid)
        group[0].send_signal(signal.SIGTERM)
    except psutil.Error as error:
        raise TargetMissedError(f"process {group[0].pid} had ended before the fault") from error


class Hanging:
    """Stops processes with SIGSTOP, and continues them later. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped: list[psutil.Process] = []

    def stop(self, group: Group) -> None:
        """SIGSTOP to all of them. Raises TargetMissedError unless this stops the first one."""
        with self._lock:
            self._stopped += group
        for process in group:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        if not (_within(lambda: _stands_still(group[0]) or not _is_there(group[0])) and _stands_still(group[0])):
            self.go_on(group)
            raise TargetMissedError(f"process {group[0].pid} did not stop: {_state(group[0])}")

    def go_on(self, group: Iterable[psutil.Process]) -> bool:
        """SIGCONT to all of them. Returns whether the first one was still there, and still stopped."""
        group = list(group)
        stood = bool(group) and _stands_still(group[0])
        for process in group:
            # psutil does not signal a later process with the same id.
            with contextlib.suppress(psutil.Error):
                process.resume()
        with self._lock:
            self._stopped = [process for process in self._stopped if process not in group]
        return stood

    def release(self) -> None:
        """Continue everything."""
        with self._lock:
            left = list(self._stopped)
        self.go_on(left)


def _within(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _FELT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_there(process: psutil.Process) -> bool:
    return _state(process) not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _stands_still(process: psutil.Process) -> bool:
    return _state(process) == psutil.STATUS_STOPPED


def _state(process: psutil.Process) -> str | None:
    try:
        return str(process.status()) if process.is_running() else None
    except psutil.Error:
        return None
