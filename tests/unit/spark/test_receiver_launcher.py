"""Where the launcher sends receivers, without a Spark: what Spark makes of it is in the integration tests."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.blocks import ReceiverId
from headrace.ledger.rows import JobLease
from headrace.receiving.receiver_task import ReceiverTask
from headrace.receiving.scheduling_policy import Executor, Location
from headrace.spark import receiver_launcher
from headrace.spark.receiver_launcher import NoFreeSlotError, SparkReceiverLauncher
from headrace.stream import ConsoleOutput, KafkaInput, Stream

STREAM = Stream(
    name="clicks",
    inputs=KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", receivers=3),
    outputs=ConsoleOutput(),
    batch_interval="10 s",
    storage={"url": "/tmp/clicks", "shared": True},
    ledger="sqlite:////tmp/ledger.db",
)
ONE, TWO, THREE = Executor("host1", "1"), Executor("host2", "2"), Executor("host3", "3")


class Handle:
    """A receiver that runs where it was sent first, until a test ends it."""

    def __init__(self, _: Any, task: ReceiverTask, __: str, locations: tuple[Location, ...]) -> None:
        self.receiver_id = task.receiver_id
        self.locations = locations
        self.ended = False

    def running_on(self) -> Executor | None:
        first = self.locations[0] if self.locations else None
        return first if isinstance(first, Executor) else None

    def done(self) -> bool:
        return self.ended


class Setting:
    def __init__(self) -> None:
        self.executors: list[Executor] = [ONE, TWO, THREE]
        self.slots_of_each = 2
        self.launcher = SparkReceiverLauncher(object(), STREAM)  # type: ignore[arg-type]

    def start(self, index: int) -> Handle:
        receiver = ReceiverId("clicks", "records", index)
        handle: Any = self.launcher.start(ReceiverTask("", receiver, JobLease("clicks", 1, "test", 1, 1)))
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


def test_after_the_loss_of_an_executor_its_receiver_goes_where_least_runs(setting: Setting) -> None:
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


def test_where_nothing_is_known_of_executors_a_receiver_starts_anywhere(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> list[Executor]:
        raise RuntimeError("the JVM says no")

    monkeypatch.setattr(receiver_launcher, "executors_of", fail)
    assert setting.start(0).locations == ()
    monkeypatch.setattr(receiver_launcher, "executors_of", lambda _: [])
    assert setting.start(1).locations == ()


def test_after_the_loss_of_executors_the_last_slot_is_kept_for_batches(setting: Setting) -> None:
    handles = [setting.start(index) for index in range(3)]
    setting.executors = [ONE]
    handles[1].ended = handles[2].ended = True
    with pytest.raises(NoFreeSlotError, match=r"2 task slot\(s\) left: 1 for receivers"):
        setting.start(1)
    setting.executors = [ONE, THREE]
    setting.start(1)


def test_receivers_that_hold_every_slot_that_is_left_are_reported(setting: Setting) -> None:
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
