"""The ledger that commands use: from the option, the environment, or a configuration file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.ledger import Ledger


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HEADRACE_LEDGER", raising=False)
    return tmp_path


def ledger_with(folder: Path, stream: str) -> str:
    url = f"sqlite:///{folder}/{stream}.db"
    with Ledger.open(url) as ledger:
        ledger.streams.register(stream, "{}", batch_interval_ms=10_000, block_interval_ms=200)
    return url


def list_events(stream: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["events", "list", stream, *arguments, "--json"])


def user_file(home: Path, text: str) -> None:
    path = home / "config" / "headrace" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_the_option_wins_over_the_variable_over_the_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files, the folder's wins over the user's."""
    urls = {name: ledger_with(home, name) for name in ("option", "variable", "folder", "user")}
    user_file(home, f'ledger = "{urls["user"]}"')
    assert json.loads(list_events("user").stdout)[0]["kind"] == "stream_registered"
    Path("headrace.toml").write_text(f'ledger = "{urls["folder"]}"')
    assert list_events("user").exit_code == 1
    assert list_events("folder").exit_code == 0
    monkeypatch.setenv("HEADRACE_LEDGER", urls["variable"])
    assert list_events("folder").exit_code == 1
    assert list_events("variable").exit_code == 0
    assert list_events("option", "--ledger", urls["option"]).exit_code == 0


def test_without_a_ledger_the_error_says_where_to_name_one() -> None:
    result = list_events("orders")
    assert result.exit_code == 1
    for part in ("--ledger", "HEADRACE_LEDGER", "headrace.toml", "config/headrace/config.toml", "headrace stack env"):
        assert part in result.stderr


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("ledger = ", "cannot be read"),
        ("ledgr = 'sqlite:////l.db'", "an unknown setting: ledgr"),
        ("ledger = 7", "`ledger` is not a text"),
        ("ledger = ''", "`ledger` is not a text"),
    ],
)
def test_a_file_that_is_wrong_is_named(text: str, reported: str) -> None:
    Path("headrace.toml").write_text(text)
    result = list_events("orders")
    assert result.exit_code == 1
    assert str(Path("headrace.toml").absolute()) in result.stderr
    assert reported in result.stderr


def test_a_relative_path_is_refused_as_everywhere() -> None:
    Path("headrace.toml").write_text('ledger = "sqlite:///l.db"')
    assert "absolute path" in list_events("orders").stderr
    assert not Path("l.db").exists()


def test_a_stream_without_a_ledger_is_stopped_unconfigured(home: Path) -> None:
    (home / "storage" / "orders").mkdir(parents=True)
    (home / "storage" / "orders" / "anything").write_text("")
    stopped = CliRunner().invoke(app, ["streams", "stop", "orders", "--storage", str(home / "storage")])
    assert stopped.exit_code == 0, stopped.output
