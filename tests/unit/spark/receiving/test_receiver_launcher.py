"""Where the launcher sends receivers, without a Spark: what Spark makes of it is in the integration tests."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.blocks import ReceiverId
from headrace.ledger.receiving.tables import ScheduledReceiver
from headrace.ledger.states import ReceiverState
from headrace.ledger.tables import JobLease
from headrace.receiver.placement import Executor, Location
from headrace.receiver.supervisor import ReceiverReport, ReceiverTask
from headrace.spark.receiving import receiver_launcher
from headrace.spark.receiving.receiver_launcher import (
    ExecutorReleaseError,
    NoFreeSlotError,
    SparkReceiverHandle,
    SparkReceiverLauncher,
)
from headrace.stream import ConsoleOutput, KafkaInput, Stream

STREAM = Stream(
    name="clicks",
    inputs=KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", receivers=3),
    outputs=ConsoleOutput(),
    batch_interval="10 s",
    storage={"url": "/tmp/clicks", "shared": True},
    ledger="sqlite:////tmp/ledger.db",
)
ONE, TWO, THREE, FOUR = (Executor(f"host{number}", str(number)) for number in range(1, 5))


def task(index: int) -> ReceiverTask:
    return ReceiverTask(
        "", ScheduledReceiver(ReceiverId("clicks", "records", index), 1, JobLease("clicks", 1, "test", 1, 1))
    )


class Handle:
    """A receiver that runs where it was sent first, or where a test says, until a test ends it."""

    def __init__(
        self,
        _: Any,
        task: ReceiverTask,
        __: str,
        locations: tuple[Location, ...],
        *___: Any,
        anywhere: bool = False,
    ) -> None:
        self.anywhere = anywhere
        self.is_refused = False
        self.receiver_id = task.receiver_id
        self.locations = locations
        first = locations[0] if locations else None
        self.executor = first if isinstance(first, Executor) else None
        self.ended = False

    def running_on(self) -> Executor | None:
        return self.executor

    def done(self) -> bool:
        return self.ended


class Setting:
    def __init__(self) -> None:
        self.executors: list[Executor] = [ONE, TWO, THREE]
        self.slots_of_each = 2
        self.others: list[SparkReceiverLauncher] = []
        self.launcher = SparkReceiverLauncher(object(), STREAM, lambda: self.others)  # type: ignore[arg-type]

    def start(self, index: int) -> Handle:
        handle: Any = self.launcher.start(task(index))
        assert isinstance(handle, Handle)
        return handle


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    made = Setting()
    monkeypatch.setattr(receiver_launcher, "SparkReceiverHandle", Handle)
    monkeypatch.setattr(receiver_launcher, "executors_of", lambda _: made.executors)
    monkeypatch.setattr(receiver_launcher, "task_slots", lambda _: made.slots_of_each * len(made.executors))
    return made


def test_receivers_get_an_executor_each(setting: Setting) -> None:
    assert [setting.start(index).locations for index in range(3)] == [(ONE,), (TWO,), (THREE,)]


def test_receivers_of_another_stream_in_the_job_count(setting: Setting) -> None:
    orders = STREAM.model_copy(update={"name": "orders"})
    other = SparkReceiverLauncher(object(), orders)  # type: ignore[arg-type]
    setting.others.append(other)
    for index in (0, 1):
        other.start(
            ReceiverTask("", ScheduledReceiver(ReceiverId("orders", "records", index), 1, task(index).scheduled.job))
        )
    # One and two run a receiver of the other stream.
    assert [setting.start(index).locations[0] for index in range(2)] == [THREE, ONE]
    setting.executors = [ONE, TWO]
    with pytest.raises(NoFreeSlotError):
        setting.start(2)


def test_a_lost_executors_receiver_starts_on_the_least_loaded(setting: Setting) -> None:
    handles = [setting.start(index) for index in range(3)]
    setting.executors = [ONE, TWO]
    handles[2].ended = True
    assert setting.start(2).locations == (ONE, TWO), "both have one"
    assert setting.launcher.crowding() is None
    handles[1].ended = True
    setting.executors = [ONE, THREE]
    assert setting.start(1).locations == (THREE,), "the third receiver runs on the first one"


def test_a_receiver_whose_job_has_ended_is_on_no_executor(setting: Setting) -> None:
    handles = [setting.start(index) for index in range(3)]
    handles[0].ended = handles[2].ended = True
    setting.executors = [ONE, TWO]
    assert setting.start(2).locations == (ONE,)


def test_a_running_receiver_counts_for_its_executor_only(setting: Setting) -> None:
    handles = [setting.start(index) for index in range(3)]
    setting.executors = [ONE, FOUR]
    handles[1].ended = handles[2].ended = True
    second, third = setting.start(1), setting.start(2)
    assert (second.locations, third.locations) == ((FOUR,), (ONE, FOUR))
    third.executor = FOUR
    second.ended = True
    assert setting.start(1).locations == (ONE, FOUR), "each runs one"


def test_a_receiver_starts_anywhere_without_known_executors(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> list[Executor]:
        raise RuntimeError("the JVM says no")

    monkeypatch.setattr(receiver_launcher, "executors_of", fail)
    assert setting.start(0).locations == ()
    monkeypatch.setattr(receiver_launcher, "executors_of", lambda _: [])
    assert setting.start(1).locations == ()


def test_after_the_loss_of_executors_batches_keep_the_last_slot(setting: Setting) -> None:
    handles = [setting.start(index) for index in range(3)]
    setting.executors = [ONE]
    handles[1].ended = handles[2].ended = True
    with pytest.raises(NoFreeSlotError, match=r"only 2 task slot\(s\): 1 run receivers"):
        setting.start(1)
    setting.executors = [ONE, THREE]
    setting.start(1)


def test_receivers_that_hold_every_slot_left_are_reported(setting: Setting) -> None:
    handles = [setting.start(index) for index in range(3)]
    setting.slots_of_each = 1
    assert "3 task slot(s) left, and 3 receiver(s) hold them all" in (setting.launcher.crowding() or "")
    handles[0].ended = True
    assert setting.launcher.crowding() is None


def test_a_question_about_slots_that_fails_ends_no_receiver(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> int:
        raise RuntimeError("the JVM says no")

    setting.start(0)
    monkeypatch.setattr(receiver_launcher, "task_slots", fail)
    assert setting.launcher.crowding() is None


def test_the_executors_of_receivers_are_known_if_each_of_them_is(setting: Setting) -> None:
    assert setting.launcher.executors_of_receivers() == set()
    handles = [setting.start(index) for index in range(3)]
    assert setting.launcher.executors_of_receivers() == {"1", "2", "3"}
    handles[2].executor = None
    assert setting.launcher.executors_of_receivers() is None
    handles[2].ended = True
    assert setting.launcher.executors_of_receivers() == {"1", "2"}


def test_no_receiver_starts_while_an_executor_is_released(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_launcher, "_RELEASE_SECONDS", 0.01)
    with setting.launcher.without_starts(), pytest.raises(ExecutorReleaseError):
        setting.start(0)
    setting.start(0)


@pytest.fixture(autouse=True)
def _asks_spark_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_launcher, "_ASK_SECONDS", 0.0)


class Context:
    """Takes a job's group and pool."""

    def setJobGroup(self, *_: Any, **__: Any) -> None:  # noqa: N802 - Spark's name
        pass

    def setLocalProperty(self, *_: Any) -> None:  # noqa: N802 - Spark's name
        pass


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What Spark is given to place: each receiver's job ends at once."""
    given: list[tuple[Any, ...]] = []

    class Job:
        def map(self, _: Any) -> Job:
            return self

        def collect(self) -> list[ReceiverReport]:
            return [ReceiverReport(task(0).receiver_id, ReceiverState.STOPPED)]

    def place(_: Any, *what: Any) -> Job:
        given.append(what)
        return Job()

    monkeypatch.setattr(receiver_launcher, "placed", place)
    return given


def test_a_receivers_job_is_placed_at_its_locations(placed: list[tuple[Any, ...]]) -> None:
    handle = SparkReceiverHandle(Context(), task(0), "the group", (ONE, TWO), list)  # type: ignore[arg-type]
    assert handle.join(20)
    assert (placed, handle.error()) == ([(task(0), (ONE, TWO))], None)


@pytest.mark.usefixtures("placed")
def test_the_launcher_asks_spark_for_an_executor_until_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the executor of a receiver."""
    asked: list[str] = []

    def ask(_: Any, group: str) -> Executor | None:
        asked.append(group)
        return None if len(asked) == 1 else TWO

    monkeypatch.setattr(receiver_launcher, "executor_of_group", ask)
    handle = SparkReceiverHandle(Context(), task(0), "the group", (ONE, TWO), list)  # type: ignore[arg-type]
    assert [handle.running_on() for _ in range(3)] == [None, TWO, TWO]
    assert asked == ["the group"] * 2


class Endless:
    """A job of Spark that ends when its group is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def setJobGroup(self, *_: Any, **__: Any) -> None:  # noqa: N802 - as Spark's
        """Nothing to do."""

    def setLocalProperty(self, *_: Any) -> None:  # noqa: N802 - as Spark's
        """Nothing to do."""

    def cancelJobGroup(self, _: str) -> None:  # noqa: N802 - as Spark's
        self.cancelled.set()

    def map(self, _: Any) -> Endless:
        return self

    def collect(self) -> list[Any]:
        assert self.cancelled.wait(30)
        raise RuntimeError("cancelled")


def test_a_lost_executors_receiver_ends_before_spark_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark repeats its task four times, each time when a slot is free."""
    job = Endless()
    live = [ONE, TWO]
    monkeypatch.setattr(receiver_launcher, "placed", lambda *_: job)
    monkeypatch.setattr(receiver_launcher, "executor_of_group", lambda *_: ONE)
    handle = SparkReceiverHandle(job, task(0), "the group", (ONE,), lambda: live)  # type: ignore[arg-type]
    live.remove(ONE)
    assert not handle.done(), "it is not known where it runs"
    live.insert(0, ONE)
    assert handle.running_on() == ONE
    assert not handle.done()
    live.remove(ONE)
    assert handle.done()
    assert handle.error() == "executor 1 on host1 was lost"
    assert handle.join(20)
    assert job.cancelled.is_set()
    assert handle.error() == "executor 1 on host1 was lost"


@pytest.fixture
def on_two(monkeypatch: pytest.MonkeyPatch) -> Endless:
    """Spark starts every receiver on the second executor."""
    job = Endless()
    monkeypatch.setattr(receiver_launcher, "placed", lambda *_: job)
    monkeypatch.setattr(receiver_launcher, "executor_of_group", lambda *_: TWO)
    return job


@pytest.mark.parametrize("locations", [(ONE,), (ONE, "host4")])
def test_a_receiver_started_outside_its_locations_is_refused(on_two: Endless, locations: tuple[Location, ...]) -> None:
    handle = SparkReceiverHandle(on_two, task(0), "the group", locations, lambda: [ONE, TWO])  # type: ignore[arg-type]
    assert not handle.done(), "it is not known where it runs"
    assert handle.running_on() == TWO
    assert handle.done()
    assert handle.is_refused
    places = " or ".join(map(str, locations))
    assert handle.error() == f"it started on executor 2 on host2 instead of {places}; it is placed again"
    assert handle.join(20)
    assert on_two.cancelled.is_set()


@pytest.mark.parametrize(
    ("locations", "anywhere"), [((ONE, TWO), False), (("host2",), False), ((), False), ((ONE,), True)]
)
def test_a_receiver_is_accepted_at_each_of_its_locations(
    on_two: Endless, locations: tuple[Location, ...], anywhere: bool
) -> None:
    """Elsewhere it is accepted if it is placed again."""
    handle = SparkReceiverHandle(
        on_two,  # type: ignore[arg-type]
        task(0),
        "the group",
        locations,
        lambda: [ONE, TWO],
        anywhere=anywhere,
    )
    assert handle.running_on() == TWO
    assert not handle.done()
    handle.cancel()
    assert handle.join(20)
    assert not handle.is_refused


def test_a_refused_receiver_is_placed_by_load_then_accepted(setting: Setting) -> None:
    """The load is the present one, and then any place is accepted."""
    handles = [setting.start(index) for index in range(3)]
    assert handles[1].locations == (TWO,)
    assert not handles[1].anywhere
    # Another one keeps the second executor busy, and the third one has ended.
    handles[0].executor = TWO
    handles[1].is_refused = handles[1].ended = handles[2].ended = True
    setting.start(2)
    again = setting.start(1)
    assert (again.locations, again.anywhere) == ((ONE,), True)
    again.ended = True
    assert not setting.start(1).anywhere, "it was not refused again"


def test_no_receiver_is_lost_where_executors_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """In local mode there are none."""
    job = Endless()
    monkeypatch.setattr(receiver_launcher, "placed", lambda *_: job)
    monkeypatch.setattr(receiver_launcher, "executor_of_group", lambda *_: ONE)
    handle = SparkReceiverHandle(job, task(0), "the group", (), list)  # type: ignore[arg-type]
    assert handle.running_on() == ONE
    assert not handle.done()
    handle.cancel()
    assert handle.join(20)


def test_the_error_of_a_receivers_first_task_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That Spark repeated the task is not reported."""
    job = Endless()
    job.cancelled.set()
    text = "ExecutorLostFailure (executor 0 exited) Reason: Command exited with code 137"
    monkeypatch.setattr(receiver_launcher, "placed", lambda *_: job)
    monkeypatch.setattr(receiver_launcher, "first_failure_of_group", lambda *_: text)
    handle = SparkReceiverHandle(job, task(0), "the group", (), list)  # type: ignore[arg-type]
    assert handle.join(20)
    assert handle.error() == text
