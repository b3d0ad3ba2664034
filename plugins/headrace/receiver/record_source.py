"""What a supervisor reads records from: `KafkaReceiver`, or `CustomSource` with a user's `Receiver`.

A source has a state for each partition that it owns, and remembers the leader epoch of the records read, with which
Kafka detects that its log was truncated since. A leader without all of its predecessor's records (an unclean election)
begins a new epoch below the offsets that were read, and gives those offsets to other records. Once the log has grown
past the position again, offsets alone do not show this; the end of the epoch in which the records were read does
(KIP-320).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka.records import EpochRecords, RecordChunk
from headrace.ledger.receiving.tables import EpochEnd
from headrace.receiver.rates import RateLimiter

# Covers the elections between reading a record and storing it, which takes seconds.
_MAX_KEPT = 100


class LeaderEpochs:
    """The consuming thread notes what it reads; the pushing thread queries what it stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[TopicPartition, list[EpochRecords]] = {}

    def begin(self, partition: TopicPartition, known: EpochEnd | None) -> None:
        """Begin to track a partition; ``known`` is the epoch end of its earlier records, if known."""
        with self._lock:
            # All records below the end are of that epoch or an earlier one.
            self._read[partition] = [] if known is None else [EpochRecords(-1, known.end_offset, known.leader_epoch)]

    def forget(self, partition: TopicPartition) -> None:
        """Stop tracking a partition that is no longer read."""
        with self._lock:
            self._read.pop(partition, None)

    def note(self, partition: TopicPartition, records: Iterable[EpochRecords]) -> None:
        """Note what was read from a partition, in the order of offsets."""
        with self._lock:
            read = self._read.get(partition)
            if read is None:
                return
            for block_range in records:
                if read and read[-1].leader_epoch == block_range.leader_epoch:
                    read[-1] = EpochRecords(read[-1].first_offset, block_range.until_offset, block_range.leader_epoch)
                else:
                    read.append(block_range)
            del read[:-_MAX_KEPT]

    def end_at(self, partition: TopicPartition, until_offset: int) -> EpochEnd | None:
        """Return the epoch of the last record below ``until_offset``, and the end of what was read in it up to there.

        Returns None if that is unknown.
        """
        with self._lock:
            for epoch_records in reversed(self._read.get(partition, ())):
                if epoch_records.first_offset < until_offset:
                    # The offsets after its last record (control records, compacted) may be of another epoch.
                    return EpochEnd(epoch_records.leader_epoch, min(until_offset, epoch_records.until_offset))
        return None


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


@dataclass(frozen=True, slots=True)
class SourceError:
    """An error that a source reports while it goes on. ``stack`` is its stack trace, None if it has none."""

    error: str
    stack: str | None = None


class Acknowledgements(Protocol):
    """Reports to the source what is stored. Thread-safe."""

    @property
    def open(self) -> int:
        """The number of partitions whose last stored position the source is not known to have."""
        ...

    @property
    def failures(self) -> int: ...

    @property
    def last_error(self) -> str | None: ...

    def note(self, ranges: Iterable[OffsetRange]) -> None:
        """Note that these offsets are stored, in log and ledger."""
        ...

    def repeat(self) -> None: ...

    def forget(self, topic: str, partition: int) -> None: ...

    def allow_until(self, monotonic_seconds: float) -> None: ...


class EpochEnds(Protocol):
    """Knows the leader epochs of the records read, if the source has such."""

    def end_at(self, partition: TopicPartition, until_offset: int) -> EpochEnd | None: ...


class RecordSource(Protocol):
    """A source of records, used by the consuming thread; other threads use the properties and `status`.

    The properties that are numbers count since the receiver began.
    """

    @property
    def partitions(self) -> dict[TopicPartition, int]:
        """The partitions read now, with their next offsets."""
        ...

    @property
    def commits(self) -> Acknowledgements: ...
    @property
    def leader_epochs(self) -> EpochEnds: ...
    @property
    def connected(self) -> bool | None:
        """Whether the source answers; None while that is unknown."""
        ...

    @property
    def client_error(self) -> str | None:
        """The last error that is not about one partition; None once it is over."""
        ...

    @property
    def below_position(self) -> int: ...
    @property
    def not_owned(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def unreadable_headers(self) -> int: ...
    @property
    def lost_offsets(self) -> int: ...
    @property
    def offsets_without_record(self) -> int: ...

    def assign(
        self,
        partition: TopicPartition,
        next_offset: int,
        epoch_end: EpochEnd | None = None,
        source_position: str | None = None,
    ) -> None:
        """Begin to read ``partition``, whose first record gets ``next_offset``. The other values are the ledger's."""
        ...

    def unassign(self, partition: TopicPartition) -> None:
        """Stop reading the partition."""
        ...

    def put_back(self, partition: TopicPartition, next_offset: int, error: str, *, seconds: float) -> None:
        """Read the partition again from ``next_offset``, after ``seconds``."""
        ...

    def fetch(self, timeout: float, max_records: int | None = None) -> Sequence[RecordChunk | Gap]:
        """Return what has arrived, in order; wait up to ``timeout`` seconds."""
        ...

    def serve_paused(self) -> None:
        """Called instead of `fetch` while the receiver is paused."""
        ...

    def serve(self) -> None:
        """Called regularly while there is no room for records."""
        ...

    def finish(self) -> Iterable[RecordChunk | Gap]:
        """Stop reading, since the receiver is asked to stop. Return what was taken from the source and must be
        stored."""
        ...

    def status(self) -> Sequence[PartitionStatus]: ...

    def take_errors(self) -> Sequence[SourceError]:
        """Return the errors to be reported since the last call."""
        ...

    def close(self, commit_seconds: float = 2.0) -> None:
        """Send acknowledgements for up to ``commit_seconds`` (0: send none), and release everything."""
        ...
