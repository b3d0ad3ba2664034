"""A whole stream by one clock, as Spark's BasicOperationsSuite and ReceiverSuite run theirs by a ManualClock."""

from __future__ import annotations

import pkgutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.receiver.custom.custom_receivers import Numbers

from headrace.batch.manifest import LOG_FOLDER
from headrace.ledger import BatchState
from headrace.receiver.tracker import TrackerEnd, find_sign
from headrace.stream import ConsoleOutput, KafkaInput, Limits, ReceiverInput, Stream
from headrace.testing import stream_on_clock
from headrace.testing.fake_kafka import FakeKafka
from headrace.testing.stream_on_clock import BatchOnClock, StreamOnClock
from headrace.wal.frame import segments_in

START_MS = 1_700_000_000_000


@pytest.fixture
def kafka() -> FakeKafka:
    kafka = FakeKafka()
    kafka.create("clicks", 2)
    return kafka


@pytest.fixture
def make_running(tmp_path: Path, kafka: FakeKafka) -> Callable[..., StreamOnClock]:
    def make(start_ms: int = START_MS, **fields: Any) -> StreamOnClock:
        given = {
            "name": "shop",
            "inputs": KafkaInput(bootstrap_servers="nowhere:9092", topics="clicks", receivers=2),
            "outputs": ConsoleOutput(),
            "batch_interval": "10 s",
            "checkpoint_interval": "10 s",
            "remember": "30 s",
            "limits": Limits(segment_interval="10 s", seal_grace="2 s"),
            "storage": str(tmp_path / "storage"),
            "ledger": f"sqlite:///{tmp_path}/ledger.db",
        }
        return StreamOnClock(Stream(**{**given, **fields}), kafka, start_ms=start_ms)

    return make


class Times:
    """Seconds from the first interval that begins after the stream has started."""

    def __init__(self, running: StreamOnClock) -> None:
        self._running = running
        self._start_ms = -(-running.clock.now_ms() // 10_000) * 10_000
        self.go_to(0)
        running.run_due()

    def at(self, second: int) -> int:
        return self._start_ms + second * 1000

    def go_to(self, second: int) -> None:
        left_ms = self.at(second) - self._running.clock.now_ms()
        assert left_ms >= 0, f"it is {-left_ms} ms past second {second}"
        self._running.advance(left_ms / 1000)

    def go_on_until(self, condition: Callable[[], bool], seconds: int) -> None:
        for _ in range(seconds * 2):
            if condition():
                return
            self._running.advance(0.5)
        assert condition(), f"not within {seconds} s"


def values(*batches: BatchOnClock) -> list[bytes | None]:
    return [value for batch in batches for _, _, _, value in batch.records]


def test_a_stream_runs_through_its_life_by_one_clock(
    make_running: Callable[..., StreamOnClock], kafka: FakeKafka
) -> None:
    with make_running() as running:
        times = Times(running)
        assert sorted(running.owners().values(), key=str) == [0, 1]
        (own,) = (partition for (_, partition), index in running.owners().items() if index == 0)
        folder = running.context.storage

        # Several batch intervals.
        kafka.produce("clicks", 0, b"a")
        running.receive()
        assert running.run_due() == [], "the first interval has not ended"
        times.go_to(10)
        kafka.produce("clicks", 1, b"b")
        running.receive()
        (first,) = running.run_due()
        times.go_to(20)
        (second,) = running.run_due()
        assert (first.batch_time_ms, values(first)) == (times.at(10), [b"a"])
        assert (second.batch_time_ms, values(second)) == (times.at(20), [b"b"])
        assert first.readiness.complete and second.readiness.complete
        (oldest, *_) = segments_in(folder.below(LOG_FOLDER).paths())

        # A block that is cut in time and stored too late goes to the next batch.
        times.go_to(27)
        running.hold_log(0)
        kafka.produce("clicks", own, b"late")
        running.receive()
        times.go_to(30)
        (third,) = running.run_due()
        assert (third.batch_time_ms, third.records, third.readiness.complete) == (times.at(30), (), False)
        running.resume(0)
        running.receive()
        times.go_to(40)
        (fourth,) = running.run_due()
        assert (fourth.batch_time_ms, values(fourth)) == (times.at(40), [b"late"])
        (block,) = running.ledger.allocations.blocks_of("shop", times.at(40))
        assert times.at(27) <= block.info.cut_time_ms < times.at(30)

        # The lease of a receiver that has stopped expires, and the other one takes over.
        running.pause(0)
        kafka.produce("clicks", own, b"taken over")
        running.advance(8)
        assert running.owners()["clicks", own] == 0, "its lease still holds"
        times.go_on_until(lambda: set(running.owners().values()) == {1}, 15)
        running.receive()
        (fifth,) = running.run_due()
        # What the first one had read is refused when it goes on, and it starts again.
        running.resume(0)
        times.go_on_until(lambda: set(running.owners().values()) == {0, 1}, 12)
        times.go_to(80)
        sixth = running.run_due()
        assert values(fifth, *sixth) == [b"taken over"]

        # A down time of the batches is caught up by one of them.
        for time in (81, 91, 101):
            times.go_to(time)
            kafka.produce("clicks", 0, b"%d" % time)
            running.receive()
        times.go_to(121)
        (caught_up,) = running.run_due()
        assert caught_up.batch_time_ms == times.at(120)
        assert caught_up.absorbed == (times.at(90), times.at(100), times.at(110))
        assert sorted(values(caught_up)) == [b"101", b"81", b"91"]

        # Each batch's log is deleted when the batch has left the remember window, and not before.
        assert [batch.cleaned.segments for batch in (first, second, third, fourth)] == [0, 0, 0, 0]
        assert oldest not in segments_in(folder.below(LOG_FOLDER).paths())
        assert running.ledger.batches.get("shop", times.at(10)).cleaned_at_ms is not None
        assert running.ledger.batches.get("shop", times.at(120)).cleaned_at_ms is None
        assert running.ledger.batches.get("shop", times.at(120)).state is BatchState.COMPLETED
        assert find_sign(folder) is not None
    assert running.report is not None and running.report.end is TrackerEnd.STOPPED
    assert find_sign(folder) is None


def test_a_record_of_the_last_block_interval_is_in_its_batch(
    make_running: Callable[..., StreamOnClock], kafka: FakeKafka
) -> None:
    """The batch is the one that ends with the interval."""
    with make_running() as running:
        times = Times(running)
        running.advance(9.85)
        kafka.produce("clicks", 0, b"last")
        running.receive()
        (first,) = running.run_due()
        assert (first.batch_time_ms, values(first)) == (times.at(10), [b"last"])


@pytest.mark.parametrize(
    "slow",
    ["headrace.receiver.supervisor.ReceiverSupervisor._take_in", "headrace.receiver.block_store.BlockStore.store"],
)
def test_the_clock_waits_for_a_slow_receiver(
    make_running: Callable[..., StreamOnClock], kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    with make_running() as running:
        times = Times(running)
        running.advance(9.85)
        original = pkgutil.resolve_name(slow)

        def take_long(self: Any, what: Any, *more: Any) -> None:
            if what:
                threading.Event().wait(1.0)
            original(self, what, *more)

        monkeypatch.setattr(slow, take_long)
        kafka.produce("clicks", 0, b"last")
        running.receive()
        (block,) = running.ledger.blocks.of_times("shop", [times.at(10), times.at(20)])
        assert (block.info.cut_time_ms, running.clock.now_ms()) == (times.at(10) - 1, times.at(10) + 50)


def test_exact_batch_times_run_in_turn_after_a_down_time(
    make_running: Callable[..., StreamOnClock], kafka: FakeKafka
) -> None:
    with make_running(coalesce=False) as running:
        times = Times(running)
        for time in (5, 15, 25):
            times.go_to(time)
            kafka.produce("clicks", 0, b"%d" % time)
            running.receive()
        times.go_to(35)
        batches = running.run_due()
        assert [batch.batch_time_ms for batch in batches] == [times.at(10), times.at(20), times.at(30)]
        assert [values(batch) for batch in batches] == [[b"5"], [b"15"], [b"25"]]
        assert running.run_due() == []


def test_a_job_that_ends_by_an_error_ends_the_test_with_it(
    make_running: Callable[..., StreamOnClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no rebalancing today")

    monkeypatch.setattr("headrace.receiver.partitioning.Partitioning.rebalance", fail)
    with pytest.raises(RuntimeError, match="no rebalancing today"), make_running():
        pass


def test_the_next_job_continues_where_the_last_one_stopped(
    make_running: Callable[..., StreamOnClock], kafka: FakeKafka
) -> None:
    with make_running() as running:
        kafka.produce("clicks", 0, b"before")
        running.receive()
    kafka.produce("clicks", 0, b"meanwhile")
    with make_running(running.clock.now_ms()) as again:
        again.receive()
        again.advance(20)
        assert values(*again.run_due()) == [b"before", b"meanwhile"]


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[ReceiverInput]:
    """An input whose receivers a test has give records, by the objects in ``Numbers.made``."""
    Numbers.made.clear()
    yield ReceiverInput(id="numbers", receiver="tests.unit.receiver.custom.custom_receivers:Numbers")
    Numbers.made.clear()


def test_what_custom_receivers_give_is_in_the_batch_of_its_time(
    make_running: Callable[..., StreamOnClock], numbers: ReceiverInput
) -> None:
    with make_running(inputs=numbers) as running:
        times = Times(running)
        (receiver,) = Numbers.made
        receiver.store(["1", "2"])
        running.receive(records=2)
        times.go_to(9)
        receiver.store("3", position={"line": 3})
        running.receive(records=3)
        times.go_to(12)
        (first,) = running.run_due()
        receiver.store("4")
        running.receive(records=4)
        times.go_to(22)
        (second,) = running.run_due()
        assert running.owners() == {("numbers", 0): 0}
    assert (first.batch_time_ms, values(first)) == (times.at(10), [b"1", b"2", b"3"])
    assert (second.batch_time_ms, values(second)) == (times.at(20), [b"4"])


def test_lines_of_a_socket_are_in_the_batch_of_their_time(make_running: Callable[..., StreamOnClock]) -> None:
    """Spark's "socket input stream", and its "no block in a batch"."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        lines = ReceiverInput(
            id="lines",
            receiver="headrace.receiver:SocketText",
            arguments={"host": "127.0.0.1", "port": server.getsockname()[1]},
        )
        with make_running(inputs=lines) as running:
            client, _ = server.accept()
            with client:
                times = Times(running)
                batches = []
                for end, sent, received in ((10, b"1\r\n2\n", 2), (20, b"3\n", 3), (30, b"", 3)):
                    client.sendall(sent)
                    running.receive(records=received)
                    times.go_to(end)
                    batches += running.run_due()
            counted = {row.batch_time_ms: row.records for row in running.ledger.batches.page("shop")}
    times_ms = [times.at(end) for end in (10, 20, 30)]
    assert [batch.batch_time_ms for batch in batches] == times_ms
    assert [values(batch) for batch in batches] == [[b"1", b"2"], [b"3"], []]
    assert [counted[time_ms] for time_ms in times_ms] == [2, 1, 0]


def test_a_custom_receiver_restarts_by_the_tests_clock(
    make_running: Callable[..., StreamOnClock], numbers: ReceiverInput
) -> None:
    """It restarts after its delay."""
    with make_running(inputs=numbers) as running:
        Numbers.made[0].store("1", position=1)
        running.receive(records=1)
        Numbers.made[0].restart("the source is away", delay_seconds=60)
        assert Numbers.made[0].stopped.wait(30)
        running.advance(55)
        assert len(Numbers.made) == 1
        running.advance(6)
        until = time.monotonic() + 30
        while len(Numbers.made) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert Numbers.made[1].started.wait(30)
        assert Numbers.made[1].position == 1
        Numbers.made[1].store("2")
        running.receive(records=2)


def test_a_custom_receiver_gets_the_time_to_wait_for_each_block(
    make_running: Callable[..., StreamOnClock],
) -> None:
    counter = ReceiverInput(
        id="counter", receiver="tests.unit.receiver.custom.custom_receivers:Counter", arguments={"until": 30}
    )
    with make_running(inputs=counter) as running:
        running.receive(records=30)
        running.advance(10)
        assert len(values(*running.run_due())) == 30


def test_a_clock_moves_a_stream_of_kafka_and_a_custom_receiver(
    make_running: Callable[..., StreamOnClock], kafka: FakeKafka, numbers: ReceiverInput
) -> None:
    clicks = KafkaInput(bootstrap_servers="nowhere:9092", topics="clicks")
    with make_running(inputs=[clicks, numbers], transform="nothing:both") as running:
        kafka.produce("clicks", 1, b"click")
        Numbers.made[0].store("number")
        running.receive(records=1)
        running.advance(10)
        assert sorted(filter(None, values(*running.run_due()))) == [b"click", b"number"]


def test_a_custom_receiver_that_gives_too_little_is_named(
    make_running: Callable[..., StreamOnClock], numbers: ReceiverInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named after the limit of time."""
    with make_running(inputs=numbers) as running:
        Numbers.made[0].store("1")
        monkeypatch.setattr(stream_on_clock, "LIMIT_SECONDS", 1.0)
        before_ms = running.clock.now_ms()
        with pytest.raises(TimeoutError, match="custom receivers have given 2 records, and not 1"):
            running.receive(records=2)
        monkeypatch.undo()
        assert running.clock.now_ms() - before_ms < 10_000, "the time stands still while nothing is given"
