"""The ledger that tests and demos seed has batch events that listeners can get."""

from __future__ import annotations

from pathlib import Path

from tests.support.seeded_ledger import SITUATIONS, seed

from headrace.ledger import Ledger
from headrace.listeners.translation import translate


def test_every_seeded_event_of_a_batch_can_be_translated(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        names = seed(ledger, streams=len(SITUATIONS), batches=5)
        rows = [row for name in names for row in ledger.events.page(name, limit=1000)]
    calls = [call for row in rows if row.batch_time_ms is not None and (call := translate(row)) is not None]
    assert {call.method for call in calls} >= {"on_batch_submitted", "on_batch_started", "on_batch_completed"}
