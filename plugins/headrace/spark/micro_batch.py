"""Runs one attempt at a batch, from its manifest to its results in the ledger.

A separate thread does the work. The calling thread waits for it and renews the attempt's lease, so the lease is renewed
only as long as a caller waits. If the attempt is fenced or terminated, the calling thread cancels this attempt's Spark
jobs and no others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

from headrace.batch.stream_status import WARNING
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.failure import FAILURE, TRIED_WITH, Failure
from headrace.ledger import BatchState
from headrace.ledger.errors import AttemptFencedError, LedgerUnavailableError
from headrace.spark.batch_inputs import check_manifests
from headrace.spark.batch_plan import OutputPlan, plan_outputs
from headrace.spark.batch_work import BatchWork
from headrace.spark.code_version import code_version, tried_with
from headrace.spark.earlier_attempts import WRITTEN, tried_before, written_before
from headrace.spark.failures import failure_of, first_cause
from headrace.spark.job_scope import JobScope
from headrace.spark.outputs import report_files
from headrace.spark.outputs.writer import Counts
from headrace.stream import STATE_STEP

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger import Ledger
    from headrace.ledger.models import Attempt, BatchOrigin, BatchRow
    from headrace.stream import Stream

# How long an attempt holds its batch after its process has died.
LEASE_MS = 30_000

# How long to wait for cancelled Spark jobs to end.
_CANCEL_SECONDS = 15.0
_ERROR_CHARACTERS = 2_000


class BatchFailedError(HeadraceError):
    """The batch's work failed; ``reason`` is the innermost reason, the error's cause has Spark's full text."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of an attempt. ``outputs`` has each step's counts, ``seconds`` is the attempt's duration.

    ``state`` is the batch's state afterwards: "completed", or another one while other outputs are not done.
    """

    stream: str
    batch_time_ms: int
    attempt: int
    records: int
    blocks: int
    seconds: float
    outputs: dict[str, Counts] = field(default_factory=dict)
    state: str = BatchState.COMPLETED.value
    source: str = "log"
    target: str = ""
    code_version: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON fields."""
        return asdict(self)


def run_micro_batch(
    spark: SparkSession | Callable[[], SparkSession],
    stream: Stream,
    ledger: Ledger,
    attempt: Attempt,
    *,
    parameters: Mapping[str, Any] | None = None,
    out: IO[str] | None = None,
    progress: Callable[[str], None] | None = None,
    partitions: int | None = None,
) -> BatchResult:
    """Run an attempt (from ``ledger.attempts.begin``) at an allocated batch and complete it.

    Only the attempt's outputs are run. If one fails, the others are still written and recorded, and the attempt fails
    at the end.

    Args:
        spark: a session, classic or Connect, or a function that opens one when the batch needs it.
        stream: the stream's definition; for an attempt of a replay, the replay's definition.
        parameters: the value of ``batch.parameters`` for transforms; by default the stream's own.
        out: where console outputs print, by default stdout.
        progress: receives a line of text at each step.
        partitions: the approximate number of tasks that read an input; by default the session's parallelism.

    Raises:
        BatchFailedError: the transform, an output or Spark failed. The attempt has failed; the batch can be run again.
        AttemptFencedError: a newer attempt took the batch. This attempt's Spark jobs are cancelled.
    """
    run = _Run(spark if callable(spark) else lambda: spark, stream, ledger, attempt, progress or (lambda _: None))
    return run.to_the_end(stream.parameters if parameters is None else parameters, out or sys.stdout, partitions)


class _Run:
    def __init__(
        self,
        session: Callable[[], SparkSession],
        stream: Stream,
        ledger: Ledger,
        attempt: Attempt,
        progress: Callable[[str], None],
    ) -> None:
        self._session = session
        self._stream = stream
        self._ledger = ledger
        self._attempt = attempt
        self._report_people = progress
        self._warning: str | None = None
        self._scope: JobScope | None = None
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._failure: BaseException | None = None

    def _report(self, line: str) -> None:
        if line.startswith(report_files.WARNING):
            # The next renewal of the lease also writes it to the ledger.
            self._warning = line.removeprefix(report_files.WARNING)
        self._report_people(line)

    def to_the_end(self, parameters: Mapping[str, Any], out: IO[str], partitions: int | None) -> BatchResult:
        started = time.monotonic()
        batch = self._ledger.batches.get(self._attempt.stream, self._attempt.batch_time_ms)
        work = self._plan(batch, parameters, out, partitions)
        worker = threading.Thread(target=self._work, args=(work,), name="headrace-batch", daemon=True)
        worker.start()
        try:
            self._wait()
        except BaseException as error:
            self._cancel()
            # Work that has not ended may still begin to write to any output.
            self._fail(error, work.written if self._ended.is_set() else list(self._attempt.outputs))
            raise
        failure = self._failure or _failure_of(work)
        if failure is not None:
            self._end_if_fenced(failure)
            self._fail(failure, work.written)
            raise failure
        version = code_version(self._stream, self._attempt.outputs)
        after = self._ledger.attempts.complete(self._attempt, code_version=version)
        seconds = round(time.monotonic() - started, 3)
        self._report(self._ending(after, seconds))
        return BatchResult(
            self._stream.name,
            self._attempt.batch_time_ms,
            self._attempt.number,
            batch.records,
            batch.blocks,
            seconds,
            work.results,
            after.state.value,
            work.own.source,
            self._attempt.target,
            version,
        )

    def _plan(self, batch: BatchRow, parameters: Mapping[str, Any], out: IO[str], partitions: int | None) -> BatchWork:
        """Plan the work. If that fails, the attempt is recorded as failed."""
        attempt, stream = self._attempt, self._stream
        try:
            own = self._own(batch)
            plans = plan_outputs(self._ledger, stream, batch.batch_time_ms, attempt.outputs)
            leaving = self._leaving(batch.batch_time_ms)
            check_manifests([own, *leaving, *(origin for plan in plans for origin in plan.read)])
        except Exception as error:
            self._fail(error, [])
            raise
        self._report(_records_line(batch, own, plans))
        return BatchWork(
            stream=stream,
            attempt=attempt,
            own=own,
            leaving=leaving,
            plans=plans,
            parameters=parameters,
            session=self._session,
            new_scope=self._new_scope,
            out=out,
            progress=self._report,
            stopped=self._cancelled.is_set,
            partitions=partitions,
            written_before=written_before(self._ledger, stream, batch, attempt),
            tried_before=tried_before(self._ledger, attempt),
        )

    def _own(self, batch: BatchRow) -> BatchOrigin:
        time_ms = batch.batch_time_ms
        origin = self._ledger.batches.origins(self._stream.name, [time_ms]).get(time_ms)
        if origin is None:
            raise BatchFailedError(f"Batch {time_text(time_ms)} is {batch.state.value}, so its records are not read.")
        return origin

    def _leaving(self, batch_time_ms: int) -> tuple[BatchOrigin, ...]:
        """The batches whose records leave the state's window with this batch."""
        if STATE_STEP not in self._attempt.outputs:
            return ()
        from headrace.spark.state.eviction import evicted_batches

        return evicted_batches(self._ledger, self._stream, batch_time_ms)

    def _work(self, work: BatchWork) -> None:
        try:
            work.run(self._record)
        except BaseException as error:
            self._failure = error if isinstance(error, HeadraceError) else _batch_failed(first_cause(error), [error])
        finally:
            self._ended.set()

    def _record(self, output: str, counts: Counts) -> None:
        version = code_version(self._stream, [output])
        self._ledger.attempts.record_output(self._attempt, output, counts, code_version=version)

    def _new_scope(self, spark: SparkSession) -> JobScope:
        self._scope = JobScope(spark, self._attempt)
        return self._scope

    def _ending(self, after: BatchRow, seconds: float) -> str:
        if self._attempt.target:
            return f"replayed into {self._attempt.target} in {seconds} s"
        if after.state is BatchState.COMPLETED:
            return f"completed in {seconds} s"
        return f"{', '.join(self._attempt.outputs)} done in {seconds} s; the batch is {after.state.value} until all are"

    def _wait(self) -> None:
        """Wait for the work, and renew the lease after each third of its time. Raises AttemptFencedError."""
        period = self._attempt.lease_ms / 3000
        held_until = time.monotonic() + self._attempt.lease_ms / 1000
        while not self._ended.wait(period):
            try:
                held_up = None if self._warning is None else {WARNING: self._warning}
                self._ledger.attempts.renew(self._attempt, attributes=held_up)
                held_until = time.monotonic() + self._attempt.lease_ms / 1000
            except LedgerUnavailableError:
                # The attempt goes on until its lease expires; then another attempt may have begun.
                if time.monotonic() > held_until:
                    raise

    def _cancel(self) -> None:
        self._cancelled.set()
        deadline = time.monotonic() + _CANCEL_SECONDS
        # Repeated, because a job may start just after the others are cancelled.
        while not self._ended.is_set() and time.monotonic() < deadline:
            if self._scope is not None:
                with contextlib.suppress(Exception):
                    self._scope.cancel()
            self._ended.wait(0.5)

    def _end_if_fenced(self, failure: BaseException) -> None:
        """Raise AttemptFencedError if a later attempt has replaced this one.

        A later attempt interrupts this one's work in Spark, so the work can fail before the fencing is noticed.
        """
        try:
            self._ledger.attempts.renew(self._attempt)
        except AttemptFencedError as fenced:
            raise fenced from failure
        except LedgerUnavailableError:
            # Fencing cannot be checked, so the caller raises the failure itself.
            return

    def _fail(self, error: BaseException, written: list[str]) -> None:
        if isinstance(error, AttemptFencedError):
            return
        with contextlib.suppress(HeadraceError):
            # The decision about another try reads these attributes.
            attributes = {**self._attributes_of(error), WRITTEN: written}
            self._ledger.attempts.renew(self._attempt, attributes=attributes)
            self._ledger.attempts.fail(self._attempt, _reason(error)[:_ERROR_CHARACTERS])

    def _attributes_of(self, error: BaseException) -> dict[str, str]:
        failure = failure_of(error)
        if failure is Failure.PASSING:
            return {FAILURE: failure.value}
        try:
            return {FAILURE: failure.value, TRIED_WITH: tried_with(self._stream, self._attempt.outputs)}
        except Exception:  # the code that failed may be what cannot be read
            return {FAILURE: failure.value}


def _records_line(batch: BatchRow, own: BatchOrigin, plans: list[OutputPlan]) -> str:
    line = f"{batch.records:,} records in {batch.blocks:,} blocks"
    if own.source == "kafka":
        line = f"{batch.records:,} records, read from Kafka, as the log does not have them"
    for plan in plans:
        if plan.output.window is not None and plan.skipped is None:
            in_kafka = sum(origin.source == "kafka" for origin in plan.origins)
            line += f"; output {plan.output.id} has a window of {len(plan.origins)} batches"
            line += f", {in_kafka} of them from Kafka" if in_kafka else ""
    return line


def _failure_of(work: BatchWork) -> HeadraceError | None:
    """One error for all failed steps: the first one's, with the others named."""
    if not work.failures:
        return None
    failures = list(work.failures.values())
    first = failures[0]
    if len(failures) == 1 and not work.results:
        return first if isinstance(first, HeadraceError) else _batch_failed(first_cause(first), failures)
    reported = "; ".join(f"{step}: {_reason(error)}" for step, error in work.failures.items())
    done = f"; done: {', '.join(work.results)}" if work.results else ""
    return _batch_failed(reported + done, failures, remedy=first.remedy if isinstance(first, HeadraceError) else None)


def _batch_failed(reason: str, causes: Sequence[BaseException], *, remedy: str | None = None) -> BatchFailedError:
    error = BatchFailedError(f"The batch failed: {reason}", remedy=remedy)
    error.reason = reason
    error.__cause__ = causes[0]
    # If any of several failed steps may succeed on a retry, the attempt is worth another try.
    kinds = {failure_of(cause) for cause in causes}
    error.failure = next(kind for kind in Failure if kind in kinds)
    return error


def _reason(error: BaseException) -> str:
    return error.reason if isinstance(error, BatchFailedError) else first_cause(error)
