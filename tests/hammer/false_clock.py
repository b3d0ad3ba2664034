"""Lets Spark's applications start with another clock than the machine's, by libfaketime."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from tests.hammer.errors import FalseClockError
from tests.hammer.kinds import Action

_LIBRARY = "faketime/libfaketimeMT.so.1"
_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
_VARIABLE = "FAKETIME"
_OFFSETS: Mapping[Action, str] = {
    Action.HOUR_AHEAD: "+1h",
    Action.HOUR_BEHIND: "-1h",
    Action.YEAR_AHEAD: "+1y",
    Action.YEAR_BEHIND: "-1y",
}
# Time goes on as everywhere, also for what a process waits for: only the time of day is another. The JVM keeps the true
# one: libfaketime keeps a core of it busy, and a receiver job did not start in two minutes.
_SCRIPT = """#!/bin/sh
if [ -e '{offset}' ]; then
  export LD_PRELOAD='{library}' {variable}="$(cat '{offset}')" FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_DISABLE_SHM=1 \
    FAKETIME_SKIP_CMDS=java
fi
exec '{java}' "$@"
"""


class FalseClock:
    """A Java in ``home``, for JAVA_HOME: what it starts has the clock that is set then, until it ends.

    A task puts its environment's own programs first in PATH, so that another `spark-submit` there would not be found.
    """

    def __init__(self, home: Path, java: Path) -> None:
        """``java`` is the real program. Raises FalseClockError without libfaketime."""
        found = [path for folder in _FOLDERS for path in (*Path(folder).glob(f"*/{_LIBRARY}"), Path(folder, _LIBRARY))]
        library = next((path for path in found if path.exists()), None)
        if library is None:
            raise FalseClockError("libfaketime is not installed (`apt-get install faketime`).")
        script = home / "bin" / "java"
        script.parent.mkdir(parents=True, exist_ok=True)
        self.home = home
        self._offset = home / "offset"
        script.write_text(
            _SCRIPT.format(offset=self._offset, library=library, variable=_VARIABLE, java=java), encoding="utf-8"
        )
        script.chmod(0o755)

    @contextlib.contextmanager
    def wrong(self, action: Action) -> Iterator[None]:
        """Let what starts as long as this lasts have this clock."""
        self._offset.write_text(_OFFSETS[action])
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
