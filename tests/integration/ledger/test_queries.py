"""`tests/unit/ledger/test_queries.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_queries import *  # noqa: F403
