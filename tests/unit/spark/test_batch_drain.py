from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import BatchState, Ledger
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.spark.receiver_application import BatchDrain
from headrace.spark.sessions import REPLACED_BY
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

T = 1_700_000_000_000
INTERVAL_MS = 10_000


class SteppingClock(ManualClock):
    """A clock with which nothing waits: ``on_wait`` is called with the seconds instead."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        self.on_wait: Callable[[float], None] = lambda seconds: None

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.on_wait(seconds)
        return event.is_set()


class World:
    """A stopping job, the blocks that it received, and the batches that somebody runs while it waits."""

    def __init__(self, folder: Path, clock: SteppingClock) -> None:
        self.clock = clock
        self.stream = Stream(
            name="clicks",
            inputs=KafkaInput(bootstrap_servers="localhost:9", topics="clicks"),
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            storage=str(folder),
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        self.ledger = Ledger.open(self.stream.ledger, clock=clock)
        self.ledger.streams.register(
            "clicks", self.stream.to_json(), batch_interval_ms=INTERVAL_MS, block_interval_ms=200
        )
        self.job = self.ledger.jobs.acquire("clicks", holder="driver", lease_ms=30_000)
        self.partition = TopicPartition("clicks", "id", 0)
        self.ledger.topics.observe(self.job, "records", [("clicks", "id", 1)])
        self.ledger.positions.ensure_all(self.job, "records", {self.partition: 0})
        self.ledger.positions.assign(self.job, "records", {self.partition: 0})
        self.receiver = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, ReceiverId("clicks", "records", 0)), host="h", lease_ms=600_000
        )
        self.offset = 0
        self.slept = 0

    def receive(self) -> int:
        """Store a block; its batch time."""
        at = self.offset
        self.offset += 1
        ranges = (OffsetRange(self.partition, at, at + 1, 1),)
        handle = BlockHandle("0.wal", at, 1)
        block = BlockInfo(self.receiver.receiver_id, self.receiver.epoch, at, self.clock.now_ms(), handle, ranges, 1, 1)
        return self.ledger.blocks.add(self.receiver, block).batch_time_ms

    def allocate(self, time_ms: int) -> None:
        self.clock.advance(max(0, time_ms - self.clock.now_ms()))
        self.ledger.allocations.seal("clicks", time_ms)
        blocks = len(self.ledger.allocations.blocks_of("clicks", time_ms))
        self.ledger.allocations.allocate(
            "clicks", time_ms, manifest_uri="m", manifest_sha256="0" * 64, blocks_expected=blocks
        )

    def run(self, time_ms: int) -> None:
        attempt = self.ledger.attempts.begin("clicks", time_ms, holder="task", way="connect", lease_ms=30_000)
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {})
        self.ledger.attempts.complete(attempt)

    def drain(self, *steps: Callable[[], object], most: int = 1_000) -> tuple[int, ...]:
        """Wait for the batches; at each look the next of ``steps`` happens, and then nothing more."""
        left = list(steps)

        def sleep(seconds: float) -> None:
            self.slept += 1
            assert self.slept <= most, "it waits for nothing"
            self.clock.advance(int(seconds * 1000))
            if left:
                left.pop(0)()

        self.clock.on_wait = sleep
        return BatchDrain(StreamContext(self.stream, self.ledger, clock=self.clock), self.job).wait()


@pytest.fixture(scope="module")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated ledger, to be copied: migrations take longer than a test."""
    path = tmp_path_factory.mktemp("empty") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def world(empty_ledger: Path, tmp_path: Path) -> Iterator[World]:
    shutil.copy(empty_ledger, tmp_path / "ledger.db")
    made = World(tmp_path, SteppingClock(T))
    yield made
    made.ledger.close()


def test_a_stop_does_not_wait_for_batches_if_none_are_run(world: World) -> None:
    world.receive()
    assert world.drain(most=0) == ()


def test_all_that_was_received_is_waited_for_with_what_is_still_to_be_allocated(world: World) -> None:
    first = world.receive()
    world.allocate(first)
    world.run(first)
    second = world.receive()
    world.allocate(second)
    third = world.receive()
    world.ledger.jobs.request_stop("clicks", "maintenance")
    world.ledger.jobs.update(world.job, state="stopping")
    left = world.drain(lambda: world.run(second), lambda: world.allocate(third), lambda: world.run(third))
    assert left == ()
    states = [world.ledger.batches.get("clicks", time_ms).state for time_ms in (first, second, third)]
    assert states == [BatchState.COMPLETED] * 3


def test_the_job_keeps_its_lease_meanwhile(world: World) -> None:
    """Nobody takes the application away from under the batches."""
    times = []
    for _ in range(4):
        times.append(world.receive())
        world.allocate(times[-1])
    world.run(times.pop(0))

    def one_more() -> None:
        if world.slept % 15 == 0:
            world.run(times.pop(0))

    assert world.drain(*[one_more] * 45) == ()
    assert world.slept == 45, "longer than a lease"
    job = world.ledger.jobs.current("clicks")
    assert job is not None
    assert job.alive(world.clock.now_ms())


def test_a_stop_waits_for_a_limited_time_for_batches_that_make_no_progress(world: World) -> None:
    time_ms = world.receive()
    world.allocate(time_ms)
    world.run(time_ms)
    late = world.receive()
    assert world.drain() == (late,)
    assert world.slept <= 26, "an interval and 15 s"


def test_a_stop_waits_for_a_backlog_for_at_most_ten_intervals(world: World) -> None:
    first = world.receive()
    world.allocate(first)
    world.run(first)
    times = []
    for _ in range(40):
        times.append(world.receive())
        world.clock.advance(INTERVAL_MS)

    def one_more() -> None:
        if world.slept % 5 == 0:
            world.allocate(times[0])
            world.run(times.pop(0))

    left = world.drain(*[one_more] * 150)
    assert left == tuple(times)
    assert len(times) == 20
    assert 100 <= world.slept <= 102


def test_a_job_that_is_replaced_leaves_what_does_not_run_yet_to_the_next(world: World) -> None:
    first = world.receive()
    world.allocate(first)
    world.run(first)
    second = world.receive()
    world.allocate(second)
    attempt = world.ledger.attempts.begin("clicks", second, holder="task", way="connect", lease_ms=30_000)
    world.receive()
    world.ledger.jobs.request_stop("clicks", "an upgrade", attributes={REPLACED_BY: {"headrace": "2.0"}})
    assert world.drain(lambda: world.ledger.attempts.fail(attempt, "over"), most=1) == ()


def test_a_job_that_lost_its_lease_meanwhile_waits_no_longer(world: World) -> None:
    time_ms = world.receive()
    world.allocate(time_ms)
    world.run(time_ms)
    world.receive()

    def taken_over() -> None:
        world.clock.advance(31_000)
        world.ledger.jobs.acquire("clicks", holder="other", lease_ms=30_000)

    with pytest.raises(LeaseLostError):
        world.drain(taken_over)


def test_a_ledger_that_does_not_answer_for_a_while_ends_no_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.receive()
    world.allocate(first)
    world.run(first)
    late = world.receive()
    renew = world.ledger.jobs.renew

    def away(*_: object) -> None:
        raise LedgerUnavailableError("it does not answer")

    def goes() -> None:
        monkeypatch.setattr(world.ledger.jobs, "renew", away)

    def comes_back() -> None:
        monkeypatch.setattr(world.ledger.jobs, "renew", renew)
        world.allocate(late)
        world.run(late)

    # Longer than the time that the drain waits without any change.
    assert world.drain(goes, *[lambda: None] * 40, comes_back) == ()
    assert world.slept == 42
