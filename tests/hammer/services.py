"""The service manager: like systemd, it restarts servers that have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.hammer.journal import Journal

from headrace.devstack.server import Server

LOOK_SECONDS = 1.0
"""How often it looks whether a server runs."""
RESTART_SECONDS = 5.0
"""Like systemd's RestartSec, so that a server that cannot start does not use up the machine."""


class Services:
    """Watches ``servers`` from its own thread while its context is entered."""

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
        """Keep the service manager from restarting a server while a fault hits it. Yields the server."""
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
        """Wait until all servers answer. Returns the names of those that do not within ``seconds``."""
        deadline = time.monotonic() + seconds
        return [name for name, server in self.servers.items() if not answers(server, deadline - time.monotonic())]

    def _run(self) -> None:
        due: dict[str, float] = {}
        while not self._stop.wait(LOOK_SECONDS):
            for name, server in self.servers.items():
                if name in self._held or server.alive:
                    due.pop(name, None)
                elif name not in due:
                    self._journal.died(name, f"exit code {server.process.exit_code}")
                    due[name] = time.monotonic() + RESTART_SECONDS
                elif time.monotonic() >= due[name] and self._locks[name].acquire(blocking=False):
                    try:
                        del due[name]
                        server.launch()
                    finally:
                        self._locks[name].release()


def answers(server: Server, seconds: float) -> bool:
    """Wait until the server answers, ``seconds`` at most. Returns whether it does. Does not restart a server."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            server.probe()
            return server.alive
        except Exception:  # a probe fails in as many ways as clients do
            if time.monotonic() > deadline:
                return False
        time.sleep(0.25)
