"""A server that does nothing, but is a real process under its guard."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hammer.journal import Journal

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
