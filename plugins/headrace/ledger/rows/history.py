"""The rows of gaps and events."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.blocks import TopicPartition
from headrace.ledger.codec import Json


@dataclass(frozen=True, slots=True)
class GapRow:
    """Offsets that were given up, and why. ``batch_time_ms`` is set when a batch was abandoned."""

    gap_id: int
    stream: str
    input_id: str
    partition: TopicPartition
    from_offset: int
    until_offset: int
    reason: str
    batch_time_ms: int | None
    at_ms: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event. Ids ascend in commit order within a stream, so reading with ``after_id`` never skips one.

    ``kind`` is an `EventKind`, or text written by a newer version.
    """

    event_id: int
    stream: str
    at_ms: int
    kind: str
    batch_time_ms: int | None
    payload: Json = field(default_factory=dict)
