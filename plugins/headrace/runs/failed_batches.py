"""Which batches that failed a later run takes up: nobody has to clear their runs.

What failed by its surroundings is tried again once an output has taken a later batch: that is the sign that it is back.
What failed by the user's code, or for good, is tried again when the definition or the code is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.failure import FAILURE, TAKEN_UP, TRIED_WITH, Failure

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.rows import AttemptRow, BatchRow
    from headrace.stream import Stream

_MOST = 1_000
_LONGEST_PAUSE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """An earlier batch that nobody is at, and those of the asked steps that are left of it."""

    batch: BatchRow
    steps: tuple[str, ...]


def failed_batches(ledger: Ledger, stream: Stream, before_ms: int, steps: Sequence[str]) -> Iterator[FailedBatch]:
    """The batches before ``before_ms`` that are to be taken up, oldest first."""
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
        rows = ledger.batches.outputs(stream.name, batch.batch_time_ms)
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
    """Whether another attempt may end otherwise than the last of these, oldest first."""
    if not attempts:
        return True
    last = attempts[-1]
    if is_held_back(stream, last):
        return False
    in_vain = _ended_in_vain(attempts)
    pause_ms = min(stream.batch_interval_ms * 2**in_vain, _LONGEST_PAUSE_MS) if in_vain else 0
    return now_ms - (last.ended_at_ms or last.heartbeat_ms) >= pause_ms


def is_held_back(stream: Stream, last: AttemptRow) -> bool:
    """Whether the attempt failed by the user's code, or for good, and definition and code are those of then."""
    if last.attributes.get(FAILURE) not in (Failure.CODE, Failure.FINAL):
        return False
    from headrace.spark.code_version import tried_with

    return last.attributes.get(TRIED_WITH) == tried_with(stream, last.outputs)


def _ended_in_vain(attempts: Iterable[AttemptRow]) -> int:
    """How many attempts by later runs, one after another, have failed: each had the sign that the output is back."""
    number = 0
    for row in reversed(list(attempts)):
        if not row.attributes.get(TAKEN_UP):
            break
        number += 1
    return min(number, 20)
