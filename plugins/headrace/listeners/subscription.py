"""One listener's queue, and the thread that calls it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.listeners.events import StreamEvent
from headrace.listeners.stream_listener import StreamListener
from headrace.listeners.translation import BLOCK_METHOD, METHODS, Call

if TYPE_CHECKING:
    from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

# What the thread does before the first event.
_STARTING = Call("start", StreamEvent(event_id=0, at_ms=0, stream=""))

# A call that takes longer is in the listener's status.
_SLOW_SECONDS = 30.0
_ERROR_CHARACTERS = 500


class Subscription:
    """Calls a listener in a thread of its own, from a queue of at most ``capacity`` events.

    ``read_to`` is the id of the last event that was read for it, and is the reader's. `cursor` is the id up to which
    the listener has got all events that it wants, except ``dropped`` ones. ``closed``: it is called no more.
    """

    def __init__(self, name: str, listener: StreamListener, *, cursor: int, capacity: int, missed: int = 0) -> None:
        self.name = name
        self.read_to = cursor
        self.dropped = 0
        self.missed = missed
        self.failed = 0
        self._listener = listener
        self._capacity = capacity
        self._methods = overridden(listener)
        self._queue: deque[Call] = deque()
        self._changed = threading.Condition()
        self._delivered = cursor
        self._running: Call | None = None
        self._running_since = 0.0
        self._ending = False
        self.closed = False
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def wants_blocks(self) -> bool:
        """Whether the listener gets events of blocks."""
        return BLOCK_METHOD in self._methods

    @property
    def room(self) -> int:
        """How many more events the queue takes."""
        return self._capacity - len(self._queue)

    @property
    def cursor(self) -> int:
        """The id of the last event that the listener need not get again."""
        with self._changed:
            return self._delivered if self._queue or self._running else self.read_to

    def start(self, context: StreamContext) -> None:
        """Start the thread, which calls the listener's `start` first."""
        self._running = _STARTING
        self._running_since = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, args=(context,), name=f"headrace-listener-{self.name}", daemon=True
        )
        self._thread.start()

    def put(self, calls: Sequence[Call], read_to: int) -> None:
        """Queue the calls that the listener wants; those without room are dropped. ``read_to``: see the class."""
        wanted = [call for call in calls if call.method in self._methods and call.event.event_id > self.read_to]
        with self._changed:
            room = self.room
            self._queue.extend(wanted[:room])
            self.read_to = max(read_to, self.read_to)
            self._changed.notify()
        lost = len(wanted) - room
        if lost > 0:
            if not self.dropped:
                logger.warning(
                    "Listener %s is too slow: %d events wait for it, and newer ones are dropped. The number is in the "
                    "receiver job's attributes; this is logged once.", self.name, self._capacity,
                )  # fmt: skip
            self.dropped += lost

    def end(self) -> None:
        """Let the thread end when the queue is empty."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def close(self, deadline: float) -> bool:
        """Wait for the thread until ``deadline`` (monotonic), then take the queue from it: it calls the listener no
        more. Returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        with self._changed:
            self.closed = True
            self._changed.notify()
        return self._thread is None or not self._thread.is_alive()

    def status(self) -> dict[str, Any]:
        """The fields of the listener's `ListenerStatus` but its name."""
        found: dict[str, Any] = {"dropped": self.dropped, "missed": self.missed, "failed": self.failed}
        if self._error is not None:
            found["error"] = self._error
        running = self._running
        if running is not None and time.monotonic() - self._running_since > _SLOW_SECONDS:
            found["slow"] = f"{running.method} takes more than {_SLOW_SECONDS:g} s"
        return found

    def _run(self, context: StreamContext) -> None:
        try:
            self._listener.start(context)
        except BaseException as error:
            # It gets no events in this job, and its cursor stays where it is.
            self.closed = True
            self._fail("start", error)
            return
        while (call := self._next()) is not None:
            try:
                getattr(self._listener, call.method)(call.event)
            except BaseException as error:
                self._fail(call.method, error)
        if self.closed:
            return
        try:
            self._listener.close()
        except BaseException as error:
            self._fail("close", error)

    def _next(self) -> Call | None:
        """Return the next call. None: there are no more."""
        with self._changed:
            if self._running is not None and self._running is not _STARTING:
                self._delivered = self._running.event.event_id
            self._running = None
            while not self._queue and not self._ending and not self.closed:
                self._changed.wait()
            if self.closed or not self._queue:
                return None
            self._running = self._queue.popleft()
            self._running_since = time.monotonic()
            return self._running

    def _fail(self, method: str, error: BaseException) -> None:
        self.failed += 1
        self._error = f"{method}: {type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        # The traceback once: a listener that fails at each event would fill the log.
        if self.failed == 1:
            logger.error("Listener %s raised in %s", self.name, method, exc_info=error)
        else:
            logger.warning("Listener %s raised again (%d times): %s", self.name, self.failed, self._error)


def overridden(listener: StreamListener) -> frozenset[str]:
    """Return the methods for events that the listener's class overrides."""
    kind = type(listener)
    return frozenset(name for name in METHODS if getattr(kind, name) is not getattr(StreamListener, name))
