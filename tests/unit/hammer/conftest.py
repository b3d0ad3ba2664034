"""A server that does nothing, but is a real process under its guard."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hammer.journal import Journal
from tests.hammer.link import Link

from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.server import Server


class Sleeper(Server):
    """Ready when it has written a file."""

    name = "kafka"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ready = folder / "ready"

    def specify(self) -> ProcessSpec:
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        code = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
        return ProcessSpec(
            name=self.name, argv=[sys.executable, "-I", "-S", "-c", code], env=child_environment(), log=self.log
        )

    def probe(self) -> None:
        if not self.ready.exists():
            raise OSError("not yet")


class Echo:
    """A server that sends back what it gets. ``got`` is all that it got."""

    def __init__(self) -> None:
        self.got = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client:
            try:
                while data := client.recv(4096):
                    self.got += data
                    client.sendall(data)
            except OSError:
                return


@pytest.fixture
def echo() -> Iterator[Echo]:
    """Running."""
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def link(echo: Echo) -> Iterator[Link]:
    """To the echo."""
    with Link(echo.port) as link:
        yield link


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sleeper]:
    """Running."""
    with Sleeper(tmp_path / "sleeper") as sleeper:
        yield sleeper


@pytest.fixture
def lines() -> list[str]:
    """What the journal says."""
    return []


@pytest.fixture
def journal(tmp_path: Path, lines: list[str]) -> Journal:
    """Kept in journal.jsonl."""
    return Journal(tmp_path / "journal.jsonl", lines.append)


def wait_until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
