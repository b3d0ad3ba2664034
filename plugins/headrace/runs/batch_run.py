"""A DAG run that processes a batch: its identity, what it asks for, its batch time, and what its steps need.

Every user who may trigger a run can set its type, params and conf, so each value is checked against the stream before
anything runs. The values select from what the stream declares. None of them is executed, rendered as a template or made
part of a command: parameters reach the batch through its attempt's row in the ledger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, DownstreamTasksSkipped

from headrace.batch.run_request import RunIdentity, RunRequest, RunRequestError
from headrace.clock import time_text, to_ms
from headrace.errors import Failure, HeadraceError
from headrace.runs.readiness import find_beginning
from headrace.stream.state import STATE_STEP
from headrace.stream.stream import ParameterError
from headrace.timetables.micro_batch import MicroBatchTimetable

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context

    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import BatchRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


def run_identity(context: Context) -> RunIdentity:
    """The run that the task of this context belongs to."""
    run = context["dag_run"]
    started = None if run.start_date is None else run.start_date.astimezone(UTC).isoformat()
    return RunIdentity(run.run_id, run.clear_number or 0, started)


def holder(context: Context) -> str:
    """The name of this task as the holder of a lease or an attempt; people read it."""
    ti = context["ti"]
    return f"airflow:{ti.dag_id}/{ti.run_id}/{ti.task_id}/{ti.try_number}"


def of_schedule(context: Mapping[str, Any]) -> bool:
    """Whether the schedule started the task's run, not a person or a backfill."""
    return bool(context["dag_run"].run_type == "scheduled")


def is_automatic(context: Mapping[str, Any]) -> bool:
    """Whether the schedule or an asset event started the task's run, so that other runs follow it without a request."""
    return of_schedule(context) or bool(context["dag_run"].run_type == "asset_triggered")


_OPTIONS = ("reprocess", "outputs", "parameters", "from_kafka")
RANGE_OPTIONS = ("from", "until", "outputs", "parameters")
"""The names that mean something to a run that may run a range of batches."""
# Airflow's TriggerDagRunOperator adds this name while OpenLineage is on.
_OF_AIRFLOW = ("openlineage",)


def run_request(context: Context, stream: Stream, *, options: Collection[str] = _OPTIONS) -> RunRequest:
    """The request of the task's DAG run. ``options`` are the names that mean something to its tasks.

    Raises:
        AirflowFailException: the request is invalid for the stream; a retry would make the same request.
    """
    check_names(context, options)
    run = context["dag_run"]
    # Airflow merges conf into the params unless core.dag_run_conf_overrides_params is off.
    asked = {**context.get("params", {}), **(run.conf or {})}
    is_backfill, spans = run.run_type == "backfill", "from" in options
    try:
        return RunRequest.of(run_identity(context), asked, stream, is_backfill=is_backfill, spans=spans)
    except (RunRequestError, ParameterError) as error:
        raise AirflowFailException(str(error)) from error


def check_names(context: Context, options: Collection[str]) -> None:
    """Refuse a name in the run's conf that is none of ``options`` and that neither the DAG nor the task declares as a
    param: a misspelt option would be ignored without notice.

    The task's own ``params`` do not say what is declared: Airflow merges the whole conf into them.

    Raises:
        AirflowFailException: there is such a name.
    """
    parts: list[Any] = [context.get("dag"), context.get("task")]
    declared = (name for part in parts if part is not None for name in part.params)
    known = sorted({*options, *declared})
    unknown = sorted({*(context["dag_run"].conf or {})}.difference(known, _OF_AIRFLOW))
    if not unknown:
        return
    nearest = [near for name in unknown for near in get_close_matches(name, known, n=1)]
    meant = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    error = RunRequestError(
        f"The run's conf has {', '.join(map(repr, unknown))}, which is not an option here.{meant} "
        f"It may have {', '.join(known) or 'no names, because these runs have no options'}.",
        remedy="Correct the name, or declare one of your own in the DAG's params.",
    )
    raise AirflowFailException(str(error)) from error


log = logging.getLogger(__name__)

# Bound the work and the time that a task spends on missed batch times. The next run continues with the others.
_MAX_MISSED = 50
_MAX_SECONDS = 10.0


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
        BatchRemovedError: it was cleared after its batch had been removed with the stream's history.
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
        BatchRemovedError: it was cleared after its batch had been removed with the stream's history.
    """
    from headrace.receiver.health import slow_runs

    stream, ledger = stream_context.stream, stream_context.ledger
    if of_schedule(context):
        _wait_for_end_of_interval(context, stream_context)
    if of_schedule(context) and (slow := slow_runs(ledger, stream.name)):
        log.warning("This stream falls behind: %s.", slow.text(coalesces=stream.coalesces))
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
    log.info("This run takes the batch times up to %s that no run has processed.", time_text(taken))
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
        raise NothingToRun(f"{took}, and run {by} already repeats that batch. To repeat it once more, clear that run")
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


def run_times(context: Mapping[str, Any]) -> tuple[int, ...]:
    """The time at which the run may begin, in milliseconds since the epoch: Airflow's clock has reached it."""
    run = context["dag_run"]
    return () if run.run_after is None else (to_ms(run.run_after),)


def _take(context: Mapping[str, Any], stream_context: StreamContext) -> int | None:
    stream, ledger, run = stream_context.stream, stream_context.ledger, context["dag_run"]
    from headrace.ledger.batches.run_batch_times import CLOCKS_DIFFER_MS, BatchBounds

    host_ms, ledger_ms = max(stream_context.clock.now_ms(), *run_times(context)), ledger.now_ms()
    if abs(host_ms - ledger_ms) >= CLOCKS_DIFFER_MS:
        log.warning(
            "The clocks of the ledger (%s) and of this host or Airflow's (%s) differ. The earlier one counts for this "
            "run.",
            time_text(ledger_ms),
            time_text(host_ms),
        )
    date_ms = None if run.logical_date is None else end_of_interval_ms(context, stream.batch_interval)
    if run.clear_number:
        begun = MicroBatchTimetable(stream.batch_interval).containing(run.run_after)
        _check_not_removed(ledger, stream.name, run.run_id, to_ms(begun.start) if date_ms is None else date_ms)
    if not stream.coalesces:
        return ledger.runs.assign(stream.name, run.run_id, host_ms=host_ms)
    limits = stream.limits
    return ledger.runs.take(
        stream.name,
        run.run_id,
        bounds=BatchBounds(limits.max_coalesced_records, limits.max_coalesced_bytes),
        date_ms=date_ms,
        keeps_date=bool(run.clear_number),
        host_ms=host_ms,
    )


def _check_not_removed(ledger: Ledger, stream_name: str, run_id: str, at_ms: int) -> None:
    """Refuse a run that was cleared after the stream's history had lost which batch it had: it would take a new one.

    Raises:
        BatchRemovedError: the time was removed, and with it the run's batch.
    """
    from headrace.ledger.errors import BatchRemovedError

    row = ledger.streams.get(stream_name)
    if row.has_removed(at_ms) and ledger.runs.find(stream_name, run_id) is None:
        raise BatchRemovedError(stream_name, at_ms, until_ms=row.removed_until_ms)


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
            "The run's data interval ends at %s, but its logical date %s belongs to batch %s. The logical date counts.",
            *(time_text(to_ms(at)) for at in (reported, asked, interval.end)),
        )
    return to_ms(interval.end)


class BatchRun:
    """A DAG run and its batch time, with the stream and its ledger open.

    Args:
        context: Airflow's context of the task.
        stream_context: the stream, registered in its ledger.
        batch_time_ms: the batch time that the run processes.
    """

    def __init__(self, context: Context, stream_context: StreamContext, batch_time_ms: int) -> None:
        self.context = context
        self.stream_context = stream_context
        self.batch_time_ms = batch_time_ms

    @classmethod
    def of(cls, context: Context, stream_context: StreamContext) -> Self:
        """The run of the task. Raises what `batch_time_of_run` raises."""
        return cls(context, stream_context, batch_time_of_run(context, stream_context))

    @classmethod
    def begin(cls, context: Context, stream_context: StreamContext) -> Self:
        """The run of its first task. Raises what `begin_run` raises."""
        return cls(context, stream_context, begin_run(context, stream_context))

    @property
    def stream(self) -> Stream:
        """The definition that the task runs with."""
        return self.stream_context.stream

    @property
    def ledger(self) -> Ledger:
        """The stream's ledger, open."""
        return self.stream_context.ledger

    @cached_property
    def request(self) -> RunRequest:
        """What the run asks for. Raises what `run_request` raises."""
        return run_request(self.context, self.stream)

    @property
    def is_automatic(self) -> bool:
        """Whether other runs follow without a request, and continue where this one ends."""
        return is_automatic(self.context)

    def find_batch(self) -> BatchRow | None:
        """The batch, or None if it is not allocated.

        Raises:
            BatchRemovedError: it was removed with the stream's history.
        """
        from headrace.ledger.errors import BatchRemovedError

        batch = self.ledger.batches.find(self.stream.name, self.batch_time_ms)
        if batch is None and (row := self.ledger.streams.get(self.stream.name)).has_removed(self.batch_time_ms):
            raise BatchRemovedError(self.stream.name, self.batch_time_ms, until_ms=row.removed_until_ms)
        return batch

    def allocate_missed(self) -> None:
        """Allocate earlier batch times that hold records and have no batch, the oldest first.

        In an ordered stream all of them, since this run has to wait for their batches. In others a bounded number, and
        only if other runs follow this one and continue: the run's own batch does not wait for them.

        Raises:
            HeadraceError: in an ordered stream, one could not be allocated.
        """
        from headrace.batch.allocation import allocate

        unclaimed = self.ledger.blocks.unclaimed(self.stream.name)
        missed = [one for one in unclaimed if one.batch_time_ms < self.batch_time_ms]
        if not missed:
            return
        log.warning(
            "%d earlier batch time(s) hold %d records and are not allocated yet, from %s to %s.",
            len(missed), sum(one.records for one in missed),
            time_text(missed[0].batch_time_ms), time_text(missed[-1].batch_time_ms),
        )  # fmt: skip
        ordered = self.stream.is_ordered
        if not ordered and not self.is_automatic:
            log.warning("The next scheduled run allocates them; a backfill of this DAG allocates and runs them.")
            return
        number, until = 0, time.monotonic() + _MAX_SECONDS
        for one in missed if ordered else missed[:_MAX_MISSED]:
            try:
                allocate(self.stream_context, one.batch_time_ms, known_ms=run_times(self.context))
            except HeadraceError as error:
                if ordered:
                    raise
                at = time_text(one.batch_time_ms)
                log.warning("Batch %s could not be allocated, so the next run tries again: %s", at, error)
                break
            number += 1
            if not ordered and time.monotonic() >= until:
                break
        log.info(
            "%d of these batch times are allocated now. The stream's repair runs them, unless runs of their own do.",
            number,
        )


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """``spark``: some step reads or makes rows. ``process``: some step needs Spark, or prints. ``counts``: the counts
    to record for each step if no process is needed."""

    spark: bool
    process: bool
    counts: Mapping[str, Mapping[str, Any]]


def needs_of(ledger: Ledger, stream: Stream, batch_time_ms: int, steps: Iterable[str]) -> StepNeeds:
    """What these steps of an allocated batch need."""
    from headrace.spark.attempts.batch_plan import plan_outputs
    from headrace.stream_context import StreamContext

    steps = tuple(steps)
    plans = plan_outputs(StreamContext(stream, ledger), batch_time_ms, steps)
    # The state is updated without records too: keys time out, and a version of the state is written.
    spark = STATE_STEP in steps or any(plan.needs_spark for plan in plans)
    prints = any(plan.output.writes_empty_batches and plan.skipped is None for plan in plans)
    counts = {plan.output.step: {"skipped": plan.skipped} if plan.skipped else {"records": 0} for plan in plans}
    return StepNeeds(spark, spark or prints, counts)
