"""A stream in one line: its state with the reason, its present numbers, and their last thirty values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.ledger import Ledger
from headrace.ledger.models import BatchRow, SampleRow, StreamRow
from headrace.ledger.states import BatchState
from headrace.monitoring.batch_lines import BatchLine, batch_line
from headrace.monitoring.stream_state import DagFacts, Evidence, State, failed_partitions, judge
from headrace.monitoring.stream_status import NOT_ALLOCATED, UNFINISHED, last_error
from headrace.receiver.sampling import numbers
from headrace.stream import Stream
from headrace.stream.errors import StreamDefinitionError

POINTS = 30
"""How many values a sparkline has."""


@dataclass(frozen=True, slots=True)
class OldestUnfinished:
    """The earliest batch time that is not finished; ``age`` in seconds since its batch time."""

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
class StreamSummary:
    """A stream. ``state`` follows from the most severe finding, ``also`` are the reasons of the others."""

    name: str
    state: State
    reason: str
    remedy: str | None
    since_ms: int | None
    also: tuple[str, ...]
    ledger: str
    batch_dag_id: str
    receiver_dag_id: str
    replay_dag_ids: tuple[str, ...]
    other_batch_dag_ids: tuple[str, ...]
    desired_state: str
    batch_interval: float
    input_rate: float
    lag: int | None
    lag_unknown: int
    lag_seconds: float | None
    last_completed_batch: BatchLine | None
    oldest_unfinished: OldestUnfinished | None
    sparklines: Sparklines

    @property
    def batch_dag_ids(self) -> tuple[str, ...]:
        """All DAGs that decide who may read the stream, and act on it."""
        return (self.batch_dag_id, *self.other_batch_dag_ids)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a stream is declared: its ledger's reference, and its DAGs.

    ``other_batch_dag_ids`` are further DAGs on which a reader needs the right.
    """

    ledger: str
    batch_dag_id: str
    receiver_dag_id: str
    replay_dag_ids: tuple[str, ...] = ()
    other_batch_dag_ids: tuple[str, ...] = ()

    @property
    def batch_dag_ids(self) -> tuple[str, ...]:
        """All DAGs that decide who may read the stream, and act on it."""
        return (self.batch_dag_id, *self.other_batch_dag_ids)


def summarize(ledger: Ledger, row: StreamRow, place: Placed, facts: Mapping[str, DagFacts]) -> StreamSummary:
    """Judge the stream by its ledger and by what Airflow says of its DAGs. About ten short queries."""
    name, now_ms = row.name, ledger.now_ms()
    job, receivers = ledger.jobs.current(name), ledger.receivers.all(name)
    recent = ledger.batch_pages.newest(name, POINTS)
    completed = next((each for each in recent if each.state is BatchState.COMPLETED), None)
    if completed is None:
        completed = next(iter(ledger.batches.page(name, 1, [BatchState.COMPLETED])), None)
    unfinished = next(iter(ledger.batches.page(name, 1, UNFINISHED, oldest_first=True)), None)
    waiting = ledger.blocks.waiting(name, now_ms)
    now = numbers(receivers, now_ms)
    evidence = Evidence(
        row=row,
        coalesces=_coalesces(row),
        now_ms=now_ms,
        job=job,
        receivers=receivers,
        recent=recent,
        last_completed=completed,
        unfinished=unfinished,
        attempts=[] if unfinished is None else ledger.attempts.of_batch(name, unfinished.batch_time_ms),
        waiting_ms=None if waiting is None else waiting.first_ms,
        failed_positions=[each for each in ledger.positions.all(name, live=True) if each.error]
        if failed_partitions(receivers)
        else [],
        lag_seconds=now.lag_seconds,
        batch_dag_id=place.batch_dag_id,
        receiver_dag_id=place.receiver_dag_id,
        facts=facts,
    )
    first, *others = judge(evidence)
    return StreamSummary(
        name=name,
        state=first.state,
        reason=first.reason,
        remedy=first.remedy,
        since_ms=first.since_ms,
        also=tuple(each.reason for each in others),
        ledger=place.ledger,
        batch_dag_id=place.batch_dag_id,
        receiver_dag_id=place.receiver_dag_id,
        replay_dag_ids=place.replay_dag_ids,
        other_batch_dag_ids=place.other_batch_dag_ids,
        desired_state=row.desired_state.value,
        batch_interval=row.batch_interval_ms / 1000,
        input_rate=now.input_rate,
        lag=now.lag,
        lag_unknown=now.lag_unknown,
        lag_seconds=now.lag_seconds,
        last_completed_batch=None if completed is None else batch_line(completed),
        oldest_unfinished=_oldest(ledger, evidence),
        sparklines=_sparklines(recent, ledger.samples.latest(name, POINTS)),
    )


def _coalesces(row: StreamRow) -> bool:
    try:
        return Stream.from_json(row.definition).coalesces
    except StreamDefinitionError:
        # A definition of another version of headrace.
        return bool(json.loads(row.definition).get("coalesce"))


def _oldest(ledger: Ledger, evidence: Evidence) -> OldestUnfinished | None:
    oldest_ms, batch = evidence.oldest_ms, evidence.unfinished
    if oldest_ms is None:
        return None
    age = evidence.late_seconds(oldest_ms)
    if batch is None or batch.batch_time_ms != oldest_ms:
        return OldestUnfinished(oldest_ms, NOT_ALLOCATED, None, age)
    return OldestUnfinished(oldest_ms, batch.state.value, last_error(ledger, batch), age)


def _sparklines(recent: Sequence[BatchRow], found: Sequence[SampleRow]) -> Sparklines:
    lines = [batch_line(row) for row in reversed(recent)]
    return Sparklines(
        input_rate=tuple(each.input_rate for each in found or lines),
        total_delay=tuple(line.total_delay for line in lines),
        lag=tuple(each.lag for each in found),
    )
