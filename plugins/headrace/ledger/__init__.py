"""The ledger: `Ledger.open(url)`.

Tables and rows are in `tables`, `receiving_tables` and `batch_tables`, errors in `errors`, states in `states`.
"""

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
