"""The operator that runs a batch: its allocated blocks through Spark into the stream's outputs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.errors import REPAIR
from headrace.operators.spark_attempt import (
    TRY_NUMBER,
    AttemptFencedInSparkError,
    BatchTaskError,
    SparkAttemptOperator,
    Wait,
)
from headrace.runs.batch_run import BatchRun

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import BatchRow


class WalSparkSubmitOperator(SparkAttemptOperator):
    """Runs a batch's steps: reads its allocated blocks from the log, transforms them, writes the outputs.

    A step is an output, or the update of the stream's state. With ``step`` the task runs that one alone, so that each
    step is a task that Airflow shows and retries separately. Without ``step`` the task runs all steps in one process.

    There are two ways to run a batch in Spark, by the same code. ``submit`` gives it its own application by spark-
    submit, with all that SparkSubmitOperator takes. Its JVM and workers start first, which often takes longer than the
    batch. So the default is ``connect``: in the receiver job's warm application, over Spark Connect. If there is no
    application to connect to (the stream was stopped, or its receiver job is on another machine, or has another secret
    key or other versions), the batch is submitted all the same. The task waits for an application that is starting, or
    is due because the last one died. It asks a job of an older version to stop, and waits for the next.

    Before anything runs, the ledger gives the attempt a number. A later attempt at the same steps fences every earlier
    one, so a zombie (Airflow starts a second try while the first is still alive) can neither complete the batch nor
    harm it. A step with a record of success is not run again unless the DAG run asks for it: see ``steps_to_run``. The
    task waits for a live attempt of another run. A batch without records completes without Spark if no output needs to
    run for it.

    The task runs its own batch and no other. If that fails, the stream's repair tries it again
    (``RepairBatchesOperator``).

    Killing the task ends its own Spark jobs and no others.

    :param stream: the stream.
    :param step: the id of the one output to write, or "state"; by default all of them.

    For the other parameters see ``SparkAttemptOperator``.
    """

    def __init__(self, *, step: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step = None if step is None else self.stream.step_of_id.get(step, step)

    def run_step(self, context: Context) -> Any:
        """Run what is left of the batch."""
        with self.opened() as stream_context:
            self.run_batch(BatchRun.of(context, stream_context))

    def run_batch(self, run: BatchRun) -> None:
        """Run this task's steps of the batch, or defer until they can run.

        Raises:
            BatchTaskError: a step failed.
        """
        if run.is_automatic:
            # The repair tries the batch again, so this run must not delay the next ones.
            self.slot_timeout = min(self.slot_timeout, timedelta(milliseconds=self.stream.retry_for_ms))
        while (awaited := self._try_batch(run)) is not None:
            self.wait(awaited)

    def _try_batch(self, run: BatchRun) -> Wait | None:
        """Run what is left of the batch; return what it has to wait for first, if anything."""
        from headrace.ledger.errors import AlreadyCompletedError, SlotBusyError
        from headrace.ledger.states import BatchState
        from headrace.runs.steps_to_run import find_steps_to_run

        batch, at = self._batch(run), time_text(run.batch_time_ms)
        if batch.state is BatchState.ABANDONED:
            self.log.info("Batch %s is abandoned, so there is nothing to run.", at)
            return None
        left = find_steps_to_run(run.ledger, batch, run.request, self._steps, stream_steps=self.stream.steps)
        if not left.steps and (batch.state is BatchState.COMPLETED or not any(map(run.request.wants, self._steps))):
            self._report_why_nothing_is_left(run)
            return None
        # If nothing is left but the batch is not completed, an attempt died after recording its last output. Beginning
        # another attempt makes the ledger notice that the batch is complete.
        steps = left.steps or self._steps
        awaited = self._other_run(run, batch, steps) or self.wait_for_application(run.ledger, batch, left.steps)
        if awaited is not None:
            return awaited
        try:
            attempt = self.begin(
                run.ledger,
                batch,
                run.context,
                steps=steps,
                force=left.repeats and bool(left.steps),
                attributes=run.request.attributes,
            )
        except AlreadyCompletedError as error:
            self.log.info("%s", error.what)
            return None
        except SlotBusyError as error:
            soon = _are_being_repaired(run.ledger, self.stream.name, error.busy)
            return Wait(str(error), f"batches {error.busy}", otherwise=error, soon=soon)
        self.run_attempt(run.ledger, attempt, batch, run.context)
        return None

    @property
    def _steps(self) -> tuple[str, ...]:
        return self.stream.steps if self.step is None else (self.step,)

    def _report_why_nothing_is_left(self, run: BatchRun) -> None:
        steps = ", ".join(self._steps)
        if not any(map(run.request.wants, self._steps)):
            self.log.info("This run does not ask for %s.", steps)
            return
        self.log.info(
            "Batch %s has %s done. To do it again, trigger a run with reprocess, or clear the run that did it.",
            time_text(run.batch_time_ms), steps,
        )  # fmt: skip

    def _batch(self, run: BatchRun) -> BatchRow:
        batch = run.find_batch()
        if batch is None:
            raise BatchTaskError(
                f"Batch {time_text(run.batch_time_ms)} of stream {self.stream.name!r} has no blocks allocated.",
                remedy="Clear the task 'allocate_blocks' of this run, and those after it.",
            )
        return batch

    def _other_run(self, run: BatchRun, batch: BatchRow, steps: tuple[str, ...]) -> Wait | None:
        """The wait for a live attempt of another run at these steps. An attempt of an earlier try of this run is not
        waited for: it gets fenced.

        Raises:
            AttemptFencedInSparkError: a later try of this run runs these steps, so this try is a zombie.
        """
        from headrace.runs.steps_to_run import attempts_without_replays

        now_ms, at = run.ledger.now_ms(), time_text(batch.batch_time_ms)
        for row in attempts_without_replays(run.ledger, batch):
            if not row.alive(now_ms) or not set(row.outputs) & set(steps):
                continue
            if row.run_id not in (None, run.request.run.run_id):
                return Wait(f"Batch {at} is being run by {row.holder}, attempt {row.number}.", f"attempt {row.number}")
            if row.attributes.get(TRY_NUMBER, 0) > run.context["ti"].try_number:
                raise AttemptFencedInSparkError(
                    f"A later try of this task has taken the batch: {row.holder}, attempt {row.number}."
                )
        return None


def _are_being_repaired(ledger: Ledger, stream_name: str, times: Collection[int]) -> bool:
    """Whether the live attempts at these batches are repairs, which give way soon."""
    now_ms = ledger.now_ms()
    live = [row for row in ledger.attempts.running(stream_name) if row.batch_time_ms in times and row.alive(now_ms)]
    return bool(live) and all(row.attributes.get(REPAIR) for row in live)
