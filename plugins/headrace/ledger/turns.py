"""Lets one thread of a process at a time wait for a lock of the ledger's database: where many want it, another process
would wait for all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

TURN_SECONDS = 2.0
"""How long a thread waits for its turn before it waits for the lock without one: who has the turn may be suspended."""

# In a forked child, a thread that it does not have may hold one.
_locks: dict[Hashable, threading.Lock] = {}
os.register_at_fork(after_in_child=_locks.clear)


@contextmanager
def thread_turn(key: Hashable) -> Iterator[bool]:
    """Wait for the turn of this thread, at most `TURN_SECONDS`. Yields whether it has come; ``key`` names the lock."""
    lock = _locks.setdefault(key, threading.Lock())
    has_come = lock.acquire(timeout=TURN_SECONDS)
    try:
        yield has_come
    finally:
        if has_come:
            lock.release()
