"""Determines the batch time that a DAG run processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException, AirflowSkipException, DownstreamTasksSkipped

from headrace.clock import time_text
from headrace.errors import Failure, HeadraceError
from headrace.runs.first_receiver import find_beginning
from headrace.runs.identity import of_schedule
from headrace.runs.request import run_request
from headrace.timetables.micro_batch import MicroBatchTimetable, from_ms, to_ms

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context

    from headrace.stream import Stream
    from headrace.stream_context import StreamContext

log = logging.getLogger(__name__)


NOTHING_TO_RUN = "nothing_to_run"
"""The XCom of a run's first task that says why the run has no batch."""


class NothingToRun(Exception):  # noqa: N818 - not an error: the run ends well
    """The run has no batch; the text says why."""

    def skip(self, context: Context, task: BaseOperator, *, itself: bool = False) -> AirflowException:
        """Return the exception that ends a run in its first task ``task``, which says why in its log and in an XCom.

        The task succeeds, and all later ones are skipped, teardowns too. With ``itself`` it is skipped, and Airflow's
        trigger rules decide about later ones.
        """
        task.log.info("Nothing to run: %s.", self)
        context["ti"].xcom_push(NOTHING_TO_RUN, str(self))
        if itself:
            return AirflowSkipException(f"Nothing to run: {self}.")
        later = [other.task_id for other in task.get_flat_relatives(upstream=False)]
        return DownstreamTasksSkipped(tasks=later)  # type: ignore[no-untyped-call]


class NoBatchTimeError(HeadraceError):
    """The run has no logical date and no batch, so its batch time cannot be determined."""

    failure = Failure.FINAL


def batch_time_of_run(context: Mapping[str, Any], stream_context: StreamContext) -> int:
    """Return the batch time of the task's run, in milliseconds since the epoch; the same for all tasks of a run.

    It is the batch time that the ledger assigned to the run (`begin_run`), else that of the run's logical date, or of
    the batch that took this one over. A run without a logical date is assigned a batch time here too. The stream must
    be registered in the ledger.

    Raises:
        NoBatchTimeError: the run has neither a logical date nor a batch.
    """
    stream, ledger, run = stream_context.stream, stream_context.ledger, context["dag_run"]
    if run.logical_date is None:
        own_ms = _take(context, stream_context)
        if own_ms is None:
            raise NoBatchTimeError(f"The DAG run {run.run_id} has neither a logical date nor a batch.")
    else:
        assigned_ms = ledger.runs.find(stream.name, run.run_id) if takes_over(context, stream) else None
        own_ms = assigned_ms or end_of_interval_ms(context, stream.batch_interval)
    batch = ledger.batches.find(stream.name, own_ms)
    return own_ms if batch is None else batch.absorbed_by_ms or own_ms


def begin_run(context: Mapping[str, Any], stream_context: StreamContext) -> int:
    """`batch_time_of_run` for a run's first task, which has the ledger assign the run's batch time.

    A scheduled run that began ahead of the end of its interval first waits for this end.

    Raises:
        NothingToRun: the run has no batch: another batch has taken its batch time over and the run does not ask to
            repeat that one, or another run of its backfill repeats it; or the batch time ended before the stream began.
        AirflowFailException: the run asks for something that the stream does not have.
    """
    from headrace.monitoring.slow_runs import slow_runs

    stream, ledger = stream_context.stream, stream_context.ledger
    if of_schedule(context):
        _wait_for_end_of_interval(context, stream_context)
    if of_schedule(context) and (slow := slow_runs(ledger, stream.name, coalesces=stream.coalesces)):
        log.warning("This stream falls behind: %s.", slow)
    if not takes_over(context, stream):
        batch_time_ms = batch_time_of_run(context, stream_context)
        by_arrival = of_schedule(context) and stream.batch_by == "arrival"
        if by_arrival and _is_before_the_first(stream_context, batch_time_ms):
            raise NothingToRun("the batch time ended before the stream's first receiver began")
        _check_taken_over(context, stream_context, batch_time_ms)
        return batch_time_ms
    taken = _take(context, stream_context)
    if taken is None:
        raise NothingToRun(_taken(context, stream_context))
    log.info("This run takes the batch times up to %s that nobody has run.", from_ms(taken).isoformat())
    return taken


def _wait_for_end_of_interval(context: Mapping[str, Any], stream_context: StreamContext) -> None:
    """Wait by the ledger's clock, but no longer than the run began ahead: the clocks may differ."""
    run = context["dag_run"]
    if run.data_interval_end is None or run.run_after >= run.data_interval_end:
        return
    ends_ms = to_ms(run.data_interval_end)
    left_ms = ends_ms - stream_context.ledger.now_ms()
    if left_ms > 0:
        time.sleep(min(left_ms, ends_ms - to_ms(run.run_after)) / 1000)


def _check_taken_over(context: Mapping[str, Any], stream_context: StreamContext, batch_time_ms: int) -> None:
    """Let a run for a batch time that another batch took over repeat that one, if it asks for it.

    Many runs of a backfill may ask for the same batch: those of the times that it took over, and its own. One of them
    repeats it, whichever asks first.

    Raises:
        NothingToRun: the run has nothing to repeat, or another one does it.
    """
    from headrace.ledger.states import BatchState

    stream, ledger, run = stream_context.stream, stream_context.ledger, context["dag_run"]
    batch = None if run.logical_date is None else ledger.batches.find(stream.name, batch_time_ms)
    if batch is None or not batch.absorbed:
        return
    own_ms, at = end_of_interval_ms(context, stream.batch_interval), time_text(batch_time_ms)
    request = run_request(context, stream)  # type: ignore[arg-type]
    took = f"this is the run of batch {at}"
    if own_ms != batch_time_ms:
        took = f"batch {at}, which is {batch.state.value}, has taken {time_text(own_ms)} over"
        if batch.state is BatchState.ABANDONED:
            raise NothingToRun(took)
        if not request.reprocess:
            raise NothingToRun(f"{took}. A run with `reprocess` repeats that batch")
    if not (request.reprocess and request.is_backfill):
        return
    by = ledger.runs.repeat(stream.name, run.run_id, batch_time_ms)
    if by != run.run_id:
        raise NothingToRun(f"{took}, and run {by} repeats that batch. To repeat it once more, clear that run")
    log.info("This run repeats batch %s, for all runs of its backfill that ask for it.", at)


def _is_before_the_first(stream_context: StreamContext, batch_time_ms: int) -> bool:
    name, ledger = stream_context.name, stream_context.ledger
    began_ms = find_beginning(ledger, name).at_ms
    return began_ms is not None and batch_time_ms <= began_ms and ledger.batches.find(name, batch_time_ms) is None


def takes_over(context: Mapping[str, Any], stream: Stream) -> bool:
    """Whether the run takes over the batch times that no run has processed, in a stream that coalesces. A run of the
    schedule or of the trigger does, and a requested run without a logical date. A requested run with a logical date and
    a backfill run process their own interval alone.
    """
    run = context["dag_run"]
    return stream.coalesces and (run.logical_date is None or of_schedule(context))


def _taken(context: Mapping[str, Any], stream_context: StreamContext) -> str:
    """Why no batch time is left for a late run."""
    own_ms = end_of_interval_ms(context, stream_context.stream.batch_interval)
    batch = stream_context.ledger.batches.find(stream_context.name, own_ms)
    taker = "an earlier run" if batch is None else f"batch {time_text(batch.absorbed_by_ms or own_ms)}"
    return f"{taker} has taken this batch time over, and no later one has ended since"


def _take(context: Mapping[str, Any], stream_context: StreamContext) -> int | None:
    stream, ledger, run = stream_context.stream, stream_context.ledger, context["dag_run"]
    from headrace.ledger.run_batch_times import CLOCKS_DIFFER_MS, BatchBounds

    host_ms, ledger_ms = stream_context.clock.now_ms(), ledger.now_ms()
    if abs(host_ms - ledger_ms) >= CLOCKS_DIFFER_MS:
        log.warning(
            "The clocks of the ledger (%s) and of this host (%s) differ: the earlier one counts for this run.",
            time_text(ledger_ms),
            time_text(host_ms),
        )
    if not stream.coalesces:
        return ledger.runs.assign(stream.name, run.run_id, host_ms=host_ms)
    limits = stream.limits
    return ledger.runs.take(
        stream.name,
        run.run_id,
        bounds=BatchBounds(limits.max_coalesced_records, limits.max_coalesced_bytes),
        date_ms=None if run.logical_date is None else end_of_interval_ms(context, stream.batch_interval),
        keeps_date=bool(run.clear_number),
        host_ms=host_ms,
    )


def end_of_interval_ms(context: Mapping[str, Any], batch_interval: timedelta) -> int:
    """The end of the interval that the run's logical date starts or falls into, in milliseconds since the epoch.

    It uses the logical date, not the run's data interval: a run triggered by another DAG's ``TriggerDagRunOperator``
    has the requested logical date, but the data interval of the current moment (airflow.api.common.trigger_dag infers
    it from ``run_after``).

    Raises:
        NoBatchTimeError: the run has no logical date.
    """
    dag_run = context["dag_run"]
    asked: datetime | None = dag_run.logical_date
    if asked is None:
        raise NoBatchTimeError(
            f"The DAG run {dag_run.run_id} has no logical date.",
            remedy="Trigger it with a logical date: the start of the batch's interval.",
        )
    interval = MicroBatchTimetable(batch_interval).containing(asked)
    reported = dag_run.data_interval_end
    if reported is not None and to_ms(reported) != to_ms(interval.end):
        log.warning(
            "The run's data interval ends at %s, its logical date %s belongs to the batch %s: the latter counts.",
            reported.isoformat(),
            asked.isoformat(),
            interval.end.isoformat(),
        )
    return to_ms(interval.end)
