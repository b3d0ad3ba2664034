"""Runs the batches of a range in one process, several at a time, each by an attempt of its own:

1. Read from the ledger which batches are left (``headrace.batch.range_progress``).
2. Begin an attempt at each (``headrace.batch.next_attempt``), like the one that the task has begun at the first: the
   same outputs, definition, parameters and Airflow run. A live attempt of another run is waited for.
3. Run it (``attempt``) in its thread's Spark session, or in Spark jobs that the batches share (``shared_jobs``). So
   what a batch costs beside its records, in Spark and in the ledger, passes while other batches are written.
4. Every few seconds, write the results of its batches (``headrace.batch.results``), which would delay the stream's own
   runs, and report how far the range is.

A batch that fails does not stop the others. But if as many fail in a row as run at a time, an output is unavailable or
the code is wrong: the run ends, and what is left is for the task's retry. An ordered range has one batch at a time, and
ends with the first failure.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Protocol

from headrace.batch.next_attempt import BatchProgress, LiveStream, NextAttempt, ReplayTarget, Wait
from headrace.batch.range_progress import RangeProgress
from headrace.batch.results import write_results
from headrace.batch.time_range import TimeRange
from headrace.clock import readable_seconds, time_text
from headrace.errors import HeadraceError
from headrace.ledger.errors import AttemptFencedError, LedgerUnavailableError, NotItsTurnError
from headrace.ledger.states import AttemptState
from headrace.spark.attempts.attempt import run_attempt
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.failures import reason_of
from headrace.spark.outputs.writer import WARNING
from headrace.stream import STATE_STEP

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger.batches.tables import Attempt, AttemptRow, BatchRow
    from headrace.spark.attempts.shared_jobs import SharedSparkJobs
    from headrace.stream_context import StreamContext

POOL = "again"
"""The pool of Spark's scheduler for the jobs of ranges."""

_REPORT_SECONDS = 10.0
_POLL_SECONDS = 1.0
# How long to wait at the end for attempts whose Spark jobs are cancelled.
_END_SECONDS = 15.0
_ERROR_CHARACTERS = 500
_FEWEST_FAILURES = 3


class RangeIncompleteError(HeadraceError):
    """Batches of the range are left."""


class RangeSessions(Protocol):
    """The Spark sessions of a range's threads, which have numbers. The command makes them, since it knows the way.

    Over Connect each thread has its own, unless they share jobs: jobs are named by the settings of a session, which are
    not a thread's.
    """

    def attributes(self, number: int) -> Mapping[str, Any]:
        """The attributes of the attempts that run in the thread's session."""
        ...

    def open(self, number: int) -> SparkSession:
        """Return the thread's session."""
        ...

    def end_earlier(self, claim: Attempt) -> None:
        """End what the attempts that this one replaces still run in Spark."""
        ...

    def give_up(self, number: int) -> None:
        """Close the thread's session: it may be gone."""
        ...

    @property
    def jobs(self) -> SharedSparkJobs | None:
        """The Spark jobs that the batches share; None if each has jobs of its own."""
        ...


@dataclass(frozen=True, slots=True)
class RangeSettings:
    """``threads``: how many batches run at a time. The others are as in `BatchAttempt`."""

    threads: int
    partitions: int | None
    parameters: Any
    out: IO[str]
    report: Callable[[str], None]
    lease_ms: int


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What a run of a range has done: its batches, their records, and its duration."""

    batches: int
    records: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON fields."""
        return asdict(self)


class RangeRunner:
    """The run of a range. ``first`` is the attempt that the task has begun for it, at one of the batches.

    Raises RangeError.
    """

    def __init__(
        self,
        context: StreamContext,
        batches: TimeRange,
        first: AttemptRow,
        sessions: RangeSessions,
        settings: RangeSettings,
    ) -> None:
        self._range, self._first, self._context = batches, first, context
        self._sessions, self._settings, self._report = sessions, settings, settings.report
        self._ledger, self._stream = context.ledger, context.stream
        written = [self._stream.output_of_step(step) for step in first.outputs if step != STATE_STEP]
        # Those whose batches the replay has to write in the order of their times.
        ordered = tuple(output.step for output in written if output.deletes_by_key)
        replay = ReplayTarget(first.target, str(first.definition), ordered) if first.target else None
        self._ordered = bool(ordered) if first.target else self._stream.is_ordered
        self._following = partial(
            NextAttempt.of_range, self._ledger, batches=batches, steps=first.outputs, replay=replay
        )
        progress = RangeProgress.of(
            self._ledger, first.stream, batches, first.outputs, target=first.target, ordered=self._ordered
        )
        self._number, self._done = progress.number, len(progress.completed)
        # The one that the task has begun comes first: its lease has begun too.
        left = sorted(progress.left, key=lambda batch: batch.batch_time_ms != first.batch_time_ms)
        self._left = deque(left)
        self._threads = 1 if self._ordered else max(1, min(settings.threads, len(left)))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        in_order = self._ordered and not first.target
        self._live = LiveStream(self._ledger, self._stream, threads=self._threads, in_order=in_order)
        self._running: dict[int, BatchAttempt] = {}
        self._failed = self._failed_in_row = self._records = 0
        self._replaced: AttemptFencedError | None = None

    def run(self) -> RangeResult:
        """Run what is left.

        Raises:
            RangeIncompleteError: batches have failed, or were not begun after failures.
            AttemptFencedError: a later try of the task runs the range.
        """
        started = time.monotonic()
        before = self._done
        self._report(f"{self._range}: {before:,} of {self._number:,} batches are done, {self._threads} run at a time")
        threads = [
            threading.Thread(target=self._work, args=(number,), name=f"headrace-range-{number}", daemon=True)
            for number in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        try:
            self._follow(threads, started, before)
        finally:
            self._end(threads)
        seconds = time.monotonic() - started
        if self._replaced is not None:
            raise self._replaced
        left = self._number - self._done
        if left:
            raise RangeIncompleteError(
                f"{left:,} of {self._number:,} batches of {self._range} are left, {self._failed:,} failed in this try."
            )
        self._report(f"all {self._number:,} batches are done: {self._rate(seconds)} in {readable_seconds(seconds)}")
        return RangeResult(self._done - before, self._records, round(seconds, 3))

    # --- the thread that reports

    def _follow(self, threads: list[threading.Thread], started: float, before: int) -> None:
        next_report = started + _REPORT_SECONDS
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_POLL_SECONDS / len(threads))
            now = time.monotonic()
            if now >= next_report:
                self._write_results()
                self._report(self._progress(now - started, before))
                next_report = time.monotonic() + _REPORT_SECONDS

    def _write_results(self) -> None:
        try:
            write_results(self._context, after_ms=self._range.after_ms, until_ms=self._range.until_ms)
        except (HeadraceError, OSError) as error:
            # The task tries again when the process has ended.
            self._report(f"results are not written yet: {error}")

    def _progress(self, seconds: float, before: int) -> str:
        done = self._done - before
        line = f"{self._done:,} of {self._number:,} batches, {self._rate(seconds)}"
        if self._failed:
            line += f", {self._failed:,} failed"
        if done:
            line += f", about {readable_seconds(seconds / done * (self._number - self._done))} left"
        return line

    def _rate(self, seconds: float) -> str:
        return f"{self._records:,} records, {self._records / max(seconds, 0.001):,.0f} a second"

    def _end(self, threads: list[threading.Thread]) -> None:
        """Let the threads end: at once if the run was interrupted."""
        self._stop.set()
        deadline = time.monotonic() + _END_SECONDS
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            with self._lock:
                running = list(self._running.values())
            for attempt in running:
                # Repeated: a job may start just after the others are cancelled.
                with contextlib.suppress(Exception):
                    attempt.cancel_jobs()
            threads[0].join(0.5)

    # --- the threads that run batches

    def _work(self, number: int) -> None:
        try:
            # The task has begun the first batch, so it does not wait.
            is_first = number == 0
            while (batch := self._next(number, give_way=not is_first)) is not None:
                is_first = False
                self._run_batch(number, batch)
        except BaseException as error:
            self._stop.set()
            # If the reader of this process's output is gone, nobody reads why.
            with contextlib.suppress(Exception):
                self._report(f"no more batches are begun: {reason_of(error)[:_ERROR_CHARACTERS]}")
        finally:
            with contextlib.suppress(Exception):
                self._sessions.give_up(number)

    def _next(self, number: int, *, give_way: bool) -> BatchRow | None:
        if give_way:
            # If the ledger is away, the attempt says so.
            began = time.monotonic()
            with contextlib.suppress(LedgerUnavailableError):
                while self._left and not self._stop.is_set():
                    if self._live.awaited(number, time.monotonic() - began) is None:
                        break
                    self._stop.wait(_POLL_SECONDS)
        with self._lock:
            return self._left.popleft() if self._left and not self._stop.is_set() else None

    def _run_batch(self, number: int, batch: BatchRow) -> None:
        at = time_text(batch.batch_time_ms)
        try:
            claim = self._begin(number, batch)
            if claim is None:
                return
            attempt = BatchAttempt(
                self._context,
                claim,
                partial(self._sessions.open, number),
                parameters=self._settings.parameters,
                partitions=self._settings.partitions,
                out=self._settings.out,
                report=lambda line: self._report(f"batch {at}: {line}") if line.startswith(WARNING) else None,
                pool=POOL,
                # A batch that runs alone would wait for others to share a job with.
                shared=self._sessions.jobs if self._threads > 1 else None,
            )
            with self._lock:
                self._running[number] = attempt
            try:
                result = run_attempt(attempt)
            finally:
                with self._lock:
                    del self._running[number]
        except AttemptFencedError as fenced:
            # The one that replaced it runs the batch. What it leaves, the task's next try finds.
            self._report(f"batch {at}: {fenced}")
            self._sessions.give_up(number)
            if self._ordered:
                # A later one must not be begun before this one is written for the range. The next try begins with it.
                self._stop.set()
        except Exception as error:
            self._sessions.give_up(number)
            self._has_failed(at, error)
        else:
            with self._lock:
                self._done += 1
                self._failed_in_row = 0
                self._records += result.records

    def _has_failed(self, at: str, error: Exception) -> None:
        with self._lock:
            self._failed += 1
            self._failed_in_row += 1
            stop = self._ordered or self._failed_in_row >= max(self._threads, _FEWEST_FAILURES)
        if self._stop.is_set():
            return
        self._report(f"batch {at} failed: {reason_of(error)[:_ERROR_CHARACTERS]}")
        if stop:
            why = "the batches have an order" if self._ordered else f"{self._failed_in_row} have failed in a row"
            self._report(f"no more batches are begun, because {why}")
            self._stop.set()

    def _begin(self, number: int, batch: BatchRow) -> Attempt | None:
        """Begin an attempt at the batch like the first, once no other run's is live. None if this run has done the
        batch meanwhile, or begins nothing more."""
        attributes = self._sessions.attributes(number)
        reported = False
        while not self._stop.is_set():
            following = self._following(batch, attributes={**self._first.attributes, **attributes})
            begun = self._begun(following, attributes)
            if begun is None:
                return None
            if not isinstance(begun, Wait):
                # Most batches have no earlier attempt that may still run.
                earlier = [row for row in following.attempts if row.number < begun.number]
                if any(row.state is not AttemptState.COMPLETED for row in earlier):
                    self._sessions.end_earlier(begun)
                return begun
            if not reported:
                self._report(begun.reason)
                reported = True
            self._stop.wait(_POLL_SECONDS)
        return None

    def _begun(self, following: NextAttempt, attributes: Mapping[str, Any]) -> Attempt | Wait | None:
        """The attempt, or what it waits for; None if it is not to be made."""
        first = self._first
        if following.batch.batch_time_ms == first.batch_time_ms:
            self._ledger.attempts.renew(first.claim(), attributes=attributes)
            return first.claim()
        try:
            awaited = following.awaited()
        except AttemptFencedError as replaced:
            # It may have another definition, and then begins the range again.
            self._replaced = replaced
            self._stop.set()
            return None
        if BatchProgress(first.outputs, following.attempts).is_written_for(self._range, like=first):
            with self._lock:
                self._done += 1
            return None
        begun = awaited or following.begin(
            holder=first.holder, way=first.way, lease_ms=self._settings.lease_ms, revision=first.revision
        )
        if isinstance(begun, Wait) and isinstance(begun.otherwise, NotItsTurnError):
            # The batches before it are this range's own. One of them is left, and the next try begins with it.
            raise begun.otherwise
        return begun
