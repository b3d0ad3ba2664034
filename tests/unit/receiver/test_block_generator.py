"""Blocks are cut by time and by bytes, pushed in order, and none of what was added is lost by a stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from tests.unit.receiver.waiting import eventually

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock, SystemClock
from headrace.receiver.block_generator import BlockGenerator, GeneratedBlock, GeneratorState, RecurringTimer
from headrace.receiver.receiver import GeneratorStateError


class Pushes:
    """What a generator pushes, and how often it ticks."""

    def __init__(self) -> None:
        self.blocks: list[GeneratedBlock[str]] = []
        self.pushes: list[int] = []
        self.ticks = 0
        self.may_push = threading.Event()
        self.may_push.set()
        self.failure: Exception | None = None

    def push(self, blocks: Sequence[GeneratedBlock[str]]) -> None:
        self.pushes.append(len(blocks))
        assert self.may_push.wait(5)
        if self.failure is not None:
            raise self.failure
        self.blocks += blocks

    def tick(self) -> None:
        self.ticks += 1

    @property
    def items(self) -> list[str]:
        return [item for block in self.blocks for item in block.items]


class Setting:
    def __init__(self, *, max_block_bytes: int = 1000, max_queued_blocks: int = 10) -> None:
        self.clock = ManualClock(10_000)
        self.pushes = Pushes()
        self.generator: BlockGenerator[str] = BlockGenerator(
            ReceiverId("air", "records", 0),
            block_interval_ms=200,
            max_block_bytes=max_block_bytes,
            max_queued_blocks=max_queued_blocks,
            clock=self.clock,
        )

    def start(self) -> None:
        self.generator.start(self.pushes.push, self.pushes.tick)

    def cut(self) -> None:
        """Let a block interval pass, and await the cut of what was added."""
        assert self.generator._filling
        self.clock.advance(200)
        eventually(lambda: not self.generator._filling)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_what_is_added_in_an_interval_becomes_a_block_at_its_end(setting: Setting) -> None:
    generator, pushes = setting.generator, setting.pushes
    assert generator.state is GeneratorState.INITIALIZED
    with pytest.raises(GeneratorStateError):
        generator.add_data("early", 1)
    setting.start()
    assert generator.state is GeneratorState.ACTIVE
    for item in ("one", "two", "three"):
        generator.add_data(item, 1)
    assert pushes.blocks == []
    setting.cut()
    eventually(lambda: pushes.items == ["one", "two", "three"])
    # The last millisecond of the interval: if a batch ends at 10,200, the block is in it.
    assert [block.cut_time_ms for block in pushes.blocks] == [10_199]
    generator.stop()


def test_records_after_an_interval_are_not_cut_into_it(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not, even if the timer is late."""
    generator, pushes = setting.generator, setting.pushes
    monkeypatch.setattr(generator._timer, "start", lambda: 0)
    setting.start()
    setting.clock.advance(230)
    generator.add_data("next", 1)
    # The timer should have called at 10,200.
    generator._on_interval(10_200)
    eventually(lambda: pushes.items == ["next"])
    assert [block.cut_time_ms for block in pushes.blocks] == [10_230]
    generator.stop()


def test_sealed_through_does_not_pass_what_is_being_filled(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a look between the end of an interval and its cut would move the block into the next batch."""
    generator, pushes = setting.generator, setting.pushes
    monkeypatch.setattr(generator._timer, "start", lambda: 0)
    pushes.may_push.clear()
    setting.start()
    setting.clock.advance(150)
    generator.add_data("one", 1)
    setting.clock.advance(51)
    assert generator.sealed_through_ms() == 10_150
    generator._on_interval(10_200)
    assert generator.sealed_through_ms() == 10_199
    pushes.may_push.set()
    eventually(lambda: generator.sealed_through_ms() == 10_201)
    assert [block.cut_time_ms for block in pushes.blocks] == [10_199]
    generator.stop()


def test_empty_intervals_make_no_block(setting: Setting) -> None:
    setting.start()
    setting.clock.advance(5_000)
    setting.generator.add_data("one", 1)
    setting.cut()
    setting.generator.stop()
    assert len(setting.pushes.blocks) == 1


def test_stop_ensures_correct_shutdown(setting: Setting) -> None:
    """Everything added before the stop is pushed, in order, and nothing is taken after it."""
    generator, pushes = setting.generator, setting.pushes
    setting.start()
    pushes.may_push.clear()
    for number in range(5):
        generator.add_data(str(number), 1)
        setting.cut()
    generator.add_data("uncut", 1)
    stopping = threading.Thread(target=generator.stop)
    stopping.start()
    eventually(lambda: generator.state is GeneratorState.STOPPED_GENERATING_BLOCKS)
    with pytest.raises(GeneratorStateError, match="stopped_generating_blocks"):
        generator.add_data("late", 1)
    assert pushes.blocks == []
    pushes.may_push.set()
    stopping.join(5)
    assert pushes.items == ["0", "1", "2", "3", "4", "uncut"]
    assert generator.state is GeneratorState.STOPPED_ALL
    generator.stop()


def test_a_stop_pushes_what_was_not_cut_from_an_empty_queue(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pushing thread waits for the last cut, however long the timer takes to end before it."""
    generator, pushes = setting.generator, setting.pushes
    setting.start()
    generator.add_data("uncut", 1)
    stop_timer = generator._timer.stop

    def stop_late() -> int:
        with pytest.raises(GeneratorStateError, match="stopped_adding_data"):
            generator.add_data("late", 1)
        ticks = pushes.ticks
        # The second of these began after the stop.
        eventually(lambda: pushes.ticks >= ticks + 2 or not (generator._pusher and generator._pusher.is_alive()))
        return stop_timer()

    monkeypatch.setattr(generator._timer, "stop", stop_late)
    generator.stop()
    assert pushes.items == ["uncut"]


def test_block_push_errors_are_reported(setting: Setting) -> None:
    generator, pushes = setting.generator, setting.pushes
    pushes.failure = OSError("disk")
    setting.start()
    generator.add_data("one", 1)
    setting.clock.advance(200)
    eventually(lambda: generator.failure is pushes.failure)
    with pytest.raises(GeneratorStateError, match="disk"):
        generator.add_data("two", 1)
    generator.stop()
    assert pushes.blocks == []


def test_a_generator_does_not_start_twice(setting: Setting) -> None:
    setting.start()
    with pytest.raises(GeneratorStateError):
        setting.start()
    setting.generator.stop()
    with pytest.raises(GeneratorStateError):
        setting.start()


def test_stop_before_start_ends_it(setting: Setting) -> None:
    setting.generator.stop()
    assert setting.generator.state is GeneratorState.STOPPED_ALL


def test_a_block_is_cut_when_its_bytes_are_reached() -> None:
    setting = Setting(max_block_bytes=100)
    setting.start()
    for number in range(5):
        setting.generator.add_data(str(number), 40)
    eventually(lambda: setting.pushes.items == ["0", "1", "2", "3"])
    assert [len(block.items) for block in setting.pushes.blocks] == [2, 2]
    setting.generator.stop()


def test_an_item_larger_than_a_block_is_a_block_of_its_own() -> None:
    setting = Setting(max_block_bytes=100)
    setting.start()
    for size in (10, 500, 10):
        setting.generator.add_data(str(size), size)
    setting.generator.stop()
    assert [block.nbytes for block in setting.pushes.blocks] == [10, 500, 10]


def test_a_full_queue_holds_back_who_adds_and_bounds_the_bytes() -> None:
    setting = Setting(max_block_bytes=100, max_queued_blocks=2)
    pushes = setting.pushes
    pushes.may_push.clear()
    setting.start()
    added: list[int] = []

    def add() -> None:
        for number in range(20):
            setting.generator.add_data(str(number), 50)
            added.append(number)

    adding = threading.Thread(target=add, daemon=True)
    adding.start()
    # One block is being pushed, two are queued, one is being filled.
    eventually(lambda: len(added) == 8)
    assert not setting.generator.wait_for_room(0.05)
    assert setting.generator.queued == (4, 400)
    pushes.may_push.set()
    adding.join(5)
    setting.generator.stop()
    assert pushes.items == [str(number) for number in range(20)]
    assert max(block.nbytes for block in pushes.blocks) <= 100


def test_an_action_comes_between_earlier_and_later_records(setting: Setting) -> None:
    generator, pushes = setting.generator, setting.pushes
    setting.start()
    seen: list[list[str]] = []
    generator.add_data("before", 1)
    generator.after_push(lambda: seen.append(pushes.items))
    generator.add_data("after", 1)
    eventually(lambda: bool(seen))
    assert seen == [["before"]]
    generator.stop()
    assert pushes.items == ["before", "after"]


def test_sealed_through_is_the_oldest_block_that_is_not_pushed(setting: Setting) -> None:
    generator, pushes = setting.generator, setting.pushes
    setting.start()
    assert generator.sealed_through_ms() == 10_000
    pushes.may_push.clear()
    generator.add_data("one", 1)
    setting.cut()
    generator.add_data("two", 1)
    setting.cut()
    setting.clock.advance(1_000)
    assert generator.sealed_through_ms() == 10_199
    pushes.may_push.set()
    eventually(lambda: len(pushes.blocks) == 2)
    eventually(lambda: generator.sealed_through_ms() == 11_400)
    generator.stop()


def test_ticks_come_without_data() -> None:
    pushes = Pushes()
    generator: BlockGenerator[str] = BlockGenerator(
        ReceiverId("air", "records", 0),
        block_interval_ms=10,
        max_block_bytes=10,
        max_queued_blocks=2,
        clock=SystemClock(),
    )
    generator.start(pushes.push, pushes.tick)
    eventually(lambda: pushes.ticks > 2)
    generator.stop()


def test_cut_times_never_go_back() -> None:
    times = [0]
    pushes = Pushes()
    generator: BlockGenerator[str] = BlockGenerator(
        ReceiverId("air", "records", 0),
        block_interval_ms=200,
        max_block_bytes=10,
        max_queued_blocks=10,
        clock=ManualClock(),
        now_ms=lambda: times[-1],
    )
    generator.start(pushes.push, pushes.tick)
    for now_ms in (500, 400, 600):
        times.append(now_ms)
        generator.add_data("item", 10)
    generator.stop()
    assert [block.cut_time_ms for block in pushes.blocks] == [500, 500, 600]


class TestRecurringTimer:
    def test_basic(self) -> None:
        clock = ManualClock(1_030)
        called: list[int] = []
        timer = RecurringTimer(clock, 100, called.append, "test")
        assert timer.start() == 1_100
        for _ in range(3):
            clock.advance(100)
        until = time.monotonic() + 5
        while len(called) < 3 and time.monotonic() < until:
            time.sleep(0.002)
        assert timer.stop() == 1_300
        assert called == [1_100, 1_200, 1_300]

    def test_callback_is_made_once_more_by_a_gentle_stop(self) -> None:
        """Such a stop does not interrupt the timer."""
        called: list[int] = []
        timer = RecurringTimer(ManualClock(0), 100, called.append, "test")
        timer.start()
        assert timer.stop(interrupt=False) == 100
        assert called == [100]


def test_all_blocks_that_wait_are_pushed_together(setting: Setting) -> None:
    setting.start()
    setting.pushes.may_push.clear()
    for item in ("one", "two", "three", "four"):
        setting.generator.add_data(item, 1)
        setting.cut()
        eventually(lambda: bool(setting.pushes.pushes))
    assert setting.generator.queued == (4, 4)
    assert setting.generator.is_pushing
    setting.pushes.may_push.set()
    setting.generator.stop()
    assert setting.pushes.pushes == [1, 3]
    assert setting.pushes.items == ["one", "two", "three", "four"]


def test_blocks_pushed_together_have_no_more_bytes_than_one_may() -> None:
    setting = Setting(max_block_bytes=10)
    setting.start()
    setting.pushes.may_push.clear()
    for item, nbytes in (("first", 1), ("a", 4), ("b", 4), ("c", 4), ("d", 10)):
        setting.generator.add_data(item, nbytes)
        if nbytes < 10:
            setting.cut()
        eventually(lambda: bool(setting.pushes.pushes))
    setting.pushes.may_push.set()
    setting.generator.stop()
    assert setting.pushes.pushes == [1, 2, 1, 1]


def test_an_action_is_called_between_the_blocks_around_it(setting: Setting) -> None:
    setting.start()
    setting.pushes.may_push.clear()
    setting.generator.add_data("held", 1)
    setting.cut()
    eventually(lambda: bool(setting.pushes.pushes))
    stored: list[list[str]] = []
    setting.generator.add_data("before", 1)
    setting.generator.after_push(lambda: stored.append(setting.pushes.items))
    setting.generator.add_data("behind", 1)
    setting.pushes.may_push.set()
    setting.generator.stop()
    assert stored == [["held", "before"]]
    assert setting.pushes.pushes == [1, 1, 1]
