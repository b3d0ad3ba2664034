"""The receiver job: runs one lease, one Spark application and one tracker from start to end.

The lease is acquired first, and any failure after that is written into it; a failed job leaves nothing running. If the
driver or the JVM is killed, the other ends too (``termination``), and the lease expires.

Several streams can share a process with one Spark application (`SharedJob`). A stream's task requests its job in the
ledger (``Jobs.requests``). The process looks for requests, adopts each one's lease and runs the stream's `ReceiverJob`
in a thread: with its own lease, tracker and listeners. So a stream fails, stops and starts again by itself. The process
ends when no stream has run in it for a while, or with its JVM. The application's settings, Python files and connections
are those of its start. A stream that needs others is refused.

Exit codes: 0 stopped as requested, 1 failed, 75 another job holds or took the stream (or is the shared job of this
name), 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.clock import times_text
from headrace.connections import ConnectionNotFoundError, resolve
from headrace.errors import HeadraceError
from headrace.fsck.connecting import check_input, check_storage
from headrace.ledger import JobState, Ledger
from headrace.ledger.errors import LeaseHeldError, LeaseLostError, LedgerUnavailableError
from headrace.ledger.tables import JobLease, JobRow, SharedJobRow
from headrace.listeners.bus import LAST_SAVE_SECONDS
from headrace.listeners.job_listeners import JobListeners
from headrace.processes import PROCESS, own_identity
from headrace.receiver.health import REVISION
from headrace.receiver.tracker import ReceiverTracker, TrackerEnd, write_sign
from headrace.spark.batch_server import link_batch_server, start_batch_server, unlink_batch_server
from headrace.spark.executor_allocation import ExecutorAllocationManager
from headrace.spark.executors import task_slots
from headrace.spark.failures import first_cause
from headrace.spark.job_log import LOG_VARIABLE, bounded_log
from headrace.spark.receiver_application import (
    BatchDrain,
    ReceiverApplication,
    check_task_slots,
    start_application,
)
from headrace.spark.receiver_launcher import SparkReceiverLauncher
from headrace.spark.sessions import (
    APPLICATION,
    FINGERPRINT,
    SECRET_VARIABLE,
    current_versions,
    is_local_master,
    secret_fingerprint,
    token_from_environment,
    version_differences,
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
from headrace.spark.warm_up import warm_up_connect
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
        add_py_files(self._stream, may_be_missing=True)
        checks = [check for source in self._stream.inputs for check in check_input(source)]
        problems = [str(check) for check in checks if check.error is not None]
        for problem in problems:
            logger.error("%s", problem)
        if problems:
            with contextlib.suppress(HeadraceError):
                self._ledger.jobs.renew(lease, attributes={"troubles": problems})

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


LOOK_SECONDS = 0.5
IDLE_SECONDS = 60.0
"""How long the process lives without a stream: a stream that fails or is restarted comes back earlier."""


class StreamJob(ReceiverJob):
    """The receiver job of one stream in a shared job's process. Its failure does not end the process."""

    def __init__(self, context: StreamContext, lease: JobLease, *, revision: int, shared: SharedApplication) -> None:
        super().__init__(context, revision=revision, holder=lease.holder, lease_ms=lease.lease_ms)
        self._adopted = lease
        self._shared = shared

    def acquire(self) -> JobLease:
        return self._adopted

    def open_application(self, lease: JobLease) -> tuple[ReceiverApplication, SparkReceiverLauncher]:  # noqa: ARG002
        """Join the process's application."""
        return self._shared.join(self._context.stream)

    def end_hangs(self, exit_code: int) -> None:  # noqa: ARG002
        """End the lease alone: the process has other streams. The next job's epoch fences what hangs."""
        logger.error("the end of the receiver job of stream %s hangs; its lease is released", self._context.name)
        self.release(JobState.FAILED, "its end hangs in the shared job's process")

    def close_application(self) -> None:
        """Leave the application."""
        self._shared.leave(self._context.stream)


class SharedJob:
    """Runs the receiver jobs of the streams that request it of a shared job. Use once.

    ``context`` is that of the stream that names the job, and with whose Spark settings the application starts.
    """

    def __init__(
        self, context: StreamContext, *, holder: str, lease_ms: int, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._name = str(context.stream.spark.job)
        self._first = context.stream
        self._ledger = context.ledger
        self._holder = holder
        # The task that started the process is mostly another stream's.
        self._streams_holder = f"shared job {self._name}, started by {holder}"
        self._lease_ms = lease_ms
        self._idle_seconds = idle_seconds
        self._running: dict[str, tuple[StreamJob, threading.Thread]] = {}
        self._idle_since = 0.0
        self._renew_at = 0.0
        # It takes no more streams, and ends with those that it has.
        self._closed = False

    def run(self) -> int:
        """Run until no stream needs the process. Returns its exit code.

        Raises:
            LeaseHeldError: another process is the job of this name.
        """
        for handler in logging.getLogger().handlers:
            # The main threads of its streams have their names.
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s"))
        attributes = process_attributes(self._first.application)
        lease = self._ledger.shared_jobs.acquire(
            self._name, holder=self._holder, lease_ms=self._lease_ms, attributes=attributes
        )
        attributes[APPLICATION] = [self._first.application, lease.epoch]
        logger.info(
            "shared job %s of epoch %d, process %d, held by %s", self._name, lease.epoch, os.getpid(), self._holder
        )
        watches = [ProcessWatch(parent_gone(), before_end=self._jvm_is_gone).start()] if under_spark_submit() else []
        application: ReceiverApplication | None = None
        batch_server: subprocess.Popen[bytes] | None = None
        code = EXIT_FAILED
        try:
            application, batch_server = self._start(lease)
            if not under_spark_submit():
                gone = jvm_gone(application.spark.sparkContext._gateway)
                watches.append(ProcessWatch(gone, before_end=self._jvm_is_gone).start())
            self._serve(lease, SharedApplication(application, self._first), attributes)
            code = EXIT_NOT_OURS if self._closed and self._is_replaced(lease) else 0
        except Terminated as terminated:
            code = EXIT_TERMINATED
            self._fail_all(str(terminated))
            raise
        except BaseException as error:
            logger.error("the shared job %s failed: %s", self._name, first_cause(error))
            text = f"the shared job {self._name} failed: {first_cause(error)}"[:ERROR_CHARACTERS]
            self._fail_all(text)
            self._refuse_all(text, attributes)
            raise
        finally:
            self._end(lease, application, batch_server, code)
            for watch in watches:
                watch.dismiss()
        return code

    def _start(self, lease: SharedJobRow) -> tuple[ReceiverApplication, subprocess.Popen[bytes] | None]:
        stream, token = self._first, None
        if stream.spark.run_batches == "connect":
            token = token_from_environment(stream.application, lease.epoch)
        started = time.monotonic()
        with Renewing(partial(self._ledger.shared_jobs.renew, lease), lease.lease_ms):
            application = start_application(stream, token=token)
        logger.info("Spark application ready after %.1f s: %s", time.monotonic() - started, application.attributes())
        if token is None:
            return application, None
        server = start_batch_server(stream.ledger, stream.application)
        slots = min(application.batch_slots, os.cpu_count() or 1)
        warm_up_connect(str(application.connect_url), token, slots, stream)
        return application, server

    def _serve(self, lease: SharedJobRow, shared: SharedApplication, attributes: dict[str, object]) -> None:
        """Run the streams that request it, until none has run for a while."""
        self._idle_since = time.monotonic()
        while True:
            self._reap()
            for request in self._requests(lease):
                try:
                    self._take(request, shared, attributes)
                except Exception as error:
                    # Whatever is wrong with one request must not end the streams that run, or keep others from running.
                    logger.warning("stream %s cannot be taken now: %s", request.stream, first_cause(error))
            if self._running:
                self._idle_since = time.monotonic()
            elif self._closed or time.monotonic() - self._idle_since >= self._idle_seconds:
                logger.info("the shared job %s ends: no stream runs in it", self._name)
                return
            time.sleep(LOOK_SECONDS)

    def _requests(self, lease: SharedJobRow) -> list[JobRow]:
        """Renew the lease and look for requests. Returns none while the ledger does not answer."""
        try:
            self._renew(lease)
            return [] if self._closed else self._ledger.jobs.requests(self._name)
        except HeadraceError as error:
            logger.warning("the shared job %s cannot look for streams now: %s", self._name, error)
            return []

    def _renew(self, lease: SharedJobRow) -> None:
        if self._closed or time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + min(RENEW_SECONDS, lease.lease_ms / 3000)
        try:
            self._ledger.shared_jobs.renew(lease)
        except LeaseLostError as error:
            # Its streams are not affected: each has its own lease.
            logger.error("%s Its streams run on in this process.", error)
            self._closed = True

    def _reap(self) -> None:
        for stream_name, (_, thread) in list(self._running.items()):
            if not thread.is_alive():
                del self._running[stream_name]
                logger.info("stream %s has left the shared job %s", stream_name, self._name)

    def _take(self, request: JobRow, shared: SharedApplication, attributes: dict[str, object]) -> None:
        """Adopt a request and run its stream, or refuse it."""
        if self._closed or request.stream in self._running:
            # An earlier job of the stream is about to end.
            return
        refusal: str | None = None
        try:
            row = self._ledger.streams.at_revision(request.stream, request.attributes[REVISION])
            context = StreamContext(Stream.from_json(row.definition), self._ledger)
            shared.check(context.stream, request.versions)
        except LedgerUnavailableError:
            raise
        except StreamDoesNotFitError as error:
            if not self._running:
                logger.info("the shared job %s makes room for a process with other settings: %s", self._name, error)
                self._closed = True
                return
            refusal = f"{type(error).__name__}: {error}"
        except HeadraceError as error:
            refusal = f"{type(error).__name__}: {error}"
        try:
            lease = self._ledger.jobs.adopt(
                request, holder=self._streams_holder, lease_ms=self._lease_ms, attributes=attributes
            )
            if refusal is not None:
                logger.error("%s", refusal)
                self._ledger.jobs.release(lease, JobState.FAILED, refusal[:ERROR_CHARACTERS])
                return
        except LeaseLostError as error:
            logger.info("%s", error)
            return
        job = StreamJob(context, lease, revision=request.attributes[REVISION], shared=shared)
        thread = threading.Thread(target=self._run, args=(job, request.stream), name=request.stream, daemon=True)
        self._running[request.stream] = job, thread
        thread.start()

    def _run(self, job: StreamJob, stream_name: str) -> None:
        try:
            job.run()
        except BaseException as error:
            logger.error(
                "the receivers of stream %s have failed (%s); other streams go on", stream_name, first_cause(error)
            )

    def _is_replaced(self, lease: SharedJobRow) -> bool:
        try:
            newest = self._ledger.shared_jobs.current(self._name)
        except HeadraceError:
            return False
        return newest is not None and newest.epoch != lease.epoch

    def _jvm_is_gone(self) -> None:
        """The receivers ended with the JVM, so the next jobs need not wait for the expiry of their leases."""
        self._fail_all("the driver's JVM is gone")

    def _fail_all(self, error: str) -> None:
        for stream_name, (job, _) in list(self._running.items()):
            try:
                job.release(JobState.FAILED, error)
            except Exception:
                logger.exception("the lease of stream %s is not released", stream_name)

    def _refuse_all(self, error: str, attributes: dict[str, object]) -> None:
        """Fail the requests that wait, so that their tasks show why the process failed."""
        try:
            for request in self._ledger.jobs.requests(self._name):
                lease = self._ledger.jobs.adopt(
                    request, holder=self._streams_holder, lease_ms=self._lease_ms, attributes=attributes
                )
                self._ledger.jobs.release(lease, JobState.FAILED, error)
        except HeadraceError as refused:
            logger.warning("requests of the shared job %s still wait: %s", self._name, refused)

    def _end(
        self,
        lease: SharedJobRow,
        application: ReceiverApplication | None,
        batch_server: subprocess.Popen[bytes] | None,
        exit_code: int,
    ) -> None:
        ending = threading.Timer(STOP_SECONDS, os._exit, (exit_code,))
        ending.daemon = True
        ending.start()
        try:
            self._ledger.shared_jobs.end(self._name, lease.epoch)
        except HeadraceError as error:
            logger.warning("the end of the shared job %s is not recorded: %s", self._name, error)
        if batch_server is not None:
            batch_server.terminate()
        if application is not None:
            try:
                application.spark.stop()
            except Exception:
                logger.exception("Spark could not be stopped")
        ending.cancel()


class StreamDoesNotFitError(HeadraceError):
    """The stream cannot run in the shared job's application, which was started otherwise."""


class SharedApplication:
    """A started application, with a launcher for each stream that is in it. Safe across threads.

    ``first`` is the definition of the stream with whose settings it was started.
    """

    def __init__(self, application: ReceiverApplication, first: Stream) -> None:
        self._application = application
        self._first = first
        self._lock = threading.Lock()
        self._receivers: dict[str, int] = {}
        self._launchers: dict[str, SparkReceiverLauncher] = {}

    def check(self, stream: Stream, versions: Mapping[str, str]) -> None:
        """Check that the stream can run in the application, apart from task slots.

        ``versions`` are those of the task that requests it. Raises StreamDoesNotFitError.
        """
        problems = [*settings_differences(self._first, stream), *_missing_connections(stream)]
        if versions:
            problems += version_differences(current_versions(), versions)
        if problems:
            with self._lock:
                others = ", ".join(sorted(self._receivers)) or "none"
            raise StreamDoesNotFitError(
                f"Stream {stream.name!r} cannot run in the shared job {stream.spark.job!r}, whose process was started "
                f"otherwise: {'; '.join(problems)}. Streams that run there: {others}.",
                remedy="Give the streams of a job the same spark settings. A process with the present settings, "
                "connections and versions starts when no stream runs in this one: stop its streams (`headrace streams "
                "stop`) and start them, or end it by SIGTERM. Or give the stream another spark.job.",
            )

    def join(self, stream: Stream) -> tuple[ReceiverApplication, SparkReceiverLauncher]:
        """Take the stream in. Returns the application, with the task slots that its batches have, and its launcher.

        Raises TaskSlotsError if its receivers would leave no slot for batches.
        """
        spark_context = self._application.spark.sparkContext
        slots = task_slots(spark_context)
        with self._lock:
            occupied = sum(self._receivers.values()) + stream.receivers
            check_task_slots(slots, occupied)
            self._receivers[stream.name] = stream.receivers
            launcher = SparkReceiverLauncher(spark_context, stream, lambda: self._launchers_beside(stream.name))
            self._launchers[stream.name] = launcher
        link_batch_server(stream.ledger, stream.name, stream.application)
        batch_slots = slots - occupied
        if is_local_master(self._application.master):
            # The other slots are for receivers of further streams.
            batch_slots = min(batch_slots, os.cpu_count() or 1)
        return dataclasses.replace(self._application, task_slots=slots, batch_slots=batch_slots), launcher

    def leave(self, stream: Stream) -> None:
        """Give the stream's task slots to others."""
        with self._lock:
            self._receivers.pop(stream.name, None)
            self._launchers.pop(stream.name, None)
        unlink_batch_server(stream.ledger, stream.name)

    def _launchers_beside(self, stream_name: str) -> list[SparkReceiverLauncher]:
        with self._lock:
            return [launcher for name, launcher in self._launchers.items() if name != stream_name]


def settings_differences(first: Stream, stream: Stream) -> Iterator[str]:
    """Yield each field of the Spark settings in which ``stream`` differs from the stream that the job began with."""
    ours, theirs = first.spark.model_dump(mode="json"), stream.spark.model_dump(mode="json")
    for name, value in ours.items():
        if value != theirs[name]:
            yield f"spark.{name} is {_text(theirs[name])}, and {_text(value)} there"


def _text(value: object) -> str:
    return "none" if value in (None, [], {}) else str(value)


def _missing_connections(stream: Stream) -> Iterator[str]:
    for conn_id in stream.connection_ids:
        try:
            resolve(conn_id)
        except ConnectionNotFoundError:
            yield f"the process does not have the connection {conn_id}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``spark_jobs/receiver.py`` and return the exit code."""

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
