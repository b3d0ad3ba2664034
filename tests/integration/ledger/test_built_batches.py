"""`tests/unit/ledger/test_built_batches.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_built_batches import *  # noqa: F403
