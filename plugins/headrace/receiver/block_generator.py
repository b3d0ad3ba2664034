"""Cuts the data that a receiver adds into blocks, and pushes the blocks to a listener, as Spark's BlockGenerator.

Three threads work here: the receiver's own (adds), the cutter's timer (cuts at each block interval) and the pushing
thread (stores one block after the other, and sends the heartbeat). A block is cut at the interval or when it reaches
its maximum bytes. The queue is bounded in blocks, each block in bytes. When the queue is full, the interval's cut waits
and the block grows to its maximum; then adding waits. This gives back-pressure, and fewer, larger blocks under load.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from headrace.blocks import ReceiverId
from headrace.clock import Clock
from headrace.receiver.errors import GeneratorStateError
from headrace.receiver.recurring_timer import RecurringTimer

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
class BlockId:
    """A block's name within its receiver: the start of the interval at whose end it was cut, and a serial number."""

    receiver: ReceiverId
    interval_start_ms: int
    serial: int

    def __str__(self) -> str:
        return f"input-{self.receiver}-{self.interval_start_ms}-{self.serial}"


@dataclass(frozen=True, slots=True)
class GeneratedBlock(Generic[T]):
    """Items in the order in which they were added. ``cut_time_ms`` never goes back from block to block."""

    block_id: BlockId
    cut_time_ms: int
    items: tuple[T, ...]
    nbytes: int


class BlockGeneratorListener(Protocol[T]):
    """Called for everything that happens to the data, in order. ``on_add_data`` and ``on_generate_block`` are called
    under the generator's lock, so they are atomic with adding and cutting, and must be quick."""

    def on_add_data(self, item: T, metadata: object) -> None:
        """``item`` was added to the block that is being filled (only from the ``_with_callback`` methods)."""

    def on_generate_block(self, block: GeneratedBlock[T]) -> None:
        """``block`` was cut; everything added later belongs to a later block."""

    def on_push_block(self, block: GeneratedBlock[T]) -> None:
        """Store ``block``; called in the pushing thread. Raising ends the generator: queued blocks are not pushed."""

    def on_tick(self) -> None:
        """Called in the pushing thread, after each block and at least every ``TICK_SECONDS`` between blocks."""

    def on_error(self, message: str, error: BaseException) -> None:
        """The pushing thread has ended with ``error``."""


class BlockGenerator(Generic[T]):
    """Owns the cutter and the pushing thread. Every method may be called from any thread except the pushing one."""

    def __init__(
        self,
        receiver: ReceiverId,
        listener: BlockGeneratorListener[T],
        *,
        block_interval_ms: int,
        max_block_bytes: int,
        max_queued_blocks: int,
        clock: Clock,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """``now_ms`` gives the cut times (the ledger's clock); ``clock`` times the cutter."""
        self._receiver = receiver
        self._listener = listener
        self._interval_ms = block_interval_ms
        self._max_block_bytes = max_block_bytes
        self._max_queued_blocks = max_queued_blocks
        self._clock = clock
        self._now_ms = now_ms or clock.now_ms
        self._changed = threading.Condition()
        self._state = GeneratorState.INITIALIZED
        self._filling: list[T] = []
        self._filling_bytes = 0
        self._serial = 0
        self._last_cut_ms = 0
        self._queue: deque[GeneratedBlock[T] | Callable[[], None]] = deque()
        self._queued_blocks = 0
        self._queued_bytes = 0
        self._pushing: GeneratedBlock[T] | None = None
        self._failure: BaseException | None = None
        self._timer = RecurringTimer(clock, block_interval_ms, self._on_interval, f"blocks-{receiver.index}")
        self._pusher = threading.Thread(target=self._push, name=f"headrace-push-{receiver.index}", daemon=True)

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

    def start(self) -> None:
        """Start both threads. Raises GeneratorStateError unless this is the first start."""
        with self._changed:
            if self._state is not GeneratorState.INITIALIZED:
                raise GeneratorStateError(f"the block generator was started in state {self._state.value}.")
            self._state = GeneratorState.ACTIVE
        self._timer.start()
        self._pusher.start()

    def stop(self) -> None:
        """Accept no more data, cut and push what was added, and end both threads. A second call does nothing."""
        with self._changed:
            started = self._state is not GeneratorState.INITIALIZED
            if self._state is GeneratorState.ACTIVE:
                self._state = GeneratorState.STOPPED_ADDING_DATA
            self._changed.notify_all()
        if started:
            self._timer.stop()
            with self._changed:
                if self._failure is None:
                    self._cut()
                    self._state = GeneratorState.STOPPED_GENERATING_BLOCKS
                self._changed.notify_all()
            self._pusher.join()
        with self._changed:
            self._state = GeneratorState.STOPPED_ALL

    def abort(self, error: BaseException) -> None:
        """Drop everything except the block being pushed, and end. For a receiver that may store nothing more."""
        with self._changed:
            self._fail(error)
        self._timer.stop()
        if self._pusher.ident is not None and self._pusher is not threading.current_thread():
            self._pusher.join()

    # -- adding ----------------------------------------------------------------------------------------------------

    def add_data(self, item: T, nbytes: int) -> None:
        """Add one item of ``nbytes``; waits while the queue is full. Raises GeneratorStateError outside Active."""
        self._add([(item, nbytes)], None, called_back=False)

    def add_data_with_callback(self, item: T, nbytes: int, metadata: object) -> None:
        """As ``add_data``; the listener's ``on_add_data(item, metadata)`` is called before any cut can intervene."""
        self._add([(item, nbytes)], metadata, called_back=True)

    def add_multiple_data_with_callback(self, items: list[tuple[T, int]], metadata: object) -> None:
        """Add items that must lie in one block, with a callback for each."""
        self._add(items, metadata, called_back=True)

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

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> tuple[int, int]:
        """(blocks, bytes) added and not yet pushed, including the block being filled and the one being pushed."""
        with self._changed:
            blocks, nbytes = self._queued_blocks, self._queued_bytes
            if self._filling:
                blocks, nbytes = blocks + 1, nbytes + self._filling_bytes
            if self._pushing is not None:
                blocks, nbytes = blocks + 1, nbytes + self._pushing.nbytes
            return blocks, nbytes

    def sealed_through_ms(self) -> int:
        """Return the time before which every block is pushed; no block with an earlier cut time will follow."""
        with self._changed:
            if self._pushing is not None:
                return self._pushing.cut_time_ms
            for entry in self._queue:
                if isinstance(entry, GeneratedBlock):
                    return entry.cut_time_ms
            return self._cut_time()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _add(self, items: list[tuple[T, int]], metadata: object, *, called_back: bool) -> None:
        nbytes = sum(size for _, size in items)
        with self._changed:
            while True:
                self._raise_unless_active()
                if not self._filling or self._filling_bytes + nbytes <= self._max_block_bytes:
                    break
                if self._queued_blocks < self._max_queued_blocks:
                    self._cut()
                    break
                self._changed.wait(TICK_SECONDS)
            for item, _ in items:
                self._filling.append(item)
                if called_back:
                    self._listener.on_add_data(item, metadata)
            self._filling_bytes += nbytes
            if self._filling_bytes >= self._max_block_bytes and self._queued_blocks < self._max_queued_blocks:
                self._cut()

    def _raise_unless_active(self) -> None:
        if self._state is not GeneratorState.ACTIVE:
            cause = f" after {self._failure}" if self._failure is not None else ""
            raise GeneratorStateError(
                f"the block generator takes data only when it is active, it is {self._state.value}{cause}."
            )

    def _has_room(self) -> bool:
        return self._queued_blocks < self._max_queued_blocks or self._filling_bytes < self._max_block_bytes

    def _cut_time(self) -> int:
        self._last_cut_ms = max(self._last_cut_ms, self._now_ms())
        return self._last_cut_ms

    def _cut(self) -> None:
        """Cut a block, unless nothing was added. Called under the lock."""
        if not self._filling:
            return
        cut_time_ms = self._cut_time()
        block_id = BlockId(self._receiver, cut_time_ms - self._interval_ms, self._serial)
        block = GeneratedBlock(block_id, cut_time_ms, tuple(self._filling), self._filling_bytes)
        self._serial += 1
        self._filling, self._filling_bytes = [], 0
        self._queue.append(block)
        self._queued_blocks += 1
        self._queued_bytes += block.nbytes
        self._listener.on_generate_block(block)
        self._changed.notify_all()

    def _on_interval(self, _time_ms: int) -> None:
        with self._changed:
            if self._state is GeneratorState.ACTIVE and self._queued_blocks < self._max_queued_blocks:
                try:
                    self._cut()
                except Exception as error:
                    self._fail(error)

    def _push(self) -> None:
        try:
            while self._push_next():
                pass
        except Exception as error:
            with self._changed:
                self._fail(error)
            self._listener.on_error("the thread that stores blocks has ended", error)

    def _push_next(self) -> bool:
        """Push the next entry, or tick. Returns whether there may be more."""
        with self._changed:
            if not self._queue:
                if self._state not in (GeneratorState.ACTIVE, GeneratorState.STOPPED_ADDING_DATA):
                    return False
                self._changed.wait(TICK_SECONDS)
            entry = self._queue.popleft() if self._queue else None
            if isinstance(entry, GeneratedBlock):
                self._queued_blocks -= 1
                self._queued_bytes -= entry.nbytes
                self._pushing = entry
                self._changed.notify_all()
        if isinstance(entry, GeneratedBlock):
            self._listener.on_push_block(entry)
            with self._changed:
                self._pushing = None
        elif entry is not None:
            entry()
        self._listener.on_tick()
        return True

    def _fail(self, error: BaseException) -> None:
        """Stop taking, cutting and pushing. Called under the lock."""
        if self._failure is None:
            self._failure = error
        self._state = GeneratorState.STOPPED_ALL
        self._filling, self._filling_bytes = [], 0
        self._queue.clear()
        self._queued_blocks = self._queued_bytes = 0
        self._pushing = None
        self._changed.notify_all()
