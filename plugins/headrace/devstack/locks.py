"""A lock between processes, based on a file."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of ``path`` for the length of a ``with`` block.

    Without ``wait``, raises BlockingIOError at once if another process holds it. The kernel releases the lock when the
    process ends, so a crash leaves no stale lock. The file itself stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
