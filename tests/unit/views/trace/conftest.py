"""A stream with a real log and ledger, as the checks of consistency have it, and a Kafka that does not answer."""

from __future__ import annotations

import pytest
from tests.unit.fsck.conftest import empty_ledger, make_shop, shop

from headrace.views import trace_records

__all__ = ["empty_ledger", "make_shop", "shop"]


@pytest.fixture(autouse=True)
def _kafka_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_records, "ANSWER_SECONDS", 0.05)
