"""The ledger's tables. Migrations build them; a test compares the two.

Every unique fact has a unique constraint, in addition to the checks made under the stream's lock. Times are epoch
milliseconds. Look-ups use a primary key or an index named here, never a scan, so a ledger with a million blocks answers
as fast as one with ten.
"""

from __future__ import annotations

from headrace.ledger.tables.batches import (
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.tables.columns import metadata
from headrace.ledger.tables.history import events, gaps
from headrace.ledger.tables.receiving import blocks, positions, receivers, segments, topics, unclaimed_times
from headrace.ledger.tables.streams import receiver_jobs, stream_revisions, streams

__all__ = [
    "batch_attempts",
    "batch_inputs",
    "batch_outputs",
    "batch_runs",
    "batches",
    "blocks",
    "events",
    "gaps",
    "metadata",
    "positions",
    "receiver_jobs",
    "receivers",
    "replay_definitions",
    "replays",
    "segments",
    "stream_revisions",
    "streams",
    "topics",
    "unclaimed_times",
]
