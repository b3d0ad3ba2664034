"""`headrace stack status` of a folder without a stack: no server is needed."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from headrace.cli.main import app


def test_the_status_of_a_folder_without_a_stack_is_an_error_with_the_exit_code_of_a_stack_that_does_not_run(
    tmp_path: Path,
) -> None:
    result = CliRunner().invoke(app, ["stack", "status", "--data", str(tmp_path)])
    assert result.exit_code == 3
    assert f"There is no stack in {tmp_path}." in result.stderr and "stack up" in result.stderr
