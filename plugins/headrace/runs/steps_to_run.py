"""Determines which steps of a batch a DAG run has to do, and what these need: Spark, a process, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.ledger.states import STATE_STEP, AttemptState

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import AttemptRow, BatchOutputRow, BatchRow
    from headrace.runs.batch_run import RunRequest
    from headrace.stream import Stream


@dataclass(frozen=True, slots=True)
class StepsToRun:
    """``repeats``: the run repeats the batch, so a step counts as done only if this run did it."""

    steps: tuple[str, ...]
    repeats: bool = False


def find_steps_to_run(
    ledger: Ledger, batch: BatchRow, request: RunRequest, steps: Iterable[str], *, stream_steps: Sequence[str]
) -> StepsToRun:
    """Those of ``steps`` that the run has to do, according to the ledger. See `steps_to_run`.

    ``stream_steps`` are all steps that the stream has.
    """
    attempts = attempts_without_replays(ledger, batch)
    history = ledger.attempts.output_history(batch.stream, batch.batch_time_ms)
    return steps_to_run(steps, request=request, needed=batch.needs(stream_steps), attempts=attempts, history=history)


def attempts_without_replays(ledger: Ledger, batch: BatchRow) -> list[AttemptRow]:
    """All attempts at the batch itself, oldest first, without those of its replays."""
    return [row for row in ledger.attempts.of_batch(batch.stream, batch.batch_time_ms) if not row.target]


def steps_to_run(
    steps: Iterable[str],
    *,
    request: RunRequest,
    needed: Iterable[str],
    attempts: Iterable[AttemptRow],
    history: Iterable[BatchOutputRow],
) -> StepsToRun:
    """Return those of ``steps`` that the run wants and that have no record of success; if the run repeats the batch,
    also those that it may repeat and has not done since it was last cleared.

    A batch that was complete when the run began, or was last cleared, is repeated if the run asks for it
    (``reprocess``), is a backfill's, or has completed an output of it before it was cleared. If a batch failed, its
    cleared run does only what is left. Within one clear no step is done twice, however often a task is tried.

    Args:
        needed: the steps that the batch needs to complete.
        history: what each attempt made of its outputs, the oldest attempt first.
    """
    clears = {row.number: clear for row in attempts if (clear := request.run.clear_of(row.attributes)) is not None}
    newest: dict[str, BatchOutputRow] = {}
    before: dict[str, BatchOutputRow] = {}
    has_completed_earlier = False
    for row in history:
        clear = clears.get(row.attempt)
        newest[row.output_id] = row
        if clear != request.run.clear_number:
            before[row.output_id] = row
            has_completed_earlier |= clear is not None and _is_done(row)
    was_complete = all(_is_done(before.get(step)) for step in needed)
    repeats = request.reprocess or (was_complete and (request.is_backfill or has_completed_earlier))
    left = []
    for step in filter(request.wants, steps):
        last = newest.get(step)
        own = last is not None and clears.get(last.attempt) == request.run.clear_number
        if not _is_done(last) or (repeats and request.may_repeat(step) and not own):
            left.append(step)
    return StepsToRun(tuple(left), repeats)


def _is_done(row: BatchOutputRow | None) -> bool:
    return row is not None and row.state is AttemptState.COMPLETED


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
