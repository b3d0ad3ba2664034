"""The operators of a stream's repair: try again what failed, and emit the events of what was completed."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException

from headrace.clock import time_text
from headrace.errors import REPAIR, Failure
from headrace.operators.batch_events import batch_alias, emit_events_of_repair
from headrace.operators.batch_steps import BatchStepOperator
from headrace.operators.wal_spark_submit import (
    APPLICATION,
    AttemptFencedInSparkError,
    BatchTaskError,
    SparkAttemptOperator,
)
from headrace.runs.batch_run import check_names, run_identity
from headrace.runs.retries import is_held_back
from headrace.stream.stream import PARAMETERS
from headrace.timetables.micro_batch import from_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow.sdk import Context

    from headrace.batch.next_attempt import NextAttempt, Wait
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import BatchRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext

# After working for so long without a break, the repair leaves the stream's slots to the runs of other batches for a
# moment. They poll for a free slot more often than that (`Wait.soon`).
_WORK_SECONDS = 10.0
_BREAK_SECONDS = 1.2


class RepairFailedError(BatchTaskError):
    """An attempt of the repair failed."""


class RepairBatchesOperator(SparkAttemptOperator):
    """Tries again the batches that their own runs left unfinished, when they are due (``headrace.batch.due_batches``),
    the oldest first, each once. It stops at the first failure that may pass, because the output may be unavailable.

    It fails if an attempt failed, and is skipped if nothing is due. While the batch DAG is paused it does nothing. A
    run that a person triggers tries everything at once, also what failed by the user's code or finally.

    It runs all due steps of a batch in one attempt, and never beside a live attempt. It waits in place, for
    ``limits.retry_for`` at most: what is left is due again.

    :param stream: the stream.
    :param batch_dag_id: the stream's batch DAG; by default ``<stream>_batches``.

    For the other parameters see ``SparkAttemptOperator``.
    """

    ui_color = "#f7d9d0"

    def __init__(self, *, stream: Stream, batch_dag_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(stream=stream, deferrable=False, **kwargs)
        self.slot_timeout = timedelta(milliseconds=stream.retry_for_ms)
        self.batch_dag_id = batch_dag_id or f"{stream.name}_batches"
        self._break_at = 0.0
        # What it waits for while no slot is free for the present batch.
        self._slot, self._give_up_at = "", 0.0

    def run_step(self, context: Context) -> Any:
        """Repair what is due. Returns the batch times of the completed attempts, as texts."""
        check_names(context, options=())
        at_once = context["dag_run"].run_type == "manual"
        if not at_once and self._is_paused(context):
            raise AirflowSkipException(f"{self.batch_dag_id} is paused, so nothing is repaired.")
        with self.opened() as stream_context:
            repaired, failures = self._repair(context, stream_context, at_once=at_once)
        if failures:
            more = f" {len(failures)} batches have failed; this is the first." if len(failures) > 1 else ""
            raise RepairFailedError(f"{failures[0]}{more}")
        if not repaired:
            raise AirflowSkipException("No batch is due to be tried again.")
        return repaired

    def _is_paused(self, context: Context) -> bool:
        try:
            return bool(context["ti"].get_dag(self.batch_dag_id).is_paused)
        except Exception as error:
            # Of a DAG of another name, for example.
            self.log.info(
                "Airflow did not report whether %s is paused, so the repair goes on: %s", self.batch_dag_id, error
            )
            return False

    def _repair(self, context: Context, stream_context: StreamContext, *, at_once: bool) -> tuple[list[str], list[str]]:
        """Try the due batches. Returns the times of those that were completed, and the errors of those that failed."""
        repaired: list[str] = []
        failures: list[str] = []
        self._break_at = time.monotonic() + _WORK_SECONDS
        for due in self._due(context, stream_context.ledger, at_once=at_once):
            at = time_text(due.batch.batch_time_ms)
            try:
                if self._try(context, stream_context.ledger, due):
                    repaired.append(at)
            except AttemptFencedInSparkError as error:
                self.log.info("%s", error)
            except Exception as error:
                self.log.warning("Batch %s has failed again: %s", at, error)
                failures.append(f"Batch {at} of stream {self.stream.name!r} has failed again: {error}")
                if stream_context.stream.is_ordered or getattr(error, "failure", Failure.PASSING) is Failure.PASSING:
                    break
            self._give_way()
        return repaired, failures

    def _due(self, context: Context, ledger: Ledger, *, at_once: bool) -> Iterator[NextAttempt]:
        """The due batches, each once. Each is judged when it is its turn, because it may have got an attempt since."""
        from headrace.batch.due_batches import due_batches

        tried: set[int] = set()
        number_before = -1
        # A batch may be due because another one was repaired: in an ordered stream, the next one always is.
        while len(tried) > number_before:
            number_before = len(tried)
            for due in due_batches(
                ledger,
                self.stream.name,
                held_back=lambda last: is_held_back(self.stream, last),
                has_own_run=lambda batch: self._own_run_waits(context, ledger, batch),
                without=tried,
                at_once=at_once,
            ):
                tried.add(due.batch.batch_time_ms)
                yield due

    def _own_run_waits(self, context: Context, ledger: Ledger, batch: BatchRow) -> bool:
        """Whether a run of its own is queued or running for a batch that was never begun. It runs the batch itself.

        In an ordered stream a queued one does not count: it may be queued behind a run that waits for this batch.
        """
        states = ["running"] if self.stream.is_ordered else ["queued", "running"]
        runs: dict[str, Any] = {"run_ids": ledger.runs.of_batch(self.stream.name, batch.batch_time_ms)}
        if not self.stream.coalesces:
            # In others a run's date does not determine its batch.
            runs = {"logical_dates": [from_ms(batch.batch_time_ms - batch.interval_ms)]}
        elif not runs["run_ids"]:
            return False
        at = time_text(batch.batch_time_ms)
        try:
            waiting = context["ti"].get_dr_count(dag_id=self.batch_dag_id, states=states, **runs)
        except Exception as error:
            self.log.warning(
                "Batch %s is not tried now: Airflow did not report whether its own run is queued or running: %s",
                at,
                error,
            )
            return True
        if waiting:
            self.log.info("Batch %s is not tried: its own run is queued or running.", at)
        return bool(waiting)

    def _try(self, context: Context, ledger: Ledger, due: NextAttempt) -> bool:
        """Run the due steps of a batch. Returns whether an attempt was made."""
        from headrace.ledger.errors import BatchRunningError, SlotBusyError

        batch, at = due.batch, time_text(due.batch.batch_time_ms)
        if not due.steps:
            error = ledger.attempts.settle(self.stream.name, batch.batch_time_ms).error
            self.log.warning("Batch %s cannot be repaired: %s", at, error)
            return False
        self.log.info("Batch %s is tried again. It was %s: %s.", at, batch.state.value, batch.error or "never begun")
        # Its own run's parameters, as far as the stream still declares them.
        given = due.attempts[-1].attributes.get(PARAMETERS) if due.attempts else None
        known = {name: value for name, value in (given or {}).items() if name in self.stream.parameters}
        attributes = {**run_identity(context).attributes, REPAIR: True, **({PARAMETERS: known} if known else {})}
        following = replace(due, attributes=attributes)
        self._slot, self._give_up_at = f"a slot for batch {at}", 0.0
        try:
            return self.run_next(lambda: following, context)
        except (BatchRunningError, SlotBusyError) as error:
            self.log.info("%s", error)
            return False

    def wait(self, awaited: Wait) -> None:
        """Wait for the application, or until a slot is free: for ``limits.retry_for`` at most.

        Raises:
            SlotBusyError: none was free, or it is not the batch's turn.
            BatchRunningError: a run has begun the batch.
        """
        from headrace.ledger.errors import BatchRunningError

        if awaited.is_for_slot:
            self._give_up_at = self._give_up_at or time.monotonic() + self.slot_timeout.total_seconds()
            if awaited.otherwise is not None and time.monotonic() >= self._give_up_at:
                raise awaited.otherwise
            awaited = replace(awaited, waiting_for=self._slot)
        elif awaited.waiting_for != APPLICATION:
            raise awaited.otherwise or BatchRunningError(awaited.reason)
        super().wait(awaited)

    def _give_way(self) -> None:
        if time.monotonic() >= self._break_at:
            time.sleep(_BREAK_SECONDS)
            self._break_at = time.monotonic() + _WORK_SECONDS


class RepairCheckpointOperator(BatchStepOperator):
    """Emits the asset events of the batches that this run's repair has completed, then checkpoints and cleans up.

    It runs after a failed repair too, which may have completed some batches before.

    :param stream: the stream.
    """

    ui_color = "#f6ecd2"

    def __init__(self, *, stream: Stream, outlets: Any = (), **kwargs: Any) -> None:
        super().__init__(stream=stream, outlets=[batch_alias(stream), *outlets], **kwargs)

    def execute(self, context: Context) -> None:
        """Emit the events; write all results, and a checkpoint if one is due; clean up."""
        from headrace.batch.checkpoint import write_checkpoint
        from headrace.batch.cleanup import clean_up
        from headrace.batch.results import write_results

        with self.opened() as stream_context:
            ledger, name = stream_context.ledger, stream_context.name
            times = emit_events_of_repair(context, ledger, name)
            self.log.info("Batches completed by this repair: %s.", ", ".join(map(time_text, times)) or "none")
            write_results(stream_context)
            for batch in ledger.batches.page(name, 1):
                write_checkpoint(stream_context, batch.batch_time_ms)
            clean_up(stream_context)
