"""`ReceiverLifecycle`: starts, restarts and stops a user's `Receiver` in a thread of its own, as Spark's
ReceiverSupervisor does. `Handoff` takes its records to the consuming thread, and says when they are stored.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

from headrace.blocks import OffsetRange
from headrace.clock import Clock
from headrace.receiver.receiver import RESTART_DELAY_SECONDS, Receiver, ReceiverStoppedError, Record
from headrace.receiver.record_source import SourceError

logger = logging.getLogger(__name__)

# After on_stop, for how long the receiver's threads may go on.
STOP_SECONDS = 10.0
# A piece of the records of an iterable is not extended beyond this size.
_PIECE_BYTES = 256 << 10
# Beside key, value and headers; about what the fixed-width columns take.
_RECORD_BYTES = 40
# An error that repeats all the time is reported this often.
_REPEAT_SECONDS = 60.0
# A receiver that has run this long after its last error is well.
_WELL_SECONDS = 10.0
_MAX_UNREPORTED = 100


class LifecycleState(Enum):
    """The states of a lifecycle. Only RUNNING has a receiver that has started."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    """The receiver stopped itself."""
    ENDED = "ended"


class ReceiverLifecycle:
    """Runs the receivers that ``make`` makes, one after the other; it is their `ReceiverHost`.

    Requests come from any thread; one thread of the lifecycle follows them, so that ``on_start`` and ``on_stop`` may
    take their time and never run at once.
    """

    def __init__(
        self,
        make: Callable[[], Receiver],
        handoff: Handoff,
        *,
        name: str,
        index: int,
        receivers: int,
        max_call_bytes: int,
        clock: Clock,
    ) -> None:
        """``max_call_bytes`` is the most of one call with a position, ``name`` the receiver's for log and threads."""
        self._make = make
        self._handoff = handoff
        self._name = name
        self.index = index
        self.receivers = receivers
        self._max_call_bytes = max_call_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._state = LifecycleState.STARTING
        self._receiver: Receiver | None = None
        # Threads of the receiver now running, each with an event that is set at its end.
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        # The state for which the receiver is to be left, after so many seconds.
        self._next: tuple[LifecycleState, float] | None = None
        self._requested = threading.Event()
        self._ended = threading.Event()
        self._error: str | None = None
        self._error_at = 0.0
        self._is_failed = False
        self._unreported: deque[SourceError] = deque(maxlen=_MAX_UNREPORTED)
        self._last_reported = ("", 0.0)
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name=f"headrace-lifecycle-{index}", daemon=True)

    # -- of the source ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first receiver. Call it once."""
        self._thread.start()

    def end(self) -> None:
        """Have the receiver stopped for good, without waiting."""
        with self._lock:
            self._request(LifecycleState.ENDED)
        self._handoff.wake()

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end. Returns whether it has ended."""
        return self._clock.wait(self._ended, seconds)

    @property
    def state(self) -> LifecycleState:
        with self._lock:
            return self._state

    @property
    def error(self) -> str | None:
        """The last error; None once the receiver has run well for a time."""
        with self._lock:
            over = self._state is LifecycleState.RUNNING and self._clock.monotonic() - self._error_at > _WELL_SECONDS
            return None if over else self._error

    @property
    def is_failed(self) -> bool:
        """Whether the receiver stopped itself with an error."""
        with self._lock:
            return self._state is LifecycleState.STOPPED and self._is_failed

    def resume(self) -> None:
        """Start again a receiver that stopped itself."""
        with self._lock:
            if self._state is LifecycleState.STOPPED and self._next is None:
                self._request(LifecycleState.RESTARTING)

    def note(self, message: str) -> None:
        """Report an error of which the receiver itself does not know."""
        with self._lock:
            self._note(message, None)

    def take_errors(self) -> list[SourceError]:
        """Return the errors to be reported since the last call."""
        with self._lock:
            taken = list(self._unreported)
            self._unreported.clear()
            return taken

    # -- of the receiver (ReceiverHost) ----------------------------------------------------------------------------

    @property
    def position(self) -> str | None:
        return self._handoff.position

    def is_stopped(self, receiver: Receiver) -> bool:
        with self._lock:
            return self._receiver is not receiver or self._next is not None

    def store(self, receiver: Receiver, records: Iterator[Record], position: str | None, *, wait: bool) -> None:
        is_gone = partial(self._is_gone, receiver)
        if position is None:
            handed = self._hand_over(records, is_gone)
        else:
            handed = _whole(records, position, self._max_call_bytes)
            self._handoff.put(handed, is_gone)
        if wait and handed is not None:
            self._handoff.wait_stored(handed)

    def start_thread(self, receiver: Receiver, target: Callable[[], object], name: str | None) -> None:
        ended = threading.Event()
        thread = threading.Thread(
            target=self._receive, args=(receiver, target, ended), name=name or f"{self._name}-{target}", daemon=True
        )
        with self._lock:
            if self._receiver is receiver:
                self._threads.append((thread, ended))
        thread.start()

    def restart(self, receiver: Receiver, message: str, error: BaseException | None, delay_seconds: float) -> None:
        self._leave(receiver, LifecycleState.RESTARTING, message, error, delay_seconds)

    def stop(self, receiver: Receiver, message: str, error: BaseException | None) -> None:
        self._leave(receiver, LifecycleState.STOPPED, message, error, 0.0)

    def report_error(self, _receiver: Receiver, message: str, error: BaseException | None) -> None:
        with self._lock:
            self._note(message, error)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _hand_over(self, records: Iterator[Record], is_gone: Callable[[], bool]) -> Handed | None:
        """Hand each record over as soon as it is there: the next may never come, or may be an error. Returns the last
        piece, None without records."""
        piece = None
        for record in records:
            nbytes = _size(record)
            if (
                piece is None
                or piece.nbytes >= _PIECE_BYTES
                or not self._handoff.extend(piece, record, nbytes, is_gone)
            ):
                piece = Handed([record], nbytes, None)
                self._handoff.put(piece, is_gone)
        return piece

    def _is_gone(self, receiver: Receiver) -> bool:
        """Whether ``on_stop`` of the receiver and its threads have ended; until then its records are taken."""
        return self._receiver is not receiver

    def _request(self, state: LifecycleState, seconds: float = 0.0) -> None:
        """Have the receiver left for a state. Called under the lock."""
        self._next = (state, seconds)
        self._requested.set()

    def _receive(self, receiver: Receiver, target: Callable[[], object], ended: threading.Event) -> None:
        try:
            target()
        except BaseException as error:
            if self.is_stopped(receiver):
                # What was to be stored with it is not.
                level = logging.WARNING if isinstance(error, ReceiverStoppedError) else logging.INFO
                logger.log(level, "receiver %s: a thread ended after the receiver's stop: %r", self._name, error)
            else:
                self.restart(receiver, "A thread of the receiver failed", error, RESTART_DELAY_SECONDS)
        finally:
            ended.set()

    def _leave(
        self, receiver: Receiver, state: LifecycleState, message: str, error: BaseException | None, seconds: float
    ) -> None:
        """Note that the receiver is to be left. Only the first request counts."""
        with self._lock:
            if self._receiver is not receiver or self._next is not None:
                return
            self._request(state, max(0.0, seconds))
            self._is_failed = state is LifecycleState.STOPPED and error is not None
            if state is LifecycleState.RESTARTING or error is not None:
                self._note(message, error)
            else:
                self._error = None
                logger.info("receiver %s stops itself: %s", self._name, message)

    def _note(self, message: str, error: BaseException | None) -> None:
        """Log an error, and keep it to be reported. Called under the lock."""
        text = message if error is None else f"{message}: {type(error).__name__}: {error}"
        stack = None if error is None else "".join(traceback.format_exception(error))
        now = self._clock.monotonic()
        self.errors += 1
        self._error, self._error_at = text, now
        last, reported_at = self._last_reported
        if text == last and now - reported_at < _REPEAT_SECONDS:
            return
        self._last_reported = (text, now)
        self._unreported.append(SourceError(text, stack))
        logger.error("receiver %s: %s", self._name, text, exc_info=error)

    def _run(self) -> None:
        state = LifecycleState.RESTARTING
        try:
            while state is not LifecycleState.ENDED:
                if state is LifecycleState.RESTARTING:
                    self._start()
                state, seconds = self._next_request()
                self._stop(state)
                if state is LifecycleState.RESTARTING and self._is_ended_within(seconds):
                    state = self._state = LifecycleState.ENDED
        finally:
            self._ended.set()

    def _start(self) -> None:
        receiver: Receiver | None = None
        try:
            receiver = self._make()
            receiver.attach(self)
            with self._lock:
                self._receiver, self._state = receiver, LifecycleState.STARTING
            receiver.on_start()
        except BaseException as error:
            with self._lock:
                if self._next is None:
                    self._note("The receiver could not be started", error)
                    self._request(LifecycleState.RESTARTING, RESTART_DELAY_SECONDS)
        else:
            logger.info("receiver %s has started its %s", self._name, type(receiver).__name__)
            with self._lock:
                self._state = LifecycleState.RUNNING

    def _next_request(self) -> tuple[LifecycleState, float]:
        while True:
            self._requested.wait()
            with self._lock:
                if self._next is not None:
                    return self._next

    def _stop(self, state: LifecycleState) -> None:
        """Stop the receiver, if one runs; then its threads can store nothing more."""
        receiver = self._receiver
        if receiver is not None:
            try:
                receiver.on_stop()
            except BaseException as error:
                # SystemExit too: else this thread would end, and nothing would start the receiver again.
                with self._lock:
                    self._note("The receiver's on_stop failed", error)
            self._await_threads()
        with self._lock:
            self._receiver, self._threads, self._state = None, [], state
            if self._next is not None and self._next[0] is not LifecycleState.ENDED:
                self._next = None
                self._requested.clear()
        self._handoff.wake()

    def _await_threads(self) -> None:
        until = self._clock.monotonic() + STOP_SECONDS
        for thread, ended in list(self._threads):
            if thread is not threading.current_thread() and thread.ident is not None:
                self._clock.wait(ended, until - self._clock.monotonic())
        late = [thread.name for thread, ended in self._threads if thread.is_alive() and not ended.is_set()]
        if late:
            with self._lock:
                text = f"{', '.join(late)} did not end within {STOP_SECONDS:.0f} s of on_stop"
                self._note(f"Threads of the receiver are left to themselves, and can store nothing more: {text}", None)

    def _is_ended_within(self, seconds: float) -> bool:
        """Wait before a restart. Returns whether the end was asked for meanwhile."""
        self._clock.wait(self._requested, seconds)
        with self._lock:
            return self._next is not None and self._next[0] is LifecycleState.ENDED


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.value or b"") + len(record.key or b"") + headers + _RECORD_BYTES


def _whole(records: Iterator[Record], position: str, max_bytes: int) -> Handed:
    whole = Handed([], 0, position)
    for record in records:
        whole.records.append(record)
        whole.nbytes += _size(record)
        if whole.nbytes > max_bytes and len(whole.records) > 1:
            raise ValueError(
                f"the records of one call with a position are more than {max_bytes} bytes, which is one block; give "
                "them in several calls, each with its position, or raise the stream's limits.max_block_bytes"
            )
    return whole


@dataclass(slots=True, eq=False)
class Handed:
    """Records of one call, or a piece of them. With ``position`` they are never divided or extended.

    ``until`` is the offset after the last of them, None while they are not all taken.
    """

    records: list[Record]
    nbytes: int
    position: str | None
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """Records to be stored together, and where the source stands after them (None: it did not say)."""

    records: list[Record]
    position: str | None


class Handoff:
    """A queue of ``max_bytes`` bytes; a larger entry is alone in it. Thread-safe.

    It is also the `Acknowledgements` of its records: a call that waits for them returns when they are noted.
    """

    def __init__(self, max_bytes: int, next_offset: int, position: str | None, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._changed = threading.Condition()
        # Set while there is something to take, or nothing will come any more.
        self._takeable = threading.Event()
        self._queue: deque[Handed] = deque()
        self._queued_bytes = 0
        self._next_offset = next_offset
        self._stored_until = next_offset
        self._position = position
        self._without_records: str | None = None
        self._closed: str | None = None

    @property
    def next_offset(self) -> int:
        """The offset of the next record that is taken."""
        with self._changed:
            return self._next_offset

    @property
    def unstored(self) -> int:
        """The number of records that were given and are not known to be stored."""
        with self._changed:
            return sum(len(queued.records) for queued in self._queue) + self._next_offset - self._stored_until

    @property
    def position(self) -> str | None:
        """The position given last."""
        with self._changed:
            return self._position

    def put(self, handed: Handed, is_over: Callable[[], bool]) -> None:
        """Add records; waits while the queue is full. ``is_over`` says whether their receiver has ended.

        Raises ReceiverStoppedError; then they were not added.
        """
        with self._changed:
            while self._queue and self._queued_bytes + handed.nbytes > self._max_bytes:
                self._raise_if_over(is_over)
                self._changed.wait(0.1)
            self._raise_if_over(is_over)
            if handed.position is not None:
                self._position = handed.position
            if handed.records:
                if handed.position is None:
                    handed.position = self._without_records
                # A position given with records is newer.
                self._without_records = None
                self._queue.append(handed)
                self._queued_bytes += handed.nbytes
                self._takeable.set()
            else:
                # Stored with the next records: until then nothing would come twice.
                self._without_records = handed.position
                handed.until = self._next_offset + sum(len(queued.records) for queued in self._queue)
            self._changed.notify_all()

    def extend(self, handed: Handed, record: Record, nbytes: int, is_over: Callable[[], bool]) -> bool:
        """Add a record to the entry that was put last, while nobody has taken it. Returns whether that was possible."""
        with self._changed:
            if not self._queue or self._queue[-1] is not handed or self._queued_bytes + nbytes > self._max_bytes:
                return False
            if is_over():
                return False
            handed.records.append(record)
            handed.nbytes += nbytes
            self._queued_bytes += nbytes
            return True

    def wait_stored(self, handed: Handed) -> None:
        """Return when the records are durable. Raises ReceiverStoppedError if that will never be known."""
        with self._changed:
            while handed.until is None or self._stored_until < handed.until:
                if self._closed is not None:
                    raise ReceiverStoppedError(
                        f"Whether records are stored is not known: {self._closed}.",
                        remedy="Do not acknowledge them; they are read again, or may come twice.",
                    )
                self._changed.wait()

    def take(self, seconds: float, max_records: int | None, max_bytes: int) -> Taken | None:
        """Take at most ``max_records`` records of about ``max_bytes``; wait up to ``seconds`` for the first.

        Records with a position are taken as a whole, however many. Returns None if there are none.
        """
        self._clock.wait(self._takeable, seconds)
        with self._changed:
            if not self._queue:
                return None
            records: list[Record] = []
            position, nbytes = None, 0
            while self._queue:
                first = self._queue[0]
                room = None if max_records is None else max(0, max_records - len(records))
                if records and (nbytes + first.nbytes > max_bytes or room == 0):
                    break
                divides = room is not None and len(first.records) > room
                if divides and first.position is None and room:
                    part = max(1, first.nbytes * room // len(first.records))
                    records += first.records[:room]
                    del first.records[:room]
                    first.nbytes -= part
                    self._queued_bytes -= part
                    break
                if divides and records:
                    break
                self._queue.popleft()
                records += first.records
                nbytes += first.nbytes
                self._queued_bytes -= first.nbytes
                first.until = self._next_offset + len(records)
                position = first.position if first.position is not None else position
            self._next_offset += len(records)
            if not self._queue and self._closed is None:
                self._takeable.clear()
            self._changed.notify_all()
            return Taken(records, position)

    def close(self, reason: str) -> int:
        """Drop what was not taken, and end all that wait, with ``reason``. A second call does nothing.

        Returns the number of dropped records that no position brings back.
        """
        with self._changed:
            lost = sum(len(queued.records) for queued in self._queue if queued.position is None)
            self._closed = self._closed or reason
            self._queue.clear()
            self._queued_bytes = 0
            self._takeable.set()
            self._changed.notify_all()
            return lost

    open = 0
    failures = 0
    last_error: str | None = None

    def wake(self) -> None:
        """Wake all that wait, so that they see whether their receiver has ended."""
        with self._changed:
            self._changed.notify_all()

    # -- Acknowledgements ------------------------------------------------------------------------------------------

    def note(self, ranges: Iterable[OffsetRange]) -> None:
        """Note that the offsets are durable in log and ledger."""
        with self._changed:
            self._stored_until = max([self._stored_until, *(offset_range.until_offset for offset_range in ranges)])
            self._changed.notify_all()

    def repeat(self) -> None:
        """Nothing is ever open."""

    def forget(self, topic: str, partition: int) -> None:
        """`close` does this."""

    def allow_until(self, monotonic_seconds: float) -> None:
        """What is stored may be reported at any time."""

    def _raise_if_over(self, is_over: Callable[[], bool]) -> None:
        if self._closed is not None or is_over():
            raise ReceiverStoppedError(
                f"Records are not taken: {self._closed or 'the receiver has ended'}.",
                remedy="End the threads of a receiver when is_stopped is true.",
            )
