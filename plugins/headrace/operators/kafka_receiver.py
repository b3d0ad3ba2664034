"""The operator that keeps a stream's receiver job alive, and the job's log files.

The job notes which task waits for its end. Airflow notifies a trigger of its task's end only once the trigger runs,
about a second after the deferral. If a person marks or clears the task before that, the next task that attaches to the
job detects it (`ended_unnoticed`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk import BaseOperator

from headrace.clock import time_text
from headrace.connections import CONNECTION_PREFIX
from headrace.errors import HeadraceError
from headrace.hooks.ledger import LedgerHook, register
from headrace.operators.links import SparkUiLink, browser_link
from headrace.runs.batch_run import check_names, holder
from headrace.runs.processes import DetachedProcess, connection_variables, spawn, tail
from headrace.runs.receiver_job import (
    ATTACHED,
    ATTACHED_TASK,
    JobOutcome,
    JobWatch,
    connections_of_others,
    end_claim,
    is_of_another_run,
    is_request,
    newest_job,
    replace_older_job,
    request_job,
    start_if_absent,
)
from headrace.triggers.ledger import ReceiverJobTrigger, StreamWantedTrigger, in_triggerer, poll_seconds

if TYPE_CHECKING:
    from airflow.sdk import BaseOperatorLink, Context

    from headrace.checks.task_places import TaskPlace
    from headrace.ledger import Ledger
    from headrace.ledger.tables import JobRow, StreamRow
    from headrace.stream import Stream


# The job's own heartbeat interval is about this long; a poll of the ledger takes a millisecond.
_START_POLL_SECONDS = 0.5


class ReceiverJobError(HeadraceError):
    """The receiver job could not start, or ended without being asked to stop."""


class KafkaReceiverOperator(BaseOperator):
    """Runs the receiver job of a stream until it ends: a Spark application that receives from Kafka into the log.

    The job is a separate process, with its own session and log file. Its only link to this task is the lease that it
    holds in the ledger. So the job continues to receive when the task is retried, when its worker or triggerer dies,
    and when Airflow is upgraded: the next task finds the lease and attaches to the job. A second job cannot start
    beside it, because the ledger grants the lease to one job only. It does not outlive the container that it runs in.

    A stream whose log or ledger would be lost where the task runs is refused (``headrace.checks.task_places``).

    The task waits for the job deferred, in the triggerer. But with an executor that starts a container for each task
    (KubernetesExecutor), the task that has started the job waits in its container. It succeeds when the job was asked
    to stop and has drained. Otherwise it fails with the job's own error and the last lines of its log, so that
    Airflow's retry starts the job again. While the stream is stopped (``headrace streams stop``), the task waits.
    Killing, clearing or marking the task asks the job to stop.

    :param stream: the stream.
    :param start_timeout: seconds for the job to get its lease and run; about 15 of them are Spark's start.
    :param poll_interval: seconds between two polls of the ledger; by default ``[headrace] poll_interval``.
    :param deferrable: whether to wait in the triggerer; otherwise the task keeps its worker's slot. Default:
        ``[operators] default_deferrable``.

    Raises:
        TaskPlaceError: the log or the ledger would be lost where the task runs.
    """

    template_fields: Sequence[str] = ()
    ui_color = "#d6e9f8"
    operator_extra_links: tuple[BaseOperatorLink, ...] = (SparkUiLink(),)

    def __init__(
        self,
        *,
        stream: Stream,
        start_timeout: float = 180.0,
        poll_interval: float | None = None,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.stream = stream
        self.start_timeout = start_timeout
        self.poll_interval = poll_interval
        self.deferrable = in_triggerer(deferrable)
        self.spark_ui_url: str | None = None
        self._process: DetachedProcess | None = None
        # Whether the driver is a child of the process that this task has started.
        self._is_driver_here = False
        self._holder = ""
        # Whether the process runs other streams too.
        self._is_shared = False

    def execute(self, context: Context) -> None:
        """Attach to the stream's live receiver job, or start one, and wait for its end."""
        from headrace.ledger.states import DesiredState

        check_names(context, options=())
        self._check_place()
        with LedgerHook(self.stream.ledger).opened() as ledger:
            self._recover_if_lost(ledger)
            revision = register(ledger, self.stream)
            if ledger.streams.get(self.stream.name).desired_state is DesiredState.STOPPED:
                return self._wait_until_wanted(ledger, context)
            job = newest_job(ledger, self.stream.name)
            if job is not None and job.alive(ledger.now_ms()) and not is_request(job):
                self.log.info(
                    "Attached to the receiver job of %s, which has run since %s.",
                    job.holder,
                    time_text(job.acquired_at_ms),
                )
                if ended_unnoticed(job, context):
                    self.log.info("The job's last Airflow task was marked or cleared, so the job is asked to stop.")
                    ledger.jobs.request_stop(self.stream.name, "its Airflow task was ended by a person")
                elif (replaced := replace_older_job(ledger, self.stream.name)) is not None:
                    self.log.info("%s", replaced)
            else:
                job = self._start(ledger, context, revision, job)
            self._holder = holder(context)
            ledger.jobs.note(self.stream.name, job.epoch, attachment(context))
            self._show(job, context)
            return self._wait_for_end(ledger, context, job.epoch)

    def _check_place(self) -> None:
        from headrace.checks.task_places import check_place

        ledger = self.stream.ledger
        named = [ledger.removeprefix(CONNECTION_PREFIX)] if ledger.startswith(CONNECTION_PREFIX) else []
        warn = partial(self.log.warning, "%s")
        check_place(self.stream, self._task_place(), warn, connection_variables(named))

    def _task_place(self) -> TaskPlace:
        from headrace.checks.task_places import task_place

        return task_place(self.executor or conf.get_mandatory_value("core", "executor"))

    def _recover_if_lost(self, ledger: Ledger) -> None:
        if self.stream.recover != "automatic":
            return
        from headrace.batch.recover import recover_if_lost
        from headrace.stream_context import StreamContext

        done = recover_if_lost(StreamContext(self.stream, ledger), progress=self.log.info)
        if done is not None:
            counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in done.counts.items())
            self.log.warning("The ledger of stream %s was lost, and has been rebuilt: %s.", self.stream.name, counts)
            for notice in done.notices:
                self.log.warning("%s", notice)

    def on_kill(self) -> None:
        """Called when Airflow kills this task on a worker: ask the job to stop, and terminate the process started here.

        A job that a later task has attached to is left alone: Airflow may take a task for dead, start a second try, and
        then end the first try when it turns out to be alive.
        """
        try:
            with LedgerHook(self.stream.ledger).opened() as ledger:
                job = ledger.jobs.current(self.stream.name)
                attached = None if job is None or job.state.ended else job.attributes.get(ATTACHED)
                if self._holder and attached not in (None, self._holder):
                    self.log.info("The receiver job continues: task %s has attached to it.", attached)
                    return
                ledger.jobs.request_stop(self.stream.name, "its Airflow task was killed")
                if job is not None and is_request(job):
                    ledger.jobs.end_dead(self.stream.name, job.epoch, "its Airflow task was killed before it started")
        except Exception:
            self._end_process()
            raise
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None and self._process.alive() and not self._is_shared:
            # A job without a lease reads no stop request; a job with a lease may crash safely (rule 8 of the design).
            os.killpg(self._process.pid, signal.SIGTERM)

    # --- starting

    def _start(self, ledger: Ledger, context: Context, own_revision: int, requested: JobRow | None = None) -> JobRow:
        from headrace.batch.set_back import refuse_if_set_back
        from headrace.spark.versions import check_spark_packages
        from headrace.stream_context import StreamContext

        check_spark_packages()
        refuse_if_set_back(StreamContext(self.stream, ledger))
        row = ledger.streams.get(self.stream.name)
        stream, revision = self._newest(row, own_revision)
        self._is_shared = stream.spark.job is not None
        if self._is_shared:
            return self._start_in_shared_job(ledger, context, stream, revision)
        if requested is not None and is_request(requested):
            # The stream's definition named a shared job before.
            ledger.jobs.end_dead(stream.name, requested.epoch, "the stream no longer shares its job")
        previous = row.job_epoch
        process = self._spawn(context, stream, revision)
        deadline = time.monotonic() + self.start_timeout
        watch: JobWatch | None = None
        while True:
            job = ledger.jobs.current(self.stream.name)
            if job is not None and job.epoch > previous:
                watch = watch or self._watch(job.epoch)
                outcome = watch.poll(ledger)
                if outcome in (JobOutcome.FAILED, JobOutcome.LOST):
                    self._raise_ended(ledger, outcome, job.epoch)
                if outcome is not None or job.state.value != "starting":
                    return job
            elif not process.alive():
                if job is not None and job.alive(ledger.now_ms()):
                    # This task's job was refused the lease: another job, started just before, holds it.
                    self.log.info(
                        "Another task started the receiver job first: %s, at %s. This task has attached to it.",
                        job.holder, time_text(job.acquired_at_ms),
                    )  # fmt: skip
                    return job
                raise self._did_not_start(f"ended with exit code {process.exit_code()}", process)
            if time.monotonic() > deadline:
                raise self._did_not_start(f"was not running after {self.start_timeout:g} s", process)
            time.sleep(poll_seconds(self.poll_interval, otherwise=_START_POLL_SECONDS))

    def _start_in_shared_job(self, ledger: Ledger, context: Context, stream: Stream, revision: int) -> JobRow:
        from headrace.ledger.errors import LeaseHeldError

        deadline = time.monotonic() + self.start_timeout
        try:
            lease_ms = round(self.start_timeout * 1000)
            request_job(ledger, stream, revision=revision, holder=self._new_holder(context), lease_ms=lease_ms)
        except LeaseHeldError as held:
            # Perhaps an earlier try of this task has requested the job. This task waits for it in the same way.
            self.log.info("%s", held)
        job = ledger.jobs.current(stream.name)
        if job is None:
            raise ReceiverJobError(f"The ledger no longer has the receiver job of stream {stream.name!r}.")
        epoch, watch, name = job.epoch, self._watch(job.epoch), str(stream.spark.job)
        holder_name = self._new_holder(context)
        while True:
            outcome, job = watch.poll(ledger), ledger.jobs.current(stream.name) or job
            if outcome in (JobOutcome.FAILED, JobOutcome.LOST):
                self._raise_ended(ledger, outcome, epoch)
            if outcome is not None or not (is_request(job) or job.state.value == "starting"):
                return job
            if is_request(job):
                if self._process is not None and not self._process.alive():
                    end_claim(ledger, name, holder=holder_name)
                    # With exit code 0 it has made room for one with other settings.
                    if (code := self._process.exit_code()) not in (None, 0):
                        ledger.jobs.end_dead(stream.name, epoch, f"the process of the shared job {name} has ended")
                        raise self._did_not_start(f"ended with exit code {code}", self._process)
                    self._process, holder_name = None, self._new_holder(context)
                start = partial(self._spawn_shared, ledger, context, stream, revision, holder_name)
                self._process = start_if_absent(ledger, name, holder=holder_name, start=start) or self._process
            if time.monotonic() > deadline:
                ledger.jobs.end_dead(stream.name, epoch, f"was not running after {self.start_timeout:g} s")
                self._raise_ended(ledger, JobOutcome.FAILED, epoch)
            time.sleep(poll_seconds(self.poll_interval, otherwise=_START_POLL_SECONDS))

    def _spawn_shared(
        self, ledger: Ledger, context: Context, stream: Stream, revision: int, holder_name: str
    ) -> DetachedProcess:
        self.log.info("This task starts the process of the shared job %s.", stream.spark.job)
        return self._spawn(context, stream, revision, holder_name, connections_of_others(ledger, stream))

    def _new_holder(self, context: Context) -> str:
        """A holder name stands for one process, so a repeated try gets another name."""
        return f"{holder(context)}@{time.time_ns() // 1_000_000}"

    def _newest(self, row: StreamRow, own_revision: int) -> tuple[Stream, int]:
        """The newest definition of the stream, and its revision. A run of an older DAG version may be retried for days,
        and its job must use what was declared since then. This task's own if a job would read the same from both: the
        folders of its ``spark.py_files`` are on this host, those of another commit of a git bundle may not be."""
        from headrace.receiver.health import receiving_differences
        from headrace.stream import Stream

        if row.revision == own_revision:
            return self.stream, own_revision
        newest = Stream.from_json(row.definition)
        if not any(receiving_differences(self.stream, newest)):
            return self.stream, own_revision
        self.log.info(
            "This run's DAG version has revision %s of the definition. The receiver job starts with the newest, %d.",
            own_revision, row.revision,
        )  # fmt: skip
        return newest, row.revision

    def _spawn(
        self,
        context: Context,
        stream: Stream,
        revision: int,
        holder_name: str | None = None,
        more: Mapping[str, str] | None = None,
    ) -> DetachedProcess:
        from headrace.hooks.spark_submit import StreamSparkSubmitHook, application

        hook = StreamSparkSubmitHook(
            stream,
            application_args=[
                *self._stream_arguments(),
                "--revision",
                str(revision),
                "--holder",
                holder_name or self._new_holder(context),
            ],
            name=f"headrace receiver {stream.application}",
            receivers=stream.receivers,
        )
        log = log_file(stream.application)
        self.log.info("The receiver job writes its log to %s on this host.", log)
        from headrace.spark.receiving.job_log import LOG_VARIABLE

        environment = {**(more or {}), **hook.environment(), LOG_VARIABLE: str(log)}
        self._is_driver_here = not hook.is_cluster_mode
        self._process = spawn(hook.command(application("receiver.py")), environment=environment, log=log)
        self.log.info("Started the receiver job as process %d.", self._process.pid)
        return self._process

    def _stream_arguments(self) -> list[str]:
        return ["--ledger", self.stream.ledger, "--stream", self.stream.name]

    def _did_not_start(self, what: str, process: DetachedProcess) -> ReceiverJobError:
        if process.alive() and not self._is_shared:
            os.killpg(process.pid, signal.SIGTERM)
        return ReceiverJobError(
            f"The receiver job of stream {self.stream.name!r} {what}. The end of its log {process.log}:\n"
            f"{tail(process.log)}"
        )

    # --- waiting

    def _wait_for_end(self, ledger: Ledger, context: Context, epoch: int) -> None:
        if self.deferrable and not self._job_would_end_with_container():
            self.defer(
                trigger=ReceiverJobTrigger(
                    ledger=self.stream.ledger,
                    stream=self.stream.name,
                    epoch=epoch,
                    poll_interval=self.poll_interval,
                ),
                method_name="job_ended",
            )
        if self._task_place().redelivers:
            self.log.warning(
                "This task holds a worker's slot for as long as the stream runs. After the visibility timeout, the "
                "broker of Celery (Redis, SQS) gives it to another worker, which ends this task and its receiver job. "
                "Set [operators] default_deferrable to True, and run a triggerer. See docs/guides/managed-airflow.md."
            )
        watch = self._watch(epoch)
        while (outcome := watch.poll(ledger)) is None:
            time.sleep(poll_seconds(self.poll_interval))
        self._conclude(ledger, context, outcome, epoch)

    def _job_would_end_with_container(self) -> bool:
        from headrace.checks.task_places import Hosts

        place = self._task_place()
        if place.hosts is not Hosts.CONTAINER_PER_TASK or not self._is_driver_here:
            return False
        if self._process is None or not self._process.alive():
            return False
        self.log.info(
            "The receiver job runs in the container of this task (%s), which ends with the task. So the task waits for "
            "the job here, not in the triggerer.", place.name,
        )  # fmt: skip
        return True

    def job_ended(self, context: Context, event: dict[str, Any]) -> None:
        """Called after the deferral: the job is over. Handle its outcome."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            self._conclude(ledger, context, JobOutcome(event["outcome"]), event["epoch"])

    def _conclude(self, ledger: Ledger, context: Context, outcome: JobOutcome, epoch: int) -> None:
        if outcome is JobOutcome.SUPERSEDED:
            # Another task started the next job: attach to that one.
            return self.execute(context)
        job = ledger.jobs.current(self.stream.name)
        if job is not None and job.epoch == epoch:
            self.spark_ui_url = job.attributes.get("ui_url")
        if outcome is not JobOutcome.STOPPED:
            self._raise_ended(ledger, outcome, epoch)
        self.log.info("The receiver job has drained and stopped (%s).", job.stop_reason if job else "reason unknown")
        return None

    def _wait_until_wanted(self, ledger: Ledger, context: Context) -> None:
        self.log.info(
            "Stream %s is stopped. This task waits until it is started again: `headrace streams start %s`.",
            self.stream.name, self.stream.name,
        )  # fmt: skip
        trigger = StreamWantedTrigger(
            ledger=self.stream.ledger, stream=self.stream.name, poll_interval=self.poll_interval
        )
        if self.deferrable:
            self.defer(trigger=trigger, method_name="wanted")
        trigger.poll_until_it_fires(ledger)
        return self.execute(context)

    def wanted(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Called after the deferral: the stream was started again."""
        self.execute(context)

    def _raise_ended(self, ledger: Ledger, outcome: JobOutcome, epoch: int) -> None:
        job = ledger.jobs.current(self.stream.name)
        error = job.error if job is not None and job.epoch == epoch else None
        log = job.attributes.get("log") if job is not None and job.epoch == epoch else None
        log = log or (str(self._process.log) if self._process else newest_log(self.stream.application))
        what = f"failed: {error}" if outcome is JobOutcome.FAILED else "died: its lease was not renewed"
        lines = tail(log) if log else ""
        end = f" The end of its log {log}:\n{lines}" if lines else f" Its log: {log or 'on the host that started it'}."
        raise ReceiverJobError(f"The receiver job (epoch {epoch}) of stream {self.stream.name!r} {what}.{end}")

    # --- reporting

    def _watch(self, epoch: int) -> JobWatch:
        return JobWatch(
            self.stream.name,
            epoch,
            progress=lambda text: self.log.info("%s", text),
            warn=lambda text: self.log.warning("%s", text),
        )

    def _show(self, job: JobRow, context: Context) -> None:
        self.spark_ui_url = job.attributes.get("ui_url")
        self.log.info(
            "Receiver job: epoch %d, held by %s, Spark UI %s, log %s",
            job.epoch,
            job.holder,
            self.spark_ui_url or "none",
            job.attributes.get("log") or (self._process.log if self._process else newest_log(self.stream.application)),
        )
        if link := browser_link(self.spark_ui_url):
            # Airflow stores links when a task ends, and this task is not meant to end.
            context["ti"].xcom_push(key=SparkUiLink().xcom_key, value=link)
        elif self.spark_ui_url:
            self.log.info(
                "No link leads to the Spark UI: it listens on the loopback address of %s, and Airflow's pages come "
                "from another host. docs/airflow.md says how to reach it.",
                job.attributes.get("host") or "the job's host",
            )


def attachment(context: Context) -> dict[str, Any]:
    """The attributes that this task sets on the job while it waits for it."""
    ti = context["ti"]
    reported = {name: getattr(ti, name) for name in ("dag_id", "run_id", "task_id", "try_number", "max_tries")}
    return {ATTACHED: holder(context), ATTACHED_TASK: reported}


def ended_unnoticed(job: JobRow, context: Context) -> bool:
    """Whether the task that waited for this job was marked or cleared, and the job was not asked to stop."""
    before = job.attributes.get(ATTACHED_TASK)
    if before is None or job.state.ended or job.stop_requested_at_ms is not None:
        return False
    ti = context["ti"]
    if is_of_another_run(job, ti):
        return _was_marked(before, ti)
    # Clearing a task gives it its retries again.
    return bool(ti.max_tries > before["max_tries"])


def _was_marked(before: Mapping[str, Any], ti: Any) -> bool:
    states = ti.get_task_states(dag_id=before["dag_id"], task_ids=[before["task_id"]], run_ids=[before["run_id"]])
    state = states.get(before["run_id"], {}).get(before["task_id"])
    # Without a person the task succeeds only when its job has stopped, and fails only when its tries are used up.
    return state in ("success", "skipped") or (state == "failed" and before["try_number"] <= before["max_tries"])


# A job that cannot start is retried until a person intervenes, and each try writes a log file.
_KEEP_LOGS = 30


def log_folder(application: str) -> Path:
    """Where the receiver jobs of this application (`Stream.application`) write their logs on this host."""
    folder = conf.get("headrace", "log_folder", fallback="")
    if folder:
        return Path(folder) / application
    return Path(conf.get_mandatory_value("logging", "base_log_folder")) / "headrace" / application


def log_file(application: str) -> Path:
    """The path of a new log file for a job that starts now. Deletes the oldest log files of earlier jobs, and the
    compressed parts of all but the last job."""
    from headrace.spark.receiving.job_log import parts_of

    earlier = sorted(log_folder(application).glob("receiver-*.log"))
    for old in earlier[:-1]:
        for part in parts_of(old):
            part.unlink(missing_ok=True)
    for old in earlier[: -_KEEP_LOGS + 1]:
        old.unlink(missing_ok=True)
    return log_folder(application) / f"receiver-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.log"


def newest_log(application: str) -> str | None:
    """The log of the job that was started last on this host."""
    logs = sorted(log_folder(application).glob("receiver-*.log"))
    return str(logs[-1]) if logs else None
