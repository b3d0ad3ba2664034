"""`tests/unit/ledger/test_races.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_races import *  # noqa: F403
