"""`tests/unit/ledger/test_timestamps.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_timestamps import *  # noqa: F403
