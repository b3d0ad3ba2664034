"""What all commands have: help, the version, suggestions, completion and times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from headrace import __version__
from headrace.cli.main import app
from headrace.cli.options import milliseconds
from headrace.clock import SystemClock
from headrace.ledger import Ledger


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"headrace {__version__}\n"


def test_python_runs_the_module_of_the_command() -> None:
    """The demo and tests start commands so."""
    module = [sys.executable, "-m", "headrace.cli.main", "streams", "list", "--help"]
    assert "List the streams" in subprocess.run(module, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", [(), ("streams",), ("streams", "list"), ("trace",)])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_both_options_print_the_help(path: tuple[str, ...], option: str) -> None:
    result = run(*path, option)
    assert result.exit_code == 0
    assert " ".join(("Usage: ", *path))[:6] in result.stdout


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (("stream", "list"), "streams"),
        (("streams", "lst"), "list"),
        (("dead-leters", "list"), "dead-letters"),
        (("streams", "list", "--jsn"), "--json"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(wrong: tuple[str, ...], right: str) -> None:
    result = run(*wrong)
    assert result.exit_code == 2
    assert right in result.stderr


def test_the_help_imports_only_a_command_listed_by_itself() -> None:
    """A noun without verbs is a command, whose help is in its own module."""
    script = (
        "import sys; from headrace.cli.main import app; app(['--help'], standalone_mode=False);"
        "print(*(name for name in sys.modules if name.partition('.')[0] in ('headrace', 'pydantic', 'sqlalchemy')))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(shown.splitlines()[-1].split()) == {
        *("headrace", "headrace.clock", "headrace.errors", "headrace.secrets"),
        *("headrace.cli", "headrace.cli.main", "headrace.cli.options", "headrace.cli.output"),
        *("headrace.cli.from_connect", "headrace.cli.mapping", "headrace.cli.trace"),
    }


def completed(words: str, **environment: str) -> list[str]:
    variables = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(app, [], prog_name="headrace", env=variables | environment)
    assert not result.stderr
    return result.stdout.split()


def test_a_shell_completes_commands_and_options_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_LEDGER", raising=False)
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Ledger.open(url) as ledger:
        for name in ("orders", "others", "flights"):
            ledger.streams.register(name, "{}", batch_interval_ms=10_000, block_interval_ms=200)
    assert completed("headrace str") == ["streams"]
    assert completed("headrace streams sto") == ["stop"]
    assert completed("headrace streams list --js") == ["--json"]
    assert completed("headrace batches list o", HEADRACE_LEDGER=url) == ["orders", "others"]
    assert completed("headrace batches list o") == [], "no ledger: nothing is offered, and nothing fails"
    assert completed("headrace batches list o", HEADRACE_LEDGER="sqlite:////nowhere/l.db") == []
    (tmp_path / "headrace.toml").write_text(f'ledger = "{url}"')
    assert completed("headrace streams show fl") == ["flights"]


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-11-21T14:05Z", 1_795_269_900_000),
        ("2026-11-21T14:05", 1_795_269_900_000),
        ("2026-11-21 15:05:00.250+01:00", 1_795_269_900_250),
        ("1795269900000", 1_795_269_900_000),
    ],
)
def test_times_are_read(text: str, ms: int) -> None:
    assert milliseconds(text, "--from") == ms


@pytest.mark.parametrize(
    ("text", "ago_ms"),
    [("2 hours ago", 7_200_000), ("1 hour ago", 3_600_000), ("90 seconds ago", 90_000), ("3days ago", 259_200_000)],
)
def test_times_before_now_are_read(text: str, ago_ms: int) -> None:
    before = SystemClock().now_ms()
    assert before <= milliseconds(text, "--from") + ago_ms <= SystemClock().now_ms()


@pytest.mark.parametrize(
    "text", ["yesterday", "two hours ago", "2 hours", "-1 hours ago", "2026-13-01", "12²", "١٢", "٢ hours ago"]
)
def test_other_texts_are_no_times(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no time"):
        milliseconds(text, "--from")
