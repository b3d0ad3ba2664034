"""Who waits for a stream's lock on Postgres."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from headrace.ledger import database, engines

THREADS = 12


def test_another_process_does_not_wait_for_all_threads_of_one(ledger: Any, ledger_url: str) -> None:
    ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
    ended, written = threading.Event(), 0

    def write_all_the_time() -> None:
        nonlocal written
        while not ended.is_set():
            with ledger.streams._database.write_stream("s"):
                written += 1
                time.sleep(0.02)

    threads = [threading.Thread(target=write_all_the_time) for _ in range(THREADS)]
    other = create_engine(ledger_url)
    waited_for = []
    try:
        for thread in threads:
            thread.start()
        for _ in range(9):
            # As another process, which has no part in the turns of this one.
            with other.begin() as connection:
                connection.execute(text("SELECT 1"))
                before = written
                connection.execute(database._LOCK_STREAM, {"stream": database._lock_key("s")})
                waited_for.append(written - before)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        other.dispose()
    # The one that holds the lock, the one that waits for it, and what comes while the other one asks.
    assert statistics.median(waited_for) <= THREADS // 3, waited_for


def test_a_thread_whose_turn_never_comes_waits_for_the_lock(ledger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.streams.register("s", "{}", batch_interval_ms=1000, block_interval_ms=200)
    monkeypatch.setattr(engines, "TURN_SECONDS", 0.1)
    turn = engines._turns.setdefault(database._lock_key("s"), threading.Lock())
    with turn, ledger.streams._database.write_stream("s") as (_, locked):
        assert locked.row.name == "s"
    assert not turn.locked()
