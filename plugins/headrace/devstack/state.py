"""The state of a stack, stored in a file of its data folder, where later commands find it."""

from __future__ import annotations

import contextlib
import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from headrace.devstack.errors import LocalStackError
from headrace.devstack.shared_files import write_atomically
from headrace.devstack.stack_processes import ProcessRef

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
