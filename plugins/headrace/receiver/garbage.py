"""Python's garbage collector, kept from walking a million messages.

Every consume() makes up to 20,000 objects that the collector tracks, and each few hundred of them start a walk
over the young ones, each walk now and then one over all. Nothing in a receiver's stream of records is cyclic:
reference counts free it. With the collector on, a receiver took in half as many records.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Exceptions with tracebacks do make cycles; once a minute is enough for those.
_COLLECT_SECONDS = 60.0


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Freeze what is loaded and switch the collector off; for a process that does nothing but receive."""
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
    """Collects once a minute where the collector is off."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _COLLECT_SECONDS

    def __call__(self) -> None:
        if time.monotonic() >= self._next and not gc.isenabled():
            gc.collect()
            self._next = time.monotonic() + _COLLECT_SECONDS
