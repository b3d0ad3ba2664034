"""A stream in one line: its state with the reason, its present numbers, and their last thirty values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from headrace.ledger import Ledger
from headrace.ledger.batch_tables import BatchRow
from headrace.ledger.overviews import StreamOverview
from headrace.ledger.tables import SampleRow, StreamRow
from headrace.monitoring.batch_lines import BatchLine, batch_line
from headrace.monitoring.evidence import DagFacts, Evidence, State
from headrace.monitoring.stream_state import judge
from headrace.monitoring.unfinished import failed_of, unfinished_of
from headrace.receiver.tracker import numbers
from headrace.stream import Stream
from headrace.stream.model import StreamDefinitionError

POINTS = 30
"""How many values a sparkline has."""


@dataclass(frozen=True, slots=True)
class OldestUnfinished:
    """The batch, or the batch time without a batch, that is due longest; ``age`` in seconds since it is due.

    It is due at its batch time, or when it was begun again after it had completed (see `Unfinished`).
    """

    batch_time_ms: int
    state: str
    error: str | None
    age: float


@dataclass(frozen=True, slots=True)
class Sparklines:
    """The last values, oldest first. The delays are those of batches, the others of samples."""

    input_rate: tuple[float | None, ...]
    total_delay: tuple[float | None, ...]
    lag: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a stream is declared: its ledger's reference as the user wrote it, and its DAGs.

    ``other_batch_dag_ids`` are further DAGs that declare themselves its batch DAG, such as a copy.
    """

    name: str
    ledger: str
    batch_dag_id: str
    receiver_dag_id: str
    replay_dag_ids: tuple[str, ...] = ()
    other_batch_dag_ids: tuple[str, ...] = ()

    @property
    def batch_dag_ids(self) -> tuple[str, ...]:
        """All DAGs that decide who may read the stream, and act on it."""
        return (self.batch_dag_id, *self.other_batch_dag_ids)


def default_place(stream_name: str, ledger: str) -> Placed:
    """The place of a stream of whose DAGs nothing is known: they have the factories' default ids."""
    return Placed(stream_name, ledger, f"{stream_name}_batches", f"{stream_name}_receiver")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary(Placed):
    """A stream. ``state`` follows from the most severe finding, ``also`` are the reasons of the others.

    ``details`` is the whole error if ``reason`` has only the line of it that matters.
    """

    state: State
    reason: str
    remedy: str | None
    since_ms: int | None
    details: str | None
    also: tuple[str, ...]
    desired_state: str
    batch_interval: float
    input_rate: float
    lag: int | None
    lag_unknown: int
    lag_seconds: float | None
    last_completed_batch: BatchLine | None
    oldest_unfinished: OldestUnfinished | None
    sparklines: Sparklines


def summarize(ledger: Ledger, row: StreamRow, place: Placed, facts: Mapping[str, DagFacts]) -> StreamSummary:
    """Judge the stream by its ledger and by what Airflow says of its DAGs."""
    (found,) = summaries(ledger, [(row, place)], facts)
    return found


def summaries(
    ledger: Ledger, found: Sequence[tuple[StreamRow, Placed]], facts: Mapping[str, DagFacts]
) -> list[StreamSummary]:
    """Judge several streams of a ledger, with as many queries as for one."""
    overviews = ledger.overviews.of([row for row, _ in found], POINTS)
    refusals = [ledger.overviews.write_refusal(each.stream.name) if _is_silent(each) else None for each in overviews]
    return [
        _summary(overview, place, facts, refusal)
        for overview, (_, place), refusal in zip(overviews, found, refusals, strict=True)
    ]


def _is_silent(found: StreamOverview) -> bool:
    """Whether what should write to the ledger does not: its writer may be dead, or the ledger not be writable."""
    job = found.job
    return job is not None and not job.state.ended and not job.alive(found.now_ms)


def _summary(
    found: StreamOverview, place: Placed, facts: Mapping[str, DagFacts], write_refusal: str | None
) -> StreamSummary:
    now = numbers(found.receivers, found.now_ms)
    unfinished = [*unfinished_of(found)]
    evidence = Evidence(
        row=found.stream,
        coalesces=_coalesces(found.stream),
        now_ms=found.now_ms,
        job=found.job,
        receivers=found.receivers,
        recent=found.recent,
        last_completed=found.last_completed,
        unfinished=unfinished,
        failed=[*failed_of(found)],
        number_failed=found.failed,
        job_before=found.job_before,
        write_refusal=write_refusal,
        dead_letters=found.dead_letters,
        failed_positions=found.failed_positions,
        lag_seconds=now.lag_seconds,
        batch_dag_id=place.batch_dag_id,
        receiver_dag_id=place.receiver_dag_id,
        facts=facts,
    )
    first, *others = judge(evidence)
    completed = found.last_completed
    return StreamSummary(
        **{field.name: getattr(place, field.name) for field in fields(Placed)},
        state=first.state,
        reason=first.reason,
        remedy=first.remedy,
        since_ms=first.since_ms,
        details=first.details,
        also=tuple(each.reason for each in others),
        desired_state=found.stream.desired_state.value,
        batch_interval=found.stream.batch_interval_ms / 1000,
        input_rate=now.input_rate,
        lag=now.lag,
        lag_unknown=now.lag_unknown,
        lag_seconds=now.lag_seconds,
        last_completed_batch=None if completed is None else batch_line(completed),
        oldest_unfinished=_oldest(evidence),
        sparklines=_sparklines(found.recent, found.samples),
    )


def _coalesces(row: StreamRow) -> bool:
    try:
        return Stream.from_json(row.definition).coalesces
    except StreamDefinitionError:
        # A definition of another version of headrace.
        return bool(json.loads(row.definition).get("coalesce"))


def _oldest(evidence: Evidence) -> OldestUnfinished | None:
    oldest = evidence.oldest
    if oldest is None:
        return None
    return OldestUnfinished(oldest.batch_time_ms, oldest.state, oldest.error, evidence.late_seconds(oldest.due_ms))


def _sparklines(recent: Sequence[BatchRow], found: Sequence[SampleRow]) -> Sparklines:
    lines = [batch_line(row) for row in reversed(recent)]
    return Sparklines(
        input_rate=tuple(each.input_rate for each in found or lines),
        total_delay=tuple(line.total_delay for line in lines),
        lag=tuple(each.lag for each in found),
    )
