"""When Airflow is not to try a task again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import RetryDecision, RetryPolicy

from headrace.failure import Failure

if TYPE_CHECKING:
    from airflow.sdk import Context


class FinalFailurePolicy(RetryPolicy):
    """No retry after an error that no repetition cures; after others those that the task has."""

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,  # noqa: ARG002 - Airflow's signature
        max_tries: int,  # noqa: ARG002 - Airflow's signature
        context: Context | None = None,  # noqa: ARG002 - Airflow's signature
    ) -> RetryDecision:
        """Airflow's question, in the task's process."""
        if getattr(exception, "failure", None) is Failure.FINAL:
            return RetryDecision.fail("no repetition cures it")
        return RetryDecision.default()
