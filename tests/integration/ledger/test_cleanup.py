"""`tests/unit/ledger/test_cleanup.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_cleanup import *  # noqa: F403
