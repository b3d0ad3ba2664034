"""The retry policy that decides whether Airflow tries a batch's task again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow.sdk import RetryDecision, RetryPolicy

from headrace.failure import Failure

if TYPE_CHECKING:
    from airflow.sdk import Context


class BoundedRetryPolicy(RetryPolicy):
    """Allows the task's own retries after an early failure: a process was killed, a connection broke.

    There is no retry after an error that no repetition cures, nor after a try that took ``seconds`` or longer: its run
    should fail visibly, and the runs of later batches should continue. Later runs take the batch up.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,  # noqa: ARG002 - Airflow's signature
        max_tries: int,  # noqa: ARG002 - Airflow's signature
        context: Context | None = None,
    ) -> RetryDecision:
        """Decide whether to retry. Airflow calls this in the task's process."""
        if getattr(exception, "failure", None) is Failure.FINAL:
            return RetryDecision.fail("no repetition cures it")
        started = None if context is None else context["ti"].start_date
        if started is not None and (datetime.now(UTC) - started).total_seconds() >= self.seconds:
            return RetryDecision.fail(f"it was tried for {self.seconds:g} s and more; a later run takes the batch up")
        return RetryDecision.default()
