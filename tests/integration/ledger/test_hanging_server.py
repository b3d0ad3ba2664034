"""A Postgres that hangs, is read-only or ends a session: the ledger's calls end, and work again after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection

from headrace.devstack.postgres import PostgresServer
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError

# The server ends a statement after a second, the client stops waiting 5 s later; a connection takes 2 s at most.
BOUNDS = "&connect_timeout=2&options=-c%20statement_timeout%3D1000"
# No call may take longer: that of a statement or of a ping, then of a new connection; and something for a busy machine.
LONGEST_SECONDS = 30.0
STREAM = {"batch_interval_ms": 1000, "block_interval_ms": 200}


@pytest.fixture
def ledger(postgres: str) -> Iterator[Ledger]:
    with Ledger.open(postgres + BOUNDS) as ledger:
        yield ledger


@contextmanager
def hanging(server: PostgresServer) -> Iterator[None]:
    server.suspend()
    try:
        yield
    finally:
        server.resume()


def test_calls_end_while_the_server_hangs_and_succeed_after_it(postgres_server: PostgresServer, ledger: Ledger) -> None:
    ledger.streams.register("s", "{}", **STREAM)
    with hanging(postgres_server):
        # The first call finds that a pooled connection does not answer, the next one makes one anew.
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(LedgerUnavailableError):
                ledger.now_ms()
            assert time.monotonic() - began < LONGEST_SECONDS
    assert ledger.now_ms() > 0
    assert ledger.streams.get("s").name == "s"


def test_a_hanging_statement_ends_and_closes_its_connection(postgres_server: PostgresServer, ledger: Ledger) -> None:
    database = ledger.streams._database
    began = 0.0
    with pytest.raises(LedgerUnavailableError, match="did not answer for 6 s"), database.write() as connection:
        connection.exec_driver_sql("SELECT 1")
        with hanging(postgres_server):
            began = time.monotonic()
            connection.exec_driver_sql("SELECT 1")
    assert time.monotonic() - began < LONGEST_SECONDS
    assert ledger.now_ms() > 0


def test_a_ledger_cannot_be_opened_while_its_server_hangs(postgres_server: PostgresServer, postgres: str) -> None:
    with hanging(postgres_server), pytest.raises(LedgerUnavailableError):
        Ledger.open(postgres + BOUNDS)


@pytest.mark.parametrize(
    "trouble",
    [
        "SET TRANSACTION READ ONLY; CREATE TABLE t (n int)",
        "SELECT pg_terminate_backend(pg_backend_pid())",
        "SELECT pg_sleep(60)",
        "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$",
        "DO $$ BEGIN RAISE SQLSTATE '53100'; END $$",
        "DO $$ BEGIN RAISE SQLSTATE '25P03'; END $$",
    ],
    ids=["read-only", "terminated", "statement_timeout", "serialization", "disk full", "idle in transaction"],
)
def test_what_passes_by_itself_is_unavailable_and_not_broken(ledger: Ledger, trouble: str) -> None:
    with pytest.raises(LedgerUnavailableError), ledger.streams._database.write() as connection:
        connection.exec_driver_sql(trouble)
    assert ledger.now_ms() > 0


def test_after_a_switchover_the_next_call_connects_anew(ledger: Ledger) -> None:
    database = ledger.streams._database

    def session(connection: Connection) -> Any:
        return connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()

    with pytest.raises(LedgerUnavailableError), database.write() as connection:
        before = session(connection)
        connection.exec_driver_sql("SET TRANSACTION READ ONLY; CREATE TABLE t (n int)")
    with database.read() as connection:
        assert session(connection) != before


def test_the_bounds_of_the_url_win_over_the_ledgers(ledger: Ledger) -> None:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    with ledger.streams._database.read() as connection:
        shown = {name: connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names}
        driver: Any = connection.connection.driver_connection
        parameters, seconds = driver.info.get_parameters(), driver.bound_seconds
    assert shown == {
        "statement_timeout": "1s", "lock_timeout": "20s", "idle_in_transaction_session_timeout": "1min"
    }  # fmt: skip
    assert seconds == 6
    assert (parameters["connect_timeout"], parameters["tcp_user_timeout"]) == ("2", "15000")
