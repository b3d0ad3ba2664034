"""`tests/unit/ledger/test_runs.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_runs import *  # noqa: F403
