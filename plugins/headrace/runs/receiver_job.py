"""A stream's receiver job as a task sees it in the ledger: its state, how it ended, and whether it receives.

Also how a job is replaced by one of a newer version, and requested of a process that several streams share. The request
is the stream's lease, acquired on behalf of that process, which adopts it
(``headrace.spark.receiving.receiver_process``). So a stream has one job, however many tasks request it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException, AirflowRuntimeError
from packaging.version import InvalidVersion, Version

from headrace.processes import PROCESS, has_ended
from headrace.runs.processes import connection_variables
from headrace.stream import Stream

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.receiving.tables import ReceiverRow
    from headrace.ledger.tables import JobRow
    from headrace.receiver.health import InputProblem
    from headrace.runs.processes import DetachedProcess


_REPORTED_PARTITIONS = 5
# After this long without a poll, the ledger or the watcher was unavailable, and the job may have been cut off as well.
_AWAY_SECONDS = 10.0
# Warnings are repeated this often, in seconds: people read a long task log from its end.
_WARN_SECONDS = 60.0


class JobOutcome(StrEnum):
    """How the receiver job of an epoch ended."""

    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    """Its lease expired: the job died without a report, or cannot reach the ledger and has to end."""
    SUPERSEDED = "superseded"
    """A job of a later epoch has taken over."""


class JobWatch:
    """Follows the receiver job of one epoch. Reports changes since the last poll; warns of problems, repeatedly while
    they last.

    If the lease has expired at the first poll, or after an outage of the ledger, the job gets one lease duration to
    renew it: the job reaches the ledger again when this watch does.
    """

    def __init__(
        self,
        stream: str,
        epoch: int,
        *,
        progress: Callable[[str], None],
        warn: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = stream
        self.epoch = epoch
        self._report = progress
        self._warn = warn
        self._reported: dict[str, str] = {}
        self._warned_at = 0.0
        self._monotonic = monotonic
        self._looked_at = -math.inf
        self._renewal_due: float | None = None

    def poll(self, ledger: Ledger) -> JobOutcome | None:
        """Poll the ledger. Returns how the job ended; None while it is alive, or may still renew its lease."""
        job = newest_job(ledger, self.stream)
        if job is None or job.epoch < self.epoch:
            return JobOutcome.LOST
        if job.epoch > self.epoch:
            return JobOutcome.SUPERSEDED
        self._follow(ledger, job)
        ended = outcome(job, ledger.now_ms())
        now = self._monotonic()
        was_away, self._looked_at = now - self._looked_at > _AWAY_SECONDS, now
        if ended is not JobOutcome.LOST:
            self._renewal_due = None
        elif self._renewal_due is None:
            self._renewal_due = now + (job.lease_ms / 1000 if was_away else 0.0)
        return None if self._renewal_due is not None and now < self._renewal_due else ended

    def _follow(self, ledger: Ledger, job: JobRow) -> None:
        from headrace.receiver.health import input_problems

        text = f"The receiver job (epoch {job.epoch}) is {job.state.value}"
        if job.stop_requested_at_ms is not None:
            text += f", asked to stop: {job.stop_reason}"
        self._report_once("job", text)
        for key, label in (("ui_url", "Spark's user interface"), ("application_id", "Spark application")):
            if value := job.attributes.get(key):
                self._report_once(key, f"{label}: {value}")
        receivers = ledger.receivers.all(self.stream)
        problems = [problem for problem in input_problems(job, receivers, ledger.now_ms()) if not problem.starting]
        self._warn_of([*map(str, problems), *(job.attributes.get("troubles") or ())])
        for receiver in receivers:
            if receiver.job_epoch == job.epoch:
                self._report_once(str(receiver.receiver_id), _receiver_text(receiver, problems))

    def _warn_of(self, problems: Collection[str]) -> None:
        text = "; ".join(problems)
        # For example a topic name with a typo: the job keeps running and waits for it, and looks healthy.
        if text and (text != self._reported.get("troubles") or self._monotonic() >= self._warned_at + _WARN_SECONDS):
            self._reported["troubles"], self._warned_at = text, self._monotonic()
            self._warn(f"Problem: {text}")
        elif not text and "troubles" in self._reported:
            del self._reported["troubles"]
            self._report("The problem is over.")

    def _report_once(self, key: str, text: str) -> None:
        if self._reported.get(key) != text:
            self._reported[key] = text
            self._report(text)


def newest_job(ledger: Ledger, stream_name: str) -> JobRow | None:
    """The stream's newest job. If it was a process of this machine and was killed, it is ended first: the next job
    then need not wait for the end of its lease. If that was wrong, the ledger refuses what the process still writes.
    """
    job = ledger.jobs.current(stream_name)
    if job is None or not job.alive(ledger.now_ms()) or not has_ended(job.attributes.get(PROCESS)):
        return job
    host, pid = job.attributes.get("host"), job.attributes.get("pid")
    ledger.jobs.end_dead(stream_name, job.epoch, f"its process {pid} on {host} was killed or has crashed")
    return ledger.jobs.current(stream_name)


def outcome(job: JobRow, now_ms: int) -> JobOutcome | None:
    """How this job had ended by ``now_ms``; None while it is alive."""
    from headrace.ledger.states import JobState

    if job.state is JobState.STOPPED:
        return JobOutcome.STOPPED
    if job.state is JobState.FAILED:
        return JobOutcome.FAILED
    return None if job.alive(now_ms) else JobOutcome.LOST


def awaited_application(ledger: Ledger, stream_name: str, *, timeout_ms: int) -> str | None:
    """Why a batch should wait for the receiver job's application instead of starting its own; None if it should not.

    It should wait if the application is starting or due. It is due if the last one ended less than ``timeout_ms`` ago
    and the stream should run, so that its receiver DAG starts the next one.
    """
    from headrace.ledger.states import DesiredState, JobState

    job = newest_job(ledger, stream_name)
    if job is None:
        return None
    now_ms = ledger.now_ms()
    if job.alive(now_ms):
        return "The receiver job's application is starting." if job.state is JobState.STARTING else None
    if ledger.streams.get(stream_name).desired_state is DesiredState.STOPPED:
        return None
    if now_ms - (job.ended_at_ms or job.heartbeat_ms) >= timeout_ms:
        return None
    return f"The receiver job (epoch {job.epoch}) is gone, and the next one is due."


ATTACHED = "attached"
"""The attribute of a receiver job that names the task waiting for its end."""
ATTACHED_TASK = "attached_task"
"""The attribute with what Airflow knows that task by."""


def is_of_another_run(job: JobRow, instance: Any) -> bool:
    """Whether the task that waits for the job's end is another one than this task instance, or of another run."""
    task = job.attributes.get(ATTACHED_TASK)
    return task is not None and any(getattr(instance, name) != task[name] for name in ("dag_id", "run_id", "task_id"))


def missing_application(ledger: Ledger, stream_name: str, job: JobRow | None) -> str | None:
    """Why no receiver job accepts batches in its application, with the remedy; None if ``job``, the newest, does."""
    from headrace.ledger.states import DesiredState

    if job is not None and job.alive(ledger.now_ms()):
        if job.attributes.get("connect_url"):
            return None
        return f"The receiver job (epoch {job.epoch}) is {job.state.value} and serves no Spark Connect."
    if ledger.streams.get(stream_name).desired_state is DesiredState.STOPPED:
        return f"The stream is stopped, and has no receiver job; `headrace streams start {stream_name}` starts it."
    if job is None:
        return f"The stream has had no receiver job yet. Is the DAG paused that starts it ({stream_name}_receiver)?"
    how = job.error or ("it was stopped" if job.state.ended else "its lease has run out")
    return (
        f"The receiver job (epoch {job.epoch}) is gone: {how}. Its DAG ({stream_name}_receiver) starts the next one, "
        "unless that is paused."
    )


def _receiver_text(receiver: ReceiverRow, problems: Collection[InputProblem]) -> str:
    from headrace.receiver.health import receiver_state

    text = f"Receiver {receiver.receiver_id} is {receiver_state(receiver, problems)} on {receiver.host}"
    if receiver.paused_reason:
        text += f", paused: {receiver.paused_reason}"
    if receiver.restarts:
        text += f", restarted {receiver.restarts} time(s)"
    if receiver.last_error:
        text += f"; its last error: {receiver.last_error}"
    return text


@dataclass(frozen=True, slots=True)
class Receiving:
    """Whether all of a stream is being received; ``reason`` explains it, in words for a task log."""

    ok: bool
    reason: str


def receiving(ledger: Ledger, stream_name: str, *, receivers: int, max_silence_ms: int) -> Receiving:
    """Return whether all of the stream is being received.

    That is: the receiver job is alive, all ``receivers`` run, none is silent for longer than ``max_silence_ms`` or
    paused, Kafka answers for every input and topic, and no partition has been stopped by an error.
    """
    from headrace.receiver.health import input_problems

    job = newest_job(ledger, stream_name)
    now_ms = ledger.now_ms()
    if (problem := _job_problem(job, now_ms)) is not None or job is None:
        return Receiving(False, problem or "")
    rows = [row for row in ledger.receivers.all(stream_name) if row.job_epoch == job.epoch]
    for row in rows:
        if (problem := _receiver_problem(row, now_ms, max_silence_ms)) is not None:
            return Receiving(False, problem)
    if len(rows) < receivers:
        return Receiving(False, f"{len(rows)} of {receivers} receivers have started")
    if problems := input_problems(job, rows, now_ms):
        return Receiving(False, ", ".join(map(str, problems[:_REPORTED_PARTITIONS])))
    if (problem := _partition_problem(ledger, stream_name)) is not None:
        return Receiving(False, problem)
    return Receiving(True, f"{len(rows)} receiver(s) running")


def _partition_problem(ledger: Ledger, stream_name: str) -> str | None:
    failed = [row for row in ledger.positions.all(stream_name, live=True) if row.state.value == "failed"]
    if failed:
        # Ignore inputs and topics that the stream no longer declares.
        declared = {one.id: one for one in Stream.from_json(ledger.streams.get(stream_name).definition).inputs}
        failed = [r for r in failed if r.input_id in declared and declared[r.input_id].matches(r.partition.topic)]
    if not failed:
        return None
    # A broken topic fails alike in all its partitions, so the first ones are enough to show why.
    reported = "; ".join(
        f"{row.partition.topic}-{row.partition.partition} at offset {row.next_offset}: {row.error or 'no error'}"
        for row in failed[:_REPORTED_PARTITIONS]
    )
    more = f"; and {len(failed) - _REPORTED_PARTITIONS} more" if len(failed) > _REPORTED_PARTITIONS else ""
    return f"{len(failed)} partition(s) are stopped by an error: {reported}{more}"


def _job_problem(job: JobRow | None, now_ms: int) -> str | None:
    if job is None:
        return "the stream has no receiver job yet"
    if not job.alive(now_ms):
        return f"the receiver job (epoch {job.epoch}) is not alive: {job.error or job.state.value}"
    if job.state.value != "running":
        return f"the receiver job (epoch {job.epoch}) is {job.state.value}"
    return None


def _receiver_problem(row: ReceiverRow, now_ms: int, max_silence_ms: int) -> str | None:
    if row.state.value != "running" or not row.alive(now_ms):
        return f"receiver {row.receiver_id} is {row.state.value}: {row.last_error or 'no error'}"
    if now_ms - row.heartbeat_ms > max_silence_ms:
        return f"receiver {row.receiver_id} has been silent for {now_ms - row.heartbeat_ms} ms"
    if row.paused_reason:
        return f"receiver {row.receiver_id} is paused: {row.paused_reason}"
    return None


# A job outlives the tasks that start it, so after an upgrade it still runs the old installation. Batches of another
# version cannot run in its application: functions are sent there by cloudpickle, and the log's reader with them.
# While only some workers are upgraded, an older one may start the job again. That job then stays for this time.
SETTLED_MS = 300_000
# The first of these versions that differs decides which of two processes is newer.
_ORDER = ("headrace", "pyspark", "python")


def is_newer(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether ``ours`` are newer versions than ``theirs``. Never true in both directions, so two jobs never replace
    each other in turns."""
    for name in _ORDER:
        if ours.get(name) != theirs.get(name):
            try:
                return Version(ours.get(name, "")) > Version(theirs.get(name, ""))
            except InvalidVersion:
                return False
    return False


def replace_older_job(ledger: Ledger, stream_name: str) -> str | None:
    """Ask the stream's job to stop if it is older than this process, so that its DAG starts the next one.

    A job is asked once, not before it has run for ``SETTLED_MS``, and not if the stream should be stopped.

    Returns:
        Why a batch should wait for the next job; None if no job is being replaced by one of this version.
    """
    from headrace.ledger.states import DesiredState
    from headrace.spark.sessions import REPLACED_BY
    from headrace.spark.versions import current_versions, version_differences

    job = newest_job(ledger, stream_name)
    ours = current_versions()
    if job is None or not job.alive(ledger.now_ms()) or not job.versions or not is_newer(ours, job.versions):
        return None
    different = "; ".join(version_differences(job.versions, ours))
    if job.stop_requested_at_ms is None:
        if ledger.now_ms() - job.acquired_at_ms < SETTLED_MS:
            return None
        if ledger.streams.get(stream_name).desired_state is DesiredState.STOPPED:
            return None
        reason = f"it is replaced by a job of a newer version: {different}"
        job = ledger.jobs.request_stop(stream_name, reason, epoch=job.epoch, attributes={REPLACED_BY: ours})
    if job is None or REPLACED_BY not in job.attributes:
        return None
    return f"The receiver job (epoch {job.epoch}) is being replaced by one of this version: {different}."


# From the start of the process until it takes the lease over: spark-submit's start, with time for a busy machine.
_CLAIM_MS = 90_000


def is_request(job: JobRow) -> bool:
    """Whether no process has adopted the job yet."""
    from headrace.ledger.receiving.jobs import REQUESTED_OF

    return not job.state.ended and job.attributes.get(REQUESTED_OF) is not None


def request_job(ledger: Ledger, stream: Stream, *, revision: int, holder: str, lease_ms: int) -> None:
    """Request the stream's receiver job of its shared job. Raises LeaseHeldError if the stream has a live job."""
    from headrace.ledger.receiving.jobs import REQUESTED_OF
    from headrace.receiver.health import REVISION
    from headrace.spark.versions import current_versions

    ledger.jobs.acquire(
        stream.name,
        holder=holder,
        lease_ms=lease_ms,
        versions=current_versions(),
        attributes={REQUESTED_OF: stream.spark.job, REVISION: revision},
    )


def start_if_absent(
    ledger: Ledger, shared_job: str, *, holder: str, start: Callable[[], DetachedProcess]
) -> DetachedProcess | None:
    """Start the process of a shared job, unless one is alive or being started. ``holder`` names the process.

    Returns the started process. Of several tasks that call this at once, one starts it.
    """
    from headrace.ledger.errors import LeaseHeldError

    job = ledger.shared_jobs.current(shared_job)
    if job is not None and job.alive(ledger.now_ms()):
        if not has_ended(job.attributes.get(PROCESS)):
            return None
        ledger.shared_jobs.end(shared_job, job.epoch)
    try:
        claim = ledger.shared_jobs.acquire(shared_job, holder=holder, lease_ms=_CLAIM_MS)
    except LeaseHeldError:
        return None
    try:
        return start()
    except BaseException:
        ledger.shared_jobs.end(shared_job, claim.epoch)
        raise


def end_claim(ledger: Ledger, shared_job: str, *, holder: str) -> None:
    """End the lease of a process that has ended without a report, so that the next task starts another at once."""
    job = ledger.shared_jobs.current(shared_job)
    if job is not None and job.holder == holder:
        ledger.shared_jobs.end(shared_job, job.epoch)


def connections_of_others(ledger: Ledger, stream: Stream) -> Mapping[str, str]:
    """The connections of the other streams of this one's shared job, as environment variables.

    Without those that are not defined, or that this task may not read: the process refuses the streams that need them.
    """
    from headrace.stream.model import StreamDefinitionError

    variables: dict[str, str] = {}
    for row in ledger.streams.all():
        try:
            other = Stream.from_json(row.definition)
        except StreamDefinitionError:
            continue
        if other.name == stream.name or other.spark.job != stream.spark.job:
            continue
        for conn_id in other.connection_ids:
            try:
                variables |= connection_variables([conn_id])
            except (AirflowException, AirflowRuntimeError, PermissionError):
                continue
    return variables
