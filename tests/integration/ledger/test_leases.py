"""`tests/unit/ledger/test_leases.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_leases import *  # noqa: F403
