"""The exit codes of `headrace stack up` and `headrace stack status`: no server is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.devstack.state import Phase, ServiceState, StackState


def test_the_status_of_a_folder_without_a_stack_is_an_error_with_the_exit_code_of_a_stack_that_does_not_run(
    tmp_path: Path,
) -> None:
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
