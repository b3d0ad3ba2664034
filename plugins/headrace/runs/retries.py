"""How Airflow retries the tasks of a batch, and whether an attempt would fail as the last one did.

1. Airflow retries the task once, soon, unless stored data is lost or the task has used up its time
   (`BatchRetryPolicy`). So the run of a failing batch fails visibly, within a bounded time.
2. The repair of the stream tries the batch again when it is due (``headrace.batch.due_batches``), so that no person has
   to clear its run. If it failed by the user's code, or finally, the repair asks `is_held_back`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from headrace.airflow_versions import RetryDecision, RetryPolicy
from headrace.errors import FAILURE, TRIED_WITH, Failure

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger.batches.tables import AttemptRow
    from headrace.stream import Stream


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


def is_held_back(stream: Stream, last: AttemptRow) -> bool:
    """Whether the attempt failed by the user's code, or finally, and definition and code have not changed since."""
    if last.attributes.get(FAILURE, Failure.PASSING) == Failure.PASSING:
        return False
    from headrace.spark.records.transforms import tried_with

    return last.attributes.get(TRIED_WITH) == tried_with(stream, last.outputs)
