"""The demo as a command: its exit code, its JSON, and nothing left behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.system.orders import wait_until

from headrace.devstack.state import Phase, processes_of_stack, read_state

pytestmark = pytest.mark.timeout(1200)

HEADRACE = [sys.executable, "-m", "headrace.cli.main"]
DEMO = [sys.executable, "-m", "examples.demo"]


@pytest.fixture
def data() -> Iterator[Path]:
    """The demo's folder; what is left in it is ended and deleted."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    folder.chmod(0o755)
    yield folder / "demo"
    subprocess.run([*HEADRACE, "stack", "down", "--data", folder / "demo", "--wipe"], check=True, capture_output=True)
    folder.rmdir()


@contextmanager
def demo(data: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that has just been started."""
    command = [*DEMO, "--data", str(data), *options]
    # As a script in the background has it: a shell lets its background commands ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def stack_processes(data: Path) -> list[psutil.Process]:
    """What runs of the demo's stack."""
    state = read_state(data) if data.exists() else None
    if state is None:
        return []
    recorded = [process for ref in state.recorded_processes() if (process := ref.find())]
    return [*processes_of_stack(state.id), *recorded]


def is_up(data: Path) -> bool:
    state = read_state(data) if data.exists() else None
    return state is not None and state.phase is Phase.RUNNING


def has_servers(data: Path) -> bool:
    """Whether a server of the stack answers."""
    state = read_state(data) if data.exists() else None
    return state is not None and any(service.phase is Phase.RUNNING for service in state.services.values())


def test_the_demo_proves_its_result_and_leaves_nothing_running(data: Path) -> None:
    with demo(data, "--records", "6000", "--rate", "0", "--json") as process:
        out, errors = process.communicate(timeout=1000)
    assert process.returncode == 0, errors
    found = json.loads(out)
    assert found["holds"] is True
    assert found["records"] == found["indexed"] + found["dead_lettered"] == 6000
    assert found["dead_lettered"] == sum(found["malformed"].values()) == 6
    assert found["batches"]["count"] >= 1
    assert "the stack is up" in errors
    assert stack_processes(data) == []


def test_a_demo_that_is_interrupted_stops_everything(data: Path) -> None:
    with demo(data) as process:
        # Its servers have begun to run. A stack that is up is stopped as this one, by the same commands.
        wait_until(lambda: has_servers(data), seconds=600)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    # A shell shows 130 for both. Python ends itself by SIGINT if the interrupt came while it ran text (`exec`), as an
    # import does, though it was handled.
    assert process.returncode in (130, -signal.SIGINT)
    assert "everything is stopped" in errors
    assert stack_processes(data) == []


def test_a_demo_that_is_killed_takes_its_servers_along(data: Path) -> None:
    with demo(data) as process:
        wait_until(lambda: is_up(data), seconds=600)
        assert stack_processes(data)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: stack_processes(data) == [], seconds=120)
