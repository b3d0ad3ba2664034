"""The answers of the REST API, field by field: the contract with the page and with other programs.

Times are ISO 8601 in UTC with milliseconds (``2026-11-23T06:30:00.000Z``), durations are seconds, and a value that is
not known is null. Lists have a bound, and say so where they are cut.

Fields that need an explanation:

- ``phases`` has no ``allocating``: the ledger notes when a batch was allocated, not when its allocation began.
  ``waiting`` lasts until the batch is allocated.
- ``total_by_state`` stops at 10,000 per state: an exact number would cost a read of all batches.
- An order other than by time sorts the newest 10,000 batches of the range; ``window`` says how many that were.
- ``timeline.thinned``: each point is then the batch with the longest total delay of its part of the range, so that no
  late batch disappears between two points. ``parts`` and ``whole`` have the median, the 95th percentile and the maximum
  of all batches.
- ``dead_letters`` of a stream are the sums of the batches of its sparkline, by output: Elasticsearch is asked only by
  ``/dead-letters``.
"""

from __future__ import annotations

from headrace.ui.api.models.actions import (
    AbandonBody,
    DeadLetterReplayBody,
    Done,
    Error,
    Preview,
    Reason,
    ReplayBody,
    RunBody,
)
from headrace.ui.api.models.base import Answer, Time, iso
from headrace.ui.api.models.batches import (
    Attempt,
    BatchDetail,
    BatchLine,
    BatchPage,
    BatchPoint,
    BatchRange,
    Block,
    Links,
    OutputResult,
    Phases,
    Sample,
    Timeline,
)
from headrace.ui.api.models.history import DeadLetter, DeadLetterPage, Event, EventPage, Gap, GapPage
from headrace.ui.api.models.streams import (
    Counts,
    Holder,
    LastBatch,
    LastError,
    ListenerStatus,
    Log,
    May,
    OfDag,
    OldestUnfinished,
    Partition,
    Problem,
    Receiver,
    ReceiverJob,
    Sparklines,
    State,
    StreamDetail,
    StreamList,
    StreamSummary,
)

__all__ = [
    "AbandonBody",
    "Answer",
    "Attempt",
    "BatchDetail",
    "BatchLine",
    "BatchPage",
    "BatchPoint",
    "BatchRange",
    "Block",
    "Counts",
    "DeadLetter",
    "DeadLetterPage",
    "DeadLetterReplayBody",
    "Done",
    "Error",
    "Event",
    "EventPage",
    "Gap",
    "GapPage",
    "Holder",
    "LastBatch",
    "LastError",
    "Links",
    "ListenerStatus",
    "Log",
    "May",
    "OfDag",
    "OldestUnfinished",
    "OutputResult",
    "Partition",
    "Phases",
    "Preview",
    "Problem",
    "Reason",
    "Receiver",
    "ReceiverJob",
    "ReplayBody",
    "RunBody",
    "Sample",
    "Sparklines",
    "State",
    "StreamDetail",
    "StreamList",
    "StreamSummary",
    "Time",
    "Timeline",
    "iso",
]
