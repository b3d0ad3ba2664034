"""`headrace stack env`: what it prints is read by a shell, and gives the connections that the stack recorded."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.connections import resolve
from headrace.devstack.stack_processes import ProcessRef
from headrace.devstack.state import Login, Phase, ServiceState, StackState, write_state

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
