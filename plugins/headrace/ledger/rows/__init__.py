"""The ledger's rows as its callers see them. Times are epoch milliseconds (``_ms``) of the ledger's clock.

Leases and attempts are tokens: the holder passes them back to the ledger. They can be pickled.
"""

from __future__ import annotations

from headrace.ledger.rows.batches import (
    Attempt,
    AttemptRow,
    BatchInputRow,
    BatchOrigin,
    BatchOutputRow,
    BatchRow,
    EarlierBatch,
    FiledReplay,
    RecordedOutput,
    ReplayDefinitionRow,
    ReplayRow,
)
from headrace.ledger.rows.history import EventRow, GapRow
from headrace.ledger.rows.receiving import (
    AddedBlock,
    AssignedPartition,
    EpochEnd,
    MovedBlock,
    PositionRow,
    ReceiverLease,
    ReceiverOrders,
    ReceiverRow,
    SegmentRow,
    StoredBlock,
    TopicRow,
    UnclaimedTime,
    WaitingTimes,
)
from headrace.ledger.rows.streams import Declared, JobLease, JobRow, JobStatus, StreamRevision, StreamRow

__all__ = [
    "AddedBlock",
    "AssignedPartition",
    "Attempt",
    "AttemptRow",
    "BatchInputRow",
    "BatchOrigin",
    "BatchOutputRow",
    "BatchRow",
    "Declared",
    "EarlierBatch",
    "EpochEnd",
    "EventRow",
    "FiledReplay",
    "GapRow",
    "JobLease",
    "JobRow",
    "JobStatus",
    "MovedBlock",
    "PositionRow",
    "ReceiverLease",
    "ReceiverOrders",
    "ReceiverRow",
    "RecordedOutput",
    "ReplayDefinitionRow",
    "ReplayRow",
    "SegmentRow",
    "StoredBlock",
    "StreamRevision",
    "StreamRow",
    "TopicRow",
    "UnclaimedTime",
    "WaitingTimes",
]
