"""Finds a stream's unfinished batches: since when each is due, and the attempts and errors that count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import WARNING
from headrace.ledger import Ledger
from headrace.ledger.batch_tables import AttemptRow, BatchRow
from headrace.ledger.overviews import StreamOverview
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState, EventKind
from headrace.ledger.tables import EventRow

NOT_ALLOCATED = "not allocated"
"""The state of a batch time that has blocks and no batch."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An unfinished batch, or a batch time that has blocks and no batch (``batch`` None).

    ``due_ms``: from then on it is late. This is the batch time. If the batch had completed before, it is when it was
    begun again; if its time is before the stream began, when it was allocated. ``attempts`` are those that count for
    it, oldest first: without those before it was begun again, and without those of replays.
    """

    batch_time_ms: int
    due_ms: int
    batch: BatchRow | None = None
    attempts: Sequence[AttemptRow] = ()

    @property
    def state(self) -> str:
        """The batch's state, or "not allocated"."""
        return NOT_ALLOCATED if self.batch is None else self.batch.state.value

    @property
    def completed_before(self) -> bool:
        """Whether it is a batch that had completed, and was begun again."""
        return self.batch is not None and self.batch.steps is not None

    @property
    def failed(self) -> list[AttemptRow]:
        """The attempts that have an error."""
        return [each for each in self.attempts if each.error]

    @property
    def warning(self) -> str | None:
        """What delays the running attempt."""
        last = self.attempts[-1] if self.attempts else None
        return last.attributes.get(WARNING) if last is not None and last.state is AttemptState.RUNNING else None

    @property
    def error(self) -> str | None:
        """The batch's error, else that of the last attempt that has one, or what delays a running attempt."""
        return (None if self.batch is None else self.batch.error) or _error_of(self.attempts)


def unfinished_of(found: StreamOverview) -> Iterator[Unfinished]:
    """Yield the first batch time without a batch, the oldest unfinished batch, and the oldest backfilled one, as far as
    there are such."""
    if found.waiting_ms is not None:
        yield Unfinished(found.waiting_ms, found.waiting_ms)
    if found.unfinished is not None:
        time_ms = found.unfinished.batch_time_ms
        yield Unfinished(time_ms, time_ms, found.unfinished, _attempts(found.unfinished, found.attempts))
    if found.backfilled is not None:
        begun_ms = _begun_again_ms(found.backfilled, found.events)
        yield Unfinished(
            batch_time_ms=found.backfilled.batch_time_ms,
            due_ms=found.backfilled.allocated_at_ms if begun_ms is None else begun_ms,
            batch=found.backfilled,
            attempts=_attempts(found.backfilled, found.attempts, begun_ms),
        )


def failed_of(found: StreamOverview) -> Iterator[Unfinished]:
    """Yield the newest failed batches, but for backfilled ones, newest first."""
    for batch in found.recent:
        if batch.state is BatchState.FAILED and batch.steps is None and batch.batch_time_ms > found.stream.zero_time_ms:
            time_ms = batch.batch_time_ms
            yield Unfinished(time_ms, time_ms, batch, _attempts(batch, found.attempts))


def last_error(ledger: Ledger, batch: BatchRow) -> str | None:
    """The error of a batch; of an unfinished one, also that of an attempt (`Unfinished.error`). None if it has none."""
    if batch.error is not None or batch.state not in UNFINISHED:
        return batch.error
    key = (batch.stream, batch.batch_time_ms)
    begun_ms = None if batch.steps is None else _begun_again_ms(batch, ledger.events.of_batch(*key))
    return _error_of(_attempts(batch, ledger.attempts.of_batch(*key), begun_ms))


def _error_of(attempts: Sequence[AttemptRow]) -> str | None:
    errors = [each.error or each.attributes.get(WARNING) for each in attempts]
    return next((error for error in reversed(errors) if error), None)


def _attempts(batch: BatchRow, rows: Sequence[AttemptRow], since_ms: int | None = None) -> list[AttemptRow]:
    """Those of the attempts that are at the batch itself, from ``since_ms`` on."""
    return [
        each
        for each in rows
        if each.batch_time_ms == batch.batch_time_ms
        and not each.target
        and (since_ms is None or each.started_at_ms >= since_ms)
    ]


def _begun_again_ms(batch: BatchRow, events: Sequence[EventRow]) -> int | None:
    """When an unfinished batch that had completed before was begun again; None if it never completed.

    ``events`` are those of the batch, oldest first.
    """
    if batch.steps is None:
        return None
    # Its row has when the newest try began. The first one is in the events, which are deleted after a week.
    begun_ms = batch.started_at_ms or batch.allocated_at_ms
    for event in reversed(events):
        if event.kind == EventKind.BATCH_COMPLETED:
            break
        if event.kind == EventKind.BATCH_STARTED:
            begun_ms = event.at_ms
    return begun_ms
