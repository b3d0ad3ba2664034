"""Selects the failed batches that a later run retries, so that nobody has to clear their runs.

A batch that failed for a passing reason is retried once its output has written a later batch: that shows that the
output is available again. A batch that failed by the user's code, or finally, is retried when the definition or the
code has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.failure import FAILURE, TAKEN_UP, TRIED_WITH, Failure

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.models import AttemptRow, BatchRow
    from headrace.stream import Stream

_MOST = 1_000
_LONGEST_PAUSE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """An earlier batch without a live attempt, and those of the requested steps that it still needs."""

    batch: BatchRow
    steps: tuple[str, ...]


def failed_batches(ledger: Ledger, stream: Stream, before_ms: int, steps: Sequence[str]) -> Iterator[FailedBatch]:
    """The failed batches before ``before_ms`` to retry, with their steps among ``steps``, oldest first."""
    from headrace.ledger.states import AttemptState, BatchState
    from headrace.runs.steps_to_run import live_attempts

    settled_ms = stream.retry_for_ms
    for earlier in ledger.batches.earlier_unfinished(stream.name, before_ms, limit=_MOST):
        if earlier.state is None or earlier.alive:
            continue
        batch = ledger.batches.get(stream.name, earlier.batch_time_ms)
        now_ms = ledger.now_ms()
        # Its own run may be about to begin it.
        if batch.state is BatchState.ALLOCATED and now_ms - batch.allocated_at_ms < settled_ms:
            continue
        rows = ledger.attempts.outputs(stream.name, batch.batch_time_ms)
        done = {row.output_id for row in rows if row.state is AttemptState.COMPLETED}
        required = batch.required or stream.steps
        attempts = live_attempts(ledger, batch)
        left = tuple(
            step
            for step in steps
            if step in required
            and step not in done
            and may_be_tried(stream, [row for row in attempts if step in row.outputs], now_ms)
        )
        if left:
            yield FailedBatch(batch, left)


def may_be_tried(stream: Stream, attempts: Sequence[AttemptRow], now_ms: int) -> bool:
    """Whether to make another attempt, after these (oldest first): not if it would fail alike, and not before the pause
    is over, which doubles with each failed retry."""
    if not attempts:
        return True
    last = attempts[-1]
    if is_held_back(stream, last):
        return False
    in_vain = _ended_in_vain(attempts)
    pause_ms = min(stream.batch_interval_ms * 2**in_vain, _LONGEST_PAUSE_MS) if in_vain else 0
    return now_ms - (last.ended_at_ms or last.heartbeat_ms) >= pause_ms


def is_held_back(stream: Stream, last: AttemptRow) -> bool:
    """Whether the attempt failed by the user's code, or finally, and definition and code have not changed since."""
    if last.attributes.get(FAILURE) not in (Failure.CODE, Failure.FINAL):
        return False
    from headrace.spark.code_version import tried_with

    return last.attributes.get(TRIED_WITH) == tried_with(stream, last.outputs)


def _ended_in_vain(attempts: Iterable[AttemptRow]) -> int:
    """How many of the last consecutive attempts were failed retries by later runs, 20 at most. Each began after its
    output had written a later batch."""
    number = 0
    for row in reversed(list(attempts)):
        if not row.attributes.get(TAKEN_UP):
            break
        number += 1
    return min(number, 20)
