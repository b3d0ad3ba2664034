from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import stack
from headrace.cli.stack_display import login_line
from headrace.devstack.state import Login, Phase, StackState


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
