"""Waits of the tests for what a receiver's threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_SECONDS = 120
"""For what hangs: no machine that runs the tests is so slow."""


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.01)
