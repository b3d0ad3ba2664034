"""Receivers are started, replaced and stopped: the tracker with a real ledger and receivers in threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.unit.receiver.tracking.setting import Handle, MakeStream, Setting
from tests.unit.receiver.waiting import eventually

from headrace.batch.allocation import allocate
from headrace.blocks import ReceiverId
from headrace.clock import SystemClock
from headrace.ledger import EventKind, ReceiverState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.receiving.tables import ScheduledReceiver
from headrace.receiver.placement import Executor
from headrace.receiver.supervisor import ReceiverTask, receive
from headrace.receiver.tracked_receiver import NoPlaceError, TrackedReceiver
from headrace.receiver.tracker import TrackerEnd, TrackerReport
from headrace.runs.readiness import blocks_ready
from headrace.stream import Limits
from headrace.stream.settings import Backpressure
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage


def test_partitions_are_shared_and_read_and_a_stop_drains(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    for partition in range(4):
        setting.kafka.produce("flights", partition, b"a", b"b")
    eventually(lambda: setting.positions() == 8)
    report = setting.end()
    assert report.end is TrackerEnd.STOPPED
    assert {row.state for row in setting.ledger.receivers.all("air")} == {ReceiverState.STOPPED}


def test_a_stop_in_the_ledger_is_heard(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.ledger.jobs.request_stop("air", "maintenance")
    setting.thread.join(30)
    assert setting.report == TrackerReport(TrackerEnd.STOPPED, "maintenance")


class _Wrong(SystemClock):
    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def test_what_was_stored_under_a_clock_ahead_does_not_wait(setting: Setting) -> None:
    setting.ledger._database.clock = clock = _Wrong()
    clock.ahead_ms = 600_000
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == 1)
    row = setting.ledger.streams.get("air")

    def is_due() -> bool:
        times = setting.ledger.blocks.unclaimed("air")
        return times[-1].batch_time_ms <= row.batch_time_after(SystemClock().now_ms())

    assert not is_due()
    clock.ahead_ms = 0
    eventually(is_due)
    setting.kafka.produce("flights", 0, b"b")
    eventually(lambda: setting.positions() == 2)
    assert is_due()
    assert setting.end().end is TrackerEnd.STOPPED


@pytest.mark.parametrize("batch_by", ["arrival", "timestamp"])
def test_what_receivers_receive_by_is_noted_before_one_starts(
    setting: Setting, make_stream: MakeStream, batch_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition may be changed under it: then only the job itself knows."""
    setting = setting.again(make_stream(receivers=2, batch_by=batch_by))
    noted: list[object] = []
    start = setting.launcher.start

    def look_and_start(task: ReceiverTask) -> Handle:
        job = setting.ledger.jobs.current("air")
        assert job is not None
        noted.append(job.attributes.get("batch_by"))
        return start(task)

    monkeypatch.setattr(setting.launcher, "start", look_and_start)
    setting.begin()
    eventually(lambda: len(noted) == 2)
    setting.end()
    assert noted == [batch_by, batch_by]


def test_batches_go_on_by_timestamp_over_a_job_by_arrival(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    row = setting.ledger.streams.get("air")
    setting.ledger.streams.register(
        "air",
        setting.stream.model_copy(update={"batch_by": "timestamp"}).to_json(),
        batch_interval_ms=row.batch_interval_ms,
        block_interval_ms=row.block_interval_ms,
        batch_by="timestamp",
        allowed_lateness_ms=3_600_000,
    )

    def ready(batch_time_ms: int) -> bool:
        readiness = blocks_ready(setting.ledger, "air", batch_time_ms=batch_time_ms, grace_ms=60_000)
        assert not readiness.ready or "still receives by arrival" in readiness.reason
        return readiness.ready

    for _ in range(2):
        at_ms = row.batch_time_after(setting.ledger.now_ms())
        eventually(lambda at_ms=at_ms: ready(at_ms))  # type: ignore[misc]
    setting.end()
    setting.ledger.jobs.release(setting.job)
    at_ms = row.batch_time_after(setting.ledger.now_ms()) - row.batch_interval_ms
    assert not blocks_ready(setting.ledger, "air", batch_time_ms=at_ms, grace_ms=0).ready


def test_should_restart_receiver_after_stopping_it(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.launcher.handles[0][0].stop.set()
    eventually(lambda: len(setting.launcher.handles[0]) == 2)
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == 1)


def test_a_dead_receivers_partitions_move_and_come_back(setting: Setting) -> None:
    """Its job says that it has ended, and nothing can be started: the other one takes over when the lease is over."""
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.launcher.broken = True
    setting.launcher.handles[0][0].stop.set()
    eventually(lambda: setting.loads() == [0, 4])
    for partition in range(4):
        setting.kafka.produce("flights", partition, b"a")
    eventually(lambda: setting.positions() == 4)
    assert "no executor" in setting.errors()
    setting.launcher.broken = False
    eventually(lambda: setting.loads() == [2, 2])


def test_receivers_that_hold_every_slot_give_one_back(setting: Setting) -> None:
    """The partitions of the receiver that ends move to another."""
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.launcher.most_beside_batches = 1
    eventually(lambda: sorted(setting.loads()) == [0, 4])
    assert "receivers hold every slot" in setting.errors()
    eventually(lambda: setting.troubles() == [])
    setting.launcher.most_beside_batches = 2
    eventually(lambda: setting.loads() == [2, 2])


def test_the_last_receiver_keeps_its_slot(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.launcher.most_beside_batches = 0
    eventually(lambda: sorted(setting.loads()) == [0, 4])
    eventually(lambda: setting.troubles() == ["receivers hold every slot"])
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == 1)
    looks = setting.launcher.looks
    eventually(lambda: setting.launcher.looks > looks + 4)
    assert setting.errors().count("receivers hold every slot") == 1, "ending a receiver did not end the trouble"


class HungDisk:
    """Its syncs return when they are let."""

    def __init__(self, storage: Any, released: threading.Event) -> None:
        self._storage, self._released = storage, released

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> HungDisk:
        return HungDisk(self._storage.below(path), self._released)

    def create_segment(self, path: str) -> Any:
        self._released.wait(60)
        return self._storage.create_segment(path)


def test_a_receiver_that_hangs_is_replaced_and_fenced(make_stream: MakeStream, setting: Setting) -> None:
    """Its thread lives, so nothing but its lapsed lease tells; it is the only one, so nobody takes its partitions."""
    setting.stream = make_stream(receivers=1)
    setting.hang_seconds = 1.0
    released = threading.Event()
    sound = setting.launcher.storage
    setting.launcher.storage = lambda: HungDisk(sound(), released)
    setting.begin()
    eventually(lambda: setting.loads() == [4])
    setting.launcher.storage = sound
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: len(setting.launcher.handles[0]) == 2)
    eventually(lambda: setting.positions() == 1)
    assert "it hangs" in setting.errors()
    hung = setting.launcher.handles[0][0]
    assert not hung.done()
    released.set()
    eventually(hung.done)
    setting.kafka.produce("flights", 0, b"b")
    eventually(lambda: setting.positions() == 2)
    assert sum(unclaimed.records for unclaimed in setting.ledger.blocks.unclaimed("air")) == 2
    assert len(setting.launcher.handles[0]) == 2


def test_a_receiver_does_not_hang_because_the_ledger_is_away(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.hang_seconds = 3.0
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailableError("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(setting.ledger.jobs, "renew", away)
        patch.setattr(setting.ledger.receivers, "heartbeat", away)
        over = time.monotonic() + 6  # Longer than a receiver's lease, and than one may hang.
        eventually(lambda: time.monotonic() > over)
    setting.kafka.produce("flights", 0, b"a")
    eventually(lambda: setting.positions() == 1 and setting.loads() == [2, 2])
    assert [len(handles) for handles in setting.launcher.handles.values()] == [1, 1]


def test_when_a_receiver_is_taken_to_hang(setting: Setting) -> None:
    handles: list[Handle] = []

    class Patient:
        def start(self, task: ReceiverTask) -> Handle:
            handles.append(Handle(lambda stop: stop.wait(30)))
            return handles[-1]

    placed = TrackedReceiver(
        "", ReceiverId("air", "records", 0), setting.job, setting.ledger.receivers, Patient(), hang_seconds=60
    )
    assert placed.keep_going(0, alive=False) is None
    assert placed.keep_going(59, alive=False) is None, "it has its time to register"
    assert placed.keep_going(200, alive=True) is None
    assert placed.keep_going(259, alive=False) is None
    assert "it hangs" in (placed.keep_going(260, alive=False) or "")
    assert handles[0].stop.is_set()
    assert not placed.running
    placed.assume_alive(262)
    placed.keep_going(263, alive=False)
    assert len(handles) == 2
    placed.cancel()


def test_a_receiver_that_never_starts_is_tried_without_an_end(setting: Setting) -> None:
    class Broken:
        def start(self, task: ReceiverTask) -> Handle:
            raise RuntimeError("the executor has no disk")

    placed = TrackedReceiver("", ReceiverId("air", "records", 0), setting.job, setting.ledger.receivers, Broken())
    for minute in range(1_100):
        assert "starts again in" in (placed.keep_going(minute * 61.0, alive=False) or "")
    assert placed.starts == 1_100
    (row,) = setting.ledger.receivers.all("air")
    assert (row.state, row.last_error) == (ReceiverState.FAILED, "RuntimeError: the executor has no disk")
    assert 'raise RuntimeError("the executor has no disk")' in (row.last_error_stack or "")
    assert row.restarts == 0, "it never registered"


@pytest.mark.parametrize(("seconds", "waits"), [(9, [2, 4, 8, 16, 16, 16]), (10, [2] * 7)])
def test_the_backoff_grows_while_a_receiver_fails_soon(setting: Setting, seconds: int, waits: list[int]) -> None:
    """It grows as long as the failures come soon after the start."""
    handles: list[Handle] = []

    class Launcher:
        def start(self, task: ReceiverTask) -> Handle:
            handles.append(Handle(lambda stop: stop.wait(30)))
            return handles[-1]

    placed = TrackedReceiver("", ReceiverId("air", "records", 0), setting.job, setting.ledger.receivers, Launcher())
    now = 0
    for wait in waits:
        placed.keep_going(now, alive=True)
        assert placed.running
        handles[-1].cancel()
        eventually(handles[-1].done)
        assert f"starts again in {wait} s" in (placed.keep_going(now + seconds, alive=True) or "")
        placed.keep_going(now + seconds + wait - 0.1, alive=False)
        assert not placed.running, "it is not due yet"
        now += seconds + wait


def test_a_receiver_that_waits_for_a_place_has_no_backoff(setting: Setting) -> None:
    """The wait is reported once."""

    class Full:
        slots = 3

        def start(self, task: ReceiverTask) -> Handle:
            raise NoPlaceError(f"there are only {self.slots} slots")

    launcher = Full()
    placed = TrackedReceiver("", ReceiverId("air", "records", 0), setting.job, setting.ledger.receivers, launcher)
    reported = [placed.keep_going(second, alive=False) for second in range(0, 40, 2)]
    assert placed.starts == 20
    place = "(docs/troubleshooting.md#NoPlaceError)"
    assert reported == [f"Receiver air/records/0 waits: there are only 3 slots {place}", *[None] * 19]
    launcher.slots = 4
    assert "only 4 slots" in (placed.keep_going(40, alive=False) or "")
    (row,) = setting.ledger.receivers.all("air")
    assert (row.state, row.last_error) == (ReceiverState.FAILED, f"there are only 4 slots {place}")
    assert len(setting.ledger.events.page("air", kinds=[EventKind.RECEIVER_FAILED])) == 2


def test_the_executor_of_a_receiver_is_noted_when_spark_knows_it(setting: Setting) -> None:
    class OnExecutor(Handle):
        executor: Executor | None = None

        def running_on(self) -> Executor | None:
            return self.executor

    class Launcher:
        def __init__(self) -> None:
            self.handle = OnExecutor(lambda stop: stop.wait(30))

        def start(self, task: ReceiverTask) -> OnExecutor:
            return self.handle

    launcher = Launcher()
    placed = TrackedReceiver("", ReceiverId("air", "records", 0), setting.job, setting.ledger.receivers, launcher)
    placed.keep_going(0, alive=False)
    placed.keep_going(1, alive=False)
    (row,) = setting.ledger.receivers.all("air")
    assert (row.state, row.executor_id) == (ReceiverState.SCHEDULED, None)
    launcher.handle.executor = Executor("vm7", "3")
    placed.keep_going(2, alive=False)
    (row,) = setting.ledger.receivers.all("air")
    assert row.executor_id == "3"
    placed.cancel()


def test_a_receiver_starts_when_the_ledger_answers_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a place in the ledger's account nothing is started."""
    receivers = setting.ledger.receivers

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailableError("it does not answer")

    placed = TrackedReceiver("", ReceiverId("air", "records", 0), setting.job, receivers, setting.launcher)
    with monkeypatch.context() as patch:
        patch.setattr(receivers, "schedule", away)
        with pytest.raises(LedgerUnavailableError):
            placed.keep_going(0, alive=False)
    assert (placed.starts, placed.running, receivers.all("air")) == (0, False, [])
    placed.keep_going(1, alive=False)
    assert (placed.starts, placed.running) == (1, True)
    placed.cancel()


def test_a_late_task_of_an_earlier_placement_is_refused(setting: Setting) -> None:
    """It may come when Spark had its task in a queue, or its process was stopped."""
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.launcher.handles[0][0].crashed = True
    eventually(lambda: len(setting.launcher.handles[0]) == 2)
    eventually(lambda: setting.loads() == [2, 2])
    receiver_id = ReceiverId("air", "records", 0)
    late = ScheduledReceiver(receiver_id, 1, setting.job)
    report = receive(StreamContext(setting.stream, setting.ledger), late)
    assert (report.state, "the tracker has scheduled epoch 2 since" in (report.error or "")) == (
        ReceiverState.LOST,
        True,
    )
    (event,) = setting.ledger.events.page("air", kinds=[EventKind.RECEIVER_REFUSED])
    assert (event.payload["receiver"], event.payload["epoch"]) == (str(receiver_id), 1)
    for partition in range(4):
        setting.kafka.produce("flights", partition, b"a")
    eventually(lambda: setting.positions() == 4)
    assert [row.epoch for row in setting.ledger.receivers.all("air")] == [2, 1]


def test_rates_are_set_while_receivers_run(setting: Setting, make_stream: MakeStream) -> None:
    """By the tracker's loop, from the second completed batch on; and the receivers' next instances keep them."""
    limits = Limits(backpressure=Backpressure(min_rate=7.0, integral=1_000.0))
    setting = setting.again(make_stream(receivers=2, limits=limits))
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    storage = open_storage(setting.stream.storage.url)
    for number in range(1, 4):
        for partition in range(4):
            setting.kafka.produce("flights", partition, b"x")
        eventually(lambda number=number: setting.positions() == 4 * number)  # type: ignore[misc]
        while (time_ms := setting.ledger.batches.next_unclaimed("air")) is not None:
            eventually(lambda time_ms=time_ms: setting.ledger.now_ms() >= time_ms)  # type: ignore[misc]
            allocate(StreamContext(setting.stream, setting.ledger, storage=storage.below(setting.stream.name)), time_ms)
            attempt = setting.ledger.attempts.begin("air", time_ms, holder="test", way="connect", lease_ms=60_000)
            begun_ms = setting.ledger.now_ms()
            # No batch takes no time.
            eventually(lambda begun_ms=begun_ms: setting.ledger.now_ms() > begun_ms + 20)  # type: ignore[misc]
            for output in attempt.outputs:
                setting.ledger.attempts.record_output(attempt, output, {})
            setting.ledger.attempts.complete(attempt)

    def rates() -> list[float | None]:
        return [row.max_rate for row in setting.ledger.receivers.all("air")]

    eventually(lambda: all(rate is not None and rate >= 7.0 for rate in rates()))
    setting.launcher.handles[0][0].stop.set()
    eventually(lambda: len(setting.launcher.handles[0]) == 2)
    eventually(lambda: setting.ledger.receivers.all("air")[0].epoch == 2)
    assert None not in rates()
    setting.end()


def test_a_tracker_that_lost_its_lease_ends_with_its_receivers(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.ledger.jobs.release(setting.job, "failed", "taken")
    setting.ledger.jobs.acquire("air", holder="another", lease_ms=60_000)
    setting.thread.join(30)
    assert setting.report is not None
    assert setting.report.end is TrackerEnd.LOST
    eventually(lambda: all(handle.done() for handles in setting.launcher.handles.values() for handle in handles))
