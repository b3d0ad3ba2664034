"""Lets the Python of Spark's applications start with another clock than the machine's.

libfaketime would change the clock of the JVM and of C libraries too, but makes their timed waits end at once: a process
of many threads is then busy, and a receiver job does not start in minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from tests.hammer.kinds import Action

_VARIABLE = "HAMMER_CLOCK_SECONDS"
_HOUR, _YEAR = 3_600, 365 * 86_400
_SECONDS: Mapping[Action, int] = {
    Action.HOUR_AHEAD: _HOUR,
    Action.HOUR_BEHIND: -_HOUR,
    Action.YEAR_AHEAD: _YEAR,
    Action.YEAR_BEHIND: -_YEAR,
}
_SCRIPT = """#!/bin/sh
if [ -e '{offset}' ]; then
  export {variable}="$(cat '{offset}')" PYTHONPATH="{python}${{PYTHONPATH:+:$PYTHONPATH}}"
fi
exec '{java}' "$@"
"""
# Python imports it at its start. Waits go by another clock. Another such module, as of `SlowSyncs`, is imported too.
_SITECUSTOMIZE = """
import contextlib
import os
import sys
import time

SECONDS = int(os.environ["{variable}"])
true_time, true_time_ns = time.time, time.time_ns
time.time = lambda: true_time() + SECONDS
time.time_ns = lambda: true_time_ns() + SECONDS * 1_000_000_000

sys.path.remove(os.path.dirname(__file__))
del sys.modules["sitecustomize"]
with contextlib.suppress(ImportError):
    import sitecustomize
"""


class FalseClock:
    """A Java in ``home``, for JAVA_HOME: the Python that it starts has the clock that is set then, until it ends.

    A task puts its environment's own programs first in PATH, so that another `spark-submit` there would not be found.
    """

    def __init__(self, home: Path, java: Path) -> None:
        """``java`` is the real program."""
        script, python = home / "bin" / "java", home / "python"
        for folder in (script.parent, python):
            folder.mkdir(parents=True, exist_ok=True)
        self.home = home
        self._offset = home / "offset"
        (python / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(variable=_VARIABLE), encoding="utf-8")
        text = _SCRIPT.format(offset=self._offset, variable=_VARIABLE, python=python, java=java)
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)

    @contextlib.contextmanager
    def wrong(self, action: Action) -> Iterator[None]:
        """Let what starts as long as this lasts have this clock."""
        self._offset.write_text(str(_SECONDS[action]))
        try:
            yield
        finally:
            self._offset.unlink()

    @staticmethod
    def is_of(process: psutil.Process) -> bool:
        """Whether the process has started with another clock."""
        with contextlib.suppress(psutil.Error):
            return _VARIABLE in process.environ()
        return False
