"""Observes a stream's progress from outside: by the ledger's public rows and Elasticsearch's counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.errors import NotAnsweringError

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import BatchRow

_MAX_BATCHES = 10_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stream's progress at one time. ``produced`` of ``to_produce`` records are in Kafka; ``receiving`` is the
    receiver job's state."""

    to_produce: int
    produced: int
    receiving: str = "not started"
    received: int = 0
    indexed: int = 0
    dead_lettered: int = 0
    batches: Sequence[BatchRow] = field(default=(), repr=False)
    unclaimed: bool = False
    """Whether blocks wait for a batch that nobody has allocated yet."""
    error: str | None = None
    """The error of the newest failed batch, or of an ended receiver job; None if neither has failed."""

    @property
    def with_records(self) -> list[BatchRow]:
        """The batches that have records, oldest first."""
        return sorted((batch for batch in self.batches if batch.records), key=lambda batch: batch.batch_time_ms)

    @property
    def states(self) -> Counter[str]:
        """Batches with records by state."""
        return Counter(batch.state.value for batch in self.with_records)

    @property
    def cleaned(self) -> int:
        """Batches with records whose log is deleted."""
        return sum(batch.cleaned_at_ms is not None for batch in self.with_records)

    @property
    def processed(self) -> bool:
        """Whether all records to produce are received, and are in batches that have completed and are checkpointed."""
        return (
            self.produced == self.to_produce == self.received == sum(batch.records for batch in self.with_records)
            and not self.unclaimed
            and all(batch.completed_at_ms and batch.checkpointed_at_ms for batch in self.with_records)
        )

    @property
    def settled(self) -> bool:
        """Whether, in addition, the log of every batch is deleted. The proof checks whether all documents exist."""
        return self.processed and self.cleaned == len(self.with_records)

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes whenever the stream makes progress."""
        documents = (self.indexed, self.dead_lettered)
        return (self.produced, self.receiving, self.received, *documents, self.cleaned, *sorted(self.states.items()))


class Observer:
    """Observes the stream ``stream_name``; ``produced`` returns how many records Kafka has acknowledged."""

    def __init__(
        self,
        stream_name: str,
        *,
        ledger: Ledger,
        to_produce: int,
        produced: Callable[[], int],
        elasticsearch: ElasticsearchSide | None = None,
        index: str = "",
    ) -> None:
        self._stream_name = stream_name
        self._ledger = ledger
        self._to_produce = to_produce
        self._produced = produced
        self._elasticsearch = elasticsearch
        self._index = index

    def look(self) -> Snapshot:
        """Return the stream's current progress."""
        from headrace.ledger.errors import StreamNotFoundError

        produced = self._produced()
        try:
            self._ledger.streams.get(self._stream_name)
        except StreamNotFoundError:
            # The first task to run registers it.
            return Snapshot(self._to_produce, produced)
        positions = self._ledger.positions.all(self._stream_name)
        batches = self._ledger.batches.page(self._stream_name, _MAX_BATCHES)
        job = self._ledger.jobs.current(self._stream_name)
        documents = self._elasticsearch
        failed = next((batch.error for batch in batches if batch.state.value == "failed"), None)
        return Snapshot(
            self._to_produce,
            produced,
            receiving="not started" if job is None else job.state.value,
            received=sum(position.next_offset - position.starting_offset for position in positions),
            indexed=documents.count(self._index) if documents else 0,
            dead_lettered=documents.count(f"{self._index}-dead-letters") if documents else 0,
            batches=batches,
            unclaimed=self._ledger.batches.next_unclaimed(self._stream_name) is not None,
            error=failed or (job.error if job is not None and job.state.ended else None),
        )


def try_to_look(observer: Observer) -> Snapshot | None:
    """`look`, or None while a server does not answer: it is starting, or an index is being created."""
    from headrace.ledger.errors import LedgerUnavailableError

    try:
        return observer.look()
    except (NotAnsweringError, LedgerUnavailableError):
        return None
