"""Crashes of a host, as its processes see them."""

from __future__ import annotations

import os
import signal

import psutil

from headrace.devstack.state import living_processes


def kill_session(pid: int) -> None:
    """Kill -9 the receiver job whole: spark-submit's JVM, the driver and the receivers, as a host's crash would."""
    session = os.getsid(pid)
    assert session != os.getsid(0)
    for process in living_processes():
        try:
            if os.getsid(process.pid) == session:
                process.send_signal(signal.SIGKILL)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
