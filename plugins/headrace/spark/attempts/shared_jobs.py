"""Spark jobs that the batches of a range share.

A query costs Spark 60 to 100 ms of processor time, and a task in a Python worker some more, however few records it
has. So batches whose records nothing transforms (`BlockWriter`) hand their tasks to one Spark job at a time: while it
runs, the tasks of the next one come together. A batch keeps its own attempt, checks, counts and errors.

A union of one query for each batch would not help: Spark plans and compiles each part of it. In 100 batches it took as
much processor time as 100 queries, and a job whose tasks do several batches a fiftieth. So batches with a transform,
which is a query of its own, do not share jobs.
"""

from __future__ import annotations

import heapq
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.spark.attempts.failures import task_cause
from headrace.spark.sessions import cancel_tag, name_jobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# While one job runs, another one is prepared, and takes the slots that become free at its end.
_JOBS_AT_ONCE = 2
_MAX_BATCHES = 64
# A job waits so long for more batches, unless it has this many for each slot.
_WAIT_SECONDS = 0.5
_ENOUGH_A_SLOT = 8
# A task runs so many batches at a time: one reads while another waits for its output's server.
_BATCHES_A_TASK = 2
# After so long without a success a task tries no more batches.
_GIVE_UP_SECONDS = 60.0

_RESULTS_DDL = "place INT, error STRING, results BINARY"
_RESULTS = pa.schema([("place", pa.int32()), ("error", pa.string()), ("results", pa.binary())])


class JobInterruptedError(Exception):
    """The batch has no results from a shared job: a large one does not share, and a job fails as a whole, for example
    when an attempt in it is fenced."""


class BatchTaskFailedError(Exception):
    """The batch's own task has failed in a shared job. Its text is the Python traceback of the task."""


class BatchNotTriedError(HeadraceError):
    """The batch was not tried, because no other batch of its Spark task has succeeded for a minute: a server is away.
    Each batch would wait for it as long as the ones before, and a job has its results when all of them have ended."""


class BlockTask(Protocol):
    """What is done with records that the task reads by their numbers. It is pickled."""

    def run(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do it for the records with these numbers. Yields its results."""
        ...

    def among(self, tasks: int) -> BlockTask:
        """The task as one of at most so many that run at once, for what they share."""
        ...


class BatchBlocks(Protocol):
    """The records of one input in one or more batches, read by Spark's tasks themselves. It is pickled.

    ``records`` is None if they were not counted, and ``weight`` then the most that they can be. Tasks get some of the
    ``numbers``, which begin with 0. ``is_small``: one task is enough.
    """

    @property
    def records(self) -> int | None: ...

    @property
    def weight(self) -> int: ...

    @property
    def numbers(self) -> int: ...

    @property
    def is_small(self) -> bool: ...

    def run(self, spark: SparkSession, tasks: int, task: BlockTask, schema: str) -> pa.Table:
        """The results of the task, with this schema (as DDL), for all records."""
        ...

    def read(self, numbers: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records of these numbers, as batches of ``RECORD_SCHEMA``."""
        ...


_Used = TypeVar("_Used")
# What the batches of the thread's task share, by name, and what closes it.
_of_task = threading.local()


@contextmanager
def used_by_task(name: str, opened: Callable[[], AbstractContextManager[_Used]]) -> Iterator[_Used]:
    """What the batches of one task of a shared job use one after the other, such as a client. It is closed at the end
    of the task, or after an error. Elsewhere it is the caller's alone."""
    if not hasattr(_of_task, "used"):
        with opened() as own:
            yield own
        return
    if name not in _of_task.used:
        closing = ExitStack()
        _of_task.used[name] = (closing.enter_context(opened()), closing)
    shared, closing = _of_task.used[name]
    try:
        yield shared
    except BaseException:
        del _of_task.used[name]
        closing.close()
        raise


@contextmanager
def _sharing() -> Iterator[None]:
    _of_task.used = {}
    try:
        yield
    finally:
        used = _of_task.used
        del _of_task.used
        with ExitStack() as closing:
            for _, each in used.values():
                closing.push(each)


@dataclass(frozen=True, slots=True)
class _JobTasks:
    """The tasks of a shared job, which get the numbers of ``parts``. A part has batches: each has its place in the job,
    what is done, and how many numbers its records have."""

    parts: tuple[tuple[tuple[int, BlockTask, int], ...], ...]

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the results of each batch as an Arrow stream, or its error."""
        batches = [batch for numbers in rows for row in numbers.column(0).to_pylist() for batch in self.parts[row]]
        left, outcomes = iter(batches), _Outcomes()
        done: Queue[pa.RecordBatch | BaseException] = Queue()
        for _ in range(min(_BATCHES_A_TASK, len(batches))):
            threading.Thread(target=_run_batches, args=(left, outcomes, done.put), daemon=True).start()
        for _ in batches:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result


@dataclass(slots=True)
class _Outcomes:
    """When a batch of a task last succeeded, and the errors since. One that fails by itself does not end the others."""

    succeeded_at: float = field(default_factory=time.monotonic)
    errors: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise BatchNotTriedError if no other batch is to be tried."""
        errors, seconds = self.errors, time.monotonic() - self.succeeded_at
        if len(errors) >= _BATCHES_A_TASK and seconds > _GIVE_UP_SECONDS:
            raise BatchNotTriedError(
                f"Not tried: {len(errors)} batches before it in its Spark task failed, and none succeeded for "
                f"{seconds:.0f} s. The last one's error: {task_cause(errors[-1])}"
            )

    def failed(self, error: str) -> None:
        self.errors += (error,)

    def succeeded(self) -> None:
        self.succeeded_at, self.errors = time.monotonic(), ()


def _run_batches(
    left: Iterator[tuple[int, BlockTask, int]],
    outcomes: _Outcomes,
    done: Callable[[pa.RecordBatch | BaseException], None],
) -> None:
    """Run batches until none is left. What they use is closed at the end. An error that is no batch's is given too:
    without it, the task would wait for results for ever."""
    try:
        with _sharing():
            # A list's iterator gives each of its items to one thread.
            for place, task, numbers in left:
                results, error = None, None
                try:
                    outcomes.check()
                    results = _stream(task, numbers)
                    outcomes.succeeded()
                except BaseException as failure:
                    # Arrow's texts have no halves of characters, and a text that a server has cut may have one.
                    error = traceback.format_exc().encode(errors="backslashreplace").decode()
                    if not isinstance(failure, BatchNotTriedError):
                        outcomes.failed(error)
                done(pa.RecordBatch.from_pylist([{"place": place, "error": error, "results": results}], _RESULTS))
    except BaseException as error:
        done(error)


def _stream(task: BlockTask, numbers: int) -> bytes:
    all_of_it = pa.record_batch([pa.array(np.arange(numbers))], ["id"])
    table = pa.Table.from_batches(task.run(iter([all_of_it])))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _WaitingBatch:
    """A batch that waits for its results. ``tag`` is its attempt's, by which the job can be interrupted."""

    tag: str
    task: BlockTask
    numbers: int
    weight: int
    results: Future[pa.Table] = field(default_factory=Future)


class SharedSparkJobs:
    """Runs the tasks of several batches in one Spark job. Its methods may be called by any thread.

    Args:
        open_session: returns the session of the jobs.
        slots: the task slots that a job may take.
        description: of the jobs, for Spark's user interface.
        pool: the pool of Spark's scheduler in which they run.
    """

    def __init__(self, open_session: Callable[[], SparkSession], *, slots: int, description: str, pool: str) -> None:
        self._open_session, self._slots = open_session, slots
        self._description, self._pool = description, pool
        self._waiting: deque[_WaitingBatch] = deque()
        self._running: set[str] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"headrace-shared-job-{number}", daemon=True)
            for number in range(_JOBS_AT_ONCE)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tag: str, task: BlockTask, blocks: BatchBlocks) -> pa.Table:
        """Do this with all records of the blocks, and return the results.

        Raises:
            JobInterruptedError: the job as a whole has failed, or the batch is large: it needs a job of its own.
            BatchTaskFailedError: the batch's own task has failed.
        """
        asked = _WaitingBatch(tag, task, blocks.numbers, blocks.weight)
        with self._changed:
            if self._is_closed or not blocks.is_small:
                raise JobInterruptedError("The batch does not share a job.")
            self._waiting.append(asked)
            self._changed.notify()
        return asked.results.result()

    def interrupt(self, tag: str) -> None:
        """Interrupt the attempt with this tag, and with it the other batches of its job, if it runs in one."""
        with self._changed:
            waiting = [batch for batch in self._waiting if batch.tag == tag]
            for batch in waiting:
                self._waiting.remove(batch)
            is_running = tag in self._running
        for batch in waiting:
            batch.results.set_exception(JobInterruptedError("The attempt was cancelled."))
        if is_running:
            cancel_tag(self._open_session(), tag)

    def close(self) -> None:
        """Begin no more jobs. Batches that wait get a JobInterruptedError."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for batch in waiting:
            batch.results.set_exception(JobInterruptedError("The run of the range ends."))

    def _work(self) -> None:
        while batches := self._next():
            tags = [batch.tag for batch in batches]
            try:
                found = self._run_job(batches, tags)
                if len(found) < len(batches):
                    raise JobInterruptedError(f"The job returned {len(found)} of {len(batches)} results.")
            except Exception as error:
                for batch in batches:
                    interrupted = JobInterruptedError(str(error))
                    interrupted.__cause__ = error
                    batch.results.set_exception(interrupted)
                continue
            finally:
                self._running.difference_update(tags)
            for row in found:
                results = batches[row["place"]].results
                if row["error"] is None:
                    results.set_result(pa.ipc.open_stream(row["results"]).read_all())
                else:
                    results.set_exception(BatchTaskFailedError(row["error"]))

    def _next(self) -> list[_WaitingBatch]:
        """The batches of the next job; none at the end."""
        enough = self._slots * _ENOUGH_A_SLOT
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                self._changed.wait_for(lambda: len(self._waiting) >= enough or self._is_closed, _WAIT_SECONDS)
                # The other thread may have taken them.
                if self._waiting:
                    batches = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCHES))]
                    self._running.update(batch.tag for batch in batches)
                    return batches
        return []

    def _run_job(self, batches: Sequence[_WaitingBatch], tags: Sequence[str]) -> list[dict[str, Any]]:
        parts = _parts(batches, self._slots)
        spark = self._open_session()
        # Who replaces one of the attempts interrupts the job by its tag.
        name_jobs(spark, f"{self._description}, {len(batches)} batches", group=tags[0], pool=self._pool, tags=tags)
        numbers = spark.range(0, len(parts), 1, len(parts))
        return numbers.mapInArrow(_JobTasks(parts).run, _RESULTS_DDL).toArrow().to_pylist()  # type: ignore[no-any-return]


def _parts(batches: Sequence[_WaitingBatch], slots: int) -> tuple[tuple[tuple[int, BlockTask, int], ...], ...]:
    """Divide the batches among as many tasks, with about as many records each. Each batch is told how many of them can
    run at once, those of the other job included."""
    parts: list[list[tuple[int, BlockTask, int]]] = [[] for _ in range(min(slots, len(batches)))]
    at_once = _JOBS_AT_ONCE * min(len(batches), _BATCHES_A_TASK * len(parts))
    fewest = [(0, number) for number in range(len(parts))]
    for place in sorted(range(len(batches)), key=lambda place: -batches[place].weight):
        weight, number = heapq.heappop(fewest)
        parts[number].append((place, batches[place].task.among(at_once), batches[place].numbers))
        heapq.heappush(fewest, (weight + batches[place].weight, number))
    return tuple(tuple(part) for part in parts)
