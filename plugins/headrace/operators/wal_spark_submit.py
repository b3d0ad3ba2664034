"""The operator that runs a batch: its allocated blocks through Spark into the stream's outputs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

from headrace.errors import HeadraceError
from headrace.hooks.environment import child_environment
from headrace.operators.batch import BatchStep
from headrace.operators.kafka_receiver import holder
from headrace.operators.links import SparkUiLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperatorLink, Context

    from headrace.hooks.spark_submit import StreamSparkSubmitHook
    from headrace.ledger import Ledger
    from headrace.ledger.rows import Attempt, BatchRow
    from headrace.stream import Stream

Way = Literal["connect", "submit"]

# An attempt is renewed by the process that runs it; until that is up (1 s for a plain process, 14 s for spark-submit,
# both more on a busy machine) the lease given here has to last. A process that died keeps the slot for as long.
_LEASE_MS = {"connect": 30_000, "submit": 90_000}
# How long a batch that is told to end may take to cancel its Spark jobs, in seconds.
_TERMINATION_GRACE = 15.0
_TAIL_LINES = 40
_EXIT_FENCED = 75


class BatchFailedError(HeadraceError):
    """Spark did not complete the batch."""


class WalSparkSubmitOperator(BatchStep, SparkSubmitOperator):
    """Runs a batch: reads its allocated blocks from the log, transforms them, writes every output.

    Two ways lead to Spark. ``connect`` runs the batch in the receiver job's warm application, over Spark Connect
    (about a second until it works); ``submit`` gives it an application of its own by spark-submit. Both run the same
    code. Where there is no application to connect to (the stream was stopped, or its receiver job is on another
    machine), a batch is submitted; one that is just starting is waited for.

    Before anything runs, the ledger gives the attempt a number. A later attempt fences every earlier one, so a
    zombie (Airflow starts a second try while a first still lives) can neither complete the batch nor harm it, and a
    completed batch is not run again unless the DAG run asks for it (``reprocess``). A batch without records completes
    without Spark where no output wants to hear of it.

    Killing the task ends its own Spark jobs and no others.

    :param stream: the stream.
    :param way: ``connect`` or ``submit``; by default the stream's ``spark.run_batches``.
    :param start_timeout: how long to wait for a receiver job that is starting.
    :param slot_timeout: how long to wait for other batches of the stream that hold its slots, or come first.
    """

    template_fields: Sequence[str] = ()
    ui_color = "#fbe3c8"
    operator_extra_links: tuple[BaseOperatorLink, ...] = (SparkUiLink(),)

    def __init__(
        self,
        *,
        stream: Stream,
        way: Way | None = None,
        start_timeout: timedelta = timedelta(minutes=3),
        slot_timeout: timedelta = timedelta(minutes=30),
        slot_poll: timedelta = timedelta(seconds=5),
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("name", f"headrace batch {stream.name}")
        super().__init__(**kwargs)
        self.stream = stream
        self.way: Way = way or stream.spark.run_batches
        self.start_timeout = start_timeout
        self.slot_timeout = slot_timeout
        self.slot_poll = slot_poll
        self.spark_ui_url: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._arguments: list[str] = []

    def execute(self, context: Context) -> Any:
        """Run the batch."""
        return self._run(context, waited=0.0)

    def slot_may_be_free(self, context: Context, event: Any = None, *, waited: float) -> Any:  # noqa: ARG002
        """Called after a deferral: look again whether it is this batch's turn, and there is a Spark for it."""
        return self._run(context, waited=waited)

    def _run(self, context: Context, *, waited: float) -> Any:
        from airflow.sdk.exceptions import AirflowFailException

        from headrace.ledger.errors import AlreadyCompletedError, BatchCleanedError, SlotBusyError
        from headrace.ledger.states import BatchState

        at_ms = self.batch_time_ms(context)
        with self.opened() as (ledger, _):
            batch = self._batch(ledger, at_ms)
            if batch.state in (BatchState.ABANDONED, BatchState.ABSORBED):
                self.log.info("Batch %d is %s, so there is nothing to run.", at_ms, batch.state.value)
                return None
            needs_spark = batch.records > 0 or wants_empty_batches(self.stream)
            if needs_spark and self._application_is_starting(ledger) and waited < self.start_timeout.total_seconds():
                # An application beside it would take the machine from it, and be ready later.
                return self._look_again("The receiver job's application is starting.", waited)
            way = self._way(ledger)
            try:
                attempt = ledger.batches.begin_attempt(
                    self.stream.name,
                    at_ms,
                    holder=holder(context),
                    way=way,
                    lease_ms=_LEASE_MS[way],
                    force=reprocess_asked(context),
                )
            except AlreadyCompletedError as error:
                self.log.info("%s To run it again, trigger or clear the run with reprocess.", error.what)
                return None
            except BatchCleanedError as error:
                # What is deleted stays deleted: retries would only hold up the batches that wait for this run.
                raise AirflowFailException(str(error)) from error
            except SlotBusyError as error:
                return self._wait_for_slot(error, waited)
            if not needs_spark and not any(output.kind == "console" for output in self.stream.outputs):
                return self._complete_empty(ledger, attempt)
            self.log.info(
                "Batch %d, attempt %d: %d records in %d blocks, by way %s.",
                at_ms, attempt.number, batch.records, batch.blocks, way,
            )  # fmt: skip
            return self._attempt(ledger, attempt, context, spark_submit=needs_spark and way == "submit")

    def _batch(self, ledger: Ledger, at_ms: int) -> BatchRow:
        batch = ledger.batches.find(self.stream.name, at_ms)
        if batch is None:
            raise BatchFailedError(
                f"Batch {at_ms} of stream {self.stream.name!r} has no blocks allocated.",
                remedy="Clear the task 'allocate_blocks' of this run, and those after it.",
            )
        return batch

    def _way(self, ledger: Ledger) -> Way:
        """The way asked for, or ``submit`` where there is no application to connect to."""
        if self.way == "submit":
            return "submit"
        job = ledger.jobs.current(self.stream.name)
        if job is None or not job.alive(ledger.now_ms()) or not job.attributes.get("connect_url"):
            self.log.info("No receiver job offers its application, so the batch is submitted.")
            return "submit"
        host = job.attributes.get("connect_host", socket.gethostname())
        if host != socket.gethostname() and "//localhost" in job.attributes["connect_url"]:
            self.log.info("The receiver job's application is on %s and not reachable, so the batch is submitted.", host)
            return "submit"
        self.spark_ui_url = job.attributes.get("ui_url")
        return "connect"

    def _application_is_starting(self, ledger: Ledger) -> bool:
        from headrace.ledger.states import JobState

        job = ledger.jobs.current(self.stream.name)
        return (
            self.way == "connect" and job is not None and job.state is JobState.STARTING and job.alive(ledger.now_ms())
        )

    def _wait_for_slot(self, error: Exception, waited: float) -> None:
        if waited >= self.slot_timeout.total_seconds():
            raise error
        self._look_again(str(error), waited)

    def _look_again(self, reason: str, waited: float) -> None:
        from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

        if not waited:
            self.log.info("%s", reason)
        self.defer(
            trigger=TimeDeltaTrigger(self.slot_poll),
            method_name="slot_may_be_free",
            kwargs={"waited": waited + self.slot_poll.total_seconds()},
        )

    def _complete_empty(self, ledger: Ledger, attempt: Attempt) -> None:
        for output in attempt.outputs:
            ledger.batches.record_output(attempt, output, {"records": 0})
        ledger.batches.complete_attempt(attempt)
        self.log.info("The batch has no records, so it completed without Spark.")

    # --- running

    def _attempt(self, ledger: Ledger, attempt: Attempt, context: Context, *, spark_submit: bool) -> None:
        from headrace.ledger.errors import LedgerError
        from headrace.ledger.states import BatchState

        self._arguments = [
            "--ledger", self.stream.ledger, "--stream", self.stream.name,
            "--batch-time", str(attempt.batch_time_ms), "--attempt", str(attempt.number), "--way", attempt.way,
        ]  # fmt: skip
        try:
            if spark_submit:
                super().execute(context)
            else:
                self._run_process()
            batch = self._batch(ledger, attempt.batch_time_ms)
            if batch.state is not BatchState.COMPLETED:
                raise BatchFailedError(
                    f"Spark ended without an error, but batch {batch.batch_time_ms} is {batch.state.value}."
                )
        except BaseException as error:
            try:
                ledger.batches.fail_attempt(attempt, f"{type(error).__name__}: {error}")
            except LedgerError as refused:
                # The process has told the ledger already, or a later attempt has the batch now.
                self.log.debug("%s", refused)
            raise
        self.log.info("Batch %d completed with attempt %d.", batch.batch_time_ms, batch.attempt)

    def _run_process(self) -> None:
        from headrace.hooks.spark_submit import application

        self._process = subprocess.Popen(
            [sys.executable, application("micro_batch.py"), *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment(self.stream),
            text=True,
            errors="replace",
        )
        last: deque[str] = deque(maxlen=_TAIL_LINES)
        with self._process as process:
            for line in process.stdout or ():
                self.log.info("%s", line.rstrip())
                last.append(line.rstrip())
        if process.returncode:
            lines = "\n".join(last)
            raise BatchFailedError(
                f"The batch's process {_ending(process.returncode)}. The last of what it said:\n{lines}"
            )

    def _get_hook(self) -> StreamSparkSubmitHook:
        from headrace.hooks.spark_submit import StreamSparkSubmitHook, application

        self.application = application("micro_batch.py")
        return StreamSparkSubmitHook(
            self.stream, application_args=self._arguments, name=self.name, conf=self.conf or {}, **self._hook_options()
        )

    def _hook_options(self) -> dict[str, Any]:
        """What the provider's operator was given and this one passes on to spark-submit."""
        return {
            "jars": self.jars,
            "packages": self.packages,
            "files": self.files,
            "properties_file": self.properties_file,
            "num_executors": self._num_executors,
            "executor_cores": self._executor_cores,
            "executor_memory": self._executor_memory,
            "driver_memory": self._driver_memory,
            "total_executor_cores": self._total_executor_cores,
            "proxy_user": self.proxy_user,
            "spark_binary": self._spark_binary,
            "yarn_queue": self._yarn_queue,
            "deploy_mode": self._deploy_mode,
            "status_poll_interval": self._status_poll_interval,
        }

    def on_kill(self) -> None:
        """End this attempt's own Spark jobs: its process cancels them when it is told to terminate."""
        process = self._process
        if process is None:
            if self._hook is not None:
                super().on_kill()
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _TERMINATION_GRACE
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if process.poll() is None:
                process.kill()


def reprocess_asked(context: Context) -> bool:
    """Whether the DAG run asks to run a completed batch again: by its params, or by its conf."""
    conf = context["dag_run"].conf or {}
    return bool(context.get("params", {}).get("reprocess") or conf.get("reprocess"))


def wants_empty_batches(stream: Stream) -> bool:
    """Whether a batch without records still makes rows for an output: an aggregate over nothing."""
    from headrace.spark.batch_outputs import needs_empty_batches

    return any(needs_empty_batches(output, stream) for output in stream.outputs)


def _ending(code: int) -> str:
    """An exit code in words; the codes are those of ``headrace.spark.micro_batch_job``."""
    if code == _EXIT_FENCED:
        return "gave way to a newer attempt at the batch"
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return "was told to end"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
