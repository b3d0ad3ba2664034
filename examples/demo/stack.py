"""Runs the embedded stack for the demo, by the same commands that a person would use."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from examples.demo.errors import DemoError

from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.guarded_process import GuardedProcess, ProcessSpec, child_environment, tail
from headrace.devstack.jars import cache_dir
from headrace.devstack.state import Phase, StackState, read_state

_POLL_SECONDS = 0.2
# Long, because the first start fetches the servers' jars.
_START_SECONDS = 600.0
_STOP_SECONDS = 120.0


class DemoStack:
    """A stack in its own folder, which is emptied at each start.

    Without ``keep`` it ends with this process, however this process ends; with ``keep`` it runs until
    `headrace stack down`.
    """

    def __init__(self, data: Path, dags: Path, *, keep: bool, settings: Mapping[str, str] | None = None) -> None:
        """``settings``: environment variables for the DAG files, besides those of log and ledger."""
        self.data = data.absolute()
        self._given = dict(settings or {})
        self._dags = dags
        self._keep = keep
        self._guarded: GuardedProcess | None = None
        self._detaching: subprocess.Popen[bytes] | None = None

    def start(self, show: Callable[[StackState], None]) -> None:
        """Stop and delete an earlier demo's stack, then start; ``show`` is called with the state until it runs."""
        self.clear()
        self.data.mkdir(parents=True, exist_ok=True)
        arguments = ["stack", "up", "--data", str(self.data), "--dags", str(self._dags)]
        arguments += ["--plugins", str(self.data / "plugins")]
        if self._keep:
            self._detaching = subprocess.Popen(
                [*_HEADRACE, *arguments, "--detach"],
                env=child_environment(self._settings()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log.open("ab"),
                start_new_session=True,
            )
            # With --detach the command ends when everything runs.
            self._await(show, lambda: self._detaching is None or self._detaching.poll() not in (None, 0))
            return
        self._guarded = GuardedProcess(
            ProcessSpec(
                name="headrace stack up",
                argv=[*_HEADRACE, *arguments],
                env=child_environment(self._settings()),
                log=self._log,
                stop_signal=signal.SIGTERM,
                grace_seconds=_STOP_SECONDS,
            )
        )
        self._await(show, lambda: not self._guarded or not self._guarded.alive)

    def stop(self) -> None:
        """Stop the stack and every process that it started; the folder with the logs stays."""
        if self._guarded is not None:
            self._guarded.stop()
        if self._detaching is not None and self._detaching.poll() is None:
            # On SIGINT it also stops the servers that it is starting.
            self._detaching.send_signal(signal.SIGINT)
            self._detaching.wait(_STOP_SECONDS)
        _run("stack", "down", "--data", str(self.data))

    def clear(self) -> None:
        """Stop the stack in the folder if one runs, and delete the folder."""
        if self.data.exists():
            _run("stack", "down", "--data", str(self.data), "--wipe")

    @property
    def state(self) -> StackState:
        """The stack's current state. DemoError if there is none."""
        state = read_state(self.data)
        if state is None:
            raise DemoError(f"There is no stack in {self.data}.")
        return state

    def address(self, service: str) -> str:
        """A server's address."""
        address = self.state.services[service].address
        if address is None:
            raise DemoError(f"The stack has no address for {service}.")
        return address

    @property
    def login(self) -> tuple[str, str]:
        """Airflow's user and password."""
        login = self.state.login
        if login is None:
            raise DemoError("The stack has no Airflow.")
        return login.user, str(json.loads(Path(login.password_file).read_text())[login.user])

    def airflow(self) -> AirflowApi:
        """A client of Airflow's REST API."""
        return AirflowApi(self.address("api-server"), *self.login)

    @property
    def ledger_url(self) -> str:
        """The ledger's URL for this process; Airflow has it as a connection."""
        return self.address("postgres")

    def failures(self) -> list[str]:
        """The servers that have failed, each with its error."""
        services = self.state.services.values()
        return [f"{one.name}: {one.error}" for one in services if one.phase is Phase.FAILED]

    @property
    def _log(self) -> Path:
        return self.data / "up.log"

    def _settings(self) -> Mapping[str, str]:
        places = {"HEADRACE_STORAGE": str(self.data / "streams"), "HEADRACE_LEDGER": "connection:headrace_ledger"}
        return {**places, **self._given}

    def _await(self, show: Callable[[StackState], None], has_failed: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            failed = has_failed()
            state = read_state(self.data)
            if state is not None:
                show(state)
                if state.phase is Phase.RUNNING:
                    return
            if failed:
                raise DemoError(f"The stack could not be started. {tail(self._log)}")
            if time.monotonic() > deadline:
                raise DemoError(f"The stack was not up after {_START_SECONDS:g} s. Its log is {self._log}.")
            time.sleep(_POLL_SECONDS)


def dags_folder() -> Path:
    """The folder with the examples' DAG files."""
    return Path(__file__).resolve().parents[2] / "dags"


def jars_are_there() -> bool:
    """Whether the servers' jars have been fetched before."""
    fetched = {folder.name.partition("-")[0] for folder in (cache_dir() / "jars").glob("*-*") if folder.is_dir()}
    return {"kafka", "elasticsearch", "postgres"} <= fetched


_HEADRACE = (sys.executable, "-m", "headrace.cli.main")


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [*_HEADRACE, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=child_environment(),
        # Ctrl-C reaches only the demo: the commands that it runs while stopping have to finish.
        start_new_session=True,
    )
    if done.returncode != 0:
        raise DemoError(f"`headrace {' '.join(arguments)}` failed with {done.returncode}: {done.stderr.strip()}")
