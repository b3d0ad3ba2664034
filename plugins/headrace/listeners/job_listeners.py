"""Makes a receiver job's listeners, and starts their bus, in a thread of its own.

Users' modules and constructors may hang, raise or exit: receiving never waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from headrace.errors import HeadraceError
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.ledger.tables import JobLease
from headrace.listeners.bus import LAST_SAVE_SECONDS, STATUS, ListenerBus
from headrace.listeners.listener import GROUP, load_listeners
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Between two tries to start the listeners while the ledger does not answer."""
SLOW_SECONDS = 30.0
"""After this time it is in the job's attribute that the listeners are not made yet."""


class JobListeners:
    """The listeners of one receiver job, from `start` to `stop`. Use once.

    Args:
        lease: the receiver job's.
        prepare: runs first, in the same thread; makes the listeners' modules importable.
    """

    def __init__(self, context: StreamContext, lease: JobLease, prepare: Callable[[], object] = lambda: None) -> None:
        self._context = context
        self._ledger = context.ledger
        self._lease = lease
        self._prepare = prepare
        self._bus: ListenerBus | None = None
        self._present: int | None = None
        self._stopped = threading.Event()
        self._slow = threading.Timer(SLOW_SECONDS, self._note, (f"not made after {SLOW_SECONDS:g} s",))
        self._slow.daemon = True
        self._thread = threading.Thread(target=self._run, name="headrace-listeners-start", daemon=True)

    def start(self) -> None:
        """Start making the listeners. A new listener gets what happens from this call on."""
        try:
            self._present = self._ledger.events.newest_id(self._lease.stream)
        except LedgerUnavailableError as error:
            logger.warning("A new listener gets events only once the ledger answers: %s", error)
        self._slow.start()
        self._thread.start()

    def stop(self, seconds: float, save_seconds: float = LAST_SAVE_SECONDS) -> None:
        """End the bus (see `ListenerBus.stop`). Listeners that are not made within ``seconds`` get no event."""
        deadline = time.monotonic() + seconds
        if self._thread.ident is not None:
            self._thread.join(seconds)
        self._stopped.set()
        self._slow.cancel()
        if self._thread.is_alive():
            logger.warning("The listeners of %s are still being made; the job does not wait", self._lease.stream)
        if self._bus is not None:
            self._bus.stop(max(deadline - time.monotonic(), 0.0), save_seconds)

    def _run(self) -> None:
        try:
            self._prepare()
            listeners, problems = load_listeners(self._context.stream)
            self._slow.cancel()
            if listeners or problems:
                self._start_bus(
                    ListenerBus(self._context, self._lease, listeners, problems=problems, new_after_id=self._present)
                )
        except LeaseLostError as error:
            logger.error("The listeners of %s are not started: %s", self._lease.stream, error)
        except BaseException as error:
            self._slow.cancel()
            logger.exception("The listeners of %s are not started", self._lease.stream)
            self._note(f"not started: {type(error).__name__}: {error}")

    def _start_bus(self, bus: ListenerBus) -> None:
        warned = False
        while not self._stopped.is_set():
            try:
                bus.start()
            except LedgerUnavailableError as error:
                if not warned:
                    logger.warning("The listeners start when the ledger answers: %s", error)
                warned = True
                self._stopped.wait(RETRY_SECONDS)
                continue
            self._bus = bus
            if self._stopped.is_set():
                # `stop` may not have seen the bus.
                bus.stop(0.0, 0.0)
            return

    def _note(self, error: str) -> None:
        """Write the error of all listeners into the job's attribute."""
        names = [listener.id for listener in self._context.stream.listeners] or [GROUP]
        try:
            self._ledger.jobs.note(
                self._lease.stream, self._lease.epoch, {STATUS: {name: {"error": error} for name in names}}
            )
        except HeadraceError as unwritten:
            logger.warning("The listeners' error cannot be written into the receiver job's attributes: %s", unwritten)
