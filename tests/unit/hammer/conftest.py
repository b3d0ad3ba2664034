"""A server that does nothing, but is a real process under its guard, and what faults find and show."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.hammer.journal import Journal
from tests.hammer.kinds import BY_NAME, Fault, Target
from tests.hammer.link import Link
from tests.hammer.onlooker import Shown
from tests.hammer.target_processes import Group, TargetProcesses

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


class Found(TargetProcesses):
    """Finds what it is told."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def find(self, target: Target) -> list[Group]:
        return self.groups

    def writers(self) -> list[psutil.Process]:
        return [process for (process,) in self.groups if process.status() != psutil.STATUS_ZOMBIE]


def fault(name: str, *, hold: float = 0.0) -> Fault:
    """One that is visible after a tenth of a second, if it ever is."""
    kind = BY_NAME[name]
    if kind.visible_after is not None:
        kind = replace(kind, visible_after=0.1)
    return Fault(number=1, at=0.0, kind=kind, aim=0.0, hold=hold, pick=0.0)


class Pages:
    """Shows one text."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self.looks = 0

    def look(self) -> Shown:
        self.looks += 1
        return self.shown


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


@pytest.fixture
def targets() -> Found:
    """Nobody yet."""
    return Found()


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    """A target."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]) as started:
        yield psutil.Process(started.pid)
        started.kill()


@pytest.fixture
def pages() -> Pages:
    """All is well."""
    return Pages(Shown("well", "All is well.", None))


def wait_until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
