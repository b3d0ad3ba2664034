"""How a process of the two Spark applications ends: exit codes, SIGTERM, and the end of the process that it depends on.

Driver, JVM and task processes end together. Without this, a driver's Python whose JVM was killed lived on under PID 1,
renewed its lease and stored nothing. So each process watches the one it depends on. Spark handles the other direction:
a JVM exits when its Python driver has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

EXIT_FAILED = 1
EXIT_NOT_OURS = 75
"""Another process holds the stream or the batch; sysexits.h calls this code a temporary failure."""
EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM was received. For the stream this is like a crash, and safe."""

    def __str__(self) -> str:
        return "the process received SIGTERM"


def raise_on_sigterm() -> None:
    """Make SIGTERM raise `Terminated` in the main thread, once: a second SIGTERM must not interrupt the shutdown."""
    signal.signal(signal.SIGTERM, _terminate)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Run a command and end this process at once with its exit code.

    Python would wait at exit for the threads of every pool. Those of a Spark Connect client retry for 50 s if the
    server is gone, which delayed the requested stop of a receiver job by that time.
    """
    try:
        code = main()
    except SystemExit as ended:
        # As Python does: nothing is success, and anything but a number is a message.
        code = ended.code if isinstance(ended.code, int) else EXIT_FAILED if ended.code else 0
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


# Neither a code of Python's nor of a signal's, so a log shows that the other process was gone.
EXIT_CODE = 70

_PERIOD_SECONDS = 0.2
# How long ``before_end`` may take: they write to the ledger, which may hang as well.
_LAST_SECONDS = 5.0


def under_spark_submit() -> bool:
    """Whether spark-submit started this process. If so, the JVM is its parent."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


class ProcessWatch:
    """A daemon thread that ends this process once ``gone()`` is true, after at most 5 s for ``before_end``."""

    def __init__(self, gone: Callable[[], bool], *, before_end: Callable[[], None] | None = None) -> None:
        self._gone = gone
        self._before_end = before_end
        self._dismissed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headrace-process-watch", daemon=True)

    def start(self) -> ProcessWatch:
        self._thread.start()
        return self

    def dismiss(self) -> None:
        """Stop watching: the process is ending regularly."""
        self._dismissed.set()

    def _watch(self) -> None:
        while not self._dismissed.wait(_PERIOD_SECONDS):
            if self._gone():
                self._end()

    def _end(self) -> None:
        if self._before_end is not None:
            last = threading.Thread(target=self._before_end, name="headrace-before-end", daemon=True)
            last.start()
            last.join(_LAST_SECONDS)
        # Not sys.exit: the main thread may be in a call to a JVM that no longer answers.
        os._exit(EXIT_CODE)


def parent_gone(parent: int | None = None) -> Callable[[], bool]:
    """A function that returns whether the process that started this one, ``parent``, has ended; by default the current
    parent, which is another one if the first has ended already."""
    expected = os.getppid() if parent is None else parent
    return lambda: os.getppid() != expected


def jvm_gone(gateway: Any) -> Callable[[], bool]:
    """A function that returns whether the driver's JVM has ended.

    Under spark-submit the JVM is the parent, otherwise the child that pyspark started.
    """
    process = getattr(gateway, "proc", None)
    if process is None:
        return parent_gone()
    return lambda: process.poll() is not None
