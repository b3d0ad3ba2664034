"""Whether a process still runs, also while it ends."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """False once it is a zombie; its status may be asked for in the moment at which it vanishes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
