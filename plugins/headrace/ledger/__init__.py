"""The ledger: `Ledger.open(url)`.

What a reader wants is in one of these rooms:

- ``batches/``: what becomes of a batch time. `allocations` makes its blocks a batch, `attempts` begins and ends tries
  at it and records their results, `batch_states` computes from these what state it is in and whether it may run now,
  `batches` finds batches and gives them up, `run_batch_times` gives batch times to runs, `replays` and `results`.
- ``receiving/``: jobs, receivers, positions, blocks, and the cleanup of segments.
- here: streams, events, what is read for people (`overviews`, `timelines`), and the database.

Tables and rows are in the `tables` of each, errors in `errors`, states in `states`.
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
