"""The unit tests of the ledger once more, on a real Postgres."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.devstack.postgres import PostgresServer
from headrace.ledger import Ledger

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    # The modules here take their tests from tests.unit.ledger, however pytest was started.
    sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite(*(f"tests.unit.ledger.{path.stem}" for path in ROOT.glob("tests/unit/ledger/test_*.py")))

from tests.unit.ledger.conftest import build, clock, ledger, world  # noqa: E402

__all__ = ["build", "clock", "ledger", "world"]


@pytest.fixture(scope="session")
def empty_database(postgres_server: PostgresServer) -> str:
    """The name of a database with an empty ledger, to be copied: migrations take longer than a test."""
    name = "empty_ledger"
    Ledger.open(postgres_server.create_database(name)).close()
    return name


@pytest.fixture
def ledger_url(postgres_server: PostgresServer, empty_database: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres_server.create_database(name, template=empty_database)
    postgres_server.drop_database(name)


@pytest.fixture
def fresh_url(postgres: str) -> str:
    return postgres
