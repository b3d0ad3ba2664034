"""`headrace stack up`, `status`, `down` and `env`: the embedded stack of a data folder, and the way to its servers."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from headrace.cli.options import AIRFLOW_VARIABLE, LEDGER_VARIABLE, AsJson, examples
from headrace.cli.output import echo
from headrace.connections import CONNECTION_PREFIX, variable_name
from headrace.devstack.errors import LocalStackError, StackRunningError
from headrace.devstack.stack import LEDGER_CONNECTION, SERVICES, StackOptions
from headrace.devstack.state import Phase, StackState, end_stack_processes, read_state, write_state
from headrace.devstack.supervisor import RESTART_SIGNAL, supervise

_STOP_SECONDS = 120
_NOT_RUNNING = 3
"""Exit code of `status` when the stack is not, or not completely, running; the same as in init scripts."""

Data = Annotated[Path, typer.Option(help="The folder of the stack's data.", file_okay=False)]
StateAsJson = Annotated[bool, typer.Option("--json", help="Print the stack's state as JSON.")]


@examples("stack up --data mine/data --dags mine/dags", "stack up --detach --without airflow", "stack up --registry")
def up(
    *,
    data: Data = Path(".headrace"),
    dags: Annotated[
        Path | None, typer.Option(help="Airflow's DAG folder; default: ./dags if there is one, else DATA/dags.")
    ] = None,
    plugins: Annotated[
        Path | None, typer.Option(help="Airflow's plugins folder; default: ./plugins if there is one.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help=f"Leave out one of: {', '.join(SERVICES)}.")] = None,
    registry: Annotated[
        bool, typer.Option("--registry", help="Also start a schema registry; its first start downloads 142 MB.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach/--foreground", help="Return when everything runs, or run until Ctrl-C.")
    ] = False,
    as_json: StateAsJson = False,
) -> None:
    """Start Kafka, Elasticsearch, Postgres and Airflow on this machine; only Java is needed.

    If the stack runs already, restarts servers that have died. Addresses and data stay the same in later starts.
    """
    data = data.absolute()
    options = StackOptions(
        data=data,
        dags=(dags or _existing("dags") or data / "dags").absolute(),
        plugins=(plugins or _existing("plugins") or data / "airflow" / "plugins").absolute(),
        without=tuple(without or ()),
        registry=registry,
    )
    _make_folder(data, "--data")
    state = read_state(data)
    if state is not None and state.supervised:
        state = _revive(data, state)
    elif detach:
        state = _start_detached(options)
    else:
        _hold(options, as_json)
        return
    _print(state, as_json)
    if not _all_run(state):
        raise typer.Exit(1)


@examples("stack status --json")
def status(*, data: Data = Path(".headrace"), as_json: StateAsJson = False) -> None:
    """Show what runs and at which address; the exit code is 3 unless everything runs."""
    state = read_state(data.absolute())
    if state is None:
        error = LocalStackError(f"There is no stack in {data.absolute()}.", remedy="`headrace stack up` makes one.")
        echo(f"Error: {error}", err=True)
        raise typer.Exit(_NOT_RUNNING)
    state = state.as_found()
    _print(state, as_json)
    if not _all_run(state):
        raise typer.Exit(_NOT_RUNNING)


@examples("stack down --data mine/data")
def down(
    *,
    data: Data = Path(".headrace"),
    wipe: Annotated[
        bool, typer.Option("--wipe", help="Afterwards delete the data folder, with all topics, indices and logs.")
    ] = False,
    as_json: StateAsJson = False,
) -> None:
    """Stop the stack and all processes that were started under it, including those that its tasks detached."""
    data = data.absolute()
    state = read_state(data)
    if state is None:
        if as_json:
            echo("null")
        else:
            echo(f"There is no stack in {data}: nothing to stop.", err=True)
        return
    supervisor = state.supervisor.find() if state.supervisor else None
    if supervisor is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, signal.SIGTERM)
        _wait_until_gone(data, state)
    left = end_stack_processes(state.id, state.recorded_processes())
    if left:
        echo(f"Ended {len(left)} processes that the stack had left behind:", err=True)
        for process in left:
            echo(f"  {process}", err=True)
    state = read_state(data) or state
    state.phase, state.supervisor = Phase.STOPPED, None
    for service in state.services.values():
        service.phase = Phase.STOPPED
    write_state(data, state)
    if wipe:
        from headrace.devstack.postgres import PostgresServer

        # If root runs the stack, Postgres may have its data in another folder.
        PostgresServer(data / "postgres").wipe()
        shutil.rmtree(data)
    if as_json:
        echo(state.model_dump_json(indent=2))
    else:
        echo(f"Stopped{' and deleted' if wipe else ''}: {data}", err=True)


def _hold(options: StackOptions, as_json: bool) -> None:
    with Progress() as progress:
        shown = False

        def on_change(state: StackState) -> None:
            nonlocal shown
            progress.show(state)
            if state.phase is Phase.RUNNING and not shown:
                shown = True
                progress.close()
                _print(state, as_json)
                echo("Ctrl-C stops it.", err=True)
            elif shown:
                for service in state.services.values():
                    if service.phase is Phase.FAILED and state.phase is Phase.RUNNING:
                        echo(f"{service.name} has failed: {service.error}", err=True)

        supervise(options, on_change)


def _start_detached(options: StackOptions) -> StackState:
    log = options.data / "supervisor.log"
    command = [sys.executable, "-m", "headrace.devstack.supervisor", "--data", str(options.data)]
    command += ["--dags", str(options.dags), "--plugins", str(options.plugins)]
    for name in options.without:
        command += ["--without", name]
    if options.registry:
        command.append("--registry")
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as output:
        supervisor = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        with Progress() as progress:
            for state in _states(options.data):
                if state is not None and state.supervisor is not None and state.supervisor.pid == supervisor.pid:
                    progress.show(state)
                    if state.phase in (Phase.RUNNING, Phase.STOPPED):
                        return state
                if supervisor.poll() is not None:
                    raise LocalStackError(f"The stack could not be started. {log.read_text().strip()[-5000:]}")
    except KeyboardInterrupt:
        supervisor.terminate()
        supervisor.wait()
        raise
    raise AssertionError("unreachable")


def _revive(data: Path, state: StackState) -> StackState:
    """Wait for a starting stack; in a running one, have dead servers started again."""
    if state.phase is Phase.RUNNING and not _all_run(state.as_found()) and state.supervisor is not None:
        os.kill(state.supervisor.pid, RESTART_SIGNAL)
        time.sleep(1.0)  # until the supervisor has received the signal
    with Progress() as progress:
        for now in _states(data):
            if now is None or not now.supervised:
                raise StackRunningError(
                    f"The stack in {data} is being stopped, or could not be started: {now.error if now else ''}",
                    remedy="Try again when `headrace stack status` says it is stopped.",
                )
            progress.show(now)
            if now.phase is Phase.RUNNING and all(one.phase is not Phase.STARTING for one in now.services.values()):
                return now
    raise AssertionError("unreachable")


def _wait_until_gone(data: Path, state: StackState) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    with Progress() as progress:
        while state.supervised:
            progress.show(read_state(data) or state)
            if time.monotonic() > deadline:
                supervisor = state.supervisor.find() if state.supervisor else None
                if supervisor is not None:
                    supervisor.kill()  # its servers' guards then end the servers
                return
            time.sleep(0.1)


def _states(data: Path) -> Iterator[StackState | None]:
    while True:
        yield read_state(data)
        time.sleep(0.1)


def _print(state: StackState, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(state.model_dump(mode="json"), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 200  # so that lines stay whole for scripts that cut out a column
    console.print(stack_table(state))
    # Print the password on a terminal only: a log or a pipe could store it.
    for line in filter(None, (login_line(state, with_password=console.is_terminal), state.error)):
        console.print(line, markup=False, highlight=False)


def _all_run(state: StackState) -> bool:
    return state.phase is Phase.RUNNING and all(one.phase is Phase.RUNNING for one in state.services.values())


def _make_folder(folder: Path, option: str) -> None:
    remedy = f"Name a folder that this user can make and write, by {option}."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LocalStackError(
            f"The folder {folder} cannot be made or written: {error.strerror}.", remedy=remedy
        ) from None


def _existing(name: str) -> Path | None:
    folder = Path(name)
    return folder if folder.is_dir() else None


AIRFLOW_CONNECTION = "headrace_airflow"
"""The connection to the stack's Airflow, by which commands log in to its API."""


@examples("stack env", "stack env --data mine/data --json")
def env(*, data: Data = Path(".headrace"), as_json: AsJson = False) -> None:
    """Print the exports with which commands find the stack's ledger, Kafka and Elasticsearch.

    In a shell: eval "$(headrace stack env)". The values go from the output to the shell's variables, and so not through
    the process list.
    """
    data = data.absolute()
    state = read_state(data)
    if state is None or state.as_found().phase is not Phase.RUNNING:
        raise LocalStackError(f"No stack runs in {data}.", remedy=f"Start it: `headrace stack up --data {data}`.")
    variables = environment(state)
    if as_json:
        echo(json.dumps(variables, indent=2))
        return
    for name, value in variables.items():
        echo(f"export {name}={shlex.quote(value)}")


def environment(state: StackState) -> dict[str, str]:
    """The variables: ``AIRFLOW_CONN_…`` for each connection, and the names of the ledger's and Airflow's if it has
    them."""
    variables = {variable_name(conn_id): json.dumps(fields) for conn_id, fields in state.connections.items()}
    if LEDGER_CONNECTION in state.connections:
        variables[LEDGER_VARIABLE] = f"{CONNECTION_PREFIX}{LEDGER_CONNECTION}"
    airflow = state.services.get("api-server")
    if airflow is not None and airflow.address is not None and state.login is not None:
        passwords = json.loads(Path(state.login.password_file).read_text(encoding="utf-8"))
        variables[AIRFLOW_VARIABLE] = AIRFLOW_CONNECTION
        variables[variable_name(AIRFLOW_CONNECTION)] = json.dumps(
            {
                "conn_type": "http",
                "host": airflow.address,
                "login": state.login.user,
                "password": passwords[state.login.user],
            }
        )
    return variables


_STYLES = {Phase.RUNNING: "green", Phase.FAILED: "red", Phase.STARTING: "yellow", Phase.STOPPING: "yellow"}


def stack_table(state: StackState) -> Table:
    """A table with one row for each server: phase, address, seconds to start."""
    table = Table("server", "state", Column("address", overflow="fold"), "started in", box=None, pad_edge=False)
    for service in state.services.values():
        seconds = "" if service.seconds_to_start is None else f"{service.seconds_to_start:.1f} s"
        style = _STYLES.get(service.phase)
        table.add_row(
            service.name, f"[{style}]{service.phase}[/]" if style else service.phase, service.address, seconds
        )
    return table


def login_line(state: StackState, *, with_password: bool) -> str | None:
    """How to log in to Airflow: user, and password or path of its file. None if the stack or Airflow does not run."""
    if state.login is None or state.phase is not Phase.RUNNING:
        return None
    if with_password:
        try:
            password = json.loads(Path(state.login.password_file).read_text())[state.login.user]
        except (OSError, ValueError, KeyError):
            pass  # This user cannot read it: name the file instead.
        else:
            return f"Airflow: user {state.login.user}, password {password}"
    return f"Airflow: user {state.login.user}, password in {state.login.password_file}"


class Progress:
    """Shows a stack's progress on standard error: a live table on a terminal, otherwise one line for each change."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True) if self._console.is_terminal else None
        self._reported: dict[str, Phase] = {}
        self._closed = False

    def show(self, state: StackState) -> None:
        """Show ``state``; does nothing after `close`."""
        if self._closed:
            return
        if self._live is not None:
            self._live.update(stack_table(state))
            return
        for service in state.services.values():
            if self._reported.get(service.name) is not service.phase:
                self._reported[service.name] = service.phase
                self._console.print(f"{service.name}: {service.phase}", highlight=False)

    def close(self) -> None:
        """Stop the live table."""
        if not self._closed and self._live is not None:
            self._live.stop()
        self._closed = True

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
