"""What a receiver knows about one partition that it owns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.blocks import TopicPartition
from headrace.receiver.damage_search import DamageSearch


class FetchState(StrEnum):
    """How a partition fares in its receiver. (The ledger's PartitionState is what the stream makes of it.)"""

    FETCHING = "fetching"
    AT_END = "at_end"
    """Everything that Kafka has was read."""
    LEADERLESS = "leaderless"
    """No broker has it at the moment; read on when one does."""
    BACKING_OFF = "backing_off"
    """An error; fetched again from the same offset after a while."""
    FAILED = "failed"
    """Not fetched any more until a person, or a new assignment, decides."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets ``[from_offset, until_offset)`` that Kafka can no longer give, and why.

    ``taken_back``: they were read before, and Kafka gives them to other records, which are not. An empty range: nobody
    knows which.
    """

    partition: TopicPartition
    from_offset: int
    until_offset: int
    reason: str
    taken_back: bool = False


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """How one partition fares; ``next_offset`` is the first that was not handed out yet."""

    partition: TopicPartition
    next_offset: int
    state: FetchState
    error: str | None


@dataclass(slots=True)
class OwnedPartition:
    """Mutable, the consuming thread's. Everything below ``next_offset`` has been handed out."""

    partition: TopicPartition
    next_offset: int
    state: FetchState = FetchState.FETCHING
    error: str | None = None
    retry_at: float = 0.0
    attempts: int = 0
    search: DamageSearch | None = None
    """What cannot be read is being passed over, as a gap."""
    doubts: int = 0
    """How often in a row the offset that the search tries was neither readable nor damaged."""
    taken_back: int | None = None
    """From here to ``next_offset`` Kafka took offsets back, as was told."""

    def progressed(self, until_offset: int) -> None:
        self.next_offset = until_offset
        self.state = FetchState.FETCHING
        self.error = None
        self.attempts = 0
        self.taken_back = None
