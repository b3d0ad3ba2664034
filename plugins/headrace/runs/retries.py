"""Decides when a batch that failed is tried again, so that no person has to clear its run.

1. Airflow retries the task once, soon, unless stored data is lost or the task has used up its time
   (`BatchRetryPolicy`). So the run of a failing batch fails visibly, within a bounded time.
2. The repair of the stream tries it again when it is due (`due_batches`). In a stream whose batches run in any order, a
   step that failed for a passing reason is due once it has succeeded for another batch: that shows that its output is
   available again. In an ordered stream no other batch can show it, so the first batch is due after a pause.
3. A batch that failed by the user's code, or finally, is tried again only when the definition or the code has changed
   (`is_held_back`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from headrace.airflow_versions import RetryDecision, RetryPolicy
from headrace.errors import FAILURE, REPAIR, TRIED_WITH, Failure

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import AttemptRow, BatchRow, EarlierBatch
    from headrace.ledger.tables import StreamRow
    from headrace.stream import Stream

_LONGEST_PAUSE_MS = 3_600_000
# The longest pause in an ordered stream, in batch intervals: all later batches wait for the one that failed.
_LONGEST_PAUSE_IN_ORDER = 4
# How many of the newest outputs' rows show whether an output is available.
_NEWEST_OUTPUTS = 200
# Above every batch time.
_END_MS = 2**62


@dataclass(frozen=True)
class BatchRetryPolicy(RetryPolicy):
    """Allows the task's retries after a failure that may pass: a process was killed, a connection broke.

    After a failure of the user's code it allows one retry.

    :param seconds: no retry follows a try that took this long, because the repair tries it again; None: no limit.
    """

    # A dataclass for its repr: Airflow 3.2 stores it, and with an address in it each parse is a new version.
    seconds: float | None = None

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
            return RetryDecision.fail(f"the try took {self.seconds:g} s or longer; the repair tries the batch again")
        return RetryDecision.default()


def batch_retries(stream: Stream) -> dict[str, Any]:
    """The arguments for the tasks of a batch: one retry, after 5 s."""
    return {
        "retries": 1,
        "retry_delay": timedelta(seconds=5),
        "retry_policy": BatchRetryPolicy(stream.retry_for_ms / 1000),
    }


def replay_retries() -> dict[str, Any]:
    """The arguments for the tasks of a replay: retries for half an hour, because no repair tries its batches again."""
    return {"retries": 30, "retry_delay": timedelta(minutes=1), "retry_policy": BatchRetryPolicy()}


@dataclass(frozen=True, slots=True)
class DueBatch:
    """A batch to try again, with the ``steps`` to run: none if the definition has lost all that it still needs.

    ``attempts`` are those at the batch itself, oldest first.
    """

    batch: BatchRow
    steps: tuple[str, ...]
    attempts: Sequence[AttemptRow]


def due_batches(
    ledger: Ledger,
    stream_name: str,
    *,
    held_back: Callable[[AttemptRow], bool],
    has_own_run: Callable[[BatchRow], bool],
    without: Collection[int] = (),
    at_once: bool = False,
    most: int = 1_000,
) -> Iterator[DueBatch]:
    """The batches to try again now, oldest first; in an ordered stream at most the first unfinished one.

    Each is judged by what the ledger has of it when it is asked for, so that an attempt made meanwhile counts.

    Batches that have completed once are left out: if one is run again and fails, it is for a person to clear that run.

    Args:
        held_back: whether another attempt would fail as this one did.
        has_own_run: whether a batch that was never begun is about to be begun by a run of its own.
        without: batch times that are left out.
        at_once: without a pause, and what is held back too.
        most: the number of unfinished batches that are checked.

    Raises:
        StreamNotFoundError: the ledger does not know the stream.
    """
    stream = ledger.streams.get(stream_name)
    unfinished = ledger.batches.earlier_unfinished(stream_name, _END_MS, limit=1 if stream.ordered else most)
    if not unfinished:
        return
    judge = _Judge(ledger, stream, held_back=held_back, at_once=at_once)
    for earlier in unfinished:
        if earlier.state is None or earlier.alive or earlier.batch_time_ms in without:
            continue
        due = judge.due(earlier)
        if due is not None and (due.batch.started_at_ms is not None or not has_own_run(due.batch)):
            yield due


class _Judge:
    """Judges a stream's unfinished batches at one time."""

    def __init__(
        self, ledger: Ledger, stream: StreamRow, *, held_back: Callable[[AttemptRow], bool], at_once: bool
    ) -> None:
        self._ledger = ledger
        self._stream = stream
        self._held_back = held_back
        self._at_once = at_once
        self._now_ms = ledger.now_ms()
        self._last_results = {} if stream.ordered else _last_results(ledger, stream.name)

    def due(self, earlier: EarlierBatch) -> DueBatch | None:
        """The batch with its steps that are due; None if there are none."""
        from headrace.ledger.errors import StepsLostError
        from headrace.ledger.states import UNFINISHED, AttemptState
        from headrace.runs.batch_run import attempts_without_replays

        name, time_ms = self._stream.name, earlier.batch_time_ms
        batch = self._ledger.batches.get(name, time_ms)
        if batch.state not in UNFINISHED:
            return None
        recorded = self._ledger.attempts.outputs(name, time_ms)
        done = {row.output_id for row in recorded if row.state is AttemptState.COMPLETED}
        required = batch.needs(self._stream.outputs)
        missing = [step for step in required if step not in done]
        attempts = attempts_without_replays(self._ledger, batch)
        known = [step for step in missing or required if step in self._stream.outputs]
        if not known:
            # No attempt can begin, and so report it.
            is_reported = bool(missing) and batch.error == str(StepsLostError(batch, missing))
            return None if is_reported or not missing else DueBatch(batch, (), attempts)
        if not missing:
            # An attempt died after its last record. The ledger notices that the batch is complete when an attempt is
            # to begin.
            return DueBatch(batch, tuple(known), attempts)
        if self._stream.ordered:
            steps = known if self._may_be_tried(attempts) else []
        else:
            steps = [step for step in known if self._step_is_due(batch, step, attempts)]
        return DueBatch(batch, tuple(steps), attempts) if steps else None

    def _step_is_due(self, batch: BatchRow, step: str, attempts: Iterable[AttemptRow]) -> bool:
        tried = [row for row in attempts if step in row.outputs]
        if not self._may_be_tried(tried):
            return False
        if self._at_once or (tried and _failure(tried[-1]) is not Failure.PASSING):
            return True
        at_ms, succeeded = self._last_results.get(step, (0, batch.started_at_ms is None))
        # Else the output may be unavailable, or the batch's own run is about to begin this step.
        return succeeded and at_ms >= (_ended_ms(tried[-1]) if tried else batch.started_at_ms or 0)

    def _may_be_tried(self, attempts: Sequence[AttemptRow]) -> bool:
        """Whether to make another attempt, after these (oldest first): not if it would fail alike, and not before the
        pause is over, which doubles with each failed repair."""
        if self._at_once or not attempts:
            return True
        if self._held_back(attempts[-1]):
            return False
        failed: int = _failed_repairs(attempts)
        interval_ms = self._stream.batch_interval_ms
        if self._stream.ordered:
            pause_ms = min(interval_ms * 2**failed, interval_ms * _LONGEST_PAUSE_IN_ORDER)
        else:
            pause_ms = min(interval_ms * 2**failed, _LONGEST_PAUSE_MS) if failed else 0
        return bool(self._now_ms - _ended_ms(attempts[-1]) >= pause_ms)


def is_held_back(stream: Stream, last: AttemptRow) -> bool:
    """Whether the attempt failed by the user's code, or finally, and definition and code have not changed since."""
    if _failure(last) is Failure.PASSING:
        return False
    from headrace.spark.transforms import tried_with

    return last.attributes.get(TRIED_WITH) == tried_with(stream, last.outputs)


def _failure(attempt: AttemptRow) -> Failure:
    return Failure(attempt.attributes.get(FAILURE, Failure.PASSING))


def _ended_ms(attempt: AttemptRow) -> int:
    return attempt.ended_at_ms or attempt.heartbeat_ms


def _last_results(ledger: Ledger, stream_name: str) -> dict[str, tuple[int, bool]]:
    """When each step last succeeded or failed, in milliseconds since the epoch, and whether it succeeded."""
    from headrace.ledger.states import AttemptState

    last: dict[str, tuple[int, bool]] = {}
    for row in ledger.attempts.newest_outputs(stream_name, _NEWEST_OUTPUTS):
        if row.state in (AttemptState.COMPLETED, AttemptState.FAILED):
            result = (row.recorded_at_ms, row.state is AttemptState.COMPLETED)
            last[row.output_id] = max(last.get(row.output_id, result), result)
    return last


def _failed_repairs(attempts: Iterable[AttemptRow]) -> int:
    """How many of the last consecutive attempts were repairs, 20 at most: all of them have failed."""
    number = 0
    for row in reversed(list(attempts)):
        if not row.attributes.get(REPAIR):
            break
        number += 1
    return min(number, 20)
