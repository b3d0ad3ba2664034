"""A batch as a line of a list or a point of a timeline: its delays, its rate, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.ledger.batch_tables import BatchRow
from headrace.ledger.states import BatchState


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds from the batch time to the checkpoint, in four parts; None if a part has not ended."""

    waiting: float | None
    starting: float | None
    running: float | None
    checkpointing: float | None


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A batch in a list. Delays are in seconds, ``input_rate`` is in records per second of the time that it covers.

    ``absorbed`` is how many earlier batch times it took over, ``first_time_ms`` the earliest of them, or its own time.
    """

    batch_time_ms: int
    records: int
    bytes: int
    input_rate: float
    scheduling_delay: float | None
    processing_time: float | None
    total_delay: float | None
    state: str
    phases: Phases
    attempts: int
    error: str | None
    absorbed: int
    first_time_ms: int
    built: bool
    late_records: int
    started_at_ms: int | None
    completed_at_ms: int | None
    checkpointed: bool
    cleaned: bool


def batch_line(row: BatchRow, *, error: str | None = None) -> BatchLine:
    """``error`` replaces the batch's own, for a batch that is run again after failed attempts."""
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
    )


def _seconds(from_ms: int | None, until_ms: int | None) -> float | None:
    if from_ms is None or until_ms is None or until_ms < from_ms:
        return None
    return round((until_ms - from_ms) / 1000, 3)
