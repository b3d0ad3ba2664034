"""A stream by a fake clock whose ledger loses commits: its life by a seed, and what must be true in the end.

What happens comes in random order: records, batches of the schedule, repairs, ranges that are run again, replays, the
receiver job's restarts, receivers that stand still. A step that fails is repeated, as Airflow repeats a task, so it
meets what the lost commit has left. No Spark runs: the outputs take the log's blocks themselves (`KeptOutput`), in the
process of the test.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeVar

import pyarrow as pa
from tests.hammer.lost_commits import LostCommits
from tests.support.ledger_rules import broken_rules

from headrace.batch import next_attempt
from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.batch.due_batches import due_batches
from headrace.batch.next_attempt import Wait
from headrace.batch.range_progress import RangeProgress
from headrace.batch.results import write_results
from headrace.batch.time_range import TimeRange
from headrace.errors import REPAIR, TRY_NUMBER, Failure, HeadraceError
from headrace.fsck.stream_check import check_stream
from headrace.ledger.batches.tables import Attempt, BatchRow
from headrace.ledger.errors import (
    AlreadyCompletedError,
    LeaseHeldError,
    LedgerUnavailableError,
    SlotBusyError,
)
from headrace.ledger.states import BatchState
from headrace.receiver import block_generator
from headrace.runs.batch_run import NothingToRun, begin_run, takes_over
from headrace.runs.readiness import blocks_ready
from headrace.runs.retries import is_held_back
from headrace.spark.attempts import range_run
from headrace.spark.attempts.attempt import run_attempt
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.range_run import RangeIncompleteError, RangeRunner, RangeSettings
from headrace.spark.attempts.shared_jobs import BatchBlocks
from headrace.spark.outputs.writer import Counts, RunBlocks, WrittenBatch
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream.stream import replayed
from headrace.stream_context import StreamContext
from headrace.testing import fake_kafka, stream_on_clock
from headrace.testing.fake_kafka import FakeKafka
from headrace.testing.stream_on_clock import StreamOnClock

T = TypeVar("T")

NAME, TOPIC, REPLAY = "shop", "clicks", "again"
START_MS = 1_700_000_000_000
INTERVAL_MS = 2_000
STEPS = 8
SHARE = 0.15
"""Of the commits, how many are lost."""
_LEASE_MS = 30_000
_BEAT_SECONDS = 0.05
# How often a step is repeated, after a second of the stream's time each: longer than any lease.
_TRIES = 120


class Place(NamedTuple):
    """Where a record is in Kafka."""

    topic: str
    partition: int
    offset: int


class Index:
    """What the outputs of a stream hold: for each target and output, each record with the times of the batches that
    wrote it."""

    of_folder: ClassVar[dict[str, Index]] = {}
    """The indices of the streams of this process, by the stream's folder."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], dict[Place, bytes]] = defaultdict(dict)
        self.batches: dict[tuple[str, str], dict[Place, set[int]]] = defaultdict(lambda: defaultdict(set))


class KeptOutput(ConsoleOutput):
    """An output that takes blocks of the log, without Spark."""

    writer: ClassVar[str] = "tests.hammer.life:KeptWriter"
    writes_empty_batches: ClassVar[bool] = False

    @property
    def takes_blocks(self) -> bool:
        """They are."""
        return True


class KeptInOrder(KeptOutput):
    """One whose batches have to be written in the order of their times."""

    def reasons_for_order(self) -> Iterator[str]:
        """Yield the reason."""
        yield "the test says so"


class KeptWriter:
    """Writes into the stream's `Index`."""

    def __init__(self, output: KeptOutput) -> None:
        self._step = output.step

    def write(self, _frame: Any, batch: WrittenBatch) -> Counts:
        """A batch without records."""
        return {"rows": 0}

    def write_blocks(self, _run: RunBlocks, blocks: BatchBlocks, batch: WrittenBatch) -> Counts:
        """Read the blocks here, as a task would."""
        index, key = Index.of_folder[batch.stream.folder_url], (batch.target, self._step)
        numbers = pa.RecordBatch.from_pydict({"id": pa.array(range(blocks.numbers), pa.int64())})
        rows = 0
        for records in blocks.read(iter([numbers])):
            for row in records.to_pylist():
                place = Place(row["topic"], row["partition"], row["offset"])
                index.values[key][place] = row["value"]
                index.batches[key][place].add(batch.batch_time_ms)
                rows += 1
        return {"rows": rows}


class _Running(StreamOnClock):
    """One whose clock moves on without a heartbeat: its commit may be lost, and the next one is due a second later."""

    def _has_beaten(self, now_ms: int) -> bool:
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        has_come = super()._has_beaten(now_ms) or time.monotonic() - self._waits_since > _BEAT_SECONDS
        if has_come:
            self._waits_since = None
        return has_come

    _waits_since: float | None = None


class WrongOutcomeError(AssertionError):
    """Something is lost, doubled, left or contradictory after lost commits, or an error does not say what failed."""


class _Sessions:
    """Of a range. Nobody uses them: no Spark runs."""

    jobs = None

    def attributes(self, _number: int) -> Mapping[str, Any]:
        return {}

    def open(self, _number: int) -> Any:
        return object()

    def end_earlier(self, _claim: Attempt) -> None:
        pass

    def give_up(self, _number: int) -> None:
        pass


@contextlib.contextmanager
def without_real_waits() -> Iterator[None]:
    """Shorten what threads wait for in real time: with the waits of production a seed takes five times as long."""
    shortened = (
        (block_generator, "TICK_SECONDS", 0.005),
        (fake_kafka, "_LONGEST_WAIT_SECONDS", 0.005),
        (stream_on_clock, "_POLL_SECONDS", 0.001),
        (stream_on_clock, "_MOMENT_SECONDS", 0.02),
        (range_run, "_POLL_SECONDS", 0.005),
        (next_attempt, "GIVE_WAY_SECONDS", 0.0),
        (next_attempt, "_ASK_SECONDS", 0.005),
    )
    before = [getattr(module, name) for module, name, _ in shortened]
    for module, name, seconds in shortened:
        setattr(module, name, seconds)
    try:
        yield
    finally:
        for (module, name, _), seconds in zip(shortened, before, strict=True):
            setattr(module, name, seconds)


class Life:
    """One stream's life in ``folder``, where a ledger is. It raises WrongOutcomeError, or what no stream must raise."""

    steps: ClassVar[int] = STEPS

    def __init__(self, folder: Path, seed: int, *, share: float = SHARE, ledger: Path | None = None) -> None:
        """``ledger`` is the folder of the ledger, if that is another one."""
        self.random = Random(seed)
        self.faults = LostCommits(seed, share=share)
        self.shown: list[HeadraceError] = []
        """The errors of the steps, as a task's log shows them."""
        self.kafka = FakeKafka()
        self._partitions = self.random.choice((1, 2, 3))
        self.kafka.create(TOPIC, self._partitions)
        self._forgets = self.random.random() < 0.5
        kind = self.random.choice((KeptOutput, KeptOutput, KeptInOrder))
        self.stream = Stream(
            name=NAME,
            inputs=KafkaInput(
                bootstrap_servers="nowhere:9092", topics=TOPIC, receivers=self.random.randint(1, self._partitions)
            ),
            outputs=[kind(id="index"), KeptOutput(id="files")],
            batch_interval="2 s",
            coalesce=self.random.choice((True, False)),
            checkpoint_interval="4 s",
            # What the log no longer has is read again from Kafka, and there is no server.
            remember="8 s" if self._forgets else "1 h",
            limits=Limits(
                segment_interval="3 s", seal_grace="1 s", max_concurrent_batches=1 if kind is KeptInOrder else 2
            ),
            storage=str(folder / "storage"),
            ledger=f"sqlite:///{ledger or folder}/ledger.db",
        )
        self.index = Index.of_folder[self.stream.folder_url] = Index()
        self.produced: dict[Place, bytes] = {}
        self._next_offset: dict[int, int] = defaultdict(int)
        self._ranges = 0
        self.running = _Running(self.stream, self.kafka, start_ms=START_MS)

    def run(self) -> None:
        """Live, catch up, and check."""
        try:
            with without_real_waits(), self.faults.on(self.running.ledger):
                self._start_job()
                for _ in range(self.steps):
                    self.random.choice(self._kinds())()
                self.faults.stop()
                self._catch_up()
                self._end_job()
                self.check()
        finally:
            self.running.ledger.close()
            del Index.of_folder[self.stream.folder_url]

    def _kinds(self) -> list[Callable[[], None]]:
        return [
            *[self.produce] * 4,
            *[self.run_due] * 4,
            *[self.repair] * 2,
            *([] if self._forgets else [self.run_again, self.replay]),
            self.restart_job,
            self.stand_still,
            self.grow,
        ]

    # -- the receiver job ------------------------------------------------------------------------------------------

    def _start_job(self) -> None:
        """Start the receiver job, as often as it takes, as the receiver DAG does."""

        def start() -> None:
            before = self.running
            self.running = _Running(self.stream, self.kafka, start_ms=before.clock.now_ms())
            # The schedule goes on where it was, whichever job runs.
            self.running._last = before._last
            self.running.__enter__()

        self._task(start, moves_clock=lambda: self.running.clock.advance(1_000))

    def _end_job(self) -> None:
        with self._tolerated():
            self.running.__exit__()

    def restart_job(self) -> None:
        """Stop the job, which releases its lease or not, and start the next one."""
        self._end_job()
        self._start_job()

    def stand_still(self) -> None:
        """A receiver's process stands still for longer than its lease, and goes on."""
        index = self.random.randrange(self.stream.receivers)
        with self._tolerated():
            if (NAME_OF_INPUT, index) in self.running._receivers:
                self.running.pause(index)
                self.produce()
                self.advance(self.random.choice((2.0, 12.0)))
                self.running.resume(index)

    def grow(self) -> None:
        """The topic gets another partition."""
        if self._partitions < 4:
            self._partitions += 1
            self.kafka.grow(TOPIC, self._partitions)

    def produce(self) -> None:
        """Some records, and perhaps the time to receive them."""
        for _ in range(self.random.randint(1, 3)):
            partition = self.random.randrange(self._partitions)
            self._produce(partition, *(b"%d" % self.random.getrandbits(40) for _ in range(self.random.randint(1, 3))))
        self.advance(self.random.choice((0.0, 0.3, 1.0, 2.5)))

    def _produce(self, partition: int, *values: bytes) -> None:
        self.kafka.produce(TOPIC, partition, *values)
        for value in values:
            self.produced[Place(TOPIC, partition, self._next_offset[partition])] = value
            self._next_offset[partition] += 1

    def advance(self, seconds: float) -> None:
        """Let time pass. A job that has ended by an error is started again."""
        try:
            self.running.advance(seconds)
        except LedgerUnavailableError as error:
            self._show(error)
            self.restart_job()

    # -- batches ---------------------------------------------------------------------------------------------------

    def run_due(self) -> None:
        """The runs of the schedule that are due, in any order; a run may end before its attempt, for the repair."""
        self.advance(self.random.choice((0.0, 1.0, 2.0)))
        runs = list(self.running.due_runs())
        if not self.stream.coalesces and not self.stream.is_ordered:
            self.random.shuffle(runs)
        for run in runs:
            self._run(run, ends_early=self.random.random() < 0.2)

    def _run(self, run: SimpleNamespace, *, ends_early: bool = False) -> None:
        context = self.running.context
        try:
            batch_time_ms = self._task(lambda: begin_run({"dag_run": run}, context))
        except NothingToRun:
            return
        assert batch_time_ms is not None
        self._await_blocks(batch_time_ms)
        self._task(lambda: allocate(context, batch_time_ms, takes_over=takes_over({"dag_run": run}, self.stream)))
        if ends_early:
            return
        steps = [output.step for output in self.stream.outputs]
        self.random.shuffle(steps)
        for outputs in self.random.choice(([steps], [[step] for step in steps])):
            with contextlib.suppress(AlreadyCompletedError):
                self._task(partial(self._attempt, batch_time_ms, outputs), tries=3, gives_up=True)
        self._finish(batch_time_ms)

    def _await_blocks(self, batch_time_ms: int) -> None:
        for _ in range(_TRIES):
            readiness = blocks_ready(self.running.ledger, NAME, batch_time_ms=batch_time_ms, grace_ms=1_000)
            if readiness.ready:
                return
            self.advance(0.5)
        raise WrongOutcomeError(f"Batch {batch_time_ms} has not got its blocks: {readiness.reason}.")

    def _attempt(self, batch_time_ms: int, outputs: Collection[str], **options: Any) -> None:
        claim = self.running.ledger.attempts.begin(
            NAME, batch_time_ms, holder="a test", way="connect", lease_ms=_LEASE_MS, outputs=list(outputs), **options
        )
        run_attempt(self._batch_attempt(self.running.context, claim))

    def _batch_attempt(self, context: StreamContext, claim: Attempt) -> BatchAttempt:
        return BatchAttempt(context, claim, object, out=StringIO())  # type: ignore[arg-type]

    def _finish(self, batch_time_ms: int) -> None:
        context = self.running.context
        self._task(lambda: write_checkpoint(context, batch_time_ms))
        self._task(lambda: clean_up(context))

    def repair(self) -> None:
        """As the operators of the repair do, with the batches of a fixed order."""
        ledger = self.running.ledger

        def repair() -> None:
            tried: set[int] = set()
            number_before = -1
            # In an ordered stream, a batch is due once the one before it is completed.
            while len(tried) > number_before:
                number_before = len(tried)
                for due in due_batches(
                    ledger,
                    NAME,
                    held_back=lambda last: is_held_back(self.stream, last),
                    has_own_run=lambda _: False,
                    without=tried,
                    at_once=True,
                ):
                    tried.add(due.batch.batch_time_ms)
                    if not due.steps:
                        ledger.attempts.settle(NAME, due.batch.batch_time_ms)
                        continue
                    again = replace(due, attributes={REPAIR: True})
                    with contextlib.suppress(AlreadyCompletedError):
                        begun = again.awaited() or again.begin(holder="a test", way="connect", lease_ms=_LEASE_MS)
                        if not isinstance(begun, Wait):
                            run_attempt(self._batch_attempt(self.running.context, begun))

        def finish() -> None:
            write_results(self.running.context)
            for batch in ledger.batches.page(NAME, 1):
                write_checkpoint(self.running.context, batch.batch_time_ms)
            clean_up(self.running.context)

        self._task(repair, tries=3, gives_up=True)
        self._task(finish)

    def run_again(self) -> None:
        """Run a range of completed batches again, into their own outputs."""
        self._range(target="", outputs=[self.random.choice(self.stream.outputs).step], stream=self.stream)

    def replay(self) -> None:
        """Replay a range of batches, or one, beside the stream's own outputs."""
        output = self.random.choice(self.stream.outputs).id
        self._range(target=REPLAY, outputs=[output], stream=replayed(self.stream, {output: {}}))

    def _range(self, *, target: str, outputs: Collection[str], stream: Stream) -> None:
        ledger = self.running.ledger
        states = [BatchState.COMPLETED]
        done = [row.batch_time_ms for row in ledger.batches.page(NAME, 50, states) if not row.absorbed_by_ms]
        if not done:
            return
        self._ranges += 1
        after_ms = self.random.choice(done) - INTERVAL_MS
        batches = TimeRange(after_ms, max(done), f"range {self._ranges}")
        ordered = not target and self.stream.is_ordered
        tries = 0

        def left() -> tuple[BatchRow, ...]:
            return RangeProgress.of(ledger, NAME, batches, outputs, target=target, ordered=ordered).left

        def run() -> None:
            nonlocal tries
            tries += 1
            if rows := left():
                attributes = {**batches.attributes, TRY_NUMBER: tries, "run_id": batches.run}
                time_ms = rows[0].batch_time_ms
                begun: dict[str, Any] = {"holder": "a range", "way": "connect", "lease_ms": _LEASE_MS}
                if target:
                    claim = ledger.replays.begin(
                        NAME, time_ms, target=target, definition=stream.to_json(), outputs=list(outputs),
                        attributes=attributes, **begun,
                    )  # fmt: skip
                else:
                    claim = ledger.attempts.begin(
                        NAME, time_ms, outputs=list(outputs), force=True, attributes=attributes, **begun
                    )
                (first,) = [row for row in ledger.attempts.of_batch(NAME, time_ms) if row.number == claim.number]
                settings = RangeSettings(
                    threads=1, partitions=1, parameters={}, out=StringIO(), report=lambda _: None, lease_ms=_LEASE_MS
                )
                context = StreamContext(stream, ledger, clock=self.running.clock)
                self._beside(RangeRunner(context, batches, first, _Sessions(), settings).run)

        self._task(run)

    def _beside(self, work: Callable[[], object]) -> None:
        """Do it in a thread while the time moves: it may wait for the end of a lease."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="headrace-range", daemon=True)
        thread.start()
        for _ in range(_TRIES):
            thread.join(0.05)
            if not thread.is_alive():
                break
            self.advance(1.0)
        else:
            raise WrongOutcomeError("A range of batches does not end.")
        if raised:
            raise raised[0]

    # -- steps that are repeated -----------------------------------------------------------------------------------

    def _task(
        self,
        step: Callable[[], T],
        *,
        tries: int = _TRIES,
        gives_up: bool = False,
        moves_clock: Callable[[], object] | None = None,
    ) -> T | None:
        """Repeat the step until it succeeds, as Airflow repeats a task. ``gives_up``: leave it to the repair then."""
        for _ in range(tries):
            try:
                return step()
            except (SlotBusyError, LeaseHeldError):
                # Another batch comes first, or the lease of what a lost commit has left ends first.
                if gives_up:
                    return None
            except AlreadyCompletedError:
                raise
            except HeadraceError as error:
                self._show(error)
            if moves_clock is None:
                self.advance(1.0)
            else:
                moves_clock()
        if gives_up:
            return None
        raise WrongOutcomeError(f"A step does not succeed in {tries} tries; the last error: {self.shown[-1:]}.")

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except HeadraceError as error:
            self._show(error)

    def _show(self, error: HeadraceError) -> None:
        """Note an error of a step. What a person reads names the ledger as the part that failed, and what to do."""
        self.shown.append(error)
        if error.failure is not Failure.PASSING:
            raise WrongOutcomeError(f"A lost commit became a failure that is {error.failure}: {error}.") from error
        if isinstance(error, RangeIncompleteError):
            # It counts the batches; each attempt has its own error.
            return
        text = str(error)
        if "ledger" not in text or "Check that it runs" not in text:
            raise WrongOutcomeError(f"An error after a lost commit does not name the ledger: {error!r}.") from error

    # -- the end ---------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Let the stream do what is left, without further faults."""
        for _ in range(_TRIES):
            self.running.receive()
            self.advance(INTERVAL_MS / 1000)
            self.run_all()
            if self._is_done():
                return
        raise WrongOutcomeError(f"The stream does not catch up: {self._left()}.")

    def run_all(self) -> None:
        """Run what is due, and repair the rest."""
        for run in list(self.running.due_runs()):
            self._run(run)
        self.repair()

    def _is_done(self) -> bool:
        return not self._left()

    def _left(self) -> list[str]:
        """What is not in a completed batch yet."""
        ledger = self.running.ledger
        stored = {row.partition.partition: row.next_offset for row in ledger.positions.all(NAME, live=True)}
        left = [f"partition {key}" for key, offset in self._next_offset.items() if stored.get(key) != offset]
        left += [f"unclaimed {row.batch_time_ms}" for row in ledger.blocks.unclaimed(NAME)]
        ended = (BatchState.COMPLETED, BatchState.ABSORBED)
        rows = ledger.batches.page(NAME, 1_000)
        return left + [
            f"{row.batch_time_ms} is {row.state.value}: {row.error}" for row in rows if row.state not in ended
        ]

    def check(self) -> None:
        """Compare the outputs with what was produced, and the ledger with its rules, its files and itself.

        Raises WrongOutcomeError.
        """
        problems: list[str] = []
        for output in self.stream.outputs:
            key = ("", output.step)
            if self.index.values[key] != self.produced:
                lost = sorted(self.produced.keys() - self.index.values[key].keys())
                more = sorted(self.index.values[key].keys() - self.produced.keys())
                problems.append(f"output {output.id}: {lost} are lost, and {more} were never produced")
            twice = {place: times for place, times in self.index.batches[key].items() if len(times) > 1}
            if twice:
                problems.append(f"output {output.id}: {twice} are in two batches")
        for key, values in self.index.values.items():
            if not values.items() <= self.produced.items():
                problems.append(f"{key} holds what was not produced")
        problems += map(str, broken_rules(self.running.ledger, NAME))
        report = check_stream(self.running.ledger, NAME, kafka=False)
        problems += map(str, report.findings)
        gaps = self.running.ledger.gaps.page(NAME)
        problems += [f"a gap: {gap}" for gap in gaps]
        if problems:
            raise WrongOutcomeError("; ".join(problems) + ".")


NAME_OF_INPUT = "records"
