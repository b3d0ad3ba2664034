"""The unit tests of the ledger once more, on a real Postgres."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import NullPool, create_engine, text

from headrace.devstack.postgres import PostgresServer
from headrace.ledger import Ledger
from headrace.ledger.database import HEAD

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    # The modules here take their tests from tests.unit.ledger, however pytest was started.
    sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite(*(f"tests.unit.ledger.{path.stem}" for path in ROOT.glob("tests/unit/ledger/test_*.py")))

from tests.unit.ledger.conftest import build, clock, ledger, world  # noqa: E402

__all__ = ["build", "clock", "ledger", "world"]


@pytest.fixture(scope="session")
def shared_url(postgres_server: PostgresServer) -> str:
    """A database with an empty ledger. A new one for each test would take ten times as long as most tests."""
    url = postgres_server.create_database("shared_ledger")
    Ledger.open(url).close()
    return url


@pytest.fixture
def ledger_url(shared_url: str) -> Iterator[str]:
    yield shared_url
    _empty(shared_url)


def _empty(url: str) -> None:
    """Delete all rows, and what a test has left open: its sessions, and with them their locks."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text(_END_OTHERS))
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        for table, nbytes in connection.execute(text(_TABLES)).all():
            # Emptying a file takes longer than deleting a few rows, and leaves nothing for a later query to read.
            connection.execute(text(f"DELETE FROM {table}" if nbytes <= _FEW_BYTES else f"TRUNCATE {table} CASCADE"))
        connection.execute(text(_RESTART_NUMBERS))
        # A test has made it another schema's.
        connection.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})


_END_OTHERS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
_TABLES = """
SELECT tablename, pg_relation_size(quote_ident(tablename)::regclass) FROM pg_tables
WHERE schemaname = 'public' AND tablename <> 'alembic_version'
"""
_RESTART_NUMBERS = "SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, 1, false) FROM pg_sequences"
_FEW_BYTES = 65_536


@pytest.fixture
def fresh_url(postgres: str) -> str:
    return postgres
