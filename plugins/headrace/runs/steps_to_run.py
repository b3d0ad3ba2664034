"""Determines which steps of a batch a DAG run has to do, and what these need: Spark, a process, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.ledger.states import STATE_STEP, AttemptState, BatchState

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import AttemptRow, BatchOutputRow, BatchRow
    from headrace.runs.batch_run import RunRequest
    from headrace.stream import Stream

AHEAD = "ahead"
"""The attribute of an attempt that the run of a later batch time made, before the batch's own run could. It is true if
that run was a backfill's: the backfill's own run for the batch then counts the attempt as its first work, and does not
repeat it. A scheduled run's attempt is not the work of a backfill."""

REPEATS = "repeats"
"""The attribute of an attempt that repeats steps that were done. The other tasks of its run then repeat theirs too,
although the batch is no longer complete when they see it."""


@dataclass(frozen=True, slots=True)
class StepsToRun:
    """``repeats``: the run repeats the batch, so a step counts as done only if this run did it."""

    steps: tuple[str, ...]
    repeats: bool = False

    def attributes(self, request: RunRequest) -> dict[str, Any]:
        """The attributes of an attempt at these steps."""
        return {**request.attributes, **({REPEATS: True} if self.repeats else {})}


def find_steps_to_run(ledger: Ledger, batch: BatchRow, request: RunRequest, steps: Iterable[str]) -> StepsToRun:
    """Those of ``steps`` that the run has to do, according to the ledger. See `steps_to_run`."""
    attempts = attempts_without_replays(ledger, batch)
    records = ledger.attempts.outputs(batch.stream, batch.batch_time_ms)
    return steps_to_run(steps, request=request, batch=batch, attempts=attempts, records=records)


def attempts_without_replays(ledger: Ledger, batch: BatchRow) -> list[AttemptRow]:
    """All attempts at the batch itself, oldest first, without those of its replays."""
    return [row for row in ledger.attempts.of_batch(batch.stream, batch.batch_time_ms) if not row.target]


def steps_to_run(
    steps: Iterable[str],
    *,
    request: RunRequest,
    batch: BatchRow,
    attempts: Sequence[AttemptRow],
    records: Iterable[BatchOutputRow],
) -> StepsToRun:
    """Return those of ``steps`` that the run wants and that have no record of success; if the run repeats the batch,
    also those that it may repeat and has not done since it was last cleared.

    A completed batch is repeated if the run asks for it (``reprocess``), is a backfill's, or was cleared after it
    completed the batch. If a batch failed, its cleared run does only what is left. Within one clear no step is done
    twice, however often a task is tried.
    """
    history = _History(request, attempts)
    repeats = request.reprocess or history.repeats or (batch.state is BatchState.COMPLETED and history.asks_again)
    done = {record.output_id: record.attempt for record in records if record.state is AttemptState.COMPLETED}
    found = [
        step
        for step in steps
        if request.wants(step)
        and (step not in done or (repeats and request.may_repeat(step) and not history.is_of_this_clear(done[step])))
    ]
    return StepsToRun(tuple(found), repeats)


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """``spark``: some step reads or makes rows. ``process``: some step needs Spark, or prints. ``counts``: the counts
    to record for each step if no process is needed."""

    spark: bool
    process: bool
    counts: Mapping[str, Mapping[str, Any]]


def needs_of(ledger: Ledger, stream: Stream, batch_time_ms: int, steps: Iterable[str]) -> StepNeeds:
    """What these steps of an allocated batch need."""
    from headrace.spark.batch_plan import plan_outputs
    from headrace.stream_context import StreamContext

    steps = tuple(steps)
    plans = plan_outputs(StreamContext(stream, ledger), batch_time_ms, steps)
    # The state is updated without records too: keys time out, and a version of the state is written.
    spark = STATE_STEP in steps or any(plan.needs_spark for plan in plans)
    prints = any(plan.output.writes_empty_batches and plan.skipped is None for plan in plans)
    counts = {plan.output.step: {"skipped": plan.skipped} if plan.skipped else {"records": 0} for plan in plans}
    return StepNeeds(spark, spark or prints, counts)


class _History:
    """The attempts at a batch, as one run sees them."""

    def __init__(self, request: RunRequest, attempts: Sequence[AttemptRow]) -> None:
        self._request = request
        # Attempt number to the clear number at which this run made it.
        self._own = {row.number: clear for row in attempts if (clear := self._clear(row)) is not None}
        self._attempts = attempts

    def _clear(self, row: AttemptRow) -> int | None:
        run = self._request.run
        if AHEAD in row.attributes and not self._request.reprocess:
            # The attempt was made in place of the batch's own run, and counts as the first work of that run.
            return 0 if run.clear_number or row.attributes[AHEAD] == self._request.is_backfill else None
        return run.clear_of(row.attributes)

    def is_of_this_clear(self, number: int) -> bool:
        return self._own.get(number) == self._request.run.clear_number

    @property
    def repeats(self) -> bool:
        """Whether another task of this run has begun to repeat the batch."""
        return any(row.attributes.get(REPEATS) and self.is_of_this_clear(row.number) for row in self._attempts)

    @property
    def asks_again(self) -> bool:
        """Whether the run repeats a completed batch without ``reprocess``: it is a backfill's, or was cleared."""
        if self._request.is_backfill:
            return True
        completed = [
            self._own[row.number]
            for row in self._attempts
            if row.number in self._own and row.state is AttemptState.COMPLETED
        ]
        return bool(completed) and self._request.run.clear_number > max(completed)
