"""What later commands know of a stack: the state in a file of its data folder, and the processes that belong to it.

The system reuses process ids; an id together with its start time identifies one process for all time. Commands change
the files under a lock, and replace them as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.devstack.errors import LocalStackError

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


@contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of ``path`` for the length of a ``with`` block.

    Without ``wait``, raises BlockingIOError at once if another process holds it. The kernel releases the lock when the
    process ends, so a crash leaves no stale lock. The file itself stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file beside ``path``, readable by its owner alone, and rename it to ``path``."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


STATE_FILE = "stack.json"


class Phase(StrEnum):
    """The phase of a stack or of one of its servers."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class ServiceState(BaseModel):
    """One server: its phase, its address if it has one, its processes, and why it failed if it did."""

    name: str
    phase: Phase = Phase.STOPPED
    address: str | None = None
    log: str | None = None
    process: ProcessRef | None = None
    guard: ProcessRef | None = None
    seconds_to_start: float | None = None
    error: str | None = None

    def as_found(self) -> ServiceState:
        """This state, changed to failed if the server should run and its process has ended."""
        if self.phase is not Phase.RUNNING or (self.process is not None and self.process.find() is not None):
            return self
        return self.model_copy(update={"phase": Phase.FAILED, "error": f"{self.name} has ended; its log is {self.log}"})


class Login(BaseModel):
    """The user who may log in to Airflow; the password is in a file that only its owner can read."""

    user: str
    password_file: str


class StackState(BaseModel):
    """A stack: its id (in the environment of all its processes), its supervisor and its servers."""

    id: str
    phase: Phase = Phase.STOPPED
    supervisor: ProcessRef | None = None
    services: dict[str, ServiceState] = {}
    login: Login | None = None
    connections: dict[str, dict[str, Any]] = {}
    """The Airflow connections to the servers, by id. Only the owner of the data folder may read them."""
    error: str | None = None

    @property
    def supervised(self) -> bool:
        """Whether the supervisor that wrote this state is still alive."""
        return self.supervisor is not None and self.supervisor.find() is not None

    def recorded_processes(self) -> list[ProcessRef]:
        """All processes recorded here, whether they still run or not."""
        refs = [ref for service in self.services.values() for ref in (service.process, service.guard)]
        return [ref for ref in refs if ref is not None]

    def as_found(self) -> StackState:
        """This state, corrected for processes that have ended without a record."""
        if self.phase in (Phase.STOPPED, Phase.FAILED):
            return self
        if self.supervised:
            # The supervisor records a server's death with a delay; this check finds it at once.
            services = {name: service.as_found() for name, service in self.services.items()}
            return self.model_copy(update={"services": services})
        services = {
            name: service.model_copy(update={"phase": Phase.STOPPED}) for name, service in self.services.items()
        }
        error = (
            "Its supervisor was killed. `headrace stack down` ends whatever is left, and so does the next "
            "`headrace stack up`."
        )
        return self.model_copy(update={"phase": Phase.STOPPED, "services": services, "error": error})


def read_state(data: Path) -> StackState | None:
    """The state of the stack in ``data``, None if there never was one. LocalStackError if it cannot be read."""
    path = data / STATE_FILE
    try:
        return StackState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise LocalStackError(f"{path} cannot be read: {error}", remedy="Is it another program's folder?") from error


def write_state(data: Path, state: StackState) -> None:
    """Replace the state file atomically: a reader sees the old or the new state."""
    write_atomically(data / STATE_FILE, state.model_dump_json(indent=2))


def remembered_ports(data: Path) -> dict[str, int]:
    """The ports of the last start, by name."""
    with contextlib.suppress(OSError, ValueError):
        return {str(name): int(port) for name, port in json.loads((data / "ports.json").read_text()).items()}
    return {}


def remember_ports(data: Path, ports: dict[str, int]) -> None:
    """Keep ``ports`` for the next start."""
    write_atomically(data / "ports.json", json.dumps(ports, indent=2))
