"""Spark jobs that batches share. In place of Spark, their tasks run here, and a job fails when a test wants it to."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.receiver.waiting import eventually

from headrace.errors import Failure
from headrace.kafka.errors import RangesUnreadableError
from headrace.spark.attempts import shared_jobs
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.failures import failure_of, first_cause
from headrace.spark.attempts.shared_jobs import (
    BatchTaskFailedError,
    JobInterruptedError,
    SharedSparkJobs,
    _JobTasks,
    _parts,
    _WaitingBatch,
    used_by_task,
)
from headrace.spark.records.wal_source import DamagedBlockError

SLOTS = 2


@dataclass(frozen=True)
class Count:
    """Returns the batch's name and the number of its records."""

    name: str
    tasks: int = field(default=0, kw_only=True)

    def among(self, tasks: int) -> Count:
        return replace(self, tasks=tasks)

    def run(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        records = sum(batch.num_rows for batch in numbers)
        if self.name.startswith("damaged"):
            raise DamagedBlockError(f"the block of {self.name} is damaged")
        yield pa.record_batch([[self.name], [records]], ["name", "records"])
        yield pa.record_batch([[self.name], [0]], ["name", "records"])


class Session:
    """As much of a session as a shared job asks for. ``jobs`` has the number of tasks of each job."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self.tags: list[list[str]] = []
        self.fails: list[Exception] = []
        self.may_run = threading.Event()
        self.may_run.set()

    def range(self, start: int, end: int, step: int, tasks: int) -> Any:
        assert (start, step, tasks) == (0, 1, end)

        def run(function: Any, _schema: str) -> Any:
            sent = pickle.dumps(function.__self__)
            return SimpleNamespace(toArrow=lambda: self._run(pickle.loads(sent).run, tasks))  # noqa: S301

        return SimpleNamespace(mapInArrow=run)

    def _run(self, function: Any, tasks: int) -> pa.Table:
        self.jobs.append(tasks)
        assert self.may_run.wait(20)
        if self.fails:
            raise self.fails.pop()
        numbers = [pa.record_batch([pa.array([number])], ["id"]) for number in range(tasks)]
        return pa.Table.from_batches([batch for number in numbers for batch in function(iter([number]))])


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session()

    def name(_spark: Any, _description: str, *, group: str, pool: str, tags: Any) -> None:
        assert (group, pool) == (tags[0], "again")
        session.tags.append(list(tags))

    monkeypatch.setattr(shared_jobs, "name_jobs", name)
    return session


@pytest.fixture
def jobs(session: Session) -> Iterator[SharedSparkJobs]:
    made = SharedSparkJobs(lambda: session, slots=SLOTS, description="clicks again", pool="again")  # type: ignore[arg-type,return-value]
    yield made
    session.may_run.set()
    made.close()


def blocks(records: int, *, is_small: bool = True) -> Any:
    return SimpleNamespace(numbers=records, weight=records, is_small=is_small)


def asked(jobs: SharedSparkJobs, *names: str) -> dict[str, Any]:
    """The results of these batches, or their errors. The batch at place n has n records."""

    def ask(place: int) -> Any:
        try:
            return jobs.run(names[place], Count(names[place]), blocks(place)).to_pylist()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(ask, range(len(names))), strict=True))


def test_batches_share_a_job_and_each_gets_its_own_results(session: Session, jobs: SharedSparkJobs) -> None:
    names = [f"batch {number}" for number in range(SLOTS * 8)]
    found = asked(jobs, *names)
    for place, name in enumerate(names):
        assert found[name] == [{"name": name, "records": place}, {"name": name, "records": 0}]
    assert session.jobs == [SLOTS]
    assert sorted(session.tags[0]) == sorted(names)


@pytest.mark.parametrize(("batches", "at_once"), [(1, 2), (3, 6), (4, 8), (16, 8)])
def test_batches_share_what_all_of_both_jobs_may_use(batches: int, at_once: int) -> None:
    """Each of two tasks runs two batches at a time, and another job may do so too."""
    waiting = [_WaitingBatch(f"{number}", Count(f"{number}"), 1, 1) for number in range(batches)]
    assert {task.tasks for part in _parts(waiting, 2) for _, task, _ in part} == {at_once}  # type: ignore[attr-defined]


# Two batches of one task meet there, so they run at the same time.
MEETING = threading.Barrier(2)


@dataclass(frozen=True)
class Meet(Count):
    def run(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        MEETING.wait(20)
        return super().run(numbers)


def test_a_task_runs_two_batches_at_a_time(session: Session, jobs: SharedSparkJobs) -> None:
    names = [f"batch {number}" for number in range(SLOTS * 8)]
    with ThreadPoolExecutor(len(names)) as pool:
        running = [pool.submit(jobs.run, name, Meet(name), blocks(1)) for name in names]
        found = [each.result().to_pylist()[0] for each in running]
    assert found == [{"name": name, "records": 1} for name in names]
    assert session.jobs == [SLOTS]


def test_what_a_tasks_batches_use_is_opened_once() -> None:
    """It is opened again after an error."""
    opened: list[str] = []

    @contextmanager
    def client() -> Iterator[int]:
        opened.append("opened")
        try:
            yield len(opened)
        finally:
            opened.append("closed")

    def use() -> int:
        with used_by_task("client", client) as number:
            return number

    with shared_jobs._sharing():
        assert [use(), use()] == [1, 1]
        with pytest.raises(RuntimeError), used_by_task("client", client):
            raise RuntimeError
        assert opened == ["opened", "closed"]
        assert use() == 3
    assert opened == ["opened", "closed"] * 2
    assert [use(), use()] == [5, 7], "elsewhere each has its own"
    assert opened == ["opened", "closed"] * 4


def test_a_batch_whose_task_fails_leaves_the_others_results(jobs: SharedSparkJobs) -> None:
    found = asked(jobs, "good", "damaged", "fine")
    assert [len(found[name]) for name in ("good", "fine")] == [2, 2]
    error = found["damaged"]
    assert isinstance(error, BatchTaskFailedError)
    # As an error that comes through Spark, it is known by its traceback.
    assert first_cause(error).startswith(
        "headrace.spark.records.wal_source.DamagedBlockError: the block of damaged is damaged"
    )
    assert failure_of(error) is DamagedBlockError.failure


def test_an_error_of_any_text_leaves_the_others_their_results() -> None:
    # Half of a character, as where a server cuts a text that it quotes.
    tasks = _JobTasks((((0, Count("damaged \ud83d"), 1), (1, Count("good"), 1)),))
    part = pa.record_batch([pa.array([0])], ["id"])
    found: list[dict[str, Any]] = []
    running = threading.Thread(
        target=lambda: found.extend(row for batch in tasks.run(iter([part])) for row in batch.to_pylist()), daemon=True
    )
    running.start()
    running.join(20)
    damaged, good = sorted(found, key=lambda row: row["place"])
    assert "the block of damaged \\ud83d is damaged" in damaged["error"]
    assert good["error"] is None


@dataclass(frozen=True)
class Away(Count):
    """Waits in vain for a server, but for that of one batch. It takes a minute each time."""

    tried: list[str]

    def run(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.tried.append(self.name)
        if self.name == "good":
            return super().run(numbers)
        raise RangesUnreadableError("Kafka brought nothing")


@pytest.mark.parametrize(
    ("seconds", "names", "tried"),
    [
        (61, "a b c d", "a b"),
        (61, "a good c d e", "a good c d"),
        (20, "a b c d e", "a b c d"),
        (0, "a b c d e", "a b c d e"),
    ],
)
def test_a_task_tries_no_more_batches_after_a_minute_of_failures(
    monkeypatch: pytest.MonkeyPatch, seconds: float, names: str, tried: str
) -> None:
    """It stops when no batch has succeeded for a minute."""
    now = [0.0]
    log: list[str] = []
    outcomes = shared_jobs._Outcomes(0.0)
    monkeypatch.setattr(shared_jobs.time, "monotonic", lambda: now[0])
    found: list[str | None] = []

    def done(result: Any) -> None:
        found.append(result.to_pylist()[0]["error"])
        now[0] += seconds

    batches = [(place, Away(name, log), 1) for place, name in enumerate(names.split())]
    shared_jobs._run_batches(iter(batches), outcomes, done)
    assert log == tried.split()
    assert len(found) == len(batches)
    for name, error in zip(names.split()[len(log) :], found[len(log) :], strict=True):
        cause = first_cause(BatchTaskFailedError(error))
        assert cause.startswith("headrace.spark.attempts.shared_jobs.BatchNotTriedError: Not tried: "), name
        assert "RangesUnreadableError: Kafka brought nothing" in cause
        assert failure_of(BatchTaskFailedError(error)) is Failure.PASSING


def test_a_job_that_fails_as_a_whole_interrupts_all_its_batches(session: Session, jobs: SharedSparkJobs) -> None:
    session.fails = [RuntimeError("Python worker exited unexpectedly")]
    found = asked(jobs, *[f"batch {number}" for number in range(SLOTS * 8)])
    assert {type(error) for error in found.values()} == {JobInterruptedError}
    assert {str(error) for error in found.values()} == {"Python worker exited unexpectedly"}
    assert len(asked(jobs, "next")["next"]) == 2


def test_a_large_batch_does_not_share_a_job(jobs: SharedSparkJobs) -> None:
    with pytest.raises(JobInterruptedError):
        jobs.run("large", Count("large"), blocks(1, is_small=False))


def test_batches_that_wait_when_the_run_ends_are_interrupted(session: Session, jobs: SharedSparkJobs) -> None:
    session.may_run.clear()
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(jobs.run, name, Count(name), blocks(1)) for name in ("a", "b")]
        eventually(lambda: sum(len(tags) for tags in session.tags) == 2)
        jobs.close()
        late = pool.submit(jobs.run, "c", Count("c"), blocks(1))
        with pytest.raises(JobInterruptedError):
            late.result(20)
        session.may_run.set()
        assert [len(each.result(20)) for each in running] == [2, 2]


def test_a_cancelled_attempt_leaves_the_queue_or_stops_its_job(
    session: Session, jobs: SharedSparkJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[str] = []
    monkeypatch.setattr(shared_jobs, "cancel_tag", lambda _spark, tag: cancelled.append(tag))
    session.may_run.clear()
    with ThreadPoolExecutor(3) as pool:
        running = []
        # Each in a job of its own, so both threads are busy.
        for number, name in enumerate(("a", "b"), 1):
            running.append(pool.submit(jobs.run, name, Count(name), blocks(1)))
            eventually(lambda number=number: len(session.tags) == number)
        waiting = pool.submit(jobs.run, "c", Count("c"), blocks(1))
        eventually(lambda: len(jobs._waiting) == 1)
        jobs.interrupt("c")
        with pytest.raises(JobInterruptedError):
            waiting.result(20)
        jobs.interrupt("b")
        session.may_run.set()
        assert [len(each.result(20)) for each in running] == [2, 2]
    jobs.interrupt("a")
    assert cancelled == ["b"]


def test_a_batch_whose_shared_job_failed_runs_a_job_of_its_own(session: Session, jobs: SharedSparkJobs) -> None:
    session.fails = [RuntimeError("interrupted")]
    opened: list[str] = []
    claim: Any = SimpleNamespace(stream="clicks", batch_time_ms=10_000, number=1, target="", attempt=1)
    stream: Any = SimpleNamespace(name="clicks", parameters={})

    def open_session() -> Any:
        opened.append("own")
        return SimpleNamespace()

    context: Any = SimpleNamespace(stream=stream, ledger=None)
    attempt = BatchAttempt(context, claim, open_session, partitions=1, out=StringIO(), shared=jobs)
    of_batch: Any = SimpleNamespace(
        numbers=3, weight=3, is_small=True, run=lambda spark, tasks, task, schema: f"{tasks} task, {schema}"
    )
    assert attempt.run_blocks(Count("a"), of_batch, "name STRING") == "1 task, name STRING"
    assert opened == ["own"]
    assert len(attempt.run_blocks(Count("a"), of_batch, "name STRING")) == 2
    assert opened == ["own"]
