"""A total time for a call of foreign code that has none of its own: functions that make tokens, keys of a cloud.

A thread cannot be ended in Python. So a call that hangs goes on in a thread of its own, and while it does, another call
for the same purpose is refused at its time: threads do not pile up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_T = TypeVar("_T")
_LOCK = threading.Lock()
_RUNNING: dict[Hashable, threading.Thread] = {}


def within(seconds: float, purpose: Hashable, call: Callable[[], _T]) -> _T:
    """Return what ``call`` returns, or raise what it raises. One call runs at a time for each ``purpose``.

    Raises TimeoutError after ``seconds``, also if another call for this purpose has not ended by then.
    """
    results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((True, call()))
        except BaseException as error:
            results.put((False, error))

    until = time.monotonic() + seconds
    while True:
        with _LOCK:
            former = _RUNNING.get(purpose)
            if former is None or not former.is_alive():
                _RUNNING[purpose] = threading.Thread(target=run, name="time-limit", daemon=True)
                _RUNNING[purpose].start()
                break
        former.join(max(0.0, until - time.monotonic()))
        if former.is_alive():
            raise TimeoutError(f"an earlier call has not ended; this one waited {seconds:g} s for it")
    try:
        succeeded, result = results.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        raise TimeoutError(f"it did not end within {seconds:g} s") from None
    if succeeded:
        returned: _T = result
        return returned
    raise result
