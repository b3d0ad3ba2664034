"""The command that runs one attempt at a batch: ``spark_jobs/micro_batch.py``, plain (connect) or under spark-submit.

Its Spark session is in the receiver job's application over Spark Connect (`open_connect_session`), or in its own
application (`open_own_session`).

Exit codes: 0 the attempt's outputs are done (or were done before), 1 failed, 75 a newer attempt took the batch, 143
ended by SIGTERM. The result's ``state`` shows whether other outputs of the batch are still to be done.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, cast

from headrace.batch.time_range import TimeRange
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger import JobState, Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.ledger.errors import AlreadyCompletedError, AttemptFencedError
from headrace.ledger.states import AttemptState
from headrace.secrets import without_secrets
from headrace.spark.attempts.attempt import BatchResult, run_attempt
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.failures import python_account
from headrace.spark.attempts.range_run import POOL, RangeIncompleteError, RangeResult, RangeRunner, RangeSettings
from headrace.spark.attempts.shared_jobs import SharedSparkJobs
from headrace.spark.connect_sessions import attempt_session_id, attempt_tag, connect_session, end_session, fail_fast
from headrace.spark.job_token import token_of_job
from headrace.spark.packaging import connections_conf, send_code, send_connections
from headrace.spark.records.batch_frames import sends_records
from headrace.spark.sessions import classic_session, given_conf, is_connect
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
from headrace.spark.versions import check_versions
from headrace.stream import STATE_STEP, Stream
from headrace.stream.stream import PARAMETERS, merged_parameters, parse_parameters
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger.batches.tables import AttemptRow
    from headrace.ledger.tables import JobRow


# The batches of a range that run at a time for each task slot: while one is written, others are planned and recorded.
_THREADS_A_SLOT = 4
# If they share jobs: so many are in one job, or come together for the next one.
_SHARING_A_SLOT = 16

# How long an attempt that is begun here holds its batch after its process has died.
LEASE_MS = 30_000


class AttemptUnknownError(HeadraceError):
    """The ledger has no such attempt at the batch."""


class TaskGoneError(HeadraceError):
    """The reader of this process's output is gone: the task that ran the attempt was killed and could not end it."""

    interrupts = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = _parse(arguments)
    raise_on_sigterm()
    report = _reporter(options.stream, f"batch {time_text(options.batch_time)}")
    watch = ProcessWatch(parent_gone()).start() if under_spark_submit() else None
    closing = contextlib.ExitStack()
    try:
        ledger = Ledger.open(options.ledger, create=False)
        closing.callback(ledger.close)
        result = _run(options, ledger, closing, report)
    except AlreadyCompletedError as completed:
        report(str(completed))
        return 0
    except AttemptFencedError as fenced:
        report(f"fenced: {fenced}")
        return EXIT_NOT_OURS
    except Terminated as terminated:
        report(str(terminated))
        return EXIT_TERMINATED
    except RangeIncompleteError as incomplete:
        with contextlib.suppress(TaskGoneError):
            # Not with the name of the batch at which the range was begun: it may have completed.
            _reporter(options.stream, "range")(f"failed: {incomplete}")
        return EXIT_FAILED
    except HeadraceError as error:
        with contextlib.suppress(TaskGoneError):
            if error.__cause__ is not None:
                account = str(error.__cause__) if options.traceback else python_account(error.__cause__)
                print(without_secrets(account), file=ReadByTask(sys.stderr))
            report(f"failed: {error}")
        return EXIT_FAILED
    finally:
        if watch is not None:
            watch.dismiss()
        closing.close()
    if options.json:
        print(json.dumps(result.to_dict(), separators=(",", ":")), flush=True)
    return 0


def _run(
    options: argparse.Namespace, ledger: Ledger, closing: contextlib.ExitStack, report: Callable[[str], None]
) -> BatchResult | RangeResult:
    row = None if options.attempt is None else _begun(options, ledger)
    if row is not None and (batches := TimeRange.of(row.attributes)) is not None:
        return _run_range(options, ledger, closing, batches, row)
    # The parameters are not on the command line, which every user of the machine can read.
    claim, given = _begin(options, ledger) if row is None else (row.claim(), row.attributes.get(PARAMETERS))
    # The first lease lasts until this process is up. From now on a batch whose host died is free sooner.
    claim = replace(claim, lease_ms=min(claim.lease_ms, LEASE_MS))
    context = StreamContext(definition_of(claim, ledger), ledger)
    replay = f" of replay {claim.target}" if claim.target else ""
    report(f"attempt {claim.number}{replay}, {options.way}: {', '.join(claim.outputs)}")

    def open_session() -> SparkSession:
        started = time.monotonic()
        spark = _session(context, claim, options.way)
        closing.callback(_close, spark)
        kind = "Spark Connect session" if is_connect(spark) else "Spark application"
        report(f"{kind} after {time.monotonic() - started:.1f} s")
        return spark

    attempt = BatchAttempt(
        context,
        claim,
        open_session,
        parameters=merged_parameters(context.stream, given),
        partitions=_batch_slots(options, ledger),
        out=cast(IO[str], ReadByTask(sys.stdout)),
        report=report,
    )
    return run_attempt(attempt)


def _batch_slots(options: argparse.Namespace, ledger: Ledger) -> int | None:
    """The task slots that batches have in the receiver job's application; None in another one."""
    job = ledger.jobs.current(options.stream) if options.way == "connect" else None
    return None if job is None else job.attributes.get("batch_slots")


def _run_range(
    options: argparse.Namespace,
    ledger: Ledger,
    closing: contextlib.ExitStack,
    batches: TimeRange,
    first: AttemptRow,
) -> RangeResult:
    """Run the range that the attempt was begun for. Raises what `RangeRunner.run` raises."""
    context = StreamContext(definition_of(first.claim(), ledger), ledger)
    slots = _batch_slots(options, ledger)
    width = slots or os.cpu_count() or 1
    written = [context.stream.output_of_step(step) for step in first.outputs if step != STATE_STEP]
    shares = all(sends_records(context.stream, output) for output in written)
    sessions = (ConnectSessions if options.way == "connect" else OwnSession)(context, first, width if shares else 0)
    closing.callback(sessions.close)
    settings = RangeSettings(
        threads=width * (_SHARING_A_SLOT if shares else _THREADS_A_SLOT),
        partitions=slots,
        parameters=merged_parameters(context.stream, first.attributes.get(PARAMETERS)),
        out=cast(IO[str], ReadByTask(sys.stdout)),
        report=_reporter(options.stream, f"replay {first.target}" if first.target else "again"),
        lease_ms=options.lease_ms,
    )
    return RangeRunner(context, batches, first, sessions, settings).run()


def _session(context: StreamContext, claim: Attempt, way: str, *, of_range: bool = False) -> SparkSession:
    if way == "connect":
        return open_connect_session(context, claim)
    spark = open_own_session(context.stream, claim)
    application = spark.sparkContext
    if not under_spark_submit():
        ProcessWatch(jvm_gone(application._gateway)).start()
    try:
        context.ledger.attempts.renew(
            claim, attributes={"application_id": str(application.applicationId), "ui_url": application.uiWebUrl}
        )
    except AttemptFencedError:
        # The first batch of a range may have ended without Spark.
        if not of_range:
            spark.stop()
            raise
    return spark


def _close(spark: SparkSession) -> None:
    if is_connect(spark):
        fail_fast(spark)
    spark.stop()


def definition_of(attempt: Attempt, ledger: Ledger) -> Stream:
    """The definition with which the attempt began; the stream may have a newer one."""
    if attempt.definition is not None:
        return Stream.from_json(attempt.definition)
    row = ledger.streams.get(attempt.stream)
    if attempt.revision is not None:
        row = ledger.streams.at_revision(attempt.stream, attempt.revision)
    return Stream.from_json(row.definition)


def _begin(options: argparse.Namespace, ledger: Ledger) -> tuple[Attempt, Any]:
    """Begin an attempt with the stream's newest definition. Returns it and the given parameters."""
    newest = ledger.streams.get(options.stream)
    given = None if options.parameters is None else parse_parameters(options.parameters)
    # Checked before the attempt begins: an attempt that cannot be run must not take the batch from another one.
    merged_parameters(Stream.from_json(newest.definition), given)
    attempt = ledger.attempts.begin(
        options.stream,
        options.batch_time,
        holder=f"{socket.gethostname()}:{os.getpid()}:{time.time_ns() // 1_000_000}",
        way=options.way,
        lease_ms=options.lease_ms,
        outputs=options.outputs,
        force=options.force,
        attributes=None if given is None else {PARAMETERS: given},
        revision=newest.revision,
    )
    return attempt, given


def _begun(options: argparse.Namespace, ledger: Ledger) -> AttemptRow:
    """The attempt that the caller began."""
    for row in ledger.attempts.of_batch(options.stream, options.batch_time):
        if row.number == options.attempt:
            return row
    raise AttemptUnknownError(
        f"The ledger has no attempt {options.attempt} at batch {time_text(options.batch_time)} of stream "
        f"{options.stream!r}.",
        remedy="Begin it first, or leave --attempt out: then the command begins one.",
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="micro_batch.py", description="Run one attempt at a stream's batch.")
    parser.add_argument("--ledger", required=True, help='SQLAlchemy URL without a password, or "connection:<id>"')
    parser.add_argument("--stream", required=True)
    parser.add_argument("--batch-time", required=True, type=int, help="milliseconds since the Unix epoch")
    parser.add_argument("--attempt", type=int, help="the attempt that the caller began; by default a new one")
    parser.add_argument(
        "--outputs",
        type=lambda text: tuple(name for name in text.split(",") if name),
        help="comma-separated ids of the outputs that a new attempt runs; by default all that are not done",
    )
    parser.add_argument(
        "--parameters",
        help="JSON object of values that override the stream's parameters, for a new attempt",
    )
    parser.add_argument("--way", choices=("connect", "submit"), default="connect")
    parser.add_argument("--force", action="store_true", help="run a completed batch again")
    parser.add_argument("--lease-ms", type=int, default=LEASE_MS)
    parser.add_argument("--json", action="store_true", help="print the result as the last line of stdout")
    parser.add_argument("--traceback", action="store_true", help="print Spark's whole error, with Java's stack")
    options = parser.parse_args(arguments)
    if options.attempt is not None and options.parameters is not None:
        parser.error("--parameters cannot be used with --attempt: the attempt has the parameters that it began with")
    return options


def _reporter(stream_name: str, work: str) -> Callable[[str], None]:
    def report(line: str) -> None:
        # stderr: stdout belongs to console outputs and the result.
        print(f"headrace: {stream_name}, {work}: {line}", file=ReadByTask(sys.stderr), flush=True)

    return report


class ReadByTask(io.TextIOBase):
    """An output stream that the attempt's task reads. If the reader is gone, writing raises TaskGoneError."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        """Raises TaskGoneError."""
        with self._reported():
            return self._stream.write(text)

    def flush(self) -> None:
        """Raises TaskGoneError."""
        with self._reported():
            self._stream.flush()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            raise TaskGoneError(
                "The Airflow task that ran this attempt was killed (its worker or machine died, or it ran out of "
                "memory), so its process ended too.",
                remedy="Airflow tries the task again; the worker's and the scheduler's logs say why it was killed.",
            ) from error


# How long Spark may take to start, including the allocation of executors.
START_SECONDS = 120.0


class ApplicationMissingError(HeadraceError):
    """There is no receiver application in which the batch can run."""


def open_connect_session(context: StreamContext, attempt: Attempt) -> SparkSession:
    """Open a session in the stream's receiver application, after ending earlier attempts' operations there.

    Raises ApplicationMissingError, VersionMismatchError, SecretKeyMissingError, ConnectUrlError, ConnectRefusedError.
    """
    url, token = _connect_server(context)
    end_earlier_attempts(context.ledger, attempt, url, token)
    return _connected(context, url, token, attempt_session_id(attempt))


def _connect_server(context: StreamContext) -> tuple[str, str]:
    """The URL of the receiver application's Connect server, and its token."""
    job = await_job(context.ledger, context.name)
    check_versions(job.versions)
    return str(job.attributes["connect_url"]), token_of_job(job)


def _connected(context: StreamContext, url: str, token: str, session_id: str) -> SparkSession:
    spark = connect_session(url, token, session_id=session_id)
    time_zone = context.stream.spark.conf.get("spark.sql.session.timeZone", "UTC")
    spark.conf.set("spark.sql.session.timeZone", time_zone)
    return spark


def await_job(ledger: Ledger, stream_name: str, *, seconds: float = START_SECONDS) -> JobRow:
    """Like `running_job`, but first waits up to ``seconds`` for a job that is starting."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job = ledger.jobs.current(stream_name)
        if job is None or job.state is not JobState.STARTING or not job.alive(ledger.now_ms()):
            break
        time.sleep(0.5)
    return running_job(ledger, stream_name)


def running_job(ledger: Ledger, stream_name: str) -> JobRow:
    """The receiver job whose application can run batches; raises ApplicationMissingError, which gives the reason."""
    job = ledger.jobs.current(stream_name)
    if job is None or not job.alive(ledger.now_ms()):
        state = (
            "was never started"
            if job is None
            else f"is {job.state.value}, last heard of at {time_text(job.heartbeat_ms)}"
        )
        raise ApplicationMissingError(
            f"The receiver job of stream {stream_name!r} {state}, so there is no application to run the batch in.",
            remedy=f"Start it (`headrace streams start {stream_name}`, or its receiver DAG), or run the batch with way "
            "'submit'.",
        )
    if not job.attributes.get("connect_url"):
        raise ApplicationMissingError(
            f"The receiver job of stream {stream_name!r} (epoch {job.epoch}, {job.state.value}) has no Spark Connect "
            "server.",
            remedy="Wait until it has started. With spark.run_batches='submit' it has none: use way 'submit'.",
        )
    host = job.attributes.get("connect_host")
    if host not in (None, socket.gethostname()):
        raise ApplicationMissingError(
            f"The receiver job of stream {stream_name!r} runs on {host}. Its Spark Connect server can only be reached "
            "on that machine.",
            remedy="Run the batch there (a queue of its Airflow worker), or with way 'submit'.",
        )
    return job


def end_earlier_attempts(ledger: Ledger, attempt: Attempt, url: str, token: str) -> list[str]:
    """Interrupt the Spark operations of the earlier attempts that this one replaces. Returns the operations' ids.

    Attempts at other outputs of the batch, and replays, run concurrently and are not interrupted.
    """
    interrupted = []
    for earlier in replaced_by(ledger, attempt):
        session_id, tag = earlier.attributes.get(SESSION), attempt_tag(earlier)
        if session_id is None:
            interrupted += end_session(url, token, attempt_session_id(earlier), tag)
        elif earlier.state is not AttemptState.COMPLETED:
            # Its range may go on in the session, with other batches.
            interrupted += end_session(url, token, session_id, tag, release=False)
    return interrupted


def replaced_by(ledger: Ledger, attempt: Attempt) -> list[AttemptRow]:
    """The earlier attempts over Spark Connect at outputs of this one."""
    rows = ledger.attempts.of_batch(attempt.stream, attempt.batch_time_ms)
    return [row for row in rows if row.way == "connect" and replaces(attempt, row)]


SESSION = "session"
"""The attribute of an attempt of a range with the id of its Connect session, which the range's attempts share."""


class ConnectSessions:
    """The sessions of a range's threads in the stream's receiver application (`RangeSessions`).

    ``slots``: if it is not 0, the batches share their jobs, which may take so many task slots, and their session.
    """

    def __init__(self, context: StreamContext, first: AttemptRow, slots: int) -> None:
        # Threads that import its modules for the first time at once would wait for each other, for ever.
        import pyspark.sql.connect.session  # noqa: F401

        self._context = context
        self._ids: dict[int, str] = {}
        self._open: dict[int, SparkSession] = {}
        # The first session sets pyspark's mode.
        self._lock = threading.Lock()
        self.jobs = shared_jobs(lambda: self._session(0), first, slots) if slots else None

    def attributes(self, number: int) -> dict[str, Any]:
        """The attributes of the attempts that run in the thread's session."""
        return {SESSION: self._ids.setdefault(self._place(number), str(uuid.uuid4()))}

    def open(self, number: int) -> SparkSession:
        """The thread's session. Raises as `open_connect_session`."""
        return self._session(self._place(number))

    def end_earlier(self, claim: Attempt) -> None:
        """End the operations of the attempts that this one replaces. Raises as `open_connect_session`."""
        end_earlier_attempts(self._context.ledger, claim, *_connect_server(self._context))

    def give_up(self, number: int) -> None:
        """Close the thread's session, which may be gone. The next one has another id. Others may use a shared one."""
        if self.jobs is None:
            self._close(number)

    def close(self) -> None:
        """Close all sessions."""
        if self.jobs is not None:
            self.jobs.close()
        for place in list(self._open):
            self._close(place)

    def _place(self, number: int) -> int:
        return number if self.jobs is None else 0

    def _session(self, place: int) -> SparkSession:
        with self._lock:
            if place not in self._open:
                session_id = self.attributes(place)[SESSION]
                self._open[place] = _connected(self._context, *_connect_server(self._context), session_id)
            return self._open[place]

    def _close(self, place: int) -> None:
        self._ids.pop(place, None)
        spark = self._open.pop(place, None)
        if spark is not None:
            with contextlib.suppress(Exception):
                _close(spark)


class OwnSession:
    """The sessions of an application that runs only a range (`RangeSessions`). Each thread has its own, because
    transforms may give their views the same names. Threads that share jobs, and so transform nothing, share one."""

    def __init__(self, context: StreamContext, first: AttemptRow, slots: int) -> None:
        self._context, self._first = context, first.claim()
        self._lock = threading.Lock()
        self._spark: SparkSession | None = None
        self._of_threads: dict[int, SparkSession] = {}
        self.jobs = shared_jobs(self._session, first, slots) if slots else None

    def attributes(self, number: int) -> dict[str, Any]:  # noqa: ARG002
        """None: the application is the process's own, so it ends with it."""
        return {}

    def open(self, number: int) -> SparkSession:
        """The thread's session. The first thread that needs one starts the application."""
        spark = self._session()
        if self.jobs is not None:
            return spark
        if number not in self._of_threads:
            self._of_threads[number] = spark.newSession()
        return self._of_threads[number]

    def end_earlier(self, claim: Attempt) -> None:
        """Nothing: they ran in applications of their own, which their tasks have ended."""

    def give_up(self, number: int) -> None:
        """Nothing: another thread may use it."""

    def close(self) -> None:
        """Stop the application."""
        if self.jobs is not None:
            self.jobs.close()
        if self._spark is not None:
            self._spark.stop()

    def _session(self) -> SparkSession:
        with self._lock:
            if self._spark is None:
                self._spark = _session(self._context, self._first, "submit", of_range=True)
            return self._spark


def shared_jobs(open_session: Callable[[], SparkSession], first: AttemptRow, slots: int) -> SharedSparkJobs:
    """The jobs that the batches of a range share, which began with this attempt."""
    replay = f", replay {first.target}" if first.target else " again"
    return SharedSparkJobs(open_session, slots=slots, description=f"{first.stream}{replay}", pool=POOL)


def replaces(attempt: Attempt, earlier: AttemptRow) -> bool:
    """Whether the attempt repeats at least one output of the earlier attempt at the same batch."""
    return (
        earlier.number < attempt.number
        and earlier.target == attempt.target
        and not set(earlier.outputs).isdisjoint(attempt.outputs)
    )


def open_own_session(stream: Stream, attempt: Attempt) -> SparkSession:
    """Open the session of an application that runs only this batch."""
    name = f"headrace {stream.name} batch {time_text(attempt.batch_time_ms)}" + (
        f" {attempt.target}" if attempt.target else ""
    )
    master = given_conf().get("spark.master") or stream.spark.master_url(0)
    spark = classic_session(name, master=master, conf={**stream.spark.conf, **connections_conf(master)})
    send_code(spark.sparkContext, stream)
    send_connections(spark.sparkContext)
    return spark
