"""What only a SQLite ledger has: its settings, and a file that can go away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError


def test_every_connection_syncs_and_waits(production_settings: None, ledger: Any) -> None:
    with ledger.streams._database.read() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}


def test_a_deleted_file_is_an_error_and_not_a_new_ledger(ledger: Any, ledger_url: str, tmp_path: Path) -> None:
    ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
    for file in tmp_path.glob("ledger.db*"):
        file.unlink()
    with pytest.raises(LedgerUnavailableError):
        ledger.streams.all()
    assert not (tmp_path / "ledger.db").exists()
    # The same process may make it anew.
    with Ledger.open(ledger_url) as again:
        assert again.streams.all() == []
    assert ledger.streams.all() == []


def test_a_new_ledger_and_its_folder_are_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.db"
    before = os.umask(0)
    try:
        with Ledger.open(f"sqlite:///{path}") as ledger:
            ledger.now_ms()
            modes = {file.name: file.stat().st_mode & 0o777 for file in (path.parent, *path.parent.iterdir())}
    finally:
        os.umask(before)
    assert modes == {"new": 0o700, "ledger.db": 0o600, "ledger.db-wal": 0o600, "ledger.db-shm": 0o600}
