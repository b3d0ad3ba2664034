"""Exit codes and SIGTERM handling of the two Spark applications."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

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
