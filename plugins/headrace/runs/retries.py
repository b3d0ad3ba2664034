"""Decides when a batch that failed is tried again, so that nobody has to clear its run.

1. Airflow retries the task once, soon, unless stored data is lost or the task has used up its time
   (`BatchRetryPolicy`). So the run of a failing batch fails visibly, within a bounded time.
2. Later runs take the batch up (`failed_batches`). A batch that failed for a passing reason is retried once its output
   has written a later batch: that shows that the output is available again.
3. A batch that failed by the user's code, or finally, is retried only when the definition or the code has changed
   (`is_held_back`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryDecision, RetryPolicy

from headrace.errors import FAILURE, TAKEN_UP, TRIED_WITH, Failure

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger.batch_tables import AttemptRow, BatchRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext

_MOST = 1_000
_LONGEST_PAUSE_MS = 3_600_000


class BatchRetryPolicy(RetryPolicy):
    """Allows the task's retries after a failure that may pass: a process was killed, a connection broke.

    After a failure of the user's code it allows one retry.

    :param seconds: no retry follows a try that took this long, because later runs should continue; None: no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,  # noqa: ARG002 - Airflow's signature
        context: Context | None = None,
    ) -> RetryDecision:
        """Decide whether to retry. Airflow calls this in the task's process."""
        failure = getattr(exception, "failure", Failure.PASSING)
        # An error of the user's code is retried once: one that passes may have a type that headrace does not know.
        if failure is Failure.FINAL or (failure is Failure.CODE and try_number > 1):
            return RetryDecision.fail(f"a retry cannot succeed (failure: {failure})")
        started = None if context is None else context["ti"].start_date
        took = 0.0 if started is None else (datetime.now(UTC) - started).total_seconds()
        if self.seconds is not None and took >= self.seconds:
            return RetryDecision.fail(f"the try took {self.seconds:g} s or longer; a later run takes the batch up")
        return RetryDecision.default()


def batch_retries(stream: Stream) -> dict[str, Any]:
    """The arguments for the tasks of a batch: one retry, after 5 s."""
    return {
        "retries": 1,
        "retry_delay": timedelta(seconds=5),
        "retry_policy": BatchRetryPolicy(stream.retry_for_ms / 1000),
    }


def replay_retries() -> dict[str, Any]:
    """The arguments for the tasks of a replay: retries for half an hour, because no later run takes its batches up."""
    return {"retries": 30, "retry_delay": timedelta(minutes=1), "retry_policy": BatchRetryPolicy()}


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """An earlier batch without a live attempt, and those of the requested steps that it still needs."""

    batch: BatchRow
    steps: tuple[str, ...]


def failed_batches(stream_context: StreamContext, before_ms: int, steps: Sequence[str]) -> Iterator[FailedBatch]:
    """The failed batches before ``before_ms`` to retry, with their steps among ``steps``, oldest first."""
    from headrace.ledger.errors import StepsLostError
    from headrace.ledger.states import AttemptState, BatchState
    from headrace.runs.steps_to_run import attempts_without_replays

    stream, ledger = stream_context.stream, stream_context.ledger
    settled_ms, newest = stream.retry_for_ms, ledger.streams.get(stream.name).outputs
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
        required = batch.needs(newest)
        missing = [step for step in required if step not in done]
        if missing and not set(missing) & set(newest):
            if batch.error != str(StepsLostError(batch, missing)):
                # No attempt can begin, and so report it.
                ledger.attempts.settle(stream.name, batch.batch_time_ms)
            continue
        attempts = attempts_without_replays(ledger, batch)
        left = tuple(
            step
            for step in steps
            if step in missing and may_be_tried(stream, [row for row in attempts if step in row.outputs], now_ms)
        )
        if not missing:
            # An attempt died after its last record. The ledger notices that the batch is complete when an attempt is to
            # begin.
            left = tuple(step for step in steps if step in required)
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
    failed = _failed_retries(attempts)
    pause_ms = min(stream.batch_interval_ms * 2**failed, _LONGEST_PAUSE_MS) if failed else 0
    return now_ms - (last.ended_at_ms or last.heartbeat_ms) >= pause_ms


def is_held_back(stream: Stream, last: AttemptRow) -> bool:
    """Whether the attempt failed by the user's code, or finally, and definition and code have not changed since."""
    if last.attributes.get(FAILURE) not in (Failure.CODE, Failure.FINAL):
        return False
    from headrace.spark.transforms import tried_with

    return last.attributes.get(TRIED_WITH) == tried_with(stream, last.outputs)


def _failed_retries(attempts: Iterable[AttemptRow]) -> int:
    """How many of the last consecutive attempts were failed retries by later runs, 20 at most. Each began after its
    output had written a later batch."""
    number = 0
    for row in reversed(list(attempts)):
        if not row.attributes.get(TAKEN_UP):
            break
        number += 1
    return min(number, 20)
