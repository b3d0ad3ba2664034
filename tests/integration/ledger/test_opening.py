"""Those of `tests/unit/ledger/test_opening.py` that concern the database, on Postgres, and its own settings."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import ConnectionInfo
from tests.unit.ledger.test_opening import (
    test_a_forked_child_has_connections_of_its_own,
    test_a_ledger_pickles_as_its_url,
    test_a_newer_schema_is_refused,
    test_an_older_ledger_is_migrated_by_the_command_alone,
    test_an_open_ledger_needs_no_alembic_and_only_its_dialect,
    test_the_clock_is_the_databases,
    test_the_migrations_make_the_tables,
    test_threads_and_event_loops_share_a_ledger,
)

from headrace.ledger.database import Database, engine_url
from headrace.ledger.postgres_engine import postgres_engine

__all__ = [
    "test_a_forked_child_has_connections_of_its_own",
    "test_a_ledger_pickles_as_its_url",
    "test_a_newer_schema_is_refused",
    "test_an_older_ledger_is_migrated_by_the_command_alone",
    "test_an_open_ledger_needs_no_alembic_and_only_its_dialect",
    "test_the_clock_is_the_databases",
    "test_the_migrations_make_the_tables",
    "test_threads_and_event_loops_share_a_ledger",
]


def test_a_commit_is_durable_whatever_the_servers_setting(ledger: Any) -> None:
    # The test server runs with synchronous_commit=off.
    with ledger.streams._database.read() as connection:
        shown = [
            connection.exec_driver_sql(f"SHOW {setting}").scalar() for setting in ("synchronous_commit", "lock_timeout")
        ]
    assert shown == ["on", "20s"]


@pytest.mark.parametrize("pooler", [True, False])
def test_statements_are_prepared_only_where_no_pooler_is_between(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch, pooler: bool
) -> None:
    """psycopg numbers prepared statements: on a connection that clients share, one would run another's."""
    if pooler:
        # PgBouncer gives each client a process id of its own.
        monkeypatch.setattr(ConnectionInfo, "backend_pid", 1)
    database = Database(postgres_engine(engine_url(ledger_url)))
    for _ in range(10):
        database.now_ms()
    with database.read() as connection:
        prepared = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements").all()
    database.dispose()
    assert (prepared == []) is pooler
