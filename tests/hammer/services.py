"""The service manager: it starts servers again that have ended, as systemd would, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.hammer.journal import Journal

from headrace.devstack.server import Server

_LOOK_SECONDS = 1.0
# systemd's RestartSec, so that what cannot start does not eat the machine.
_RESTART_SECONDS = 5.0


class Services:
    """Watches ``servers`` from a thread of its own while it is entered."""

    def __init__(self, servers: Mapping[str, Server], journal: Journal) -> None:
        self.servers = servers
        self._journal = journal
        self._held: set[str] = set()
        self._locks = {name: threading.Lock() for name in servers}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="services", daemon=True)

    def __enter__(self) -> Services:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextmanager
    def held(self, name: str) -> Iterator[Server]:
        """A server that is to be left as it is for a while: it is being hit."""
        with self._locks[name]:
            self._held.add(name)
            try:
                yield self.servers[name]
            finally:
                self._held.discard(name)

    def named(self, name: str) -> list[str]:
        """The servers of this name, or of a kind of which there are several (`spark-worker-0`, …)."""
        return [one for one in self.servers if one == name or one.startswith(f"{name}-")]

    def await_all(self, seconds: float) -> list[str]:
        """Wait until all servers answer; those that do not."""
        deadline = time.monotonic() + seconds
        return [name for name, server in self.servers.items() if not answers(server, deadline - time.monotonic())]

    def _run(self) -> None:
        due: dict[str, float] = {}
        while not self._stop.wait(_LOOK_SECONDS):
            for name, server in self.servers.items():
                if name in self._held or server.alive:
                    due.pop(name, None)
                elif name not in due:
                    self._journal.died(name, f"exit code {server.process.exit_code}")
                    due[name] = time.monotonic() + _RESTART_SECONDS
                elif time.monotonic() >= due[name] and self._locks[name].acquire(blocking=False):
                    try:
                        del due[name]
                        server.launch()
                    finally:
                        self._locks[name].release()


def answers(server: Server, seconds: float) -> bool:
    """Wait until the server answers; whether it does. One that ends meanwhile is the service manager's."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            server.probe()
            return server.alive
        except Exception:  # a probe fails in as many ways as clients do
            if time.monotonic() > deadline:
                return False
        time.sleep(0.25)
