"""`tests/unit/ledger/test_replays.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_replays import *  # noqa: F403
