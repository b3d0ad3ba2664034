"""Runs the batches of a range in one process, several at a time, each by an attempt of its own:

1. Read from the ledger which batches are left (``headrace.batch.batch_range``).
2. Begin an attempt at each, like the one that the task has begun at the first: the same outputs, definition, parameters
   and Airflow run. A live attempt of another run is waited for.
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
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Protocol

from headrace.batch.batch_range import RangeProgress, TimeRange
from headrace.batch.results import write_results
from headrace.clock import readable_seconds, time_text
from headrace.errors import TRY_NUMBER, HeadraceError
from headrace.ledger.errors import AttemptFencedError, LedgerUnavailableError, SlotBusyError
from headrace.ledger.states import AttemptState, BatchState
from headrace.spark.attempts.attempt import run_attempt
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.failures import reason_of
from headrace.spark.outputs.writer import WARNING
from headrace.stream import STATE_STEP

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger.batch_tables import Attempt, AttemptRow, BatchRow
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
_GIVE_WAY_SECONDS = 30.0
# A batch is due for so many intervals, at least a minute. After that nobody seems to run it.
_LIVE_INTERVALS = 10
_AVERAGED_SECONDS = 60.0
# One of so many threads runs batches where processors are short. With 4, the live stream's p99 rose by 11% on Postgres.
_FEWER = 8
# None: it has blocks, and is not allocated yet.
_DUE = (None, BatchState.ALLOCATED, BatchState.RUNNING)


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
        self._ordered_steps = tuple(output.step for output in written if first.target and output.deletes_by_key)
        self._ordered = bool(self._ordered_steps) if first.target else self._stream.is_ordered
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
        self._few, self._began = max(1, self._threads // _FEWER), time.monotonic()
        self._asking, self._ask_at, self._known = threading.Lock(), 0.0, _Live(is_due=False, has_batches=False)
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
            with contextlib.suppress(LedgerUnavailableError):
                self._give_way(number)
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
        """Begin an attempt at the batch, once no other run's is live. None if this run has done the batch meanwhile."""
        attributes = self._sessions.attributes(number)
        if batch.batch_time_ms == self._first.batch_time_ms:
            earlier = [row for row in self._attempts(batch) if row.number < self._first.number]
            claim = self._first.claim()
            self._ledger.attempts.renew(claim, attributes=attributes)
        else:
            waited_for = self._earlier(batch)
            if waited_for is None:
                return None
            earlier = waited_for
            claim = self._begin_like(batch, {**self._first.attributes, **attributes})
        # Most batches have no earlier attempt that may still run.
        if any(row.state is not AttemptState.COMPLETED for row in earlier):
            self._sessions.end_earlier(claim)
        return claim

    def _earlier(self, batch: BatchRow) -> list[AttemptRow] | None:
        """The earlier attempts at the batch, once none of another run is live; None if it is not to be begun."""
        reported = False
        while not self._stop.is_set():
            attempts = self._attempts(batch)
            # A later try that has another definition begins the range again.
            of_run = [row for row in attempts if self._range.is_of_same_run(row)]
            tries = [row.attributes.get(TRY_NUMBER, 0) for row in of_run]
            if max(tries, default=0) > self._first.attributes.get(TRY_NUMBER, 0):
                self._replaced = AttemptFencedError("A later try of this task runs the range.")
                self._stop.set()
                return None
            own = [row for row in of_run if set(self._first.outputs) <= set(row.outputs)]
            if own and self._range.is_written_by(own[-1], like=self._first):
                with self._lock:
                    self._done += 1
                return None
            now_ms = self._ledger.now_ms()
            others = [row for row in attempts if row.alive(now_ms) and row not in of_run]
            if not others:
                return attempts
            if not reported:
                self._report(f"batch {time_text(batch.batch_time_ms)} waits for {others[-1].holder}, which runs it")
                reported = True
            self._stop.wait(_POLL_SECONDS)
        return None

    def _attempts(self, batch: BatchRow) -> list[AttemptRow]:
        """The attempts at outputs of this run."""
        time_ms = batch.batch_time_ms
        rows = self._ledger.attempts.between(batch.stream, time_ms - 1, time_ms, target=self._first.target)
        return [row for row in rows if set(row.outputs) & set(self._first.outputs)]

    def _begin_like(self, batch: BatchRow, attributes: Mapping[str, Any]) -> Attempt:
        first = self._first
        begun: dict[str, Any] = {
            "holder": first.holder,
            "way": first.way,
            "lease_ms": self._settings.lease_ms,
            "outputs": first.outputs,
            "attributes": attributes,
        }
        if first.target:
            return self._ledger.replays.begin(
                batch.stream,
                batch.batch_time_ms,
                target=first.target,
                definition=str(first.definition),
                ordered=self._ordered_steps,
                **begun,
            )
        while True:
            try:
                return self._ledger.attempts.begin(
                    batch.stream, batch.batch_time_ms, force=True, revision=first.revision, **begun
                )
            except SlotBusyError:
                if self._stop.wait(_POLL_SECONDS):
                    raise

    def _give_way(self, number: int) -> None:
        """Let the live stream go first: in an ordered stream, and where processors are short. While a batch of the
        stream is due, none of the range begins. Else a few of the threads run batches, because those that run when the
        stream's next batch is due delay it, and many hold up its receivers in the ledger.

        A low priority of this process would not do: the stream would wait for it whenever it holds the ledger's lock.
        Not for ever: the batch that is due may wait for a person.
        """
        in_order = self._ordered and not self._first.target
        deadline = time.monotonic() + _GIVE_WAY_SECONDS
        while self._left and not self._stop.is_set():
            if not (in_order or processors_are_short(self._began)):
                return
            live = self._live()
            waits = live.is_due and time.monotonic() < deadline
            if not waits and (number < self._few or not live.has_batches):
                return
            self._stop.wait(_POLL_SECONDS)

    def _live(self) -> _Live:
        """The state of the live stream; asks the ledger once a second at most."""
        with self._asking:
            now = time.monotonic()
            if now >= self._ask_at:
                self._ask_at = now + _POLL_SECONDS
                self._known = self._read_live()
            return self._known

    def _read_live(self) -> _Live:
        now_ms, stream = self._ledger.now_ms(), self._stream
        since_ms = now_ms - max(60_000, _LIVE_INTERVALS * stream.batch_interval_ms)
        batches, newest = self._ledger.batches, self._ledger.batches.page(stream.name, 1)
        catches_up = False
        if stream.is_ordered:
            # The others wait for the first one, which may wait for a person.
            unfinished = batches.earlier_unfinished(stream.name, now_ms, limit=1)
            for batch in unfinished:
                # However old it is, it is due while the stream works through a backlog.
                before = batches.page(stream.name, 1, [BatchState.COMPLETED], before_ms=batch.batch_time_ms)
                catches_up = batch.alive or any((row.completed_at_ms or 0) >= since_ms for row in before)
        else:
            unfinished = batches.earlier_unfinished(stream.name, now_ms, after_ms=since_ms)
        return _Live(
            is_due=any((catches_up or batch.batch_time_ms > since_ms) and batch.state in _DUE for batch in unfinished),
            has_batches=any(batch.batch_time_ms > since_ms for batch in newest),
        )


@dataclass(frozen=True, slots=True)
class _Live:
    """``is_due``: a batch of the stream is due and has not completed. ``has_batches``: there was one lately."""

    is_due: bool
    has_batches: bool


def processors_are_short(began: float) -> bool:
    """Whether more threads of this host want a processor than it has, on average over the last minute. True for the
    first minute from ``began`` on (`time.monotonic`): the average does not show yet what the range itself adds."""
    is_new = time.monotonic() < began + _AVERAGED_SECONDS
    return is_new or os.getloadavg()[0] > (os.cpu_count() or 1)
