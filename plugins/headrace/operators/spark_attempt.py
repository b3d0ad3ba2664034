"""Base operator that runs an attempt at a batch in Spark: chooses the way, starts the process, handles its end."""

from __future__ import annotations

import abc
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

from headrace.clock import time_text
from headrace.errors import FAILURE, Failure, HeadraceError
from headrace.hooks.ledger import LedgerHook
from headrace.operators.airflow_stats import send_attempt
from headrace.operators.batch import BatchStep
from headrace.operators.links import SparkUiLink
from headrace.operators.submit_arguments import submit_options
from headrace.runs.batch_process import BatchProcess
from headrace.runs.environment import child_environment, secret_key
from headrace.runs.receiver_job import awaited_application, missing_application
from headrace.runs.replacement import replace_older_job
from headrace.runs.waiting import in_triggerer, poll_seconds

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import BaseOperatorLink, Context

    from headrace.hooks.spark_submit import StreamSparkSubmitHook
    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import Attempt, AttemptRow, BatchRow
    from headrace.stream import Stream

Way = Literal["connect", "submit"]

# The process that runs an attempt renews its lease. The first lease has to last until that process is up (1 s for a
# plain process, 14 s for spark-submit, both more on a busy machine). A process that died keeps the slot for as long.
FIRST_LEASE_MS: Mapping[Way, int] = {"connect": 30_000, "submit": 90_000}
# A poll after a deferral starts the task again, which takes two seconds.
_SLOT_POLL_SECONDS = 5.0
# `waiting_for` while the receiver job's application is starting.
_APPLICATION = "application"


class _LookAgain(BaseException):
    """Asks for a wait in place, after which the step starts again. Like Airflow's TaskDeferred it derives from
    BaseException, so that error handlers do not catch it."""

    def __init__(self, waited: dict[str, Any]) -> None:
        super().__init__()
        self.waited = waited


class BatchTaskError(HeadraceError):
    """The task did not complete its steps of the batch."""


class AttemptFencedInSparkError(BatchTaskError):
    """Another attempt took over from this one."""


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
    or by this operator, whatever the way. A parameter that would have no effect is refused (``submit_arguments``).

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
        self._submit_options = submit_options(kwargs, way=self.way)
        kwargs["name"] = kwargs.get("name") or f"headrace batch {stream.name}"
        # An application left by an earlier try is fenced by the attempt's number, so a retry must not attach to it.
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

    def execute(self, context: Context) -> Any:
        return self._until_done(context, self.run_step)

    def slot_may_be_free(self, context: Context, event: Any = None, **waited: Any) -> Any:  # noqa: ARG002
        """Called after a deferral: check again whether the step can run."""
        self.take_up(**waited)
        return self._until_done(context, self.run_again)

    @abc.abstractmethod
    def run_step(self, context: Context) -> Any:
        """Do the task's work, from its beginning; call `wait` if other work must finish first."""

    def run_again(self, context: Context) -> Any:
        """Do the task's work again after a wait."""
        return self.run_step(context)

    # --- waiting

    def _until_done(self, context: Context, run: Callable[[Context], Any]) -> Any:
        """Call ``run``, and `run_again` after each wait in place."""
        while True:
            try:
                return run(context)
            except _LookAgain as again:
                time.sleep(self.slot_poll.total_seconds())
                self.take_up(**again.waited)
                run = self.run_again

    def take_up(self, *, waited: float = 0.0, waiting_for: str = "", waiting_since: float = 0.0) -> None:
        """Restore the state of the wait from before the deferral; ``waited`` and ``waiting_since`` in seconds."""
        self._waited, self._waiting_for, self._waiting_since = waited, waiting_for, waiting_since

    def wait(self, reason: str, *, waiting_for: str, otherwise: Exception | None = None) -> NoReturn:
        """Wait for ``slot_poll``, then run the step again: deferred, or in place.

        Raises ``otherwise`` (by default BatchTaskError) after waiting for the same ``waiting_for`` for
        ``slot_timeout``. A wait for the application has no end here: `await_application` ends it.
        """
        if waiting_for != self._waiting_for:
            self._waiting_for, self._waiting_since = waiting_for, self._waited
            self.log.info("%s", reason)
        waited_too_long = self._waited - self._waiting_since >= self.slot_timeout.total_seconds()
        if waited_too_long and waiting_for != _APPLICATION:
            raise otherwise or BatchTaskError(f"Waited for {self.slot_timeout}: {reason}")
        waited = {
            "waited": self._waited + self.slot_poll.total_seconds(),
            "waiting_for": self._waiting_for,
            "waiting_since": self._waiting_since,
        }
        if not self.deferrable:
            raise _LookAgain(waited)
        from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

        self.defer(trigger=TimeDeltaTrigger(self.slot_poll), method_name="slot_may_be_free", kwargs=waited)

    def await_application(self, ledger: Ledger, batch: BatchRow, steps: Iterable[str]) -> None:
        """Wait for a receiver job that is starting or due, if the steps need Spark: a separate application would
        compete with it for the machine, and be ready later. A job of an older version is asked to stop, so that the
        next one replaces it."""
        from headrace.runs.steps_to_run import needs_of

        replaced = replace_older_job(ledger, self.stream.name)
        waited = self._waited - self._waiting_since if self._waiting_for == _APPLICATION else 0.0
        if self.way != "connect" or waited >= self.start_timeout.total_seconds():
            return
        timeout_ms = self.start_timeout // timedelta(milliseconds=1)
        reason = replaced or awaited_application(ledger, self.stream.name, timeout_ms=timeout_ms)
        if reason is not None and needs_of(ledger, self.written, batch.batch_time_ms, steps).spark:
            self.wait(reason, waiting_for=_APPLICATION)

    # --- running

    def choose_way(self, ledger: Ledger) -> Way:
        """Return the requested way, or ``submit`` if there is no usable application to connect to."""
        from headrace.spark import connect_token
        from headrace.spark.versions import current_versions, differences

        if self.way == "submit":
            return "submit"
        job = ledger.jobs.current(self.stream.name)
        missing = missing_application(ledger, self.stream.name)
        if job is None or missing is not None:
            self.log.warning(
                "%s Until there is a receiver job, each batch is submitted as an application of its own, which takes "
                "Spark's start every time: a quarter of a minute and more, in place of a second.",
                missing,
            )
            return "submit"
        host = job.attributes.get("connect_host", socket.gethostname())
        if host != socket.gethostname() and "//localhost" in job.attributes["connect_url"]:
            self.log.info("The receiver job's application is on %s and not reachable, so the batch is submitted.", host)
            return "submit"
        if job.versions and (different := differences(job.versions, current_versions())):
            self.log.warning(
                "The receiver job (epoch %d) runs with other versions (%s), so the batch is submitted. A job that is "
                "older than this task is replaced by itself; otherwise `headrace streams stop %s` and "
                "`headrace streams start %s` replace it.",
                job.epoch, "; ".join(different), self.stream.name, self.stream.name,
            )  # fmt: skip
            return "submit"
        theirs = job.attributes.get(connect_token.FINGERPRINT)
        if theirs is not None and theirs != _fingerprint(self.stream):
            self.log.warning(
                "The receiver job (epoch %d) was started with another secret key and would refuse this batch, so the "
                "batch is submitted. `headrace streams stop %s` and `headrace streams start %s` give the job the "
                "present key.",
                job.epoch, self.stream.name, self.stream.name,
            )  # fmt: skip
            return "submit"
        self.spark_ui_url = job.attributes.get("ui_url")
        return "connect"

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
        try:
            self._run_attempt(ledger, attempt, batch, context)
        finally:
            send_attempt(ledger, attempt)

    def _run_attempt(self, ledger: Ledger, attempt: Attempt, batch: BatchRow, context: Context) -> None:
        from headrace.runs.steps_to_run import needs_of

        steps, at = ", ".join(attempt.outputs), time_text(batch.batch_time_ms)
        needs = needs_of(ledger, self.written, batch.batch_time_ms, attempt.outputs)
        if not needs.process:
            for step, counts in needs.counts.items():
                ledger.attempts.record_output(attempt, step, counts)
            ledger.attempts.complete(attempt)
            self.log.info("Batch %s has nothing for %s, which is done without Spark.", at, steps)
            return
        self.log.info(
            "Batch %s, attempt %d at %s: %d records in %d blocks, by way %s.",
            at, attempt.number, steps, batch.records, batch.blocks, attempt.way,
        )  # fmt: skip
        self._run_in_spark(ledger, attempt, context, spark=needs.spark)
        self.log.info("Attempt %d at batch %s has completed.", attempt.number, at)

    def get_openlineage_facets_on_complete(self, _task_instance: Any) -> OperatorLineage[Any, Any]:
        """Called by Airflow's OpenLineage provider after the task, whether it succeeded or failed."""
        from headrace.lineage import batch_lineage

        with LedgerHook(self.stream.ledger).opened() as ledger:
            return batch_lineage(ledger, self.written, self._ran)

    def _run_in_spark(self, ledger: Ledger, attempt: Attempt, context: Context, *, spark: bool) -> None:
        from headrace.ledger.errors import AttemptFencedError, LedgerError
        from headrace.ledger.states import AttemptState

        self._arguments = [
            "--ledger", self.stream.ledger, "--stream", self.stream.name,
            "--batch-time", str(attempt.batch_time_ms), "--attempt", str(attempt.number), "--way", attempt.way,
        ]  # fmt: skip
        try:
            if spark and attempt.way == "submit":
                # A task may run several attempts; with a kept hook the provider would reuse the first one's arguments.
                self._hook = None
                SparkSubmitOperator.execute(self, context)
            else:
                self._run_process()
            state = _row(ledger, attempt).state
            if state is not AttemptState.COMPLETED:
                raise BatchTaskError(
                    f"Spark ended without an error, but attempt {attempt.number} at batch "
                    f"{time_text(attempt.batch_time_ms)} is {state.value}."
                )
        except BaseException as error:
            reported = False
            try:
                ledger.attempts.fail(attempt, _cause(error))
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
            self._process = None

    def _run_process(self) -> None:
        from headrace.hooks.spark_submit import application

        command = [sys.executable, application("micro_batch.py"), *self._arguments]
        self._process = BatchProcess(command, child_environment(self.written))
        failure = self._process.log_until_end(self.log.log)
        if failure is not None:
            raise BatchTaskError(failure)

    def _get_hook(self) -> StreamSparkSubmitHook:
        from headrace.hooks.spark_submit import StreamSparkSubmitHook, application

        self.application = application("micro_batch.py")
        # Templates are rendered in the operator's attributes.
        rendered = {
            name: getattr(self, name) if name in self.template_fields else value
            for name, value in self._submit_options.items()
        }
        # The provider adds OpenLineage's settings to `conf`, so it is always passed.
        options = rendered | {"name": self.name, "conf": self.conf or {}}
        return StreamSparkSubmitHook(self.written, application_args=self._arguments, **options)

    def on_kill(self) -> None:
        """End this attempt's own Spark jobs: its process cancels them on SIGTERM."""
        if self._process is not None:
            self._process.terminate()
        elif self._hook is not None:
            super().on_kill()


def _fingerprint(stream: Stream) -> str:
    from headrace.spark import connect_token

    return connect_token.fingerprint(secret_key(stream.application), stream.application)


def _row(ledger: Ledger, attempt: Attempt) -> AttemptRow:
    rows = ledger.attempts.of_batch(attempt.stream, attempt.batch_time_ms)
    return next(row for row in rows if row.number == attempt.number)


def _cause(error: BaseException) -> str:
    """Why the attempt failed. A task whose supervisor was killed gets a BrokenPipeError when it logs its next line."""
    if isinstance(error, BrokenPipeError):
        return "The Airflow task was killed: its supervisor is gone, with the worker or by itself."
    return f"{type(error).__name__}: {error}"
