"""`headrace stack up` and `status`: without a server, and what a shell reads of `headrace stack env`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from headrace.cli import stack
from headrace.cli.main import app
from headrace.cli.stack import login_line
from headrace.connections import resolve
from headrace.devstack.stack import Stack, StackOptions
from headrace.devstack.state import (
    STACK_VARIABLE,
    Login,
    Phase,
    ProcessRef,
    ServiceState,
    StackState,
    remembered_ports,
    write_state,
)


def test_the_status_of_a_folder_without_a_stack_is_an_error(
    tmp_path: Path,
) -> None:
    """Its exit code is that of a stack that does not run."""
    result = CliRunner().invoke(app, ["stack", "status", "--data", str(tmp_path)])
    assert result.exit_code == 3
    assert f"There is no stack in {tmp_path}." in result.stderr and "stack up" in result.stderr


@pytest.mark.parametrize(
    ("phase", "service", "exit_code"),
    [
        (Phase.RUNNING, Phase.RUNNING, 0),
        (Phase.RUNNING, Phase.FAILED, 1),
        (Phase.STOPPED, Phase.STOPPED, 1),
    ],
)
def test_a_detached_start_succeeds_only_if_everything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, service: Phase, exit_code: int
) -> None:
    state = StackState(id="1", phase=phase, services={"kafka": ServiceState(name="kafka", phase=service)})
    monkeypatch.setattr("headrace.cli.stack._start_detached", lambda options: state)
    result = CliRunner().invoke(app, ["stack", "up", "--detach", "--json", "--data", str(tmp_path)])
    assert result.exit_code == exit_code
    assert f'"phase": "{phase.value}"' in result.stdout


@pytest.mark.parametrize("wanted", [True, False])
def test_a_registry_is_started_only_where_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wanted: bool
) -> None:
    monkeypatch.setenv(STACK_VARIABLE, "")
    monkeypatch.setenv("HEADRACE_DATA", "")
    started: list[Stack] = []

    def supervise(options: StackOptions, on_change: object) -> None:
        started.append(Stack(options))

    monkeypatch.setattr("headrace.cli.stack.supervise", supervise)
    arguments = ["--registry"] if wanted else []
    result = CliRunner().invoke(app, ["stack", "up", "--data", str(tmp_path), "--without", "airflow", *arguments])
    assert result.exit_code == 0, result.output
    (made,) = started
    assert ("registry" in made.servers) is wanted
    assert (made.state.services.keys() >= {"registry"}) is wanted
    port = remembered_ports(tmp_path)["registry"]
    url = {"conn_type": "http", "host": f"http://127.0.0.1:{port}/apis/ccompat/v7"}
    assert made.connections().get("schema_registry_default") == (url if wanted else None)


@pytest.fixture
def state(tmp_path: Path) -> StackState:
    file = tmp_path / "passwords.json"
    file.write_text(json.dumps({"admin": "s3cret"}))
    return StackState(id="1", phase=Phase.RUNNING, login=Login(user="admin", password_file=str(file)))


def test_a_person_is_shown_the_password(state: StackState) -> None:
    assert login_line(state, with_password=True) == "Airflow: user admin, password s3cret"


def test_a_log_gets_the_path_of_the_password(state: StackState, capsys: pytest.CaptureFixture[str]) -> None:
    stack._print(state, as_json=False)
    reported = capsys.readouterr().out
    assert "s3cret" not in reported
    assert "passwords.json" in reported


def test_a_file_that_is_not_ours_to_read_is_named(state: StackState) -> None:
    Path(state.login.password_file).unlink()  # type: ignore[union-attr]
    assert "password in" in (login_line(state, with_password=True) or "")


KAFKA = {"conn_type": "kafka", "extra": {"bootstrap.servers": "127.0.0.1:1", "client.id": "it's $HOME"}}
LEDGER = {"conn_type": "postgres", "host": "127.0.0.1", "port": 2, "login": "headrace", "schema": "headrace"}


def env(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["stack", "env", "--data", str(data), *arguments])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    state = StackState(
        id="1",
        phase=Phase.RUNNING,
        supervisor=ProcessRef.of(psutil.Process().pid),
        connections={"kafka_default": KAFKA, "headrace_ledger": LEDGER},
    )
    write_state(tmp_path, state)
    return tmp_path


def test_a_shell_gets_the_stacks_connections_and_its_ledger(data: Path) -> None:
    exports = env(data)
    assert exports.exit_code == 0, exports.output
    script = 'eval "$EXPORTS"; python3 -c "import json, os; print(json.dumps(dict(os.environ)))"'
    shell = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": os.environ["PATH"], "EXPORTS": exports.stdout},
        check=True,
        capture_output=True,
        text=True,
    )
    variables = json.loads(shell.stdout)
    assert dict(resolve("kafka_default", variables).extra) == KAFKA["extra"]
    assert resolve("headrace_ledger", variables).port == 2
    assert variables["HEADRACE_LEDGER"] == "connection:headrace_ledger"
    assert json.loads(env(data, "--json").stdout).items() <= variables.items()


def test_a_stack_without_postgres_has_no_ledger(data: Path) -> None:
    state = StackState.model_validate_json((data / "stack.json").read_bytes())
    del state.connections["headrace_ledger"]
    write_state(data, state)
    assert set(json.loads(env(data, "--json").stdout)) == {"AIRFLOW_CONN_KAFKA_DEFAULT"}


def test_a_stack_with_airflow_exports_its_login(data: Path) -> None:
    state = StackState.model_validate_json((data / "stack.json").read_bytes())
    (data / "passwords.json").write_text('{"admin": "secret"}')
    state.login = Login(user="admin", password_file=str(data / "passwords.json"))
    state.services["api-server"] = ServiceState(name="api-server", address="http://127.0.0.1:3")
    write_state(data, state)
    variables = json.loads(env(data, "--json").stdout)
    airflow = resolve(variables["HEADRACE_AIRFLOW"], variables)
    assert (airflow.host, airflow.login, airflow.password) == ("http://127.0.0.1:3", "admin", "secret")


def test_a_stack_that_does_not_run_exports_nothing(data: Path, tmp_path: Path) -> None:
    state = StackState.model_validate_json((data / "stack.json").read_bytes())
    state.phase = Phase.STOPPED
    write_state(data, state)
    for folder in (data, tmp_path / "nothing"):
        result = env(folder)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"headrace stack up --data {folder}" in result.stderr
