"""A person who has just come, and does what a page of the documentation says, by its own blocks."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.guarded_process import child_environment
from headrace.devstack.postgres import PostgresServer
from headrace.devstack.state import STACK_VARIABLE, Phase, StackState, end_stack_processes, read_state

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0


class Page:
    """A page of the documentation, whose blocks a person pastes."""

    def __init__(self, path: str) -> None:
        text = (ROOT / "docs" / path).read_text()
        self._blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)

    def block(self, containing: str) -> str:
        """The page's only block with this text."""
        found = [each for each in self._blocks if containing in each]
        assert len(found) == 1, containing
        return str(found[0])


def eventually(what: Callable[[], Any], reason: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline, reason
        time.sleep(0.5)
    return found


class Newcomer:
    """A person in a folder with ``.venv``, who has started the servers in one terminal, as a page says, and types into
    another."""

    def __init__(self, folder: Path, page: Page) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in child_environment().items() if k not in (STACK_VARIABLE, "VIRTUAL_ENV")}
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "mine" / "dags").mkdir(parents=True)
        up = page.block("headrace stack up").splitlines()[-1]
        with (folder / "up.log").open("w") as log:
            self.terminal = subprocess.Popen(
                ["bash", "-c", f"exec {up}"], cwd=folder, env=self.environment, stdout=log, stderr=log
            )
        self.stack: StackState = eventually(self._running, "the stack did not start")
        address = {name: service.address or "" for name, service in self.stack.services.items()}
        self.address = address
        self.kafka, self.elasticsearch = address["kafka"], httpx.Client(base_url=address["elasticsearch"], timeout=120)
        assert self.stack.login is not None
        password = json.loads(Path(self.stack.login.password_file).read_text())[self.stack.login.user]
        self.airflow = AirflowApi(address["api-server"], self.stack.login.user, password, timeout=120)

    def _running(self) -> StackState | None:
        assert self.terminal.poll() is None, (self.folder / "up.log").read_text()
        state = read_state(self.folder / "mine" / "data")
        return state if state is not None and state.as_found().phase is Phase.RUNNING else None

    def type(self, script: str) -> str:
        """What the commands print; they succeed."""
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def documents(self, index: str) -> list[dict[str, Any]]:
        if self.elasticsearch.post(f"/{index}/_refresh").status_code == 404:
            return []
        hits: list[dict[str, Any]] = self.elasticsearch.get(f"/{index}/_search").json()["hits"]["hits"]
        return hits

    def close(self) -> None:
        if self.terminal.poll() is None:
            self.terminal.send_signal(signal.SIGTERM)
            self.terminal.wait(120)
        self.elasticsearch.close()


@contextmanager
def newcomer(page: Page) -> Iterator[Newcomer]:
    """The servers of the page run while this lasts."""
    # Not below pytest's own temporary folder: that is closed to others, and Postgres runs as nobody under root.
    folder = Path(tempfile.mkdtemp(prefix="headrace-newcomer-"))
    folder.chmod(0o755)
    person = Newcomer(folder, page)
    yield person
    person.close()
    assert end_stack_processes(person.stack.id, person.stack.recorded_processes()) == []
    PostgresServer(folder / "mine" / "data" / "postgres").wipe()
    shutil.rmtree(folder, ignore_errors=True)
