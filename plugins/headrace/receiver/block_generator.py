"""Cuts the data that a receiver adds into blocks, and has them stored one after the other, as Spark's BlockGenerator.

Three threads work here: the receiver's own (adds), the cutter's timer (cuts at each block interval) and the pushing
thread (stores all blocks that wait, and sends the heartbeat). A block is cut at the interval or when it reaches
its maximum bytes. The queue is bounded in blocks, each block in bytes, and blocks that are stored together have no more
bytes than one block may have. When the queue is full, the interval's cut waits
and the block grows to its maximum; then adding waits. This gives back-pressure, and fewer, larger blocks under load.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from headrace.blocks import ReceiverId
from headrace.clock import Clock
from headrace.receiver.receiver import GeneratorStateError


class RecurringTimer:
    """Calls ``callback(time_ms)`` at each multiple of ``period_ms`` of ``now_ms``, by default its clock's time.

    A callback that takes longer than the period delays the next ones. Missed periods are made up for, unless there are
    more than 50. The callback must not raise.
    """

    def __init__(
        self,
        clock: Clock,
        period_ms: int,
        callback: Callable[[int], None],
        name: str,
        *,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        if period_ms <= 0:
            raise ValueError(f"a timer's period is positive, got {period_ms} ms")
        self._clock = clock
        self._now_ms = now_ms or clock.now_ms
        self._period_ms = period_ms
        self._callback = callback
        self._stopped = threading.Event()
        self._interrupted = False
        self._next_ms = 0
        self._last_ms = -1
        self._thread = threading.Thread(target=self._run, name=f"headrace-timer-{name}", daemon=True)

    def start(self) -> int:
        """Start; returns the time of the first callback in ms."""
        self._next_ms = (self._now_ms() // self._period_ms + 1) * self._period_ms
        first = self._next_ms
        self._thread.start()
        return first

    def stop(self, *, interrupt: bool = True) -> int:
        """Stop and wait for the thread. Returns the time of the last callback in ms, or -1 if there was none.

        With ``interrupt=False`` the next callback is still made, at once.
        """
        self._interrupted = interrupt
        self._stopped.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return self._last_ms

    def _run(self) -> None:
        while not self._stopped.is_set():
            wait_ms = self._next_ms - self._now_ms()
            if wait_ms > 2 * self._period_ms:
                # The wall clock was set back: do not wait until it has caught up.
                self._next_ms -= (wait_ms // self._period_ms) * self._period_ms
                continue
            if self._clock.wait(self._stopped, wait_ms / 1000):
                break
            self._fire()
        if not self._interrupted:
            self._fire()

    def _fire(self) -> None:
        self._callback(self._next_ms)
        self._last_ms = self._next_ms
        # After a long jump of the wall clock, missed periods are skipped.
        behind = (self._now_ms() - self._next_ms) // self._period_ms
        self._next_ms += self._period_ms * max(1, behind if behind > _CATCH_UP else 1)


_CATCH_UP = 50


logger = logging.getLogger(__name__)

T = TypeVar("T")

# The pushing thread ticks this often while there is nothing to push; the heartbeat (1 s) runs in these ticks.
TICK_SECONDS = 0.2


class GeneratorState(Enum):
    """The states of a generator, in order."""

    INITIALIZED = "initialized"
    ACTIVE = "active"
    STOPPED_ADDING_DATA = "stopped_adding_data"
    STOPPED_GENERATING_BLOCKS = "stopped_generating_blocks"
    STOPPED_ALL = "stopped_all"


@dataclass(frozen=True, slots=True)
class GeneratedBlock(Generic[T]):
    """Items in the order in which they were added. ``cut_time_ms`` never goes back from block to block.

    A block that is cut at the end of a block interval has the last millisecond of that interval as its cut time. So if
    a batch interval ends there too, the block belongs to that batch, not to the next one.
    """

    cut_time_ms: int
    items: tuple[T, ...]
    nbytes: int


class BlockGenerator(Generic[T]):
    """Owns the cutter and the pushing thread. Every method may be called from any thread except the pushing one."""

    def __init__(
        self,
        receiver: ReceiverId,
        *,
        block_interval_ms: int,
        max_block_bytes: int,
        max_queued_blocks: int,
        clock: Clock,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """``now_ms`` gives block intervals and cut times (the ledger's clock); the threads wait by ``clock``."""
        self._receiver = receiver
        self._max_block_bytes = max_block_bytes
        self._max_queued_blocks = max_queued_blocks
        self._now_ms = now_ms or clock.now_ms
        self._changed = threading.Condition()
        self._state = GeneratorState.INITIALIZED
        self._filling: list[T] = []
        self._filling_bytes = 0
        self._filling_since_ms = 0
        # No block will have an earlier cut time.
        self._last_cut_ms = 0
        self._queue: deque[GeneratedBlock[T] | Callable[[], None]] = deque()
        self._queued_blocks = 0
        self._queued_bytes = 0
        self._pushing: list[GeneratedBlock[T]] = []
        self._failure: BaseException | None = None
        self._timer = RecurringTimer(
            clock, block_interval_ms, self._on_interval, f"blocks-{receiver.index}", now_ms=self._now_ms
        )
        self._pusher: threading.Thread | None = None

    # -- life cycle ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> GeneratorState:
        with self._changed:
            return self._state

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the pushing thread, if any."""
        with self._changed:
            return self._failure

    def start(self, push: Callable[[Sequence[GeneratedBlock[T]]], None], tick: Callable[[], None]) -> None:
        """Start both threads. The pushing thread calls ``push`` with the blocks that wait, in order, to store them: as
        many as have together no more than the maximum bytes of a block, and at least one. It calls ``tick`` after each
        push, and at least every ``TICK_SECONDS`` between them.

        An error that one of them raises ends the generator: queued blocks are not pushed. See `failure`.
        Raises GeneratorStateError unless this is the first start.
        """
        with self._changed:
            if self._state is not GeneratorState.INITIALIZED:
                raise GeneratorStateError(f"the block generator was started in state {self._state.value}.")
            self._state = GeneratorState.ACTIVE
            self._pusher = threading.Thread(
                target=self._push, args=(push, tick), name=f"headrace-push-{self._receiver.index}", daemon=True
            )
        self._timer.start()
        self._pusher.start()

    def stop(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Accept no more data, cut and push what was added, and end both threads. A second call does nothing.

        Calls ``give_up`` every ``TICK_SECONDS``; once it returns True, the pushing thread is no longer waited for.
        """
        with self._changed:
            pusher = self._pusher
            if self._state is GeneratorState.ACTIVE:
                self._state = GeneratorState.STOPPED_ADDING_DATA
            self._changed.notify_all()
        if pusher is not None:
            self._timer.stop()
            with self._changed:
                if self._failure is None:
                    self._cut()
                    self._state = GeneratorState.STOPPED_GENERATING_BLOCKS
                self._changed.notify_all()
            while pusher.is_alive() and not give_up():
                pusher.join(TICK_SECONDS)
        with self._changed:
            self._state = GeneratorState.STOPPED_ALL

    # -- adding ----------------------------------------------------------------------------------------------------

    def add_data(self, item: T, nbytes: int, *, waiting: Callable[[], None] = lambda: None) -> None:
        """Add one item of ``nbytes``; waits while the queue is full, and calls ``waiting`` at least every
        ``TICK_SECONDS`` meanwhile. Raises GeneratorStateError outside Active."""
        while not self._add_if_room(item, nbytes):
            waiting()

    def _add_if_room(self, item: T, nbytes: int) -> bool:
        with self._changed:
            self._raise_unless_active()
            if self._filling and self._filling_bytes + nbytes > self._max_block_bytes:
                if self._queued_blocks >= self._max_queued_blocks:
                    self._changed.wait(TICK_SECONDS)
                    return False
                self._cut()
            if not self._filling:
                self._filling_since_ms = self._now_ms()
            self._filling.append(item)
            self._filling_bytes += nbytes
            if self._filling_bytes >= self._max_block_bytes and self._queued_blocks < self._max_queued_blocks:
                self._cut()
            return True

    def after_push(self, action: Callable[[], None]) -> None:
        """Have the pushing thread call ``action`` once everything added so far is pushed."""
        with self._changed:
            self._raise_unless_active()
            self._cut()
            self._queue.append(action)
            self._changed.notify_all()

    def wait_for_room(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until an item can be added without waiting. Returns whether it can."""
        with self._changed:
            if self._has_room() or self._state is not GeneratorState.ACTIVE:
                return True
            self._changed.wait(seconds)
            return self._has_room()

    # -- what is not stored yet ------------------------------------------------------------------------------------

    @property
    def queued(self) -> tuple[int, int]:
        """(blocks, bytes) added and not yet pushed, including the block being filled and the one being pushed."""
        with self._changed:
            blocks, nbytes = self._queued_blocks, self._queued_bytes
            if self._filling:
                blocks, nbytes = blocks + 1, nbytes + self._filling_bytes
            return blocks + len(self._pushing), nbytes + sum(block.nbytes for block in self._pushing)

    @property
    def is_pushing(self) -> bool:
        """Whether a block that was cut is not pushed yet."""
        with self._changed:
            return bool(self._pushing or self._queue)

    def sealed_through_ms(self) -> int:
        """Return the time before which every block is pushed; no block with an earlier cut time will follow."""
        with self._changed:
            if self._pushing:
                return self._pushing[0].cut_time_ms
            for entry in self._queue:
                if isinstance(entry, GeneratedBlock):
                    return entry.cut_time_ms
            # What is being filled may still get a cut time that is over: the end of an interval that has just ended.
            return self._cut_time(self._filling_since_ms if self._filling else self._now_ms())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _raise_unless_active(self) -> None:
        if self._state is not GeneratorState.ACTIVE:
            cause = f" after {self._failure}" if self._failure is not None else ""
            raise GeneratorStateError(
                f"the block generator takes data only when it is active, it is {self._state.value}{cause}."
            )

    def _has_room(self) -> bool:
        return self._queued_blocks < self._max_queued_blocks or self._filling_bytes < self._max_block_bytes

    def _cut_time(self, at_ms: int) -> int:
        self._last_cut_ms = max(self._last_cut_ms, at_ms)
        return self._last_cut_ms

    def _cut(self, at_ms: int | None = None) -> None:
        """Cut a block, by default with the present time, unless nothing was added. Called under the lock."""
        if not self._filling:
            return
        cut_time_ms = self._cut_time(self._now_ms() if at_ms is None else at_ms)
        block = GeneratedBlock(cut_time_ms, tuple(self._filling), self._filling_bytes)
        self._filling, self._filling_bytes = [], 0
        self._queue.append(block)
        self._queued_blocks += 1
        self._queued_bytes += block.nbytes
        self._changed.notify_all()

    def _on_interval(self, end_ms: int) -> None:
        with self._changed:
            if self._state is GeneratorState.ACTIVE and self._queued_blocks < self._max_queued_blocks:
                try:
                    # The timer may be late: what was added after the interval does not belong to it.
                    self._cut(max(end_ms - 1, self._filling_since_ms))
                except Exception as error:
                    self._fail(error)

    def _push(self, push: Callable[[Sequence[GeneratedBlock[T]]], None], tick: Callable[[], None]) -> None:
        try:
            while self._push_next(push, tick):
                pass
        except Exception as error:
            with self._changed:
                self._fail(error)
            logger.error("receiver %s: the thread that stores blocks has ended: %s", self._receiver, error)

    def _push_next(self, push: Callable[[Sequence[GeneratedBlock[T]]], None], tick: Callable[[], None]) -> bool:
        """Push the next blocks, or call the next action, or tick. Returns whether there may be more."""
        with self._changed:
            if not self._queue:
                if self._state not in (GeneratorState.ACTIVE, GeneratorState.STOPPED_ADDING_DATA):
                    return False
                self._changed.wait(TICK_SECONDS)
            blocks = self._take_blocks()
            action = None if blocks or not self._queue else self._queue.popleft()
        if blocks:
            push(blocks)
            with self._changed:
                self._pushing = []
        elif action is not None and not isinstance(action, GeneratedBlock):
            action()
        tick()
        return True

    def _take_blocks(self) -> list[GeneratedBlock[T]]:
        """Take the blocks to push together from the queue, up to the next action. Called under the lock."""
        taken: list[GeneratedBlock[T]] = []
        nbytes = 0
        while self._queue and isinstance(block := self._queue[0], GeneratedBlock):
            nbytes += block.nbytes
            if taken and nbytes > self._max_block_bytes:
                break
            taken.append(block)
            self._queue.popleft()
            self._queued_blocks -= 1
            self._queued_bytes -= block.nbytes
        if taken:
            self._pushing = taken
            self._changed.notify_all()
        return taken

    def _fail(self, error: BaseException) -> None:
        """Stop taking, cutting and pushing. Called under the lock."""
        if self._failure is None:
            self._failure = error
        self._state = GeneratorState.STOPPED_ALL
        self._filling, self._filling_bytes = [], 0
        self._queue.clear()
        self._queued_blocks = self._queued_bytes = 0
        self._pushing = []
        self._changed.notify_all()
