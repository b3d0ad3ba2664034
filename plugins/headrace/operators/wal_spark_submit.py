"""The operator that runs a batch: its allocated blocks through Spark into the stream's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from headrace.failure import FAILURE, Failure
from headrace.hooks.run_request import run_request
from headrace.operators.attachment import holder
from headrace.operators.output_retries import OutputRetries, code_failures
from headrace.operators.spark_attempt import (
    LEASE_MS,
    AttemptFencedInSparkError,
    BatchFailedError,
    SparkAttemptOperator,
)
from headrace.stream.parameters import ATTRIBUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow.sdk import Context

    from headrace.hooks.run_request import RunRequest
    from headrace.ledger import Ledger
    from headrace.ledger.rows import Attempt, BatchRow
    from headrace.operators.steps_to_run import StepsToRun
    from headrace.wal.storage import LogStorage


# The attribute of an attempt that has the try of its task.
_TRY = "try_number"


@dataclass(frozen=True, slots=True)
class _Run:
    """A DAG run at its task, with what the task has opened."""

    context: Context
    request: RunRequest
    ledger: Ledger
    storage: LogStorage


class EarlierBatchFailedError(BatchFailedError):
    """A batch that comes first, in a stream whose batches run in order, did not complete."""


class WalSparkSubmitOperator(SparkAttemptOperator):
    """Runs a batch's steps: reads its allocated blocks from the log, transforms them, writes the outputs.

    A step is an output, or the update of the stream's state. With ``step`` the task does that one alone, so that
    ``partial(…).expand(step=[…])`` shows each in Airflow and tries each again by itself; without, it does all of
    them in one process.

    Two ways lead to Spark. ``connect`` runs the batch in the receiver job's warm application, over Spark Connect
    (about a second until it works); ``submit`` gives it an application of its own by spark-submit. Both run the same
    code. Where there is no application to connect to (the stream was stopped, or its receiver job is on another
    machine, or has another secret key or other versions), a batch is submitted; one that is just starting, or due
    since the last one died, is waited for. A job of an older version is asked to stop, and its successor waited for.

    Before anything runs, the ledger gives the attempt a number. A later attempt at the same steps fences every earlier
    one, so a zombie (Airflow starts a second try while a first still lives) can neither complete the batch nor harm
    it. What has a record of success is not run again unless the DAG run asks for it: see ``steps_to_run``. Another
    run's attempt that lives is waited for. A batch without records completes without Spark where no output wants to
    hear of it.

    In a stream whose batches run in order, earlier batch times that nobody runs are allocated and run first, in order,
    in this task: their own runs, which may wait for this one to end, find them completed.

    Killing the task ends its own Spark jobs and no others.

    :param stream: the stream.
    :param step: the id of the one step to run; by default all of them.
    :param output_retries: how often an output is tried again that does not say so itself; by default as the task.

    For the other parameters see ``SparkAttemptOperator``.
    """

    def __init__(self, *, step: str | None = None, output_retries: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step = step
        self.output_retries = output_retries

    def run_step(self, context: Context) -> Any:
        """Run what is left of the batch."""
        with self.opened() as (ledger, storage):
            self.run_batch(ledger, storage, self.batch_time_ms(context, ledger), context)

    def run_batch(self, ledger: Ledger, storage: LogStorage, at_ms: int, context: Context) -> None:
        """Run the batch's steps, or defer until it is their turn.

        Raises:
            BatchFailedError: a step failed.
            AirflowFailException: and it is not to be tried again; or steps whose retries are used up are still to do,
                after the others were done.
        """
        run = _Run(context, run_request(context, self.stream), ledger, storage)
        failures = partial(self._code_failures, run, at_ms)
        retries = OutputRetries(self.stream, context, self.output_retries, code_failures=failures)
        with retries.honoured(lambda: self._left(run, at_ms).steps):
            self._run_batch(run, at_ms, retries)

    def _run_batch(self, run: _Run, at_ms: int, retries: OutputRetries) -> None:
        from headrace.ledger.errors import AlreadyCompletedError
        from headrace.ledger.states import BatchState

        batch = self._batch(run.ledger, at_ms)
        if batch.state in (BatchState.ABANDONED, BatchState.ABSORBED):
            self.log.info("Batch %d is %s, so there is nothing to run.", at_ms, batch.state.value)
            return
        left = self._left(run, at_ms)
        if not left.steps and (batch.state is BatchState.COMPLETED or not any(map(run.request.wants, self._steps))):
            self._tell_why_nothing_is_left(run, at_ms)
            return
        # With nothing left of a batch that is not completed, an attempt died after its last record: to begin another
        # has the ledger see that.
        steps = retries.still_tried(left.steps) or self._steps
        self._await_other_runs(run, batch, steps)
        self.await_application(run.ledger, batch, left.steps)
        begin = self._beginning(
            run, batch, steps, force=left.repeats and bool(left.steps), attributes=left.attributes(run.request)
        )
        try:
            attempt = self._in_its_turn(run, batch, begin)
            self.run_attempt(run.ledger, attempt, batch, run.context)
        except AlreadyCompletedError as error:
            self.log.info("%s", error.what)
        given_up = set(left.steps).difference(steps)
        if given_up and (unwritten := [step for step in self._left(run, at_ms).steps if step in given_up]):
            raise AirflowFailException(
                f"Batch {at_ms} was not written to {', '.join(unwritten)}, whose retries are used up. Clear this task "
                "to have them tried again."
            )

    @property
    def _steps(self) -> tuple[str, ...]:
        return self.stream.steps if self.step is None else (self.step,)

    def _left(self, run: _Run, at_ms: int) -> StepsToRun:
        """What the run has to do of this task's steps."""
        from headrace.operators.steps_to_run import find_steps_to_run

        return find_steps_to_run(run.ledger, self._batch(run.ledger, at_ms), run.request, self._steps)

    def _tell_why_nothing_is_left(self, run: _Run, at_ms: int) -> None:
        steps = ", ".join(self._steps)
        if not any(map(run.request.wants, self._steps)):
            self.log.info("This run does not ask for %s.", steps)
            return
        self.log.info(
            "Batch %d has %s done. To do it again, trigger a run with reprocess, or clear the run that did it.",
            at_ms, steps,
        )  # fmt: skip

    def _code_failures(self, run: _Run, at_ms: int, step: str) -> int:
        from headrace.operators.steps_to_run import live_attempts

        return code_failures(live_attempts(run.ledger, self._batch(run.ledger, at_ms)), run.request.run, step)

    def _batch(self, ledger: Ledger, at_ms: int) -> BatchRow:
        batch = ledger.batches.find(self.stream.name, at_ms)
        if batch is None:
            raise BatchFailedError(
                f"Batch {at_ms} of stream {self.stream.name!r} has no blocks allocated.",
                remedy="Clear the task 'allocate_blocks' of this run, and those after it.",
            )
        return batch

    # --- turns

    def _await_other_runs(self, run: _Run, batch: BatchRow, steps: tuple[str, ...]) -> None:
        """Wait for the attempt of another run at these steps, if it lives; an earlier try's of this run is fenced.

        Raises:
            AttemptFencedInSparkError: a later try of this run is at them. This one is a zombie that woke up.
        """
        from headrace.operators.steps_to_run import live_attempts

        now_ms = run.ledger.now_ms()
        for row in live_attempts(run.ledger, batch):
            if not row.alive(now_ms) or not set(row.outputs) & set(steps):
                continue
            if row.attributes.get("run_id") not in (None, run.request.run.run_id):
                self.wait(
                    f"Batch {batch.batch_time_ms} is being run by {row.holder}, attempt {row.number}.",
                    waiting_for=f"attempt {row.number}",
                )
            if row.attributes.get(_TRY, 0) > run.context["ti"].try_number:
                raise AttemptFencedInSparkError(
                    f"A later try of this task has taken the batch: {row.holder}, attempt {row.number}."
                )

    def _beginning(
        self,
        run: _Run,
        batch: BatchRow,
        steps: tuple[str, ...] | None,
        *,
        force: bool,
        attributes: Mapping[str, Any],
    ) -> Callable[[], Attempt]:
        """What begins an attempt at these steps of the batch, by the way that there then is; None: those left."""

        def begin() -> Attempt:
            way = self.choose_way(run.ledger)
            return run.ledger.batches.begin_attempt(
                self.stream.name,
                batch.batch_time_ms,
                holder=holder(run.context),
                way=way,
                lease_ms=LEASE_MS[way],
                outputs=steps,
                force=force,
                attributes={**attributes, _TRY: run.context["ti"].try_number},
                revision=self.revision,
            )

        return begin

    def _in_its_turn(self, run: _Run, batch: BatchRow, begin: Callable[[], Attempt]) -> Attempt:
        """Begin an attempt at the batch when nothing comes before it: what does is run, or waited for, deferred."""
        from headrace.ledger.errors import NotItsTurnError, SlotBusyError

        while True:
            try:
                return begin()
            except NotItsTurnError as error:
                if not self._run_earlier(run, batch.batch_time_ms):
                    self.wait(str(error), waiting_for=f"turn of {error.busy}", otherwise=error)
            except SlotBusyError as error:
                self.wait(str(error), waiting_for=f"slot of {error.busy}", otherwise=error)

    def _run_earlier(self, run: _Run, at_ms: int) -> bool:
        """Allocate, or run, the earliest batch time before ``at_ms`` that is unfinished; whether there was one."""
        from headrace.batching.allocation import allocate

        for earlier in run.ledger.batches.earlier_unfinished(self.stream.name, at_ms, limit=1):
            first_ms = earlier.batch_time_ms
            if earlier.state is None:
                self.log.info(
                    "Batch %d comes before %d, and nobody has allocated it: that is done here.", first_ms, at_ms
                )
                # The next look, for whether somebody runs it, comes right before it is begun here: the tasks of the
                # other outputs get here at the same time.
                allocate(self.stream, run.ledger, run.storage, first_ms)
                return True
            if earlier.alive:
                self.wait(f"Batch {first_ms} comes before {at_ms} and is running.", waiting_for=f"batch {first_ms}")
            self._await_mending(run, first_ms, at_ms)
            self.log.info(
                "Batch %d comes before %d and is %s, and nobody runs it: it is run first, here.",
                first_ms, at_ms, earlier.state.value,
            )  # fmt: skip
            self._run_ahead(run, run.ledger.batches.get(self.stream.name, first_ms))
            return True
        return False

    def _await_mending(self, run: _Run, first_ms: int, at_ms: int) -> None:
        """Wait where the earlier batch failed for good: what it reads is not to be had, however often it is run."""
        from headrace.operators.steps_to_run import live_attempts

        tried = live_attempts(run.ledger, run.ledger.batches.get(self.stream.name, first_ms))
        if not tried or tried[-1].attributes.get(FAILURE) != Failure.FINAL:
            return
        reason = f"Batch {first_ms} comes before {at_ms}, and no repetition mends its failure: {tried[-1].error}"
        error = EarlierBatchFailedError(reason, remedy=self._way_out(first_ms))
        self.wait(str(error), waiting_for=f"batch {first_ms}", otherwise=error)

    def _way_out(self, at_ms: int) -> str:
        return (
            "Mend what makes it fail and clear its run; if the batch can never succeed, give it up: "
            f"`headrace batches abandon {self.stream.name} {at_ms} --reason WHY`."
        )

    def _run_ahead(self, run: _Run, batch: BatchRow) -> None:
        """Run what is left of a batch that is another run's."""
        from headrace.ledger.errors import AlreadyCompletedError

        self.await_application(run.ledger, batch, self.stream.steps)
        begin = self._beginning(run, batch, None, force=False, attributes=self._ahead(run, batch))
        try:
            attempt = self._in_its_turn(run, batch, begin)
            self.run_attempt(run.ledger, attempt, batch, run.context)
        except AlreadyCompletedError as error:
            self.log.info("%s", error.what)
        except AttemptFencedInSparkError as error:
            self.wait(str(error), waiting_for=f"batch {batch.batch_time_ms}", otherwise=error)
        except EarlierBatchFailedError:
            raise
        except Exception as error:
            raise EarlierBatchFailedError(
                f"Batch {batch.batch_time_ms} comes first in stream {self.stream.name!r}, and it failed: {error}",
                remedy=self._way_out(batch.batch_time_ms),
            ) from error

    def _ahead(self, run: _Run, batch: BatchRow) -> dict[str, Any]:
        """What the attempt in another run's place keeps: it is for that run's parameters, as its last attempt had them,
        those of them that the stream still has."""
        from headrace.operators.steps_to_run import AHEAD, live_attempts

        tried = live_attempts(run.ledger, batch)
        given = tried[-1].attributes.get(ATTRIBUTE) if tried else None
        known = {name: value for name, value in (given or {}).items() if name in self.stream.parameters}
        return {**run.request.run.attributes, AHEAD: True, **({ATTRIBUTE: known} if known else {})}
