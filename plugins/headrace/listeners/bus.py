"""The bus: reads the stream's events from the ledger, translates them (`translate`), and gives them to the listeners,
each with its own queue and thread (`Subscription`).

- At its start, a listener continues after its cursor. While it catches up, events wait in the ledger until its queue
  has room, so none is dropped.
- Afterwards a queue that is full drops events, as Spark's does: a listener that is too slow or hangs does not hold the
  others back.
- Cursors are written every few seconds, in one transaction for all listeners.

Ids ascend in the order of commits, but for blocks that several receivers add at the same time; `Events.page` waits for
these, so reading by id skips none.

`ListenerStatus` is what the receiver job's attributes say of a listener: what it did not get, and what is wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.ledger.states import EventKind, JobState
from headrace.ledger.tables import EventRow, JobLease, JobRow
from headrace.listeners.listener import (
    BatchCompleted,
    BatchInfo,
    BatchStarted,
    BatchSubmitted,
    BlockAdded,
    DeadLetters,
    Gap,
    OutputOperationCompleted,
    OutputOperationStarted,
    ReceiverError,
    ReceiverStarted,
    ReceiverStopped,
    ReceivingPaused,
    ReceivingResumed,
    StreamEvent,
    StreamingStarted,
    StreamListener,
)
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

CAPACITY = 10_000
"""Events that wait for one listener; as spark.scheduler.listenerbus.eventqueue.capacity."""
POLL_SECONDS = 1.0
# How often a queue is checked for room while events wait in the ledger for it. Nothing is read before that.
_BEHIND_SECONDS = 0.1
# The time for which a crash of the job lets events come again.
SAVE_SECONDS = 5.0
LAST_SAVE_SECONDS = 5.0
"""How long `ListenerBus.stop` waits for the last cursors to be written."""
_PAGE = 1_000
_ERROR_CHARACTERS = 500
# Then cursors are written if that is due, and `stop` is noticed.
_PAGES_AT_ONCE = 10


class ListenerBus:
    """Runs listeners for one receiver job, from `start` to `stop`. Use once.

    Args:
        lease: the receiver job's; when it is lost, the bus ends.
        listeners: by their names, which name their cursors.
        new_after_id: the event after which a new listener begins; by default the newest at `start`.
    """

    def __init__(
        self,
        context: StreamContext,
        lease: JobLease,
        listeners: Mapping[str, StreamListener],
        *,
        problems: Mapping[str, str] | None = None,
        new_after_id: int | None = None,
        capacity: int = CAPACITY,
        poll_seconds: float = POLL_SECONDS,
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        self._context = context
        self._ledger = context.ledger
        self._lease = lease
        self._listeners = listeners
        self._problems = dict(problems or {})
        self._new_after_id = new_after_id
        self._failure: str | None = None
        self._capacity = capacity
        self._page = min(_PAGE, capacity)
        self._poll_seconds = poll_seconds
        self._save_seconds = save_seconds
        self._subscriptions: list[Subscription] = []
        # The newest event at the start, or after the ledger was away: up to it, events wait for room.
        self._history_until: int | None = None
        self._away = False
        self._saved: dict[str, int] = {}
        self._noted: dict[str, Any] | None = None
        self._next_save = 0.0
        self._stopping = threading.Event()
        self._stop_until = 0.0
        self._thread = threading.Thread(target=self._run, name="headrace-listener-bus", daemon=True)

    def start(self) -> None:
        """Open the cursors and start the threads. After an error of the ledger it can be called again.

        Raises:
            LeaseLostError: another job has begun.
            LedgerUnavailableError: the ledger does not answer.
        """
        # First, since `open` resets the counts of missed events.
        self._history_until = self._ledger.events.newest_id(self._lease.stream)
        cursors = self._ledger.listener_cursors.open(self._lease, list(self._listeners), self._new_after_id)
        for name, listener in self._listeners.items():
            row = cursors[name]
            self._saved[name] = row.event_id
            self._subscriptions.append(
                Subscription(name, listener, cursor=row.event_id, capacity=self._capacity, missed=row.missed)
            )
            if row.missed:
                logger.warning("Listener %s missed %d events: they were deleted before it got them.", name, row.missed)
        self._next_save = time.monotonic() + self._save_seconds
        for subscription in self._subscriptions:
            subscription.start(self._context)
        self._thread.start()

    def stop(self, seconds: float, save_seconds: float = LAST_SAVE_SECONDS) -> None:
        """Deliver what has happened so far, for at most ``seconds``, then write the cursors, for at most
        ``save_seconds``, and end. No listener is called afterwards, but one that hangs in a call stays there."""
        self._stop_until = time.monotonic() + seconds
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(seconds + save_seconds)
        for subscription in self._subscriptions:
            subscription.close(time.monotonic())

    def status(self) -> dict[str, Any]:
        """The fields of each listener's `ListenerStatus`, by its name."""
        failure = {} if self._failure is None else {"error": self._failure}
        started = {subscription.name: {**subscription.status(), **failure} for subscription in self._subscriptions}
        return {**started, **{name: {"error": error} for name, error in self._problems.items()}}

    # -- the reading thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                behind = self._read_new()
                self._pause(behind, time.monotonic() + self._poll_seconds, self._stopping.wait)
                if time.monotonic() >= self._next_save:
                    self._save()
            self._finish()
        except LeaseLostError as error:
            logger.error("The listeners of %s end: %s", self._lease.stream, error)
        except Exception as error:
            logger.exception("The listeners of %s get no more events: the bus failed", self._lease.stream)
            self._failure = f"gets no more events: {type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
            self._note_failure()
        for subscription in self._subscriptions:
            subscription.close(time.monotonic())

    def _pause(
        self, behind: Sequence[Subscription], until: float, wait: Callable[[float], bool | None] = time.sleep
    ) -> None:
        """Wait until this monotonic time, or until one of the listeners ``behind`` can get its next page, or until
        ``wait`` returns True."""
        while (left := until - time.monotonic()) > 0:
            if wait(min(left, _BEHIND_SECONDS) if behind else left) or not all(map(self._must_wait, behind)):
                return

    def _finish(self) -> None:
        """Deliver what is left, until the time given to `stop` is over, and write the cursors."""
        while (behind := self._read_new()) and time.monotonic() < self._stop_until:
            self._pause(behind, self._stop_until)
        for subscription in self._subscriptions:
            subscription.end()
        for subscription in self._subscriptions:
            if not subscription.close(self._stop_until):
                logger.warning("Listener %s did not end in time; the job does not wait for it", subscription.name)
        self._save()

    def _read_new(self) -> list[Subscription]:
        """Read new events. Returns the listeners for which some are left in the ledger."""
        pending = [subscription for subscription in self._subscriptions if not subscription.closed]
        behind: list[Subscription] = []
        try:
            if self._history_until is None:
                self._history_until = self._ledger.events.newest_id(self._lease.stream)
            for _ in range(_PAGES_AT_ONCE):
                waiting = [subscription for subscription in pending if self._must_wait(subscription)]
                behind += waiting
                pending = self._read([subscription for subscription in pending if subscription not in waiting])
        except LedgerUnavailableError as error:
            if not self._away:
                logger.warning("The listeners wait, the ledger does not answer: %s", error)
            self._away = True
            # What happens until it answers again may be more than a queue holds.
            self._history_until = None
            return []
        self._away = False
        return [*behind, *pending]

    def _read(self, subscriptions: Sequence[Subscription]) -> list[Subscription]:
        """Read a page of events for each listener. Returns those that have more."""
        more: list[Subscription] = []
        positions: dict[tuple[bool, int], list[Subscription]] = {}
        for subscription in subscriptions:
            positions.setdefault((subscription.wants_blocks, subscription.read_to), []).append(subscription)
        for (blocks, after_id), group in positions.items():
            rows = self._ledger.events.page(self._lease.stream, after_id, limit=self._page, blocks=blocks)
            if rows:
                calls = [call for row in rows if (call := _translated(row)) is not None]
                for subscription in group:
                    subscription.put(calls, rows[-1].event_id)
            if len(rows) == self._page:
                more += group
        return more

    def _must_wait(self, subscription: Subscription) -> bool:
        """Whether the next page might not fit into the queue of a listener that catches up."""
        catches_up = self._history_until is None or subscription.read_to < self._history_until
        return catches_up and subscription.room < self._page and not subscription.closed

    def _note_failure(self) -> None:
        """Write the status into the job's attribute, as soon as the ledger answers."""
        while True:
            try:
                self._ledger.jobs.note(self._lease.stream, self._lease.epoch, {STATUS: self.status()})
                return
            except LedgerUnavailableError:
                if self._stopping.wait(self._poll_seconds):
                    return
            except Exception:
                logger.exception("The failure of the bus is not in the receiver job's attributes")
                return

    def _save(self) -> None:
        """Write the cursors that have moved, and what is wrong with the listeners if that has changed."""
        self._next_save = time.monotonic() + self._save_seconds
        moved = {subscription.name: subscription.cursor for subscription in self._subscriptions}
        moved = {name: cursor for name, cursor in moved.items() if cursor != self._saved[name]}
        status = self.status()
        try:
            if moved:
                self._ledger.listener_cursors.save(self._lease, moved)
                self._saved |= moved
            if status != self._noted:
                self._ledger.jobs.note(self._lease.stream, self._lease.epoch, {STATUS: status})
                self._noted = status
        except LedgerUnavailableError as error:
            logger.warning("The listeners' cursors are not written, the ledger does not answer: %s", error)


class Call(NamedTuple):
    """The method of a listener to call, and its event."""

    method: str
    event: StreamEvent


def translate(row: EventRow) -> Call | None:
    """Return the call for an event of the ledger; None if listeners do not get this kind.

    Raises KeyError or another error if the payload is not as this version writes it.
    """
    translation = _TRANSLATIONS.get(row.kind)
    if translation is None:
        return None
    method, make = translation
    event = make(row, {"event_id": row.event_id, "at_ms": row.at_ms, "stream": row.stream})
    return None if event is None else Call(method, event)


_Common = dict[str, Any]


_Make = Callable[[EventRow, _Common], StreamEvent | None]


def _of(kind: type[StreamEvent], *names: str) -> _Make:
    """What makes an event whose fields have these names in the payload too."""
    return lambda row, common: kind(**common, **{name: row.payload[name] for name in names})


def _streaming_started(row: EventRow, common: _Common) -> StreamingStarted | None:
    if row.payload["state"] != JobState.RUNNING:
        return None
    return StreamingStarted(**common, job_epoch=row.payload["epoch"])


def _receiver_error(row: EventRow, common: _Common) -> ReceiverError:
    payload = row.payload
    return ReceiverError(
        **common,
        receiver=payload.get("receiver"),
        input_id=payload.get("input"),
        error=payload["error"],
        stack=payload.get("stack"),
    )


def _batch(row: EventRow, **more: Any) -> BatchInfo:
    payload = row.payload
    return BatchInfo(
        batch_time_ms=_batch_time_ms(row),
        interval_ms=payload["interval_ms"],
        records=payload["records"],
        blocks=payload["blocks"],
        payload_bytes=payload["payload_bytes"],
        late_records=payload["late_records"],
        absorbed_ms=tuple(payload["absorbed"]),
        submitted_at_ms=payload.get("allocated_at_ms", row.at_ms),
        attempt=payload.get("attempt", 0),
        started_at_ms=payload.get("started_at_ms"),
        **more,
    )


def _batch_submitted(row: EventRow, common: _Common) -> BatchSubmitted:
    return BatchSubmitted(**common, batch=_batch(row))


def _batch_started(row: EventRow, common: _Common) -> BatchStarted | None:
    # Each attempt at some of the batch's outputs has this event; those after the first continue the batch.
    return None if row.payload["continues"] else BatchStarted(**common, batch=_batch(row))


def _batch_completed(row: EventRow, common: _Common) -> BatchCompleted:
    outputs, failures = row.payload["outputs"], row.payload["failures"]
    batch = _batch(row, completed_at_ms=row.at_ms, outputs=outputs, failures=failures)
    return BatchCompleted(**common, batch=batch)


def _output(row: EventRow) -> dict[str, Any]:
    return {
        "batch_time_ms": _batch_time_ms(row),
        "output_id": row.payload["output"],
        "attempt": row.payload["attempt"],
    }


def _output_started(row: EventRow, common: _Common) -> OutputOperationStarted:
    return OutputOperationStarted(**common, **_output(row))


def _output_completed(row: EventRow, common: _Common) -> OutputOperationCompleted:
    counts: Mapping[str, Any] = row.payload.get("counts", {})
    seconds = counts.get("duration_seconds")
    return OutputOperationCompleted(
        **common,
        **_output(row),
        failure_reason=row.payload.get("error"),
        counts=counts,
        duration_ms=None if seconds is None else round(seconds * 1000),
    )


def _dead_letters(row: EventRow, common: _Common) -> DeadLetters:
    names = ("records", "reasons", "exceeded")
    return DeadLetters(**common, **_output(row), **{name: row.payload[name] for name in names})


def _gap(row: EventRow, common: _Common) -> Gap:
    names = ("input_id", "topic", "topic_id", "partition", "from_offset", "until_offset", "reason")
    return Gap(**common, **{name: row.payload[name] for name in names}, batch_time_ms=row.batch_time_ms)


def _resumed(row: EventRow, common: _Common) -> ReceivingResumed:
    payload = row.payload
    return ReceivingResumed(
        **common, receiver=payload["receiver"], epoch=payload["epoch"], paused_seconds=payload["seconds"]
    )


def _batch_time_ms(row: EventRow) -> int:
    if row.batch_time_ms is None:
        raise ValueError(f"the event {row.event_id} ({row.kind}) has no batch time")
    return row.batch_time_ms


_TRANSLATIONS: dict[str, tuple[str, _Make]] = {
    EventKind.JOB_STATE_CHANGED: ("on_streaming_started", _streaming_started),
    EventKind.RECEIVER_REFUSED: ("on_receiver_error", _receiver_error),
    EventKind.RECEIVER_STARTED: ("on_receiver_started", _of(ReceiverStarted, "receiver", "epoch", "host", "restarts")),
    EventKind.RECEIVER_ERROR: ("on_receiver_error", _receiver_error),
    EventKind.RECEIVER_STOPPED: ("on_receiver_stopped", _of(ReceiverStopped, "receiver", "epoch", "error")),
    EventKind.RECEIVER_FAILED: ("on_receiver_stopped", _of(ReceiverStopped, "receiver", "epoch", "error")),
    EventKind.BATCH_ALLOCATED: ("on_batch_submitted", _batch_submitted),
    EventKind.BATCH_STARTED: ("on_batch_started", _batch_started),
    EventKind.BATCH_COMPLETED: ("on_batch_completed", _batch_completed),
    EventKind.BATCH_FAILED: ("on_batch_completed", _batch_completed),
    EventKind.OUTPUT_STARTED: ("on_output_operation_started", _output_started),
    EventKind.OUTPUT_COMPLETED: ("on_output_operation_completed", _output_completed),
    EventKind.OUTPUT_FAILED: ("on_output_operation_completed", _output_completed),
    EventKind.DEAD_LETTERS: ("on_dead_letters", _dead_letters),
    EventKind.BLOCK_ADDED: ("on_block_added", _of(BlockAdded, "receiver", "batch_time_ms", "records", "payload_bytes")),
    EventKind.GAP: ("on_gap", _gap),
    EventKind.RECEIVING_PAUSED: ("on_receiving_paused", _of(ReceivingPaused, "receiver", "epoch", "cause", "reason")),
    EventKind.RECEIVING_RESUMED: ("on_receiving_resumed", _resumed),
}

METHODS = tuple(sorted({method for method, _ in _TRANSLATIONS.values()}))
"""The methods of a listener that get events."""
BLOCK_METHOD = "on_block_added"


def _translated(row: EventRow) -> Call | None:
    try:
        return translate(row)
    except (KeyError, TypeError, ValueError) as error:
        # Written by another version of headrace.
        logger.warning("Listeners do not get event %d (%s): %r", row.event_id, row.kind, error)
        return None


# What the thread does before the first event.
_STARTING = Call("start", StreamEvent(event_id=0, at_ms=0, stream=""))

# A call that takes longer is in the listener's status.
_SLOW_SECONDS = 30.0


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
        fields: dict[str, Any] = {"dropped": self.dropped, "missed": self.missed, "failed": self.failed}
        if self._error is not None:
            fields["error"] = self._error
        running = self._running
        if running is not None and time.monotonic() - self._running_since > _SLOW_SECONDS:
            fields["slow"] = f"{running.method} takes more than {_SLOW_SECONDS:g} s"
        return fields

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


STATUS = "listeners"
"""The attribute of the receiver job that has the status of each listener, by its name. The bus writes it."""


@dataclass(frozen=True, slots=True)
class ListenerStatus:
    """A listener in one receiver job; the counts begin with the job.

    ``dropped`` events came while its queue was full, ``missed`` ones were deleted before it got them. ``failed`` is the
    number of its calls that raised. ``error`` is the last error, also of a listener that could not be made. ``slow``
    says which call takes long at the moment.
    """

    name: str
    dropped: int = 0
    missed: int = 0
    failed: int = 0
    error: str | None = None
    slow: str | None = None

    def __str__(self) -> str:
        counts = ((self.dropped, "events dropped"), (self.missed, "events missed"), (self.failed, "calls failed"))
        said = [*(f"{number:,} {what}" for number, what in counts if number), self.slow, self.error]
        return f"Listener {self.name}: {'; '.join(filter(None, said)) or 'gets all events'}"

    @property
    def well(self) -> bool:
        """Whether it has got every event, without an error, and is not slow."""
        return self == ListenerStatus(self.name)


def listener_statuses(job: JobRow | None) -> list[ListenerStatus]:
    """The listeners of a receiver job, sorted by name; none before the job has reported them."""
    statuses = {} if job is None else job.attributes.get(STATUS) or {}
    return [
        ListenerStatus(
            name=name,
            dropped=values.get("dropped", 0),
            missed=values.get("missed", 0),
            failed=values.get("failed", 0),
            error=values.get("error"),
            slow=values.get("slow"),
        )
        for name, values in sorted(statuses.items())
    ]
