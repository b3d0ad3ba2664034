"""The producer where no broker ever answers; with one, the hammer's own run tells."""

from __future__ import annotations

import pytest
from tests.hammer import load as module
from tests.hammer.load import Load
from tests.hammer.pipeline import records
from tests.unit.hammer.conftest import wait_until

from headrace.devstack.server import free_port


def test_a_stuck_producer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records count as refused."""
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.3)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 1.0)
    load = Load(f"127.0.0.1:{free_port()}", "hammer", records(1), rate=200)
    load.start()
    wait_until(lambda: load.purged > 0)
    load.stop()
    assert load.acknowledged == 0
    assert set(load.receipts.refused) == set(range(load.sent))
