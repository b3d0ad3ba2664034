"""A receiver's state of one partition that it owns: fetch state, position, error, gap."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.blocks import TopicPartition
from headrace.receiver.rate_limiter import RateLimiter


class FetchState(StrEnum):
    """The state of a partition in its receiver. (The ledger's PartitionState is its state in the stream.)"""

    FETCHING = "fetching"
    AT_END = "at_end"
    """Everything that Kafka has was read."""
    LEADERLESS = "leaderless"
    """No broker has it at the moment; reading continues when one does."""
    LIMITED = "limited"
    """It was read as fast as its rate allows; it is fetched again when the rate allows more."""
    BACKING_OFF = "backing_off"
    """An error occurred; it is fetched again from the same offset later."""
    FAILED = "failed"
    """Not fetched any more until a person, or a new assignment, decides."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets ``[from_offset, until_offset)`` that Kafka can no longer give, and why.

    ``taken_back``: they were read before, and Kafka now gives them to other records, which are not read. An empty range
    means that the offsets are unknown.
    """

    partition: TopicPartition
    from_offset: int
    until_offset: int
    reason: str
    taken_back: bool = False


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The status of one partition; ``next_offset`` is the first offset that was not handed out yet."""

    partition: TopicPartition
    next_offset: int
    state: FetchState
    error: str | None


@dataclass(slots=True)
class OwnedPartition:
    """Mutable, used by the consuming thread. Everything below ``next_offset`` has been handed out."""

    partition: TopicPartition
    next_offset: int
    limiter: RateLimiter
    state: FetchState = FetchState.FETCHING
    error: str | None = None
    resume_at: float = 0.0
    attempts: int = 0
    taken_back: int | None = None
    """Kafka took back the offsets from here to ``next_offset``, and this was reported."""

    def progressed(self, until_offset: int) -> None:
        self.next_offset = until_offset
        self.state = FetchState.FETCHING
        self.error = None
        self.attempts = 0
        self.taken_back = None
