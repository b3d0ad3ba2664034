"""`headrace ledger migrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.ledger.next_schema import NEWER, OLDER, install_next_schema
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.ledger import Ledger
from headrace.ledger.schema import HEAD


def run(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["ledger", "migrate", "--ledger", url, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_empty_place_becomes_a_ledger_and_is_left_alone_then(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/ledger.db"
    assert run(url) == f"Made a ledger of schema {HEAD}.\n"
    assert run(url) == f"The ledger's schema is {HEAD} already.\n"
    assert json.loads(run(url, "--json")) == {"ledger": url, "before": HEAD, "after": HEAD}


def test_an_older_ledger_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.open(url).close()
    install_next_schema(monkeypatch, tmp_path)
    assert run(url) == f"Migrated the ledger from schema {OLDER} to {NEWER}.\n"
