"""Retries by output, and by what failed: Airflow knows those of a task, and either may want fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from headrace.failure import FAILURE, Failure

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.hooks.run_identity import RunIdentity
    from headrace.ledger.rows import AttemptRow
    from headrace.stream import Stream

CODE_RETRIES = 4
"""How often what failed by the user's own code is tried again, where its output does not say so."""

_NO_CURE = "no repetition cures it"


class OutputRetries:
    """How often the steps of a batch are tried, in the task of this context.

    What failed by its surroundings is tried as often as Airflow tries the task, so that a batch outlives a server that
    is away for hours; the user's code a few times; and what nothing can mend not again.

    :param default: for steps that do not say so themselves; None: as often as Airflow tries the task.
    :param code_failures: how often a step has failed by the user's code, since its run was cleared.
    """

    def __init__(
        self,
        stream: Stream,
        context: Context,
        default: int | None = None,
        *,
        code_failures: Callable[[str], int] = lambda _: 0,
    ) -> None:
        task = context["ti"]
        self._code_failures = code_failures
        self._own = {output.id: output.retries for output in stream.outputs}
        self._default = default
        retries = task.task.retries or 0
        # Of the tries since the task was cleared, counted from 1: clearing gives a task its retries once more. Beyond
        # them Airflow tries a task only where no try failed: the scheduler that had started one died.
        self._try_number = min(task.try_number - (task.max_tries - retries), retries + 1)

    def may_try(self, step: str, try_number: int) -> bool:
        """Whether the step is to be tried at the task's ``try_number``-th try."""
        own = self._own.get(step)
        limit = self._default if own is None else own
        return limit is None or try_number <= limit + 1

    def may_try_after(self, error: Exception, step: str) -> bool:
        """Whether the step is to be tried again after this error."""
        failure = getattr(error, "failure", Failure.PASSING)
        if failure is Failure.FINAL or not self.may_try(step, self._try_number + 1):
            return False
        if failure is Failure.PASSING or self._own.get(step) is not None:
            return True
        return self._code_failures(step) <= CODE_RETRIES

    def still_tried(self, steps: Iterable[str]) -> tuple[str, ...]:
        """Those of the steps that are to be tried at this try.

        Raises:
            AirflowFailException: none of them.
        """
        left = tuple(steps)
        tried = tuple(step for step in left if self.may_try(step, self._try_number))
        if left and not tried:
            raise AirflowFailException(f"{', '.join(left)} failed, and has used up its retries.")
        return tried

    @contextmanager
    def honoured(self, left: Callable[[], Iterable[str]]) -> Iterator[None]:
        """An error within becomes Airflow's final one when steps are left then, and none of them may be tried again.

        With none left an attempt died after its last record, and another try has the ledger see that.
        """
        try:
            yield
        except (AirflowFailException, AirflowSkipException):
            raise
        except Exception as error:
            steps = tuple(left())
            if steps and not any(self.may_try_after(error, step) for step in steps):
                why = _NO_CURE if getattr(error, "failure", None) is Failure.FINAL else "its retries are used up"
                raise AirflowFailException(f"Not to be tried again, {why}: {error}") from error
            raise


def code_failures(attempts: Iterable[AttemptRow], run: RunIdentity, step: str) -> int:
    """How often the step failed by the user's code in attempts that this run made since it was cleared."""
    return sum(
        row.attributes.get(FAILURE) == Failure.CODE and step in row.outputs and run.made(row.attributes)
        for row in attempts
    )
