"""Identifies processes without ambiguity, and finds those that belong to a stack.

The system reuses process ids; an id together with its start time identifies one process for all time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import psutil
from pydantic import BaseModel, ConfigDict

STACK_VARIABLE = "HEADRACE_STACK"
"""The environment variable that holds the stack's id in every process of a stack; children inherit it."""

_TERMINATE_SECONDS = 5.0


class ProcessRef(BaseModel):
    """One process: its id and its start time (seconds since the epoch, as the kernel reports it)."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessRef | None:
        """The process that has ``pid`` now, None if there is none."""
        try:
            return cls(pid=pid, started=psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def find(self) -> psutil.Process | None:
        """The process if it still runs; None if it has ended or is a zombie."""
        try:
            process = psutil.Process(self.pid)
            # The kernel counts in hundredths of a second since boot, and the wall time of boot may be corrected.
            same = abs(process.create_time() - self.started) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


def living_processes() -> Iterator[psutil.Process]:
    """Every process of the machine.

    psutil keeps its objects between two searches, by process id: one of a process that has ended would stand for the
    next process with this id, and refuse to signal it.
    """
    psutil.process_iter.cache_clear()
    return psutil.process_iter()


def processes_of_stack(stack_id: str) -> list[psutil.Process]:
    """Every living process with HEADRACE_STACK=``stack_id`` in its environment, except this one and its ancestors."""
    mine = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    processes = []
    for process in living_processes():
        if process.pid in mine:
            continue
        # Other users' environments cannot be read, and their processes not be signalled.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(STACK_VARIABLE) == stack_id and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def end_stack_processes(stack_id: str, recorded: Iterable[ProcessRef] = ()) -> list[str]:
    """End the remaining processes of a stack, in order and then by force. Returns the id and command of each.

    ``recorded`` are processes known by id and start time, because some (Postgres) overwrite their own environment.
    """
    ended: dict[int, str] = {}
    # Repeated, because one search may miss a process that is just being started.
    while left := {*processes_of_stack(stack_id), *(process for ref in recorded if (process := ref.find()))}:
        fresh = {process.pid: _described(process) for process in left if process.pid not in ended}
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, stubborn = psutil.wait_procs(left, timeout=_TERMINATE_SECONDS)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=_TERMINATE_SECONDS)
        if not fresh:
            break  # a process that kill -9 does not end (stuck in the kernel) would make this loop endless
        ended |= fresh
    return list(ended.values())


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)
