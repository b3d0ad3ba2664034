"""`tests/unit/ledger/test_run_batch_times.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_run_batch_times import *  # noqa: F403
