"""Makes the syncs of the log slow, in each process of Python that the stack starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Python imports it at its start. A change of the delay is for running processes too.
_SITECUSTOMIZE = """
import os
import time

LOG, DELAY, DELAYED = {log!r}, {delay!r}, {delayed!r}


def slowed(sync):
    def slow(fd):
        sync(fd)
        try:
            with open(DELAY) as file:
                seconds = float(file.read())
            path = os.readlink(f"/proc/self/fd/{{fd}}")
        except OSError:
            return
        if path.startswith(LOG):
            time.sleep(seconds)
            with open(DELAYED, "a") as file:
                file.write(path + "\\n")

    return slow


os.fsync, os.fdatasync = slowed(os.fsync), slowed(os.fdatasync)
"""


class SlowSyncs:
    """The syncs of files below ``log``. Make it before the stack starts; ``folder`` is for the module."""

    def __init__(self, folder: Path, log: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._delay, self._delayed = folder / "delay", folder / "delayed"
        module = _SITECUSTOMIZE.format(log=f"{log}{os.sep}", delay=str(self._delay), delayed=str(self._delayed))
        (folder / "sitecustomize.py").write_text(module)
        self.python_path = str(folder)

    @contextlib.contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Let each sync take so much longer as long as this lasts."""
        self._delayed.unlink(missing_ok=True)
        new = self._delay.with_name("new")
        new.write_text(str(seconds))
        new.rename(self._delay)
        try:
            yield
        finally:
            self._delay.unlink()

    @property
    def delayed(self) -> int:
        """How many were slow, since they were made so."""
        try:
            return len(self._delayed.read_text().splitlines())
        except FileNotFoundError:
            return 0
