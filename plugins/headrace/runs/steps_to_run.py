"""Which steps of a batch a DAG run has to do: what is left, and what it asks to do again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.ledger.states import AttemptState, BatchState

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.rows import AttemptRow, BatchOutputRow, BatchRow
    from headrace.runs.request import RunRequest

AHEAD = "ahead"
"""The attribute of an attempt that the run of a later batch time made, before the batch's own run came to it."""

REPEATS = "repeats"
"""The attribute of an attempt that does again what was done. Its run's other tasks then do so too, though the batch
that they see is complete no more."""


@dataclass(frozen=True, slots=True)
class StepsToRun:
    """``repeats``: the run does the batch again, so that what is done counts only where this run did it."""

    steps: tuple[str, ...]
    repeats: bool = False

    def attributes(self, request: RunRequest) -> dict[str, Any]:
        """What the attempt at these steps keeps."""
        return {**request.attributes, **({REPEATS: True} if self.repeats else {})}


def find_steps_to_run(ledger: Ledger, batch: BatchRow, request: RunRequest, steps: Iterable[str]) -> StepsToRun:
    """Those of ``steps`` that the run has to do, by what the ledger has of the batch."""
    attempts = live_attempts(ledger, batch)
    records = ledger.batches.outputs(batch.stream, batch.batch_time_ms)
    return steps_to_run(steps, request=request, batch=batch, attempts=attempts, records=records)


def live_attempts(ledger: Ledger, batch: BatchRow) -> list[AttemptRow]:
    """The attempts at the batch itself, oldest first: not those of its replays."""
    return [row for row in ledger.batches.attempts(batch.stream, batch.batch_time_ms) if not row.target]


def steps_to_run(
    steps: Iterable[str],
    *,
    request: RunRequest,
    batch: BatchRow,
    attempts: Sequence[AttemptRow],
    records: Iterable[BatchOutputRow],
) -> StepsToRun:
    """Those of ``steps`` that are wanted and have no record of success; of a batch that is run again, all of them.

    A completed batch is run again when the run asks for it (``reprocess``), is a backfill's, or was cleared since it
    completed the batch. What is left of a batch that failed is all that its cleared run does. Within one clear no
    step is done twice, however often a task is tried.
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


class _History:
    """The attempts at a batch, as one run sees them."""

    def __init__(self, request: RunRequest, attempts: Sequence[AttemptRow]) -> None:
        self._request = request
        # By number, the clear in which this run made the attempt.
        self._own = {row.number: clear for row in attempts if (clear := self._clear(row)) is not None}
        self._attempts = attempts

    def _clear(self, row: AttemptRow) -> int | None:
        run = self._request.run
        if row.attributes.get(AHEAD) and not self._request.reprocess:
            # Made in the place of the batch's own run, so it is the first work of one that was there and waited. One
            # that was made since then (a backfill over what has long been done) has not had its turn.
            return 0 if run.clear_number or run.existed(row.started_at_ms) else None
        return run.clear_of(row.attributes)

    def is_of_this_clear(self, number: int) -> bool:
        return self._own.get(number) == self._request.run.clear_number

    @property
    def repeats(self) -> bool:
        """Whether another task of this run has begun to do the batch again."""
        return any(row.attributes.get(REPEATS) and self.is_of_this_clear(row.number) for row in self._attempts)

    @property
    def asks_again(self) -> bool:
        """Whether the run, by what it is, asks for a completed batch again."""
        if self._request.is_backfill:
            return True
        completed = [
            self._own[row.number]
            for row in self._attempts
            if row.number in self._own and row.state is AttemptState.COMPLETED
        ]
        return bool(completed) and self._request.run.clear_number > max(completed)
