"""The operator that runs a batch: its allocated blocks through Spark into the stream's outputs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.errors import TAKEN_UP, Failure
from headrace.operators.spark_attempt import (
    FIRST_LEASE_MS,
    AttemptFencedInSparkError,
    BatchTaskError,
    SparkAttemptOperator,
)
from headrace.runs.batch_run import BatchRun, holder
from headrace.stream.parameters import ATTRIBUTE
from headrace.timetables.micro_batch import from_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow.sdk import Context

    from headrace.ledger.batch_tables import Attempt, BatchRow
    from headrace.runs.steps_to_run import StepsToRun


# The attribute of an attempt that holds the try number of its task.
_TRY = "try_number"
# How often a task that retries failed batches checks for a free slot.
_SLOT_SECONDS = 0.5


class EarlierBatchFailedError(BatchTaskError):
    """In a stream whose batches run in order, an earlier batch did not complete."""


class WalSparkSubmitOperator(SparkAttemptOperator):
    """Runs a batch's steps: reads its allocated blocks from the log, transforms them, writes the outputs.

    A step is an output, or the update of the stream's state. With ``step`` the task runs that one alone, so that each
    step is a task that Airflow shows and retries separately. Without ``step`` the task runs all steps in one process.

    There are two ways to run a batch in Spark. ``connect`` runs it in the receiver job's warm application, over Spark
    Connect (about a second until it works); ``submit`` gives it its own application by spark-submit. Both run the same
    code. If there is no application to connect to (the stream was stopped, or its receiver job is on another machine,
    or has another secret key or other versions), the batch is submitted. The task waits for an application that is
    starting, or is due because the last one died. It asks a job of an older version to stop, and waits for the next.

    Before anything runs, the ledger gives the attempt a number. A later attempt at the same steps fences every earlier
    one, so a zombie (Airflow starts a second try while the first is still alive) can neither complete the batch nor
    harm it. A step with a record of success is not run again unless the DAG run asks for it: see ``steps_to_run``. The
    task waits for a live attempt of another run. A batch without records completes without Spark if no output needs to
    run for it.

    Later scheduled runs retry failed batches. In a stream whose batches run in order, this task first allocates and
    runs, in order, the earlier batch times that no task runs; their own runs, which may wait for this one to end, find
    them completed. In other streams a run does its own batch first, whose success shows that the output is available
    again, and then what is left of earlier batches (``failed_batches``). Both end after ``limits.retry_for``.

    Killing the task ends its own Spark jobs and no others.

    :param stream: the stream.
    :param step: the id of the one output to write, or "state"; by default all of them.

    For the other parameters see ``SparkAttemptOperator``.
    """

    def __init__(self, *, step: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step = None if step is None else self.stream.step_of_id.get(step, step)
        # The time.monotonic() until which this task runs batches of other runs.
        self._others_until = 0.0

    def run_step(self, context: Context) -> Any:
        """Run what is left of the batch."""
        with self.opened() as stream_context:
            self.run_batch(BatchRun.of(context, stream_context))

    def run_batch(self, run: BatchRun) -> None:
        """Run the batch's steps, or defer until it is their turn; then run the steps of earlier batches that failed.

        Raises:
            BatchTaskError: a step failed.
        """
        if run.is_automatic:
            # The next run takes the batch up, so this run must not delay it.
            self.slot_timeout = min(self.slot_timeout, timedelta(milliseconds=self.stream.retry_for_ms))
        self._others_until = time.monotonic() + self.stream.retry_for_ms / 1000
        self._run_own_batch(run)
        if run.is_automatic and not self.stream.is_ordered:
            self._take_up_failed(run)

    def _run_own_batch(self, run: BatchRun) -> None:
        from headrace.ledger.errors import AlreadyCompletedError
        from headrace.ledger.states import BatchState

        batch, at = self._batch(run), time_text(run.batch_time_ms)
        if batch.state is BatchState.ABANDONED:
            self.log.info("Batch %s is abandoned, so there is nothing to run.", at)
            return
        left = self._left(run, batch)
        if not left.steps and (batch.state is BatchState.COMPLETED or not any(map(run.request.wants, self._steps))):
            self._report_why_nothing_is_left(run)
            return
        # If nothing is left but the batch is not completed, an attempt died after recording its last output. Beginning
        # another attempt makes the ledger notice that the batch is complete.
        steps = left.steps or self._steps
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

    # --- what failed before

    def _take_up_failed(self, run: BatchRun) -> None:
        """Run this task's steps of earlier batches that failed, oldest first, for a bounded time. Their result does not
        affect the run's own batch, which is done.

        At least one is tried, also if the run's own batch took all the time: nothing else runs a missed batch time. A
        passing error ends the loop: the output may be unavailable again.
        """
        from headrace.ledger.errors import AlreadyCompletedError, BatchAttendedError
        from headrace.runs.retries import failed_batches

        tried = 0
        for failed in failed_batches(run.stream_context, run.batch_time_ms, self._steps):
            time_ms = failed.batch.batch_time_ms
            if tried and time.monotonic() >= self._others_until:
                self.log.info("Batch %s and later ones that failed are left to the next runs.", time_text(time_ms))
                return
            if failed.batch.started_at_ms is None and self._own_run_waits(run, failed.batch):
                continue
            attributes = {**self._given(run, failed.batch), TAKEN_UP: True}
            begin = self._beginning(
                run, failed.batch, failed.steps, force=False, unattended=True, attributes=attributes
            )
            try:
                attempt = self._when_a_slot_is_free(begin)
                if attempt is None:
                    self.log.info("Batch %s and later ones that failed are left to the next runs.", time_text(time_ms))
                    return
                self.log.info("Batch %s was %s, and is taken up here.", time_text(time_ms), failed.batch.state.value)
                tried += 1
                self.run_attempt(run.ledger, attempt, failed.batch, run.context)
            except (AlreadyCompletedError, BatchAttendedError, AttemptFencedInSparkError) as error:
                self.log.info("%s", error)
            except Exception as error:
                self.log.warning("Batch %s, which had failed, has failed again: %s", time_text(time_ms), error)
                if getattr(error, "failure", Failure.PASSING) is Failure.PASSING:
                    return

    def _own_run_waits(self, run: BatchRun, batch: BatchRow) -> bool:
        """Whether a run for the batch's interval is queued or running. It runs the batch itself; a backfill's run would
        otherwise repeat what this one has done.

        False in a stream that coalesces: there a run's date does not determine its batch.
        """
        if self.stream.coalesces:
            return False
        ti, start_ms = run.context["ti"], batch.batch_time_ms - batch.interval_ms
        at = time_text(batch.batch_time_ms)
        try:
            waiting = ti.get_dr_count(dag_id=ti.dag_id, logical_dates=[from_ms(start_ms)], states=["queued", "running"])
        except Exception as error:
            self.log.warning(
                "Batch %s is left to the next runs: Airflow did not say whether it has a run: %s", at, error
            )
            return True
        if waiting:
            self.log.info("Batch %s is left to its own run, which waits.", at)
        return bool(waiting)

    def _when_a_slot_is_free(self, begin: Callable[[], Attempt]) -> Attempt | None:
        """Begin an attempt when a slot is free; None if none is free before the time for other runs' batches is over.
        The tasks of other outputs may still run another batch."""
        from headrace.ledger.errors import SlotBusyError

        while True:
            try:
                return begin()
            except SlotBusyError:
                if time.monotonic() >= self._others_until:
                    return None
                time.sleep(_SLOT_SECONDS)

    @property
    def _steps(self) -> tuple[str, ...]:
        return self.stream.steps if self.step is None else (self.step,)

    def _left(self, run: BatchRun, batch: BatchRow) -> StepsToRun:
        """Those of this task's steps that the run still has to do."""
        from headrace.runs.steps_to_run import find_steps_to_run

        return find_steps_to_run(run.ledger, batch, run.request, self._steps)

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

    # --- turns

    def _await_other_runs(self, run: BatchRun, batch: BatchRow, steps: tuple[str, ...]) -> None:
        """Wait while an attempt of another run at these steps is alive. An attempt of an earlier try of this run is not
        waited for: it gets fenced.

        Raises:
            AttemptFencedInSparkError: a later try of this run runs these steps, so this try is a zombie.
        """
        from headrace.runs.steps_to_run import attempts_without_replays

        now_ms = run.ledger.now_ms()
        for row in attempts_without_replays(run.ledger, batch):
            if not row.alive(now_ms) or not set(row.outputs) & set(steps):
                continue
            if row.attributes.get("run_id") not in (None, run.request.run.run_id):
                self.wait(
                    f"Batch {time_text(batch.batch_time_ms)} is being run by {row.holder}, attempt {row.number}.",
                    waiting_for=f"attempt {row.number}",
                )
            if row.attributes.get(_TRY, 0) > run.context["ti"].try_number:
                raise AttemptFencedInSparkError(
                    f"A later try of this task has taken the batch: {row.holder}, attempt {row.number}."
                )

    def _beginning(
        self,
        run: BatchRun,
        batch: BatchRow,
        steps: tuple[str, ...] | None,
        *,
        force: bool,
        attributes: Mapping[str, Any],
        unattended: bool = False,
    ) -> Callable[[], Attempt]:
        """Return a function that begins an attempt at these steps of the batch (None: those that are left). It chooses
        the way when it is called."""

        def begin() -> Attempt:
            way = self.choose_way(run.ledger)
            return run.ledger.attempts.begin(
                self.stream.name,
                batch.batch_time_ms,
                holder=holder(run.context),
                way=way,
                lease_ms=FIRST_LEASE_MS[way],
                outputs=steps,
                force=force,
                unattended=unattended,
                attributes={**attributes, _TRY: run.context["ti"].try_number},
                revision=self.revision,
            )

        return begin

    def _in_its_turn(self, run: BatchRun, batch: BatchRow, begin: Callable[[], Attempt]) -> Attempt:
        """Begin an attempt at the batch when it is its turn. Run the batches that come first, or wait for them."""
        from headrace.ledger.errors import NotItsTurnError, SlotBusyError

        while True:
            try:
                return begin()
            except NotItsTurnError as error:
                self._check_time_for_others(run, batch, error)
                if not self._run_earlier(run, batch.batch_time_ms):
                    self.wait(str(error), waiting_for=f"turn of {error.busy}", otherwise=error)
            except SlotBusyError as error:
                self.wait(str(error), waiting_for=f"slot of {error.busy}", otherwise=error)

    def _check_time_for_others(self, run: BatchRun, batch: BatchRow, error: Exception) -> None:
        """Fail a run that other runs follow when its time for earlier batches is over. The next run continues, and
        allocates the batch times that have ended meanwhile without more delay.

        Raises:
            EarlierBatchFailedError: the time is over, and batches that come first are left.
        """
        if run.is_automatic and time.monotonic() >= self._others_until:
            raise EarlierBatchFailedError(
                f"Batch {time_text(batch.batch_time_ms)} is left to the next runs: this one has run earlier batches "
                f"for {self.stream.retry_for_ms / 1000:g} s, and more come first. {error}"
            )

    def _run_earlier(self, run: BatchRun, batch_time_ms: int) -> bool:
        """Allocate, or run, the earliest unfinished batch time before this one. Returns whether there was one."""
        from headrace.batch.allocation import allocate

        for earlier in run.ledger.batches.earlier_unfinished(self.stream.name, batch_time_ms, limit=1):
            first_ms = earlier.batch_time_ms
            if earlier.state is None:
                self.log.info(
                    "Batch %s comes before %s, and is not allocated: it is allocated now.",
                    time_text(first_ms),
                    time_text(batch_time_ms),
                )
                # Only allocated in this pass; the next one checks it again, as the tasks of the other outputs get here
                # at the same time.
                allocate(run.stream_context, first_ms)
                return True
            if earlier.alive:
                reason = f"Batch {time_text(first_ms)} comes before {time_text(batch_time_ms)} and is running."
                self.wait(reason, waiting_for=f"batch {first_ms}")
            self._await_repair(run, first_ms, batch_time_ms)
            self.log.info(
                "Batch %s comes before %s and is %s, and no task runs it: it is run first, by this task.",
                time_text(first_ms), time_text(batch_time_ms), earlier.state.value,
            )  # fmt: skip
            self._run_ahead(run, run.ledger.batches.get(self.stream.name, first_ms))
            return True
        return False

    def _await_repair(self, run: BatchRun, first_ms: int, batch_time_ms: int) -> None:
        """Fail if the earlier batch failed by the user's code, or finally, and nothing has changed since: no run should
        repeat it for nothing. A requested run waits instead until that is repaired."""
        from headrace.runs.retries import is_held_back
        from headrace.runs.steps_to_run import attempts_without_replays

        tried = attempts_without_replays(run.ledger, run.ledger.batches.get(self.stream.name, first_ms))
        if not tried or not is_held_back(self.stream, tried[-1]):
            return
        reason = (
            f"Batch {time_text(first_ms)} comes before {time_text(batch_time_ms)}, "
            f"and nothing has changed since it failed: {tried[-1].error}."
        )
        error = EarlierBatchFailedError(reason, remedy=self._remedy(first_ms))
        error.failure = Failure.FINAL
        if run.is_automatic:
            raise error
        self.wait(str(error), waiting_for=f"batch {first_ms}", otherwise=error)

    def _remedy(self, batch_time_ms: int) -> str:
        return (
            "Correct what makes it fail: later runs run it again once the stream's definition or code has changed, or "
            "clear its run. If the batch can never succeed, abandon it: "
            f"`headrace batches abandon {self.stream.name} {time_text(batch_time_ms)} --reason WHY` "
            "(with `--output ID` one output of it only)."
        )

    def _run_ahead(self, run: BatchRun, batch: BatchRow) -> None:
        """Run what is left of another run's batch, unless another task has begun it in the meantime."""
        from headrace.ledger.errors import AlreadyCompletedError, BatchAttendedError

        self.await_application(run.ledger, batch, self.stream.steps)
        begin = self._beginning(run, batch, None, force=False, unattended=True, attributes=self._ahead(run, batch))
        try:
            attempt = self._in_its_turn(run, batch, begin)
            self.run_attempt(run.ledger, attempt, batch, run.context)
        except AlreadyCompletedError as error:
            self.log.info("%s", error.what)
        except (BatchAttendedError, AttemptFencedInSparkError) as error:
            self.wait(str(error), waiting_for=f"batch {batch.batch_time_ms}", otherwise=error)
        except EarlierBatchFailedError:
            raise
        except Exception as error:
            raise EarlierBatchFailedError(
                f"Batch {time_text(batch.batch_time_ms)} comes first in stream {self.stream.name!r}, and it failed: "
                f"{error}",
                remedy=self._remedy(batch.batch_time_ms),
            ) from error

    def _ahead(self, run: BatchRun, batch: BatchRow) -> dict[str, Any]:
        """The attributes of an attempt that is made in place of another run's."""
        from headrace.runs.steps_to_run import AHEAD

        return {**self._given(run, batch), AHEAD: run.request.is_backfill}

    def _given(self, run: BatchRun, batch: BatchRow) -> dict[str, Any]:
        """The attributes of an attempt at another run's batch: this run's identity, and the parameters of the batch's
        last attempt, limited to those that the stream still declares."""
        from headrace.runs.steps_to_run import attempts_without_replays

        tried = attempts_without_replays(run.ledger, batch)
        given = tried[-1].attributes.get(ATTRIBUTE) if tried else None
        known = {name: value for name, value in (given or {}).items() if name in self.stream.parameters}
        return {**run.request.run.attributes, **({ATTRIBUTE: known} if known else {})}
