"""How the two applications end before their time: by SIGTERM, or because what they held is another's."""

from __future__ import annotations

import signal
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


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
