"""The ledger's world of tests: a stream with one receiver and three partitions."""

from __future__ import annotations

from tests.unit.ledger.conftest import build, clock, empty_ledger, ledger, ledger_url, world

__all__ = ["build", "clock", "empty_ledger", "ledger", "ledger_url", "world"]
