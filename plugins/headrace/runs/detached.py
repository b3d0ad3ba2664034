"""Starts processes that outlive the task: each has its own session, and a log file instead of pipes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# Enough for a Python traceback with a JVM's, small enough for a task log.
_TAIL_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class DetachedProcess:
    """A started process. ``created`` (seconds since the epoch) distinguishes it from a later one with the same id."""

    pid: int
    created: float
    log: Path

    def alive(self) -> bool:
        """Whether it still runs on this machine; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def exit_code(self) -> int | None:
        """The exit code (negative: the signal that ended it). None while it runs, or if this is not its parent."""
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return None
        return os.waitstatus_to_exitcode(status) if pid else None


def spawn(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> DetachedProcess:
    """Start ``command`` in a new session, its output appended to ``log``, readable by this user only."""
    log.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            # Outside the task's session: Airflow ends a task by ending its process group.
            start_new_session=True,
            close_fds=True,
        )
    finally:
        os.close(descriptor)
    # Suppresses Popen's warning when it is garbage-collected with a living child: this one is meant to live on.
    child.returncode = 0
    try:
        created = psutil.Process(child.pid).create_time()
    except psutil.Error:
        created = 0.0
    return DetachedProcess(child.pid, created, log)


def tail(log: Path | str, lines: int = 40) -> str:
    """The last lines of a log file; empty if the file is not on this machine."""
    try:
        with Path(log).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
