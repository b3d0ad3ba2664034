"""`tests/unit/ledger/test_samples.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_samples import *  # noqa: F403
