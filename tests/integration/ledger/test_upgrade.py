"""`tests/unit/ledger/test_upgrade.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_upgrade import *  # noqa: F403
