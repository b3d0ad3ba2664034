"""`tests/unit/ledger/test_rebuild.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_rebuild import *  # noqa: F403
