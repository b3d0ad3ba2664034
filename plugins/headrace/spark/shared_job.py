"""The process of a shared job: one Spark application, and in it the receiver jobs of several streams.

A stream's task requests its job in the ledger (``Jobs.requests``). This process looks for requests, adopts each one's
lease and runs the stream's `ReceiverJob` in a thread: with its own lease, tracker and listeners. So a stream fails,
stops and starts again by itself. The process ends when no stream has run in it for a while, or with its JVM.

Exit codes: those of ``receiver_driver``. It is 75 if another process is the job of this name.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from functools import partial

from headrace.errors import HeadraceError
from headrace.ledger import JobState
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.ledger.tables import JobLease, JobRow, SharedJobRow
from headrace.receiver.health import REVISION
from headrace.spark.batch_server import start_batch_server
from headrace.spark.failures import first_cause
from headrace.spark.receiver_application import ReceiverApplication, start_application, warm_up_connect
from headrace.spark.receiver_driver import (
    ERROR_CHARACTERS,
    RENEW_SECONDS,
    STOP_SECONDS,
    ReceiverJob,
    Renewing,
    process_attributes,
)
from headrace.spark.receiver_launcher import SparkReceiverLauncher
from headrace.spark.sessions import APPLICATION, token_from_environment
from headrace.spark.shared_application import SharedApplication, StreamDoesNotFitError
from headrace.spark.termination import (
    EXIT_FAILED,
    EXIT_NOT_OURS,
    EXIT_TERMINATED,
    ProcessWatch,
    Terminated,
    jvm_gone,
    parent_gone,
    under_spark_submit,
)
from headrace.stream import Stream
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

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
