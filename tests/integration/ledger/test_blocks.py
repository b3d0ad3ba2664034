"""`tests/unit/ledger/test_blocks.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_blocks import *  # noqa: F403
