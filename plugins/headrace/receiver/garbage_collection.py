"""Python's garbage collector is off while a receiver runs, so that it does not traverse a million messages.

Every consume() makes up to 20,000 objects that the collector tracks. Every few hundred of them start a collection of
the young objects, and some of these a collection of all. A receiver's records contain no cycles: reference counts free
them. With the collector on, a receiver received half as many records.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Exceptions with tracebacks do make cycles; once a minute is enough for those.
_COLLECT_SECONDS = 60.0


@contextmanager
def collector_off() -> Iterator[None]:
    """Freeze all existing objects and switch the collector off. For a process that only receives."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class OccasionalCollection:
    """Collects once a minute while the collector is off."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _COLLECT_SECONDS

    def __call__(self) -> None:
        if time.monotonic() >= self._next and not gc.isenabled():
            gc.collect()
            self._next = time.monotonic() + _COLLECT_SECONDS
