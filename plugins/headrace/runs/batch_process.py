"""The process that runs an attempt at a batch, and what a task does with it."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

# How long a terminated batch process may take to cancel its Spark jobs, in seconds.
_TERMINATION_GRACE = 15.0
_TAIL_LINES = 40
# Marks a warning in the output of the batch's process (headrace.spark.outputs.report_files).
_WARNING = ": warning: "


class BatchProcess:
    """A started process of a batch."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        )

    def log_until_end(self, log: Callable[..., None]) -> str | None:
        """Log the process's output, by a logger's method ``log``, until it ends. Returns None if its exit code is 0,
        else how it ended, with its last lines."""
        last: deque[str] = deque(maxlen=_TAIL_LINES)
        with self._process as process:
            for line in process.stdout or ():
                level = logging.WARNING if line.startswith("headrace: ") and _WARNING in line else logging.INFO
                log(level, "%s", line.rstrip())
                last.append(line.rstrip())
        if not process.returncode:
            return None
        lines = "\n".join(last)
        return f"The batch's process {_ending(process.returncode)}. The last lines of its output:\n{lines}"

    def terminate(self) -> None:
        """Ask the process to end, which cancels the attempt's Spark jobs. Kill it if it does not end in time."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATION_GRACE
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._process.poll() is None:
            self._process.kill()


def _ending(code: int) -> str:
    """An exit code of ``headrace.spark.batch_command`` in words."""
    # Not above: parsing a DAG file imports this module, and must not import the Spark layer.
    from headrace.spark.termination import EXIT_NOT_OURS, EXIT_TERMINATED

    if code == EXIT_NOT_OURS:
        return "ended because a newer attempt at the batch began"
    if code in (-signal.SIGTERM, EXIT_TERMINATED):
        return "was asked to end"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
