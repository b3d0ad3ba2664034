"""`tests/unit/ledger/test_output_attempts.py` on Postgres."""

from __future__ import annotations

from tests.unit.ledger.test_output_attempts import *  # noqa: F403
