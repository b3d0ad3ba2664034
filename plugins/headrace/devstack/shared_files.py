"""Files that several processes use: a lock between them, and an atomic write."""

from __future__ import annotations

import fcntl
import os
import tempfile
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


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file beside ``path``, readable by its owner alone, and rename it to ``path``."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
