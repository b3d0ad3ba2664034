"""The unit tests of the ledger once more, on a real Postgres."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    # The modules here take their tests from tests.unit.ledger, however pytest was started.
    sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite(*(f"tests.unit.ledger.{path.stem}" for path in ROOT.glob("tests/unit/ledger/test_*.py")))

from tests.unit.ledger.conftest import build, clock, ledger, world  # noqa: E402

__all__ = ["build", "clock", "ledger", "world"]


@pytest.fixture
def ledger_url(postgres: str) -> str:
    return postgres


@pytest.fixture
def fresh_url(postgres: str) -> str:
    return postgres
