"""`tests/unit/ledger/test_positions.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_positions import *  # noqa: F403
