"""What a supervisor reads records from: `KafkaReceiver`, or `CustomSource` with a user's `Receiver`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka.records import RecordChunk
from headrace.ledger.models import EpochEnd
from headrace.receiver.partition_state import Gap, PartitionStatus


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

    def listen(self) -> None:
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
