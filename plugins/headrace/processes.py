"""Identifies a process of this machine, so that another process of it can find out that it has ended (Linux); and keeps
a process's garbage collector short.

The number of a process is not enough: it is used again, and each container has its own. So the identity also has the
machine's boot, the PID namespace and the time at which the process started. On other systems there is none.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PROCESS = "process"
"""The attribute of a receiver job that holds the identity of its driver."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def own_identity() -> dict[str, Any] | None:
    """The identity of this process as JSON values; None where the system does not have one."""
    place, status = _place(), _status(os.getpid())
    return None if place is None or status is None else {**place, "pid": os.getpid(), "started": status[1]}


def has_ended(identity: Mapping[str, Any] | None) -> bool:
    """Whether it is certain that the process has ended. False for a process of another machine, boot or container."""
    place = _place()
    if not identity or place is None or any(identity.get(name) != value for name, value in place.items()):
        return False
    try:
        os.kill(identity["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    # Processes of other users may be hidden.
    status = _status(identity["pid"])
    return status is not None and (status[0] == "Z" or status[1] != identity["started"])


@cache
def freeze_imports() -> None:
    """Exempt what this process has imported from garbage collection, at the first call.

    After each task Spark's Python worker collects garbage. With the modules of a batch that takes 40 ms of processor
    time, more than a small task itself; without them less than 1 ms.
    """
    gc.collect()
    gc.freeze()


def _place() -> dict[str, str] | None:
    try:
        if str(Path("/proc/self").readlink()) != str(os.getpid()):
            # The mounted /proc has the numbers of another namespace.
            return None
        return {"boot": _BOOT.read_text().strip(), "pid_namespace": str(_NAMESPACE.readlink())}
    except OSError:
        return None


def _status(pid: int) -> tuple[str, int] | None:
    """The state of the process (Z: it has ended), and its start in clock ticks since the boot; see proc(5)."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, and may contain spaces and brackets.
    fields = line.rpartition(")")[2].split()
    return fields[0], int(fields[19])
