"""Blocks are cut by time and by bytes, pushed in order, and none of what was added is lost by a stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock, SystemClock
from headrace.receiver.block_generator import BlockGenerator, GeneratedBlock, GeneratorState
from headrace.receiver.errors import GeneratorStateError


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.002)


class Listener:
    def __init__(self) -> None:
        self.added: list[tuple[object, object]] = []
        self.generated: list[GeneratedBlock[str]] = []
        self.pushed: list[GeneratedBlock[str]] = []
        self.errors: list[BaseException] = []
        self.ticks = 0
        self.may_push = threading.Event()
        self.may_push.set()
        self.failure: Exception | None = None

    def on_add_data(self, item: str, metadata: object) -> None:
        self.added.append((item, metadata))

    def on_generate_block(self, block: GeneratedBlock[str]) -> None:
        self.generated.append(block)

    def on_push_block(self, block: GeneratedBlock[str]) -> None:
        assert self.may_push.wait(5)
        if self.failure is not None:
            raise self.failure
        self.pushed.append(block)

    def on_tick(self) -> None:
        self.ticks += 1

    def on_error(self, _message: str, error: BaseException) -> None:
        self.errors.append(error)

    @property
    def items(self) -> list[str]:
        return [item for block in self.pushed for item in block.items]


class Setting:
    def __init__(self, *, max_block_bytes: int = 1000, max_queued_blocks: int = 10) -> None:
        self.clock = ManualClock(10_000)
        self.listener = Listener()
        self.generator: BlockGenerator[str] = BlockGenerator(
            ReceiverId("air", "records", 0),
            self.listener,
            block_interval_ms=200,
            max_block_bytes=max_block_bytes,
            max_queued_blocks=max_queued_blocks,
            clock=self.clock,
        )

    def cut(self) -> None:
        """Let a block interval pass."""
        blocks = len(self.listener.generated)
        self.clock.advance(200)
        eventually(lambda: len(self.listener.generated) > blocks)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_block_generation_and_data_callbacks(setting: Setting) -> None:
    generator, listener = setting.generator, setting.listener
    assert generator.state is GeneratorState.INITIALIZED
    with pytest.raises(GeneratorStateError):
        generator.add_data("early", 1)
    generator.start()
    assert generator.state is GeneratorState.ACTIVE
    generator.add_data("plain", 1)
    assert listener.added == []
    generator.add_data_with_callback("one", 1, "meta")
    generator.add_multiple_data_with_callback([("two", 1), ("three", 1)], "more")
    assert listener.added == [("one", "meta"), ("two", "more"), ("three", "more")]
    setting.cut()
    eventually(lambda: listener.items == ["plain", "one", "two", "three"])
    assert listener.pushed[0].cut_time_ms == 10_200
    assert listener.pushed[0].block_id.interval_start_ms == 10_000
    generator.stop()


def test_empty_intervals_make_no_block(setting: Setting) -> None:
    setting.generator.start()
    setting.clock.advance(5_000)
    setting.generator.add_data("one", 1)
    setting.cut()
    setting.generator.stop()
    assert len(setting.listener.generated) == 1


def test_stop_ensures_correct_shutdown(setting: Setting) -> None:
    """Everything added before the stop is pushed, in order, and nothing is taken after it."""
    generator, listener = setting.generator, setting.listener
    generator.start()
    listener.may_push.clear()
    for number in range(5):
        generator.add_data(str(number), 1)
        setting.cut()
    generator.add_data("uncut", 1)
    stopping = threading.Thread(target=generator.stop)
    stopping.start()
    eventually(lambda: generator.state is GeneratorState.STOPPED_GENERATING_BLOCKS)
    with pytest.raises(GeneratorStateError, match="stopped_generating_blocks"):
        generator.add_data("late", 1)
    assert listener.pushed == []
    listener.may_push.set()
    stopping.join(5)
    assert listener.items == ["0", "1", "2", "3", "4", "uncut"]
    assert generator.state is GeneratorState.STOPPED_ALL
    generator.stop()


def test_a_stop_pushes_what_was_not_cut_though_nothing_was_queued(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pushing thread waits for the last cut, however long the timer takes to end before it."""
    generator, listener = setting.generator, setting.listener
    generator.start()
    generator.add_data("uncut", 1)
    stop_timer = generator._timer.stop

    def stop_late() -> int:
        with pytest.raises(GeneratorStateError, match="stopped_adding_data"):
            generator.add_data("late", 1)
        ticks = listener.ticks
        # The second of these began after the stop.
        eventually(lambda: listener.ticks >= ticks + 2 or not generator._pusher.is_alive())
        return stop_timer()

    monkeypatch.setattr(generator._timer, "stop", stop_late)
    generator.stop()
    assert listener.items == ["uncut"]


def test_block_push_errors_are_reported(setting: Setting) -> None:
    generator, listener = setting.generator, setting.listener
    listener.failure = OSError("disk")
    generator.start()
    generator.add_data("one", 1)
    setting.clock.advance(200)
    eventually(lambda: listener.errors == [listener.failure])
    assert generator.failure is listener.failure
    with pytest.raises(GeneratorStateError, match="disk"):
        generator.add_data("two", 1)
    generator.stop()
    assert listener.pushed == []


def test_it_does_not_start_twice(setting: Setting) -> None:
    setting.generator.start()
    with pytest.raises(GeneratorStateError):
        setting.generator.start()
    setting.generator.stop()
    with pytest.raises(GeneratorStateError):
        setting.generator.start()


def test_stop_before_start_ends_it(setting: Setting) -> None:
    setting.generator.stop()
    assert setting.generator.state is GeneratorState.STOPPED_ALL


def test_a_block_is_cut_when_its_bytes_are_reached() -> None:
    setting = Setting(max_block_bytes=100)
    setting.generator.start()
    for number in range(5):
        setting.generator.add_data(str(number), 40)
    eventually(lambda: setting.listener.items == ["0", "1", "2", "3"])
    assert [len(block.items) for block in setting.listener.pushed] == [2, 2]
    setting.generator.stop()


def test_an_item_larger_than_a_block_is_a_block_of_its_own() -> None:
    setting = Setting(max_block_bytes=100)
    setting.generator.start()
    for size in (10, 500, 10):
        setting.generator.add_data(str(size), size)
    setting.generator.stop()
    assert [block.nbytes for block in setting.listener.pushed] == [10, 500, 10]


def test_a_full_queue_holds_back_who_adds_and_bounds_the_bytes() -> None:
    setting = Setting(max_block_bytes=100, max_queued_blocks=2)
    listener = setting.listener
    listener.may_push.clear()
    setting.generator.start()
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
    listener.may_push.set()
    adding.join(5)
    setting.generator.stop()
    assert listener.items == [str(number) for number in range(20)]
    assert max(block.nbytes for block in listener.pushed) <= 100


def test_an_action_comes_after_what_was_added_before_it_and_before_what_comes_later(setting: Setting) -> None:
    generator, listener = setting.generator, setting.listener
    generator.start()
    seen: list[list[str]] = []
    generator.add_data("before", 1)
    generator.after_push(lambda: seen.append(listener.items))
    generator.add_data("after", 1)
    eventually(lambda: bool(seen))
    assert seen == [["before"]]
    generator.stop()
    assert listener.items == ["before", "after"]


def test_sealed_through_is_the_oldest_block_that_is_not_pushed(setting: Setting) -> None:
    generator, listener = setting.generator, setting.listener
    generator.start()
    assert generator.sealed_through_ms() == 10_000
    listener.may_push.clear()
    generator.add_data("one", 1)
    setting.cut()
    generator.add_data("two", 1)
    setting.cut()
    setting.clock.advance(1_000)
    assert generator.sealed_through_ms() == 10_200
    listener.may_push.set()
    eventually(lambda: len(listener.pushed) == 2)
    eventually(lambda: generator.sealed_through_ms() == 11_400)
    generator.stop()


def test_abort_forgets_what_is_queued(setting: Setting) -> None:
    generator, listener = setting.generator, setting.listener
    generator.start()
    listener.may_push.clear()
    for number in range(3):
        generator.add_data(str(number), 1)
        setting.cut()
    eventually(lambda: generator.queued[0] == 3)
    aborting = threading.Thread(target=generator.abort, args=(RuntimeError("lost"),))
    aborting.start()
    eventually(lambda: generator.state is GeneratorState.STOPPED_ALL)
    listener.may_push.set()
    aborting.join(5)
    assert listener.items in ([], ["0"])
    assert str(generator.failure) == "lost"


def test_ticks_come_without_data() -> None:
    listener = Listener()
    generator: BlockGenerator[str] = BlockGenerator(
        ReceiverId("air", "records", 0),
        listener,
        block_interval_ms=10,
        max_block_bytes=10,
        max_queued_blocks=2,
        clock=SystemClock(),
    )
    generator.start()
    eventually(lambda: listener.ticks > 2)
    generator.stop()


def test_cut_times_never_go_back() -> None:
    times = iter([500, 400, 600])
    listener = Listener()
    generator: BlockGenerator[str] = BlockGenerator(
        ReceiverId("air", "records", 0),
        listener,
        block_interval_ms=200,
        max_block_bytes=10,
        max_queued_blocks=10,
        clock=ManualClock(),
        now_ms=lambda: next(times),
    )
    generator.start()
    for item in "abc":
        generator.add_data(item, 10)
    generator.stop()
    assert [block.cut_time_ms for block in listener.pushed] == [500, 500, 600]
