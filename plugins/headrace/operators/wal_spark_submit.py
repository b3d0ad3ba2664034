"""The operator that runs a batch: its allocated blocks through Spark into the stream's outputs.

`SparkAttemptOperator` runs the next attempt at a batch (``headrace.batch.next_attempt``): it waits until the attempt
can begin, chooses the way, starts the process, handles its end, and sends the attempt's numbers to Airflow's own
metrics (`send_attempt`). `WalSparkSubmitOperator` runs what is left of a run's batch.
"""

from __future__ import annotations

import abc
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowTaskTimeout

from headrace.airflow_versions import stats
from headrace.clock import time_text
from headrace.errors import FAILURE, INTERRUPTED, TRY_NUMBER, Failure, HeadraceError
from headrace.hooks import spark_submit
from headrace.hooks.ledger import LedgerHook
from headrace.operators.batch_steps import BatchStep
from headrace.operators.links import SparkUiLink
from headrace.runs.batch_run import BatchRun, holder, needs_of
from headrace.runs.processes import BatchProcess, child_environment, secret_key
from headrace.runs.receiver_job import awaited_application, missing_application, replace_older_job
from headrace.triggers.ledger import in_triggerer, poll_seconds

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import BaseOperatorLink, Context

    from headrace.batch.next_attempt import NextAttempt, Wait
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt, AttemptRow, BatchRow
    from headrace.stream import Stream


Way = Literal["connect", "submit"]

# The process that runs an attempt renews its lease. The first lease has to last until that process is up (1 s for a
# plain process, 14 s for spark-submit, both more on a busy machine). A process that died keeps the slot for as long.
FIRST_LEASE_MS: Mapping[Way, int] = {"connect": 30_000, "submit": 90_000}
# A poll after a deferral starts the task again, which takes two seconds.
_SLOT_POLL_SECONDS = 5.0
# How often to check for a slot that a repair's attempt holds.
_SOON_POLL_SECONDS = 0.5
APPLICATION = "application"
"""What a wait for the receiver job's application waits for."""


class BatchTaskError(HeadraceError):
    """The task did not complete its steps of the batch."""


class AttemptFencedInSparkError(BatchTaskError):
    """Another attempt took over from this one."""


class AttemptKilledError(BatchTaskError):
    """The attempt's process was ended from outside."""


class SparkAttemptOperator(BatchStep, SparkSubmitOperator):
    """Runs attempts at batches in one of two ways, and waits deferred for other attempts that must finish first.

    :param stream: the stream.
    :param way: ``connect`` or ``submit``; by default the stream's ``spark.run_batches``.
    :param start_timeout: how long to wait for a receiver job that is starting, or is due because the last one died.
    :param slot_timeout: how long to wait for the same other attempts: those that hold the stream's slots, come first,
        or run the same batch. A scheduled run waits for ``limits.retry_for`` at most.
    :param slot_poll: how often to check whether the wait is over; by default ``[headrace] poll_interval``, else 5 s.
    :param deferrable: whether to wait in the triggerer; otherwise the task keeps its worker's slot. Default:
        ``[operators] default_deferrable``.

    SparkSubmitOperator's own parameters are for spark-submit, so they need ``way="submit"``. Some are set by the stream
    or by this operator, whatever the way. A parameter that would have no effect is refused (``submit_options``).

    Raises:
        SubmitArgumentError: an argument that would have no effect.
    """

    ui_color = "#fbe3c8"
    operator_extra_links: tuple[BaseOperatorLink, ...] = (SparkUiLink(),)

    def __init__(
        self,
        *,
        stream: Stream,
        way: Way | None = None,
        start_timeout: timedelta = timedelta(minutes=2),
        slot_timeout: timedelta = timedelta(minutes=30),
        slot_poll: timedelta | None = None,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.way: Way = way or stream.spark.run_batches
        self._submit_options = spark_submit.submit_options(kwargs, way=self.way)
        kwargs["name"] = kwargs.get("name") or f"headrace batch {stream.name}"
        # An application left by an earlier try is fenced by the attempt's number, so a retry must not attach to it.
        if "durable" in spark_submit.provider_arguments():
            kwargs["durable"] = False
        super().__init__(**kwargs)
        self.stream = stream
        self.start_timeout = start_timeout
        self.slot_timeout = slot_timeout
        self.slot_poll = slot_poll or timedelta(seconds=poll_seconds(otherwise=_SLOT_POLL_SECONDS))
        self.deferrable = in_triggerer(deferrable)
        self.spark_ui_url: str | None = None
        self._process: BatchProcess | None = None
        # The attempts of this task, for its lineage.
        self._ran: list[Attempt] = []
        self._arguments: list[str] = []
        # Seconds waited in total, the current reason to wait, and the total when the wait for that reason began.
        self._waited = 0.0
        self._waiting_for = ""
        self._waiting_since = 0.0
        self._application_waited = 0.0

    def execute(self, context: Context) -> Any:
        return self.run_step(context)

    def slot_may_be_free(self, context: Context, event: Any = None, **waited: Any) -> Any:  # noqa: ARG002
        """Called after a deferral: check again whether the step can run."""
        self.resume_wait(**waited)
        return self.run_again(context)

    @abc.abstractmethod
    def run_step(self, context: Context) -> Any:
        """Do the task's work, from its beginning; call `wait` if other work must finish first."""

    def run_again(self, context: Context) -> Any:
        """Do the task's work again after a deferral."""
        return self.run_step(context)

    # --- waiting

    def resume_wait(
        self, *, waited: float = 0.0, waiting_for: str = "", waiting_since: float = 0.0, application_waited: float = 0.0
    ) -> None:
        """Restore the state of the wait from before the deferral; ``waited`` and ``waiting_since`` in seconds."""
        self._waited, self._waiting_for, self._waiting_since = waited, waiting_for, waiting_since
        self._application_waited = application_waited

    def wait(self, awaited: Wait) -> None:
        """Wait for ``slot_poll``, after which the step has to be tried again: in place, or deferred.

        Raises ``otherwise`` (by default BatchTaskError) after waiting for the same ``waiting_for`` for
        ``slot_timeout``. This does not apply to waiting for the application: `wait_for_application` ends it.
        """
        if awaited.waiting_for != self._waiting_for:
            self._waiting_for, self._waiting_since = awaited.waiting_for, self._waited
            self.log.info("%s", awaited.reason)
        waited_too_long = self._waited - self._waiting_since >= self.slot_timeout.total_seconds()
        if waited_too_long and awaited.waiting_for != APPLICATION:
            raise awaited.otherwise or BatchTaskError(
                f"The task gives up after a wait of {self.slot_timeout}. {awaited.reason}",
                remedy="Clear the task once this is over.",
            )
        seconds = self.slot_poll.total_seconds()
        if awaited.soon:
            seconds = min(seconds, _SOON_POLL_SECONDS)
        self._waited += seconds
        self._application_waited += seconds if awaited.waiting_for == APPLICATION else 0.0
        if awaited.soon or not self.deferrable:
            time.sleep(seconds)
            return
        from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

        waited = {
            "waited": self._waited,
            "waiting_for": self._waiting_for,
            "waiting_since": self._waiting_since,
            "application_waited": self._application_waited,
        }
        self.defer(trigger=TimeDeltaTrigger(self.slot_poll), method_name="slot_may_be_free", kwargs=waited)

    def wait_for_application(self, ledger: Ledger, batch: BatchRow, steps: Iterable[str]) -> Wait | None:
        """The wait for a receiver job that is starting or due, if the steps need Spark: a separate application would
        compete with it for the machine, and be ready later. A job of an older version is asked to stop, so that the
        next one replaces it."""

        replaced = replace_older_job(ledger, self.stream.name)
        # In all, so that waits for a slot between do not begin it anew.
        if self.way != "connect" or self._application_waited >= self.start_timeout.total_seconds():
            return None
        from headrace.batch.next_attempt import Wait

        timeout_ms = self.start_timeout // timedelta(milliseconds=1)
        reason = replaced or awaited_application(ledger, self.stream.name, timeout_ms=timeout_ms)
        if reason is None or not needs_of(ledger, self.written, batch.batch_time_ms, steps).spark:
            return None
        return Wait(reason, APPLICATION)

    # --- running

    def choose_way(self, ledger: Ledger) -> Way:
        """Return the requested way, or ``submit`` if there is no usable application to connect to."""
        from headrace.spark.job_token import FINGERPRINT
        from headrace.spark.versions import current_versions, version_differences

        if self.way == "submit":
            return "submit"
        job = ledger.jobs.current(self.stream.name)
        missing = missing_application(ledger, self.stream.name, job)
        if job is None or missing is not None:
            self.log.warning(
                "%s Until there is a receiver job, each batch is submitted as a Spark application of its own, which "
                "takes 15 s or more to start, instead of 1 s.",
                missing,
            )
            return "submit"
        host = job.attributes.get("connect_host", socket.gethostname())
        if host != socket.gethostname() and "//localhost" in job.attributes["connect_url"]:
            self.log.info(
                "The receiver job's Spark application is on %s, and this task cannot reach it there. So the batch is "
                "submitted.",
                host,
            )
            return "submit"
        if job.versions and (different := version_differences(job.versions, current_versions())):
            self.log.warning(
                "The receiver job (epoch %d) runs with other versions (%s), so the batch is submitted. A job of "
                "an older headrace is replaced automatically. To replace another one, run `headrace streams stop %s`, "
                "then `headrace streams start %s`.",
                job.epoch, "; ".join(different), self.stream.name, self.stream.name,
            )  # fmt: skip
            return "submit"
        theirs = job.attributes.get(FINGERPRINT)
        if theirs is not None and theirs != _fingerprint(self.stream):
            self.log.warning(
                "The receiver job (epoch %d) was started with another secret key and would refuse this batch, so the "
                "batch is submitted. To start the job with the present key, run `headrace streams stop %s`, then "
                "`headrace streams start %s`.",
                job.epoch, self.stream.name, self.stream.name,
            )  # fmt: skip
            return "submit"
        self.spark_ui_url = job.attributes.get("ui_url")
        return "connect"

    def run_next(
        self,
        find: Callable[[], NextAttempt | Wait | None],
        context: Context,
        run: Callable[[Attempt], None] | None = None,
    ) -> bool:
        """Begin the next attempt that ``find`` finds, in the way that is usable then, once it can begin; then ``run``
        it, by default by `run_attempt`. Returns whether there was one.

        Raises:
            AttemptFencedInSparkError: a later try of this task has taken over the batch, so this try is a zombie.
            MixedSparkError: no attempt can run on this host.
            HeadraceError: the wait took too long; or what `NextAttempt.begin` or ``run`` raises.
        """
        from headrace.batch.next_attempt import Wait
        from headrace.ledger.errors import AlreadyCompletedError, AttemptFencedError

        while True:
            try:
                following = find()
                if following is None:
                    return False
                if isinstance(following, Wait):
                    self.wait(following)
                    continue
                begun = self._begin_attempt(following, context)
            except AlreadyCompletedError as error:
                self.log.info("%s", error.what)
                return False
            except AttemptFencedError as error:
                raise AttemptFencedInSparkError(error.what) from error
            if isinstance(begun, Wait):
                self.wait(begun)
                continue
            if run is None:
                self.run_attempt(following.ledger, begun, following.batch, context)
            else:
                run(begun)
            return True

    def _begin_attempt(self, following: NextAttempt, context: Context) -> Attempt | Wait:
        from headrace.spark.versions import check_spark_packages

        ledger = following.ledger
        following = replace(following, attributes={**following.attributes, TRY_NUMBER: context["ti"].try_number})
        awaited = following.awaited() or self.wait_for_application(ledger, following.batch, following.left)
        if awaited is not None:
            return awaited
        check_spark_packages()
        way = self.choose_way(ledger)
        lease_ms = FIRST_LEASE_MS[way]
        return following.begin(holder=holder(context), way=way, lease_ms=lease_ms, revision=self.revision)

    @property
    def written(self) -> Stream:
        """The stream definition that the attempts write by; a replay overrides it with its own."""
        return self.stream

    def run_attempt(
        self,
        ledger: Ledger,
        attempt: Attempt,
        batch: BatchRow,
        context: Context,
    ) -> None:
        """Run a begun attempt to its end. An attempt that has nothing to write completes without Spark.

        Raises:
            BatchTaskError: it did not complete; the failure is recorded in the ledger.
            AttemptFencedInSparkError: another attempt took over.
        """

        self._ran.append(attempt)
        steps, at = ", ".join(attempt.outputs), time_text(batch.batch_time_ms)
        try:
            needs = needs_of(ledger, self.written, batch.batch_time_ms, attempt.outputs)
            if not needs.process:
                for step, counts in needs.counts.items():
                    ledger.attempts.record_output(attempt, step, counts)
                ledger.attempts.complete(attempt)
                self.log.info("Batch %s has nothing to write for %s, so no Spark is needed.", at, steps)
                return
            self.log.info(
                "Attempt %d at batch %s runs %s: %d records in %d blocks, by %s.",
                attempt.number, at, steps, batch.records, batch.blocks, attempt.way,
            )  # fmt: skip
            self._run_in_spark(ledger, attempt, context, spark=needs.spark)
            self.log.info("Attempt %d at batch %s has completed.", attempt.number, at)
        finally:
            send_attempt(ledger, attempt)

    def get_openlineage_facets_on_complete(self, _task_instance: Any) -> OperatorLineage[Any, Any]:
        """Called by Airflow's OpenLineage provider after the task, whether it succeeded or failed."""
        from headrace.lineage import batch_lineage

        with LedgerHook(self.stream.ledger).opened() as ledger:
            return batch_lineage(ledger, self.written, self._ran)

    def _run_in_spark(self, ledger: Ledger, attempt: Attempt, context: Context, *, spark: bool) -> None:
        from headrace.ledger.errors import AttemptFencedError, LedgerError
        from headrace.ledger.states import AttemptState

        try:
            self._run_application(attempt, context, spark=spark)
            state = _row(ledger, attempt).state
            if state is not AttemptState.COMPLETED:
                raise BatchTaskError(
                    f"Spark ended without an error, but attempt {attempt.number} at batch "
                    f"{time_text(attempt.batch_time_ms)} is {state.value} in the ledger.",
                    remedy="Clear the task to run another attempt.",
                )
        except BaseException as error:
            reported = False
            try:
                if _was_interrupted(error, _row(ledger, attempt)):
                    ledger.attempts.renew(attempt, attributes={INTERRUPTED: True})
                ledger.attempts.fail(attempt, cause_of(error))
            except LedgerError as refused:
                # The application has already ended the attempt, or a later attempt has the batch now.
                self.log.debug("%s", refused)
                reported = isinstance(refused, AttemptFencedError)
            if isinstance(error, Exception):
                row = _row(ledger, attempt)
                if row.state is AttemptState.FENCED:
                    raise AttemptFencedInSparkError(
                        f"Another attempt took over from attempt {attempt.number} at batch "
                        f"{time_text(attempt.batch_time_ms)}."
                    ) from error
                # A killed process records no kind of failure; its failure counts as a passing one.
                failure = Failure(row.attributes.get(FAILURE, Failure.PASSING))
                # spark-submit's last lines may come from the JVM alone; a plain process's last lines show the cause.
                cause = row.error if reported and attempt.way == "submit" else None
                if cause or failure is not Failure.PASSING:
                    failed = BatchTaskError(f"{cause}\n{error}" if cause else str(error))
                    failed.failure = failure
                    raise failed from error
            raise
        finally:
            self._end_process()

    def _end_process(self) -> None:
        """End the process, which lives on only if the task was interrupted, by its execution timeout for instance."""
        if self._process is not None:
            self._process.terminate()
        self._process = None

    def _run_application(self, attempt: Attempt, context: Context, *, spark: bool) -> None:
        """Run the attempt's command (``headrace.spark.attempts.batch_command``). Raises if it does not end well."""
        self._arguments = [
            "--ledger", self.stream.ledger, "--stream", self.stream.name,
            "--batch-time", str(attempt.batch_time_ms), "--attempt", str(attempt.number), "--way", attempt.way,
        ]  # fmt: skip
        if spark and attempt.way == "submit":
            # A task may run several attempts; with a kept hook the provider would reuse the first one's arguments.
            self._hook = None
            SparkSubmitOperator.execute(self, context)
            return
        command = [sys.executable, spark_submit.application("micro_batch.py"), *self._arguments]
        self._process = BatchProcess(command, child_environment(self.written))
        failure = self._process.log_until_end(self.log.log)
        if failure is not None:
            raise AttemptKilledError(failure) if self._process.was_killed else BatchTaskError(failure)

    def _get_hook(self) -> spark_submit.StreamSparkSubmitHook:
        self.application = spark_submit.application("micro_batch.py")
        # Templates are rendered in the operator's attributes.
        rendered = {
            name: getattr(self, name) if name in self.template_fields else value
            for name, value in self._submit_options.items()
        }
        # The provider adds OpenLineage's settings to `conf`, so it is always passed.
        options = rendered | {"name": self.name, "conf": self.conf or {}}
        return spark_submit.StreamSparkSubmitHook(self.written, application_args=self._arguments, **options)

    def on_kill(self) -> None:
        """End this attempt's own Spark jobs: its process cancels them on SIGTERM."""
        if self._process is not None:
            self._process.terminate()
        elif self._hook is not None:
            super().on_kill()


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
    harm it. A step with a record of success is not run again unless the DAG run asks for it
    (`BatchProgress.left_for`). The task waits for a live attempt of another run. A batch without records
    completes without Spark if no output needs to run for it.

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
        self.run_next(lambda: self._next_attempt(run), run.context)

    def _next_attempt(self, run: BatchRun) -> NextAttempt | None:
        """What is left of the batch for this run; None if there is nothing to do."""
        from headrace.batch.next_attempt import NextAttempt

        batch = self._batch(run)
        following = NextAttempt.of_run(run.stream_context, batch, run.request, self._steps)
        if following is None:
            self._report_why_nothing_is_left(run, batch)
        return following

    @property
    def _steps(self) -> tuple[str, ...]:
        return self.stream.steps if self.step is None else (self.step,)

    def _report_why_nothing_is_left(self, run: BatchRun, batch: BatchRow) -> None:
        from headrace.ledger.states import BatchState

        at = time_text(run.batch_time_ms)
        if batch.state is BatchState.ABANDONED:
            self.log.info("Batch %s is abandoned, so there is nothing to run.", at)
            return
        steps = ", ".join(self._steps)
        if not any(map(run.request.wants, self._steps)):
            self.log.info("This run does not ask for %s, so there is nothing to run.", steps)
            return
        self.log.info(
            "Batch %s: %s is done already. To repeat it, trigger a run with `reprocess`, or clear the run of this DAG "
            "that did it.",
            at, steps,
        )  # fmt: skip

    def _batch(self, run: BatchRun) -> BatchRow:
        batch = run.find_batch()
        if batch is None:
            raise BatchTaskError(
                f"Batch {time_text(run.batch_time_ms)} of stream {self.stream.name!r} has no blocks allocated.",
                remedy="Clear the task 'allocate_blocks' or 'micro_batch' of this run, and those after it.",
            )
        return batch


def _was_interrupted(error: BaseException, row: AttemptRow) -> bool:
    """Whether the attempt was ended from outside; not by the task's own time limit."""
    if isinstance(error, AirflowTaskTimeout):
        return False
    if isinstance(error, AttemptKilledError | BrokenPipeError) or not isinstance(error, Exception):
        return True
    # Under spark-submit the exit code may be the JVM's or the driver's. An application that failed by itself says why.
    return row.way == "submit" and "application_id" in row.attributes and FAILURE not in row.attributes


def _fingerprint(stream: Stream) -> str:
    from headrace.spark.job_token import secret_fingerprint

    return secret_fingerprint(secret_key(stream.application), stream.application)


def _row(ledger: Ledger, attempt: Attempt) -> AttemptRow:
    rows = ledger.attempts.of_batch(attempt.stream, attempt.batch_time_ms)
    return next(row for row in rows if row.number == attempt.number)


def cause_of(error: BaseException) -> str:
    """The attempt's error as text. A task whose supervisor was killed gets a BrokenPipeError when it logs a line."""
    if isinstance(error, BrokenPipeError):
        return "The Airflow task was killed: its supervisor process has ended, alone or with the worker."
    if isinstance(error, AirflowTaskTimeout):
        return "The Airflow task ran for longer than its execution_timeout."
    return f"{type(error).__name__}: {error}"


logger = logging.getLogger(__name__)

# Names of metrics are ``headrace.<metric>`` with tags, as Airflow's are since 3.0, and ``headrace.<stream>.<metric>``
# without: plain StatsD has no tags. They go to StatsD, Datadog or OpenTelemetry, as ``[metrics]`` says.
# The counts of outputs that are sent, and the names of their metrics.
_COUNTS: Mapping[str, str] = {
    "created": "created",
    "updated": "updated",
    "messages": "sent",
    "rows": "rows",
    "dead_lettered": "dead_letters",
}


def send_attempt(ledger: Ledger, attempt: Attempt) -> None:
    """Send the numbers of an attempt that has ended: of its outputs, and of its batch if it completed the batch for the
    first time, or ended a run of it that has failed.

    It never raises: a batch does not fail because its numbers cannot be sent. Replays are not sent.
    """
    if attempt.target:
        return
    try:
        _send(ledger, attempt)
    except Exception as error:
        logger.warning("The numbers of the batch could not be sent to Airflow's metrics: %s", error)


def _send(ledger: Ledger, attempt: Attempt) -> None:
    from headrace.ledger.states import AttemptState, BatchState, EventKind

    stream, batch_time_ms = attempt.stream, attempt.batch_time_ms
    attempts = [tried for tried in ledger.attempts.of_batch(stream, batch_time_ms) if not tried.target]
    row = next(tried for tried in attempts if tried.number == attempt.number)
    if row.state is AttemptState.FENCED:
        # The attempt that replaced it sends its own numbers.
        return
    _count("batch.attempts", 1, stream=stream, state=row.state.value)
    outputs = ledger.attempts.outputs(stream, batch_time_ms)
    for output in outputs:
        if output.attempt == attempt.number:
            # One that failed because of its dead letters has written them.
            letters = {name: output.counts[name] for name in ("dead_lettered",) if name in output.counts}
            _send_output(stream, output.output_id, output.counts if output.error is None else letters)
    for event in ledger.events.of_batch(stream, batch_time_ms):
        if event.kind == EventKind.BATCH_FAILED and event.payload["ended_attempt"] == attempt.number:
            _count("batch.failed", 1, stream=stream)
    batch = ledger.batches.get(stream, batch_time_ms)
    written = [output for output in outputs if output.error is None]
    last = max(written, key=lambda output: (output.recorded_at_ms, output.attempt), default=None)
    if batch.state is not BatchState.COMPLETED or last is None or last.attempt != attempt.number:
        return
    earlier = [tried for tried in attempts if tried.number < attempt.number and tried.state is AttemptState.COMPLETED]
    if not any(set(tried.outputs) & set(attempt.outputs) for tried in earlier):
        # A batch that is run again a year later is not a year late.
        _send_batch(batch, ledger.streams.get(stream).zero_time_ms)


def _send_batch(batch: BatchRow, zero_time_ms: int) -> None:
    stream = batch.stream
    _count("batch.completed", 1, stream=stream)
    _count("batch.records", batch.records, stream=stream)
    if batch.completed_at_ms is None or batch.batch_time_ms <= zero_time_ms:
        # Neither is one from before the stream began, such as those that are built from Kafka.
        return
    _time("batch.total_delay", batch.completed_at_ms - batch.batch_time_ms, stream)
    if batch.started_at_ms is not None:
        _time("batch.scheduling_delay", batch.started_at_ms - batch.batch_time_ms, stream)
        _time("batch.processing_time", batch.completed_at_ms - batch.started_at_ms, stream)


def _send_output(stream: str, output_id: str, counts: Mapping[str, Any]) -> None:
    for name, metric in _COUNTS.items():
        if counts.get(name):
            _count(f"output.{metric}", int(counts[name]), stream=stream, output=output_id)


def _count(metric: str, amount: int, *, stream: str, **tags: str) -> None:
    stats.incr(f"headrace.{metric}", amount, tags={"stream": stream, **tags})
    place = ".".join([stream, *tags.values()])
    stats.incr(f"headrace.{place}.{metric}", amount)


def _time(metric: str, milliseconds: int, stream: str) -> None:
    stats.timing(f"headrace.{metric}", timedelta(milliseconds=milliseconds), tags={"stream": stream})
    stats.timing(f"headrace.{stream}.{metric}", timedelta(milliseconds=milliseconds))
