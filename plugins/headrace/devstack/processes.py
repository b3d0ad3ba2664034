"""Telling processes apart for certain, and finding those that belong to a stack.

A process id alone is given to another process sooner or later; with its start time it is one process for ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import psutil
from pydantic import BaseModel, ConfigDict

STACK_VARIABLE = "HEADRACE_STACK"
"""Set in the environment of everything that a stack starts, to the stack's id; children inherit it."""

_TERMINATE_SECONDS = 5.0


class ProcessRef(BaseModel):
    """One process: its id and when it was started (seconds since the epoch, as the kernel tells)."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessRef | None:
        """The process that has ``pid`` now, if one has."""
        try:
            return cls(pid=pid, started=psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def find(self) -> psutil.Process | None:
        """The process, if it is still there (and not merely waiting to be reaped)."""
        try:
            process = psutil.Process(self.pid)
            # The kernel counts in hundredths of a second from boot; its wall time of boot may be corrected.
            same = abs(process.create_time() - self.started) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


def processes_of_stack(stack_id: str) -> list[psutil.Process]:
    """Every living process with HEADRACE_STACK=``stack_id`` in its environment, but this one and its ancestors."""
    mine = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in mine:
            continue
        # Other users' environments are closed to us, and so are their processes.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(STACK_VARIABLE) == stack_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_stack_processes(stack_id: str, recorded: Iterable[ProcessRef] = ()) -> int:
    """End what is left of a stack, in order and then by force; how many processes there were.

    ``recorded`` are processes known by id and start time: some (Postgres) overwrite their own environment.
    """
    ended: set[int] = set()
    # What is being started just now may escape one look.
    while left := {*processes_of_stack(stack_id), *(process for ref in recorded if (process := ref.find()))}:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, stubborn = psutil.wait_procs(left, timeout=_TERMINATE_SECONDS)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=_TERMINATE_SECONDS)
        fresh = {process.pid for process in left} - ended
        if not fresh:
            break  # what a kill -9 does not end (a process stuck in the kernel) would hold us for ever
        ended |= fresh
    return len(ended)
