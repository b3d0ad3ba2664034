"""The ledger: `Ledger.open(url)`. Rows are in `rows`, errors in `errors`, states and event kinds in `states`."""

from __future__ import annotations

from headrace.ledger.ledger import Ledger
from headrace.ledger.states import (
    AttemptState,
    BatchState,
    DesiredState,
    EventKind,
    JobState,
    PartitionState,
    ReceiverState,
)

__all__ = [
    "AttemptState",
    "BatchState",
    "DesiredState",
    "EventKind",
    "JobState",
    "Ledger",
    "PartitionState",
    "ReceiverState",
]
