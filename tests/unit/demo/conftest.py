"""Rows of the ledger as the demo sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.states import BatchState

MakeBatch = Callable[..., BatchRow]


@pytest.fixture
def make_batch() -> MakeBatch:
    """A batch at 10,000 ms that is done with in every way, but for what a test says."""

    def make(**changes: Any) -> BatchRow:
        fields: dict[str, Any] = {
            "stream": "flights",
            "batch_time_ms": 10_000,
            "interval_ms": 10_000,
            "state": BatchState.COMPLETED,
            "revision": 1,
            "manifest_uri": "/manifests/10000.json",
            "manifest_sha256": "",
            "code_version": None,
            "blocks": 1,
            "records": 100,
            "payload_bytes": 1,
            "absorbed": (),
            "absorbed_by_ms": None,
            "attempt": 1,
            "allocated_at_ms": 10_100,
            "started_at_ms": 10_200,
            "completed_at_ms": 10_300,
            "checkpointed_at_ms": 10_400,
            "checkpoint_uri": None,
            "cleaned_at_ms": 10_500,
            "cleanup": None,
            "error": None,
        }
        return BatchRow(**{**fields, **changes})

    return make
