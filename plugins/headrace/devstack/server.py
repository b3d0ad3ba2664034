"""The base class of the embedded stack's servers (Kafka, Elasticsearch, Postgres, the schema registry and Airflow's
components), and the search for their ports."""

from __future__ import annotations

import random
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.devstack.errors import LocalStackError
from headrace.devstack.guarded_process import GuardedProcess, ProcessSpec

LOOPBACK = "127.0.0.1"

# Below the range of ports for outgoing connections on Linux (from 32768) and macOS (from 49152), so that no client's
# socket can take a port between the check here and the server's bind.
_FIRST, _LAST = 20_000, 32_000
_reservations: list[socket.socket] = []


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of the loopback interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        # Servers set this too, so that an ended server's connections in TIME_WAIT do not block the port.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((LOOPBACK, port))
            candidate.listen(1)
        except OSError:
            return False
        return True


def free_port(taken: Collection[int] = ()) -> int:
    """A free loopback port that is not in ``taken``, and that `free_port` gives nobody else while this process lives.

    A server binds its port seconds after it was chosen. Until then, only the reservation keeps another process that
    starts servers from choosing the same one.
    """
    for _ in range(1000):
        port = random.randint(_FIRST, _LAST)  # noqa: S311 - no secret
        if port not in taken and is_free(port) and _reserve(port):
            return port
    raise OSError(f"no free port between {_FIRST} and {_LAST}")


def _reserve(port: int) -> bool:
    """Bind the UDP port of this number, which no server uses. The kernel frees it when this process ends."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        reservation.bind((LOOPBACK, port))
    except OSError:
        reservation.close()
        return False
    _reservations.append(reservation)
    return True


class Startable(ABC):
    """What runs for the length of a ``with`` block: started on entering, stopped on leaving."""

    @abstractmethod
    def start(self) -> Self:
        """Start; returns when it answers. If it cannot be started, it is stopped, and the error raised."""

    @abstractmethod
    def stop(self) -> None:
        """Stop with everything that it has started. Does nothing if it does not run."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class Server(Startable):
    """A server with its data in ``folder``. The data stays after `stop`, `kill` and the end of this process."""

    name: str
    ready_seconds: float = 120.0

    def __init__(self, folder: Path) -> None:
        # Absolute: the server may run in another folder.
        self.folder = folder.absolute()
        self._process: GuardedProcess | None = None
        self._earlier: list[GuardedProcess] = []

    @abstractmethod
    def specify(self) -> ProcessSpec:
        """Prepare the folder if that has not been done, and return what to run. Called at each start."""

    @abstractmethod
    def probe(self) -> None:
        """Return if the server answers, raise any exception if it does not yet; within a second or two."""

    @property
    def log(self) -> Path:
        """The file with the server's standard output and error."""
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.alive

    @property
    def process(self) -> GuardedProcess:
        """The last started process; LocalStackError if there was none."""
        if self._process is None:
            raise LocalStackError(f"{self.name} has not been started.")
        return self._process

    def start(self) -> Self:
        """Start, or restart with the same data and address; returns when the server answers."""
        self.launch()
        return self.await_ready()

    def launch(self) -> None:
        """Start without waiting for an answer. Does nothing if the server runs."""
        if self.alive:
            return
        if self._process is not None:
            # Its guard may still hold processes that a crashed server left running; they run until `stop`.
            self._earlier.append(self._process)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = GuardedProcess(self.specify())

    def await_ready(self) -> Self:
        """Return when the server that `launch` started answers. Stop it and raise if it ends or does not answer in
        time."""
        try:
            self.process.wait_until_ready(self.probe, timeout=self.ready_seconds)
        except BaseException:  # Ctrl-C too
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop in order, with all processes that this run and earlier ones have started. Does nothing if none runs."""
        processes = [process for process in (self._process, *self._earlier) if process is not None]
        for process in processes:
            process.request_stop()
        for process in processes:
            process.stop()
        self._earlier.clear()

    def kill(self) -> None:
        """Kill -9, like a crash. `start` restarts it on the data that its folder then holds."""
        self.process.kill()

    def suspend(self) -> None:
        """Make the server hang until `resume`: sockets stay open, requests get no answer."""
        self.process.suspend()

    def resume(self) -> None:
        """Undo `suspend`."""
        self.process.resume()
