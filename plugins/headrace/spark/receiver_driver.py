"""The receiver job's driver: runs one lease, one Spark application and one tracker from start to end.

The lease is acquired first, and any failure after that is written into it; a failed job leaves nothing running. If the
driver or the JVM is killed, the other ends too (``termination``), and the lease expires.

Exit codes: 0 stopped as requested, 1 failed, 75 another job holds or took the stream, 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.clock import times_text
from headrace.errors import HeadraceError
from headrace.fsck.connecting import check_input, check_storage
from headrace.ledger import JobState, Ledger
from headrace.ledger.errors import LeaseHeldError, LeaseLostError, LedgerUnavailableError
from headrace.ledger.tables import JobLease
from headrace.listeners.bus import LAST_SAVE_SECONDS
from headrace.listeners.job_listeners import JobListeners
from headrace.processes import PROCESS, own_identity
from headrace.receiver.health import REVISION
from headrace.receiver.tracker import ReceiverTracker, TrackerEnd, write_sign
from headrace.spark.batch_drain import BatchDrain
from headrace.spark.batch_server import start_batch_server
from headrace.spark.executor_allocation import ExecutorAllocationManager
from headrace.spark.failures import first_cause
from headrace.spark.job_log import LOG_VARIABLE, bounded_log
from headrace.spark.receiver_application import ReceiverApplication, start_application, warm_up_connect
from headrace.spark.receiver_launcher import SparkReceiverLauncher
from headrace.spark.sessions import (
    FINGERPRINT,
    SECRET_VARIABLE,
    current_versions,
    secret_fingerprint,
    token_from_environment,
)
from headrace.spark.termination import (
    EXIT_FAILED,
    EXIT_NOT_OURS,
    EXIT_TERMINATED,
    ProcessWatch,
    Terminated,
    jvm_gone,
    parent_gone,
    raise_on_sigterm,
    under_spark_submit,
)
from headrace.spark.transforms import add_py_files
from headrace.stream import Stream
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

# Long enough for pauses of the driver's garbage collector, disk or ledger. A dead driver is replaced after this time.
LEASE_MS = 30_000

RENEW_SECONDS = 5.0
_CANCEL_SECONDS = 10.0
# Stopping Spark can hang on a lost executor; after this time the process ends anyway.
STOP_SECONDS = 30.0
# How long a regularly stopped job tries to record this in a ledger that does not answer. If it cannot, it counts as
# dead, and its task in Airflow as failed.
_RELEASE_SECONDS = 300.0
_RELEASE_PERIOD_SECONDS = 2.0
ERROR_CHARACTERS = 2_000
# How long the end of a stopped job waits for listeners, before their cursors are written.
_LISTENERS_SECONDS = 10.0
# The same for a failed job, and for its cursors: the next job waits for the lease, which nothing renews any more.
_FAILED_LISTENERS_SECONDS = 1.0


class StorageNotUsableError(HeadraceError):
    """The stream's storage cannot be written to."""


class ReceiverJob:
    """Runs a stream's receivers until a stop is requested in the ledger. Use once."""

    def __init__(self, context: StreamContext, *, revision: int, holder: str, lease_ms: int = LEASE_MS) -> None:
        self._context = context
        self._stream = context.stream
        self._ledger = context.ledger
        self._revision = revision
        self._holder = holder
        self._lease_ms = lease_ms
        self._lease: JobLease | None = None
        self._application: ReceiverApplication | None = None
        self._launcher: SparkReceiverLauncher | None = None
        self._watches: list[ProcessWatch] = []
        self._listeners: JobListeners | None = None
        self._batch_server: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run the job and return the process's exit code. Raises LeaseHeldError if another job is alive."""
        self._lease = self.acquire()
        logger.info(
            "stream %s by revision %d, receiver job of epoch %d, held by %s",
            self._stream.name, self._revision, self._lease.epoch, self._holder,
        )  # fmt: skip
        try:
            self._listeners = JobListeners(self._context, self._lease, partial(add_py_files, self._stream))
            self._listeners.start()
            self._start(self._lease)
            return self._track(self._lease)
        except LeaseLostError as lost:
            logger.error("%s", lost)
            self._end(JobState.FAILED, str(lost), EXIT_NOT_OURS)
            return EXIT_NOT_OURS
        except BaseException as error:
            logger.error("the receiver job failed: %s", first_cause(error))
            code = EXIT_TERMINATED if isinstance(error, Terminated) else EXIT_FAILED
            self._end(JobState.FAILED, first_cause(error)[:ERROR_CHARACTERS], code)
            raise

    def acquire(self) -> JobLease:
        """Acquire the stream's lease for this process. Raises LeaseHeldError."""
        if under_spark_submit():
            self._watch(parent_gone())
        return self._ledger.jobs.acquire(
            self._stream.name,
            holder=self._holder,
            lease_ms=self._lease_ms,
            versions=current_versions(),
            attributes={REVISION: self._revision, **process_attributes(self._stream.name)},
        )

    def _start(self, lease: JobLease) -> None:
        storage = check_storage(self._stream)
        if storage.error is not None:
            # Without storage nothing can be received. Problems with Kafka do not end the job: receivers wait.
            raise StorageNotUsableError(f"{storage.where} cannot be written to: {storage.error}", remedy=storage.remedy)
        # The tracker continues with it, when Spark has started.
        write_sign(self._context.storage, lease, self._ledger.now_ms())
        threading.Thread(target=self._look_at_inputs, args=(lease,), name="headrace-check", daemon=True).start()
        started = time.monotonic()
        application, self._launcher = self.open_application(lease)
        self._ledger.jobs.update(lease, state=JobState.RUNNING, attributes=application.attributes())
        logger.info("Spark application ready after %.1f s: %s", time.monotonic() - started, application.attributes())

    def open_application(self, lease: JobLease) -> tuple[ReceiverApplication, SparkReceiverLauncher]:
        """Start the application, and return it with the launcher of the stream's receivers in it."""
        token = None
        if self._stream.spark.run_batches == "connect":
            token = token_from_environment(self._stream.name, lease.epoch)
        with Renewing(lambda: self._ledger.jobs.renew(lease), lease.lease_ms):
            self._application = start_application(self._stream, token=token)
        spark_context = self._application.spark.sparkContext
        if not under_spark_submit():
            self._watch(jvm_gone(spark_context._gateway))
        if token is not None:
            self._batch_server = start_batch_server(self._stream.ledger, self._stream.name)
            warm_up_connect(str(self._application.connect_url), token, self._application.batch_slots, self._stream)
        return self._application, SparkReceiverLauncher(spark_context, self._stream)

    def _look_at_inputs(self, lease: JobLease) -> None:
        """Log and record problems with Kafka and topics while Spark starts. After that the tracker does this."""
        add_py_files(self._stream, may_be_elsewhere=True)
        found = [each for source in self._stream.inputs for each in check_input(source)]
        wrong = [str(each) for each in found if each.error is not None]
        for text in wrong:
            logger.error("%s", text)
        if wrong:
            with contextlib.suppress(HeadraceError):
                self._ledger.jobs.renew(lease, attributes={"troubles": wrong})

    def _track(self, lease: JobLease) -> int:
        if self._launcher is None:
            raise RuntimeError("the application was not started")
        with self._allocating_executors(self._launcher, lease):
            report = ReceiverTracker(self._context, self._launcher, lease).run()
        logger.info("the receivers have ended: %s (%s)", report.end, report.reason)
        if report.end is TrackerEnd.LOST:
            self._end(JobState.FAILED, report.reason, EXIT_NOT_OURS)
            return EXIT_NOT_OURS
        if report.end is TrackerEnd.WITHOUT_LEDGER:
            self._end(JobState.FAILED, f"stopped without its ledger: {report.reason}", 0)
            return 0
        if self._stream.spark.run_batches == "connect":
            with contextlib.suppress(LedgerUnavailableError):
                self._ledger.jobs.update(lease, state=JobState.STOPPING)
            pending = BatchDrain(self._context, lease).wait()
            if pending:
                logger.warning("stopped before the batches of %s were done", times_text(pending[:10]))
        forced = None if report.end is TrackerEnd.STOPPED else "some receivers had to be cancelled"
        self._end(JobState.STOPPED, forced, 0)
        return 0

    def _allocating_executors(
        self, launcher: SparkReceiverLauncher, lease: JobLease
    ) -> contextlib.AbstractContextManager[object]:
        settings = self._stream.spark.executors
        if settings is None or self._application is None:
            return contextlib.nullcontext()
        return ExecutorAllocationManager(self._context, settings, self._application, launcher, lease)

    def _end(self, state: JobState, error: str | None, exit_code: int) -> None:
        """End the receivers, the listeners, the lease, then Spark. A step that fails does not prevent the next one; if
        a step hangs, the process ends with ``exit_code``."""
        release_seconds = _RELEASE_SECONDS if state is JobState.STOPPED else 0.0
        most = STOP_SECONDS + _LISTENERS_SECONDS + LAST_SAVE_SECONDS + release_seconds
        ending = threading.Timer(most, self.end_hangs, (exit_code,))
        ending.daemon = True
        ending.start()
        lease = self._lease if state is JobState.STOPPED else None
        # Cancelling and the listeners may take nearly as long as a lease.
        with (
            contextlib.nullcontext()
            if lease is None
            else Renewing(lambda: self._ledger.jobs.renew(lease), lease.lease_ms)
        ):
            _try_step(self._cancel_receivers)
            _try_step(partial(self._stop_listeners, state))
        _try_step(partial(self.release, state, error, release_seconds))
        _try_step(self.close_application)
        for watch in self._watches:
            watch.dismiss()
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
            self._listeners.stop(_LISTENERS_SECONDS)

    def release(self, state: JobState, error: str | None, release_seconds: float = 0.0) -> None:
        """End the lease, with retries for ``release_seconds`` while the ledger does not answer."""
        if self._lease is None:
            return
        until = time.monotonic() + release_seconds
        while True:
            try:
                with contextlib.suppress(LeaseLostError):
                    self._ledger.jobs.release(self._lease, state, error)
                return
            except LedgerUnavailableError as unavailable:
                if time.monotonic() >= until:
                    raise
                logger.warning("the ledger does not answer, so the job's end is not recorded yet: %s", unavailable)
                time.sleep(_RELEASE_PERIOD_SECONDS)

    def end_hangs(self, exit_code: int) -> None:
        """Called if a step of the end hangs: end the process."""
        os._exit(exit_code)

    def close_application(self) -> None:
        """End the batch server and Spark."""
        if self._batch_server is not None:
            self._batch_server.terminate()
        if self._application is not None:
            self._application.spark.stop()

    def _watch(self, gone: Callable[[], bool]) -> None:
        self._watches.append(ProcessWatch(gone, before_end=self._jvm_is_gone).start())

    def _jvm_is_gone(self) -> None:
        """Release the lease: the receivers ended with the JVM, so the next job need not wait for its expiry."""
        self.release(JobState.FAILED, "the driver's JVM is gone")


def _try_step(step: Callable[[], None]) -> None:
    """Run a step of the job's end."""
    try:
        step()
    except Exception:
        logger.exception("a step of the receiver job's end failed")


def process_attributes(application: str) -> dict[str, Any]:
    """The attributes of a receiver job that identify its process, for people and for other processes.

    ``application`` is the name of the Spark application (`Stream.application`).
    """
    secret = os.environ.get(SECRET_VARIABLE)
    return {
        "pid": os.getpid(),
        PROCESS: own_identity(),
        "host": socket.gethostname(),
        "java_parent": under_spark_submit(),
        # On the host; None in cluster mode, where the master keeps the driver's output.
        "log": os.environ.get(LOG_VARIABLE),
        # With it, batches check that they have the same secret.
        **({FINGERPRINT: secret_fingerprint(secret, application)} if secret else {}),
    }


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``spark_jobs/receiver.py`` and return the exit code."""
    from headrace.spark.shared_job import SharedJob

    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    raise_on_sigterm()
    try:
        with bounded_log(), Ledger.open(options.ledger, create=False) as ledger:
            row = ledger.streams.get(options.stream)
            if options.revision is not None:
                row = ledger.streams.at_revision(options.stream, options.revision)
            context = StreamContext(Stream.from_json(row.definition), ledger)
            if context.stream.spark.job is not None:
                return SharedJob(context, holder=options.holder, lease_ms=options.lease_ms).run()
            job = ReceiverJob(context, revision=row.revision, holder=options.holder, lease_ms=options.lease_ms)
            return job.run()
    except Terminated:
        return EXIT_TERMINATED
    except LeaseHeldError as held:
        print(held, file=sys.stderr, flush=True)
        return EXIT_NOT_OURS
    except HeadraceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="receiver.py", description="Run a stream's receivers in Spark.")
    parser.add_argument("--ledger", required=True, help='SQLAlchemy URL without a password, or "connection:<id>"')
    parser.add_argument("--stream", required=True)
    parser.add_argument("--revision", type=int, help="of the stream's definition; by default its newest")
    parser.add_argument("--holder", default=f"{socket.gethostname()}:{os.getpid()}:{time.time_ns() // 1_000_000}")
    parser.add_argument("--lease-ms", type=int, default=LEASE_MS)
    return parser
