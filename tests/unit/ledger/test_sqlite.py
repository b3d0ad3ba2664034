"""What only a SQLite ledger has: its settings, a file that can go away, and writes that begin in turn."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from headrace.ledger import Ledger, engines
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
            ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
            modes = {file.name: file.stat().st_mode & 0o777 for file in (path.parent, *path.parent.iterdir())}
    finally:
        os.umask(before)
    assert modes == {"new": 0o700} | {f"ledger.db{end}": 0o600 for end in ("", "-wal", "-shm", "-turn")}


_COUNT = "UPDATE streams SET updated_at_ms = updated_at_ms + 1"
_SPAWN = multiprocessing.get_context("spawn")


def _write(ledger: Any) -> int:
    """Add one to a number. Returns it."""
    with ledger.streams._database.write() as connection:
        connection.exec_driver_sql(_COUNT)
        return _number(connection)


def _number(connection: Any) -> int:
    return int(connection.exec_driver_sql("SELECT max(updated_at_ms) FROM streams").scalar() or 0)


def _write_all_the_time(url: str, started: Event, ended: Event) -> None:
    def write() -> None:
        while not ended.is_set():
            with ledger.streams._database.write() as connection:
                connection.exec_driver_sql(_COUNT)
                # The file is locked for most of the time, as by the long transactions of a range of batches.
                time.sleep(0.002)
            started.set()

    with Ledger.open(url) as ledger:
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextmanager
def _constant_writer(url: str) -> Iterator[None]:
    started, ended = _SPAWN.Event(), _SPAWN.Event()
    process = _SPAWN.Process(target=_write_all_the_time, args=(url, started, ended))
    process.start()
    try:
        assert started.wait(60)
        yield
    finally:
        ended.set()
        process.join()


def test_a_process_that_writes_all_the_time_lets_another_begin(ledger: Any, ledger_url: str) -> None:
    ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
    before = []
    with _constant_writer(ledger_url):
        for _ in range(20):
            with ledger.streams._database.read() as connection:
                seen = _number(connection)
            before.append(_write(ledger) - seen - 1)
            # The threads that wait are not to fall asleep for this one to write several times in a row.
            time.sleep(0.03)
    # Those that began before it asked, and some in the time that it takes to ask. Without turns, hundreds.
    assert statistics.median(before) <= 20, before


def test_a_suspended_process_with_the_turn_only_delays_a_write(
    ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TURN_SECONDS", 0.2)
    ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print(flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "ledger.db-turn")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as suspended:
        assert suspended.stdout is not None
        assert suspended.stdout.readline() == b"\n"
        began = time.monotonic()
        _write(ledger)
        assert time.monotonic() - began >= 0.2
        suspended.kill()


def test_a_write_begins_where_the_file_of_turns_cannot_be_made(ledger: Any, tmp_path: Path) -> None:
    (tmp_path / "ledger.db-turn").mkdir()
    ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
    assert _write(ledger) > 0


def test_a_child_that_is_forked_in_a_turn_has_turns_of_its_own(
    ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TURN_SECONDS", 30.0)
    ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
    with engines._turns[tmp_path / "ledger.db"]:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _write(ledger)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - began < 30
