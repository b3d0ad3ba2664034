"""A stream's receiver job: one lease, one tracker, the receivers and the listeners, from start to end.

It runs in a process with a Spark application (``receiver_process``), alone or beside the jobs of other streams. It
fails, stops and ends by itself: any failure is written into its lease, and an ended job leaves nothing running.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.checks.connecting import check_part, check_storage
from headrace.clock import times_text
from headrace.errors import HeadraceError
from headrace.ledger import BatchState, JobState
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.ledger.tables import JobLease, JobRow
from headrace.listeners.bus import LAST_SAVE_SECONDS
from headrace.listeners.job_listeners import JobListeners
from headrace.receiver.tracker import ReceiverTracker, TrackerEnd, TrackerReport, write_sign
from headrace.spark.attempts.failures import first_cause
from headrace.spark.receiving.executor_allocation import ExecutorAllocationManager
from headrace.spark.receiving.receiver_application import ReceiverApplication
from headrace.spark.receiving.receiver_launcher import SparkReceiverLauncher
from headrace.spark.records.transforms import add_py_files
from headrace.spark.sessions import REPLACED_BY
from headrace.spark.termination import EXIT_FAILED, EXIT_NOT_OURS, EXIT_TERMINATED, Terminated
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from headrace.spark.receiving.job_application import JobApplication

logger = logging.getLogger(__name__)

RENEW_SECONDS = 5.0
_CANCEL_SECONDS = 10.0
# Cancelling can hang on a lost executor, and the ledger's calls on a lost server.
_END_SECONDS = 30.0
PATIENCE_SECONDS = 300.0
"""How long a job waits for a ledger that does not answer, at its start, and when it has to record that it has stopped.

A job that starts would otherwise fail, and the next one would first have to start Spark. A job that has stopped counts
as dead then, and its task in Airflow as failed."""
_REPEAT_SECONDS = 2.0
ERROR_CHARACTERS = 2_000
LISTENERS_SECONDS = 10.0
"""How long the end of a stopped job waits for listeners, before their cursors are written."""
# The same for a failed job, and for its cursors: the next job waits for the lease, which nothing renews any more.
_FAILED_LISTENERS_SECONDS = 1.0


class StorageNotUsableError(HeadraceError):
    """The stream's storage cannot be written to."""


class ReceiverJob:
    """Runs a stream's receivers until a stop is requested in the ledger. Use once.

    ``end_hangs`` is called with an exit code if the job's end hangs; it ends the process, or leaves the job behind.
    """

    def __init__(self, context: StreamContext, lease: JobLease, *, end_hangs: Callable[[int], None]) -> None:
        self._context = context
        self._stream = context.stream
        self._ledger = context.ledger
        self._lease = lease
        self._end_hangs = end_hangs
        self._application: JobApplication | None = None
        self._launcher: SparkReceiverLauncher | None = None
        self._listeners: JobListeners | None = None

    def run(self, open_application: Callable[[], JobApplication]) -> int:
        """Run the job in the application of its process. Returns the exit code of a process without other jobs.

        1. Start the listeners: they get the events from the job's start on.
        2. Check that the storage can be written to, and in the background the inputs, while Spark starts.
        3. Join the process's application, which may have to be started for it.
        4. Run the receivers, by the tracker, until a stop is requested.
        5. Wait for the batches that still need the application.
        6. End the receivers, the listeners and the lease.
        """
        try:
            self._listeners = JobListeners(self._context, self._lease, partial(add_py_files, self._stream))
            self._listeners.start()
            self._until_answered(self._check_storage, PATIENCE_SECONDS, "the job waits with its start")
            threading.Thread(target=self._check_inputs, name="headrace-check", daemon=True).start()
            report = self._track(*self._join(open_application))
            if report.end in (TrackerEnd.STOPPED, TrackerEnd.FORCED):
                self._await_batches()
            return self._end_as_reported(report)
        except LeaseLostError as lost:
            logger.error("%s", lost)
            self._end(JobState.FAILED, str(lost), EXIT_NOT_OURS)
            return EXIT_NOT_OURS
        except BaseException as error:
            logger.error("the receiver job failed: %s", first_cause(error))
            code = EXIT_TERMINATED if isinstance(error, Terminated) else EXIT_FAILED
            self._end(JobState.FAILED, first_cause(error)[:ERROR_CHARACTERS], code)
            raise

    def _check_storage(self) -> None:
        """Raise StorageNotUsableError if nothing could be received. Problems with Kafka do not end the job: receivers
        wait."""
        storage = check_storage(self._stream)
        if storage.error is not None:
            raise StorageNotUsableError(f"{storage.where} cannot be written to: {storage.error}", remedy=storage.remedy)
        # The tracker continues with it, when Spark has started.
        write_sign(self._context.storage, self._lease, self._ledger.now_ms())

    def _check_inputs(self) -> None:
        """Log and record problems with Kafka and topics while Spark starts. After that the tracker does this."""
        add_py_files(self._stream, may_be_missing=True)
        checks = [check for source in self._stream.inputs for check in check_part(source)]
        problems = [str(check) for check in checks if check.error is not None]
        for problem in problems:
            logger.error("%s", problem)
        if problems:
            with contextlib.suppress(HeadraceError):
                self._ledger.jobs.renew(self._lease, attributes={"troubles": problems})

    def _join(
        self, open_application: Callable[[], JobApplication]
    ) -> tuple[ReceiverApplication, SparkReceiverLauncher]:
        with Renewing(self._renew, self._lease.lease_ms):
            self._application = open_application()
        application, self._launcher = self._application.join(self._stream)

        def running() -> None:
            self._ledger.jobs.update(self._lease, state=JobState.RUNNING, attributes=application.attributes())

        self._until_answered(running, PATIENCE_SECONDS, "the job waits with its receivers")
        return application, self._launcher

    def _track(self, application: ReceiverApplication, launcher: SparkReceiverLauncher) -> TrackerReport:
        settings = self._stream.spark.executors
        with (
            contextlib.nullcontext()
            if settings is None
            else ExecutorAllocationManager(self._context, settings, application, launcher, self._lease)
        ):
            report = ReceiverTracker(self._context, launcher, self._lease).run()
        logger.info("the receivers have ended: %s (%s)", report.end, report.reason)
        return report

    def _await_batches(self) -> None:
        if self._stream.spark.run_batches != "connect":
            return
        with contextlib.suppress(LedgerUnavailableError):
            self._ledger.jobs.update(self._lease, state=JobState.STOPPING)
        pending = BatchDrain(self._context, self._lease).wait()
        if pending:
            logger.warning("stopped before the batches of %s were done", times_text(pending[:10]))

    def _end_as_reported(self, report: TrackerReport) -> int:
        if report.end is TrackerEnd.LOST:
            self._end(JobState.FAILED, report.reason, EXIT_NOT_OURS)
            return EXIT_NOT_OURS
        if report.end is TrackerEnd.WITHOUT_LEDGER:
            self._end(JobState.FAILED, f"stopped without its ledger: {report.reason}", 0)
        else:
            forced = None if report.end is TrackerEnd.STOPPED else "some receivers had to be cancelled"
            self._end(JobState.STOPPED, forced, 0)
        return 0

    def _end(self, state: JobState, error: str | None, exit_code: int) -> None:
        """End the receivers, the listeners, then the lease. A step that fails does not prevent the next one."""
        release_seconds = PATIENCE_SECONDS if state is JobState.STOPPED else 0.0
        most = _END_SECONDS + LISTENERS_SECONDS + LAST_SAVE_SECONDS + release_seconds
        ending = threading.Timer(most, self._end_hangs, (exit_code,))
        ending.daemon = True
        ending.start()
        # Cancelling and the listeners may take nearly as long as a lease.
        with Renewing(self._renew, self._lease.lease_ms) if state is JobState.STOPPED else contextlib.nullcontext():
            _try_step(self._cancel_receivers)
            _try_step(partial(self._stop_listeners, state))
        _try_step(partial(self.release, state, error, release_seconds))
        if self._application is not None:
            _try_step(partial(self._application.leave, self._stream))
        ending.cancel()

    def _cancel_receivers(self) -> None:
        if self._launcher is not None and not self._launcher.cancel_all(_CANCEL_SECONDS):
            logger.warning("some receivers did not end in %.0f s; the next epoch fences them", _CANCEL_SECONDS)

    def _stop_listeners(self, state: JobState) -> None:
        if self._listeners is None:
            return
        if state is JobState.FAILED:
            self._listeners.stop(_FAILED_LISTENERS_SECONDS, _FAILED_LISTENERS_SECONDS)
        else:
            self._listeners.stop(LISTENERS_SECONDS)

    def release(self, state: JobState, error: str | None, release_seconds: float = 0.0) -> None:
        """End the lease, with retries for ``release_seconds`` while the ledger does not answer."""

        def release() -> None:
            with contextlib.suppress(LeaseLostError):
                self._ledger.jobs.release(self._lease, state, error)

        self._until_answered(release, release_seconds, "the job's end is not recorded yet")

    def _until_answered(self, step: Callable[[], object], seconds: float, so: str) -> None:
        """Repeat ``step`` for ``seconds`` while the ledger does not answer; ``so`` is the consequence, for the log."""
        until = time.monotonic() + seconds
        while True:
            try:
                step()
                return
            except LedgerUnavailableError as unavailable:
                if time.monotonic() >= until:
                    raise
                logger.warning("the ledger does not answer, so %s: %s", so, unavailable)
                time.sleep(_REPEAT_SECONDS)

    def _renew(self) -> None:
        self._ledger.jobs.renew(self._lease)


def _try_step(step: Callable[[], None]) -> None:
    """Run a step of the job's end."""
    try:
        step()
    except Exception:
        logger.exception("a step of the receiver job's end failed")


class Renewing:
    """Renews a lease while Spark starts, which can take longer than a lease with slow executors, and while a stopped
    job ends.

    These are the exceptions to the rule that the storing loop renews: nothing is received before the start is done, or
    after the tracker has ended.
    """

    def __init__(self, renew: Callable[[], object], lease_ms: int) -> None:
        self._renew = renew
        self._over = threading.Event()
        self._period = min(RENEW_SECONDS, lease_ms / 3000)
        self._thread = threading.Thread(target=self._renew_until_over, name="headrace-renewal", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _renew_until_over(self) -> None:
        # Bounded: a start that hangs must not hold the stream forever.
        for _ in range(60):
            if self._over.wait(self._period):
                return
            with contextlib.suppress(HeadraceError):
                self._renew()


# Spark Streaming's bound for a graceful stop: ten batch intervals.
_MAX_INTERVALS = 10
# How long after an interval's end a batch task may take to be scheduled and to allocate its blocks.
_SCHEDULING_SECONDS = 15.0
_POLL_SECONDS = 1.0

Pending = tuple[int, ...]


class BatchDrain:
    """Keeps the application (and its lease) until the batches of all received blocks are done.

    It waits for at most ten batch intervals. It stops waiting after one interval and 15 s without any change: failed
    batches need a person, and if no batches are run there is nothing to wait for. A job that is replaced by one of a
    newer version does not wait for batches that have not started; they run in the new job. Time in which the ledger
    does not answer does not count as time without change.
    """

    def __init__(self, context: StreamContext, lease: JobLease) -> None:
        self._name = context.name
        self._ledger = context.ledger
        self._lease = lease
        self._clock = context.clock
        self._interval = context.stream.batch_interval_ms / 1000

    def wait(self) -> Pending:
        """Wait. Returns the batch times that are still not done, as far as known. Raises LeaseLostError."""
        started = changed = self._clock.monotonic()
        pending: Pending | None = None
        while True:
            latest = self._poll()
            now = self._clock.monotonic()
            if latest is None or latest != pending:
                pending, changed = pending if latest is None else latest, now
            if pending == () or now - started > _MAX_INTERVALS * self._interval:
                return pending or ()
            if now - changed > self._interval + _SCHEDULING_SECONDS:
                return pending or ()
            self._clock.wait(threading.Event(), _POLL_SECONDS)

    def _poll(self) -> Pending | None:
        """Renew the lease and return the pending batch times; None if the ledger does not answer."""
        try:
            self._ledger.jobs.renew(self._lease)
            return self.pending()
        except LedgerUnavailableError as error:
            logger.warning("the ledger does not answer, so the pending batches are not known: %s", error)
            return None

    def pending(self) -> Pending:
        """The batch times that run now; also those that wait to run, if batches are run at all."""
        name = self._name
        running = {row.batch_time_ms for row in self._ledger.batches.page(name, states=[BatchState.RUNNING])}
        # A running batch whose process is gone is not worth waiting for.
        now_ms = self._ledger.now_ms()
        alive = {
            batch_time_ms
            for batch_time_ms in running
            if any(attempt.alive(now_ms) for attempt in self._ledger.attempts.of_batch(name, batch_time_ms))
        }
        job = self._ledger.jobs.current(name)
        if not self._somebody_runs_batches(job) or (job is not None and REPLACED_BY in job.attributes):
            return tuple(sorted(alive))
        allocated = {row.batch_time_ms for row in self._ledger.batches.page(name, states=[BatchState.ALLOCATED])}
        unclaimed = {row.batch_time_ms for row in self._ledger.blocks.unclaimed(name)}
        return tuple(sorted(alive | allocated | unclaimed))

    def _somebody_runs_batches(self, job: JobRow | None) -> bool:
        since_ms = 0 if job is None else job.acquired_at_ms
        return any(
            row.started_at_ms is not None and row.started_at_ms >= since_ms
            for row in self._ledger.batches.page(self._name, 20)
        )
