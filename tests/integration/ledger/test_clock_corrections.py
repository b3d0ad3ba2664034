"""`tests/unit/ledger/test_clock_corrections.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_clock_corrections import *  # noqa: F403
