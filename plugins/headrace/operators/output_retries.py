"""Retries by output: Airflow knows those of a task, and an output may want fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream


class OutputRetries:
    """How often the steps of a batch are tried, in the task of this context.

    :param default: for steps that do not say so themselves; None: as often as Airflow tries the task.
    """

    def __init__(self, stream: Stream, context: Context, default: int | None = None) -> None:
        task = context["ti"]
        self._own = {output.id: output.retries for output in stream.outputs}
        self._default = default
        # Of the tries since the task was cleared, counted from 1: clearing gives a task its retries once more.
        self._try_number = task.try_number - (task.max_tries - (task.task.retries or 0))

    def may_try(self, step: str, try_number: int) -> bool:
        """Whether the step is to be tried at the task's ``try_number``-th try."""
        own = self._own.get(step)
        limit = self._default if own is None else own
        return limit is None or try_number <= limit + 1

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
            if steps and not any(self.may_try(step, self._try_number + 1) for step in steps):
                raise AirflowFailException(f"Not to be tried again, by its output's retries: {error}") from error
            raise
