"""A batch as a line of a list or a point of a timeline, and unfinished batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import Field

from headrace.batch.due_batches import NextTries
from headrace.errors import WARNING
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import AttemptRow, BatchRow
from headrace.ledger.overviews import StreamOverview
from headrace.ledger.states import UNFINISHED, AttemptState, BatchState, EventKind
from headrace.ledger.tables import EventRow
from headrace.views.base import ROWS, Time, View


class Phases(View):
    """Where a batch's time went, in seconds; they add up from the batch time to the checkpoint."""

    waiting: float | None = Field(description="From the batch time to its allocation.")
    starting: float | None = Field(
        description="From its allocation to the start of its newest run: Spark's start, and earlier runs that failed."
    )
    running: float | None = Field(description="From the start of its newest run to its completion.")
    checkpointing: float | None = Field(description="From its completion to its checkpoint.")


class BatchPoint(View):
    """A batch on the timeline."""

    batch_time_ms: Time
    records: int
    bytes: int
    input_rate: float = Field(description="Records per second of the time that the batch covers.")
    scheduling_delay: float | None
    processing_time: float | None
    total_delay: float | None
    state: str
    phases: Phases


class BatchLine(BatchPoint):
    """A batch in a list."""

    attempts: int
    error: str | None
    absorbed: int = Field(description="How many earlier batch times it took over.")
    first_time_ms: Time = Field(description="The earliest of them, or its own time.")
    built: bool = Field(description="It was built from Kafka by timestamps; its records are an upper bound.")
    late_records: int
    started_at_ms: Time | None
    completed_at_ms: Time | None
    checkpointed: bool
    cleaned: bool
    next_try_ms: Time | None = Field(
        default=None, description="When the repair tries it again; null if that does not depend on a time."
    )
    tried_again: str | None = Field(
        default=None, description="The same as text, or what has to happen first. Null if it is not tried again."
    )
    row: Annotated[BatchRow, *ROWS]


_Line = TypeVar("_Line", bound=BatchLine)


class LastBatch(View):
    """The newest batch that has completed."""

    batch_time_ms: Time
    records: int
    scheduling_delay: float | None = Field(description="Seconds from the batch time to the start of its processing.")
    processing_time: float | None = Field(description="Seconds from its start to its completion.")
    total_delay: float | None = Field(description="Seconds from the batch time to its completion.")
    completed_at_ms: Time | None


class CompletedBatch(BatchLine, LastBatch):
    """The last completed batch: its line, of which the API's answer has the fields of `LastBatch`."""


class BatchPage(View):
    """A page of batches."""

    batches: tuple[BatchLine, ...]
    next_cursor: str | None = Field(description="Pass it as ``cursor`` to get the next page; null on the last one.")
    total_by_state: dict[str, int]
    window: int | None = Field(
        default=None, description="With an order other than by time: how many of the newest batches were sorted."
    )


def batch_lines(ledger: Ledger, rows: Iterable[BatchRow]) -> tuple[BatchLine, ...]:
    """The lines of batches of one stream, each with the error of its last attempt if it is run again."""
    lines = [batch_line(row, error=last_error(ledger, row)) for row in rows]
    if not any(line.row.state in UNFINISHED for line in lines):
        return tuple(lines)
    tries = NextTries(ledger, lines[0].row.stream)
    return tuple(with_next_try(line, tries) for line in lines)


def with_next_try(line: _Line, tries: NextTries) -> _Line:
    """The line, with the time or event at which the batch is tried again."""
    following = tries.of(line.row)
    if following is None:
        return line
    return line.model_copy(update={"next_try_ms": following.at_ms, "tried_again": following.text(tries.now_ms)})


def completed_batch(row: BatchRow) -> CompletedBatch:
    """The line of a batch that has completed."""
    return CompletedBatch(**dict(batch_line(row)))


def batch_line(row: BatchRow, *, error: str | None = None) -> BatchLine:
    """``error`` is shown if the batch has none of its own: it is run again after failed attempts."""
    # A batch that is run again has its old completion until it completes again.
    completed_ms = row.completed_at_ms if row.state is BatchState.COMPLETED else None
    covered_ms = row.batch_time_ms - row.first_time_ms + row.interval_ms
    return BatchLine(
        batch_time_ms=row.batch_time_ms,
        records=row.records,
        bytes=row.payload_bytes,
        input_rate=round(row.records * 1000 / covered_ms, 1),
        scheduling_delay=_seconds(row.batch_time_ms, row.started_at_ms),
        processing_time=_seconds(row.started_at_ms, completed_ms),
        total_delay=_seconds(row.batch_time_ms, completed_ms),
        state=row.state.value,
        phases=Phases(
            waiting=_seconds(row.batch_time_ms, row.allocated_at_ms),
            starting=_seconds(row.allocated_at_ms, row.started_at_ms),
            running=_seconds(row.started_at_ms, completed_ms),
            checkpointing=_seconds(completed_ms, row.checkpointed_at_ms),
        ),
        attempts=row.attempt,
        error=row.error or error,
        absorbed=len(row.absorbed),
        first_time_ms=row.first_time_ms,
        built=row.built,
        late_records=row.late_records,
        started_at_ms=row.started_at_ms,
        completed_at_ms=completed_ms,
        checkpointed=row.checkpointed_at_ms is not None,
        cleaned=row.cleaned_at_ms is not None,
        row=row,
    )


def _seconds(from_ms: int | None, until_ms: int | None) -> float | None:
    if from_ms is None or until_ms is None or until_ms < from_ms:
        return None
    return round((until_ms - from_ms) / 1000, 3)


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
        return [attempt for attempt in self.attempts if attempt.error]

    @property
    def warning(self) -> str | None:
        """What delays the running attempt."""
        last = self.attempts[-1] if self.attempts else None
        return last.attributes.get(WARNING) if last is not None and last.state is AttemptState.RUNNING else None

    @property
    def error(self) -> str | None:
        """The batch's error, else that of the last attempt that has one, or what delays a running attempt."""
        return (None if self.batch is None else self.batch.error) or _error_of(self.attempts)


def unfinished_of(overview: StreamOverview) -> Iterator[Unfinished]:
    """Yield the first batch time without a batch, the oldest unfinished batch, and the oldest backfilled one, as far as
    there are such."""
    if overview.waiting_ms is not None:
        yield Unfinished(overview.waiting_ms, overview.waiting_ms)
    if overview.unfinished is not None:
        time_ms = overview.unfinished.batch_time_ms
        yield Unfinished(time_ms, time_ms, overview.unfinished, _attempts(overview.unfinished, overview.attempts))
    if overview.backfilled is not None:
        begun_ms = _begun_again_ms(overview.backfilled, overview.events)
        yield Unfinished(
            batch_time_ms=overview.backfilled.batch_time_ms,
            due_ms=overview.backfilled.allocated_at_ms if begun_ms is None else begun_ms,
            batch=overview.backfilled,
            attempts=_attempts(overview.backfilled, overview.attempts, begun_ms),
        )


def failed_of(overview: StreamOverview) -> Iterator[Unfinished]:
    """Yield the newest failed batches, but for backfilled ones, newest first."""
    for batch in overview.recent:
        time_ms = batch.batch_time_ms
        if batch.state is BatchState.FAILED and batch.steps is None and time_ms > overview.stream.zero_time_ms:
            yield Unfinished(time_ms, time_ms, batch, _attempts(batch, overview.attempts))


def last_error(ledger: Ledger, batch: BatchRow) -> str | None:
    """The error of a batch; of an unfinished one, also that of an attempt (`Unfinished.error`). None if it has none."""
    if batch.error is not None or batch.state not in UNFINISHED:
        return batch.error
    key = (batch.stream, batch.batch_time_ms)
    begun_ms = None if batch.steps is None else _begun_again_ms(batch, ledger.events.of_batch(*key))
    return _error_of(_attempts(batch, ledger.attempts.of_batch(*key), begun_ms))


def _error_of(attempts: Sequence[AttemptRow]) -> str | None:
    errors = [attempt.error or attempt.attributes.get(WARNING) for attempt in attempts]
    return next((error for error in reversed(errors) if error), None)


def _attempts(batch: BatchRow, rows: Sequence[AttemptRow], since_ms: int | None = None) -> list[AttemptRow]:
    """Those of the attempts that are at the batch itself, from ``since_ms`` on."""
    return [
        row
        for row in rows
        if row.batch_time_ms == batch.batch_time_ms
        and not row.target
        and (since_ms is None or row.started_at_ms >= since_ms)
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
