"""`tests/unit/ledger/test_batch_pages.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_batch_pages import *  # noqa: F403
