"""`tests/unit/ledger/test_timelines.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_timelines import *  # noqa: F403
