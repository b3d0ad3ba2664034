"""When Airflow tries a batch's task again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow.sdk import RetryDecision, RetryPolicy

from headrace.failure import Failure

if TYPE_CHECKING:
    from airflow.sdk import Context


class BoundedRetryPolicy(RetryPolicy):
    """The task's own retries for what failed soon: a process that was killed, a connection that broke.

    None after an error that no repetition cures, nor after a try that has taken ``seconds`` already: its run is to fail
    visibly, and those of later batches are to go on. Later runs take the batch up.
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
        """Airflow's question, in the task's process."""
        if getattr(exception, "failure", None) is Failure.FINAL:
            return RetryDecision.fail("no repetition cures it")
        started = None if context is None else context["ti"].start_date
        if started is not None and (datetime.now(UTC) - started).total_seconds() >= self.seconds:
            return RetryDecision.fail(f"it was tried for {self.seconds:g} s and more; a later run takes the batch up")
        return RetryDecision.default()
