"""The process of receiver jobs: one Spark application, and in it the jobs of one or several streams.

Most streams have a process of their own, which acquires the stream's lease and runs its job (`ReceiverJob`). Streams
with the same ``spark.job`` share one: a stream's task requests its job in the ledger (``Jobs.requests``), and the
process looks for requests, adopts each one's lease and runs the job in a thread. Each job has its own lease, tracker
and listeners, so a stream fails, stops and starts again by itself. A shared process ends when no stream has run in it
for a while. Its application (`JobApplication`) is started by the settings of the first stream. The settings, Python
files and connections are those of its start, so a stream that needs others is refused.

If the process or the JVM is killed, the other ends too (``termination``), and the leases expire.

Exit codes: 0 stopped as requested, 1 failed, 75 another process holds or took the stream (or is the shared job of this
name), 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.errors import HeadraceError
from headrace.ledger import JobState, Ledger
from headrace.ledger.errors import LeaseHeldError, LeaseLostError, LedgerUnavailableError
from headrace.ledger.tables import JobLease, JobRow
from headrace.processes import PROCESS, own_identity
from headrace.receiver.health import REVISION
from headrace.secrets import CleanFormatter, log_to
from headrace.spark.attempts.failures import first_cause
from headrace.spark.job_token import (
    APPLICATION,
    FINGERPRINT,
    SECRET_VARIABLE,
    secret_fingerprint,
)
from headrace.spark.receiving.job_application import JobApplication, StreamDoesNotFitError
from headrace.spark.receiving.job_log import LOG_VARIABLE, bounded_log
from headrace.spark.receiving.receiver_job import ERROR_CHARACTERS, RENEW_SECONDS, ReceiverJob, Renewing
from headrace.spark.termination import (
    EXIT_FAILED,
    EXIT_NOT_OURS,
    EXIT_TERMINATED,
    ProcessWatch,
    Terminated,
    parent_gone,
    raise_on_sigterm,
    under_spark_submit,
)
from headrace.spark.versions import check_spark_packages, current_versions
from headrace.stream import Stream
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

# Long enough for pauses of the driver's garbage collector, disk or ledger. A dead driver is replaced after this time.
LEASE_MS = 30_000

# Stopping Spark can hang on a lost executor; after this time the process ends anyway.
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.5
IDLE_SECONDS = 60.0
"""How long a shared process lives without a stream: a stream that fails or is restarted comes back earlier."""


class ReceiverProcess:
    """Runs the receiver jobs of one or several streams in one Spark application. Use once.

    ``context`` is that of the stream by whose Spark settings the application starts: the only one, or the one whose
    task started the process of a shared job.
    """

    def __init__(
        self,
        context: StreamContext,
        *,
        revision: int,
        holder: str,
        lease_ms: int = LEASE_MS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._context = context
        self._first = context.stream
        self._ledger = context.ledger
        self._revision = revision
        self._holder = holder
        self._lease_ms = lease_ms
        self._idle_seconds = idle_seconds
        self._jobs: dict[str, ReceiverJob] = {}
        self._shared: SharedLease | None = None
        self._application: JobApplication | None = None
        self._watches: list[ProcessWatch] = []

    def run(self) -> int:
        """Run until no stream needs the process. Returns its exit code.

        1. Watch the JVM: the process ends with it.
        2. Acquire the stream's lease and run its job, which starts Spark; or acquire the lease of the shared job, start
           Spark, and run the job of each stream that requests it.
        3. Stop Spark.

        Raises:
            LeaseHeldError: another process holds the stream, or is the shared job of this name.
            MixedSparkError: pyspark and pyspark-client are installed in different versions.
        """
        check_spark_packages()
        code = EXIT_FAILED
        if under_spark_submit():
            self._watch(parent_gone())
        try:
            code = self._run_own_job() if self._first.spark.job is None else self._run_shared_job(self._first.spark.job)
            return code
        except Terminated:
            code = EXIT_TERMINATED
            raise
        finally:
            self._end(code)

    def _run_own_job(self) -> int:
        lease = self._ledger.jobs.acquire(
            self._first.name,
            holder=self._holder,
            lease_ms=self._lease_ms,
            versions=current_versions(),
            attributes={REVISION: self._revision, **process_attributes(self._first.name)},
        )
        return self._new_job(self._context, lease, self._revision).run(partial(self._open_application, lease.epoch))

    def _run_shared_job(self, name: str) -> int:
        _name_threads_in_log()
        shared = self._shared = SharedLease(self._ledger, name, self._first.application, self._holder, self._lease_ms)
        try:
            with Renewing(shared.renew, self._lease_ms):
                application = self._open_application(shared.epoch)
            self._serve(shared, application)
            return EXIT_NOT_OURS if shared.is_replaced() else 0
        except Terminated as terminated:
            self._fail_jobs(str(terminated))
            raise
        except BaseException as error:
            logger.error("the shared job %s failed: %s", name, first_cause(error))
            text = f"the shared job {name} failed: {first_cause(error)}"[:ERROR_CHARACTERS]
            self._fail_jobs(text)
            shared.refuse_all(text)
            raise

    def _serve(self, shared: SharedLease, application: JobApplication) -> None:
        """Run the streams that request it, until none has run for a while."""
        idle_since = time.monotonic()
        while True:
            for request in shared.requests():
                try:
                    self._take(request, shared, application)
                except Exception as error:
                    # Whatever is wrong with one request must not end the streams that run, or keep others from running.
                    logger.warning("stream %s cannot be taken now: %s", request.stream, first_cause(error))
            if self._jobs:
                idle_since = time.monotonic()
            elif shared.is_closed or time.monotonic() - idle_since >= self._idle_seconds:
                logger.info("the shared job %s ends: no stream runs in it", shared.name)
                return
            time.sleep(_POLL_SECONDS)

    def _take(self, request: JobRow, shared: SharedLease, application: JobApplication) -> None:
        """Adopt a request and run its stream, or refuse it."""
        if shared.is_closed or request.stream in self._jobs:
            # An earlier job of the stream is about to end.
            return
        revision = request.attributes[REVISION]
        try:
            row = self._ledger.streams.at_revision(request.stream, revision)
            context = StreamContext(Stream.from_json(row.definition), self._ledger)
            application.check(context.stream, request.versions)
        except LedgerUnavailableError:
            raise
        except HeadraceError as error:
            if isinstance(error, StreamDoesNotFitError) and not self._jobs:
                logger.info("the shared job %s makes room for a process with other settings: %s", shared.name, error)
                shared.is_closed = True
            else:
                logger.error("%s", error)
                shared.refuse(request, f"{type(error).__name__}: {error}")
            return
        lease = shared.adopt(request)
        if lease is not None:
            job = self._new_job(context, lease, revision)
            threading.Thread(
                target=self._run_job, args=(job, application, lease.stream), name=lease.stream, daemon=True
            ).start()

    def _run_job(self, job: ReceiverJob, application: JobApplication, stream_name: str) -> None:
        try:
            job.run(lambda: application)
        except BaseException as error:
            logger.error(
                "the receivers of stream %s have failed (%s); other streams go on", stream_name, first_cause(error)
            )
        finally:
            del self._jobs[stream_name]
            logger.info("stream %s has left the shared job %s", stream_name, self._first.spark.job)

    def _new_job(self, context: StreamContext, lease: JobLease, revision: int) -> ReceiverJob:
        logger.info(
            "stream %s by revision %d, receiver job of epoch %d, held by %s",
            lease.stream, revision, lease.epoch, lease.holder,
        )  # fmt: skip
        job = ReceiverJob(context, lease, end_hangs=partial(self._end_hangs, lease.stream))
        self._jobs[lease.stream] = job
        return job

    def _open_application(self, epoch: int) -> JobApplication:
        self._application = JobApplication.start(self._first, epoch)
        if not under_spark_submit():
            self._watch(self._application.jvm_gone())
        return self._application

    def _watch(self, gone: Callable[[], bool]) -> None:
        self._watches.append(ProcessWatch(gone, before_end=self._jvm_is_gone).start())

    def _jvm_is_gone(self) -> None:
        """The receivers ended with the JVM, so the next jobs need not wait for the expiry of their leases."""
        self._fail_jobs("the driver's JVM is gone")

    def _fail_jobs(self, error: str) -> None:
        for stream_name, job in list(self._jobs.items()):
            try:
                job.release(JobState.FAILED, error)
            except Exception:
                logger.exception("the lease of stream %s is not released", stream_name)

    def _end_hangs(self, stream_name: str, exit_code: int) -> None:
        """Called if the end of a stream's job hangs. The next job's epoch fences what hangs."""
        if self._shared is None:
            os._exit(exit_code)
        logger.error("the end of the receiver job of stream %s hangs; its lease is released", stream_name)
        self._jobs[stream_name].release(JobState.FAILED, "its end hangs in the shared job's process")

    def _end(self, exit_code: int) -> None:
        ending = threading.Timer(_STOP_SECONDS, os._exit, (exit_code,))
        ending.daemon = True
        ending.start()
        if self._shared is not None:
            self._shared.end()
        if self._application is not None:
            self._application.stop()
        for watch in self._watches:
            watch.dismiss()
        ending.cancel()


class SharedLease:
    """The lease of a shared job's process, and the requests of streams for it.

    It only keeps two tasks from starting two processes. What a stream stores is fenced by the stream's own lease.
    """

    def __init__(self, ledger: Ledger, name: str, application: str, holder: str, lease_ms: int) -> None:
        """Acquires it. ``application`` is the application's name. Raises LeaseHeldError if another process has it."""
        self.name = name
        self._ledger = ledger
        self._lease_ms = lease_ms
        attributes = process_attributes(application)
        self._lease = ledger.shared_jobs.acquire(name, holder=holder, lease_ms=lease_ms, attributes=attributes)
        # The task that started the process is mostly another stream's.
        self._streams_holder = f"shared job {name}, started by {holder}"
        self._attributes = {**attributes, APPLICATION: [application, self.epoch]}
        self._renew_at = 0.0
        self.is_closed = False
        """The process takes no more streams, and ends with those that it has."""
        logger.info("shared job %s of epoch %d, process %d, held by %s", name, self.epoch, os.getpid(), holder)

    @property
    def epoch(self) -> int:
        return self._lease.epoch

    def renew(self) -> None:
        """Renew it. Raises LeaseLostError if another process has it."""
        self._ledger.shared_jobs.renew(self._lease)

    def requests(self) -> list[JobRow]:
        """Renew the lease if that is due, and return the requests. Returns none while the ledger does not answer."""
        if self.is_closed:
            return []
        try:
            if time.monotonic() >= self._renew_at:
                self._renew_at = time.monotonic() + min(RENEW_SECONDS, self._lease_ms / 3000)
                self.renew()
            return self._ledger.jobs.requests(self.name)
        except LeaseLostError as error:
            # Its streams are not affected: each has its own lease.
            logger.error("%s Its streams run on in this process.", error)
            self.is_closed = True
        except HeadraceError as error:
            logger.warning("the shared job %s cannot look for streams now: %s", self.name, error)
        return []

    def adopt(self, request: JobRow) -> JobLease | None:
        """Take the stream's lease over. Returns None if the request has ended."""
        try:
            return self._ledger.jobs.adopt(
                request, holder=self._streams_holder, lease_ms=self._lease_ms, attributes=self._attributes
            )
        except LeaseLostError as error:
            logger.info("%s", error)
            return None

    def refuse(self, request: JobRow, error: str) -> None:
        """Fail a request, so that its task shows why. Raises LedgerUnavailableError."""
        lease = self.adopt(request)
        if lease is not None:
            self._ledger.jobs.release(lease, JobState.FAILED, error[:ERROR_CHARACTERS])

    def refuse_all(self, error: str) -> None:
        """Fail the requests that wait."""
        try:
            for request in self._ledger.jobs.requests(self.name):
                self.refuse(request, error)
        except HeadraceError as refused:
            logger.warning("requests of the shared job %s still wait: %s", self.name, refused)

    def is_replaced(self) -> bool:
        """Whether another process has become the shared job of this name, as far as the ledger answers."""
        try:
            newest = self._ledger.shared_jobs.current(self.name) if self.is_closed else None
        except HeadraceError:
            return False
        return newest is not None and newest.epoch != self.epoch

    def end(self) -> None:
        """End the lease."""
        try:
            self._ledger.shared_jobs.end(self.name, self.epoch)
        except HeadraceError as error:
            logger.warning("the end of the shared job %s is not recorded: %s", self.name, error)


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


def _name_threads_in_log() -> None:
    """The main threads of the streams have their names."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``spark_jobs/receiver.py`` and return the exit code."""

    options = _parser().parse_args(arguments)
    log_to(sys.stderr)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    raise_on_sigterm()
    try:
        with bounded_log(), Ledger.open(options.ledger, create=False) as ledger:
            row = ledger.streams.get(options.stream)
            if options.revision is not None:
                row = ledger.streams.at_revision(options.stream, options.revision)
            context = StreamContext(Stream.from_json(row.definition), ledger)
            process = ReceiverProcess(context, revision=row.revision, holder=options.holder, lease_ms=options.lease_ms)
            return process.run()
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
