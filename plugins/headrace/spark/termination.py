"""How the two applications end before their time: by SIGTERM, or because what they held is another's."""

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
"""Somebody else has the stream or the batch; sysexits.h calls it a temporary failure."""
EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM came: a crash, as far as the stream is concerned, and safe."""

    def __str__(self) -> str:
        return "the process was told to end (SIGTERM)"


def raise_on_sigterm() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread, once: a second one must not break the end that the
    first began."""
    signal.signal(signal.SIGTERM, _terminate)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Run a command and end this process at once with its exit code.

    Python would wait at its end for the threads of every pool, and those of a Spark Connect client go on asking for
    50 s where the server has gone: so long a receiver job took to end that had been told to.
    """
    try:
        code = main()
    except SystemExit:
        raise
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
