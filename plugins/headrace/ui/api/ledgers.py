"""The ledgers that the API server has open, and the threads in which they are asked.

A ledger that does not answer must not block the others, nor use up the server's threads: each has at most a few calls
under way, and a call that takes too long is given up with an error (its thread ends when the database answers).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from sqlalchemy.engine import URL

from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.database import engine_url
from headrace.ledger.errors import LedgerUnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_OPEN = 50
"""How many ledgers are kept open; the least recently used one is closed."""
SECONDS = 10.0
"""How long a ledger has to answer."""
_CALLS_AT_ONCE = 4
# A connection that was changed in Airflow counts after this long. Looking it up may ask a secrets backend.
_LOOK_UP_SECONDS = 30.0


class LedgerSilentError(HeadraceError):
    """A ledger did not answer in time."""


class OpenLedgers:
    """Opens ledgers by reference, and keeps them open. Creates and migrates none. Safe across threads."""

    def __init__(
        self, environ: Callable[[str], Mapping[str, str] | None], *, seconds: float = SECONDS, max_open: int = MAX_OPEN
    ) -> None:
        """``environ`` returns the environment in which a reference's connection is looked up."""
        self._environ = environ
        self._seconds = seconds
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenLedger] = OrderedDict()

    def ask(self, reference: str, question: Callable[[Ledger], T]) -> T:
        """Call ``question`` with the ledger, in a thread of the ledger's own, and return its result.

        Raises:
            LedgerSilentError: it did not answer in time.
            HeadraceError: it cannot be opened, or the question raises.
        """
        return self.answer(reference, self.submit(reference, question), self.deadline())

    def deadline(self) -> float:
        """Return the time of the monotonic clock until which a ledger that is asked now has to answer."""
        return time.monotonic() + self._seconds

    def submit(self, reference: str, question: Callable[[Ledger], T]) -> Future[T]:
        """Begin `ask`. The future has a LedgerSilentError if too many calls to this ledger have not returned yet."""
        try:
            return self._of(reference).submit(question)
        except HeadraceError as error:
            refused: Future[T] = Future()
            refused.set_exception(error)
            return refused

    def answer(self, reference: str, future: Future[T], deadline: float) -> T:
        """Wait until ``deadline`` for what `submit` has begun. Ledgers that are asked together share a deadline."""
        try:
            return future.result(timeout=max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise _silent(reference, f"It has not answered for {self._seconds:g} s.") from None

    def close(self) -> None:
        """Close all ledgers."""
        with self._lock:
            closing, self._open = list(self._open.values()), OrderedDict()
        for each in closing:
            each.close()

    def _of(self, reference: str) -> _OpenLedger:
        with self._lock:
            found = self._open.get(reference)
            if found is None:
                found = self._open[reference] = _OpenLedger(reference, self._environ)
            self._open.move_to_end(reference)
            oldest = self._open.popitem(last=False)[1] if len(self._open) > self._max_open else None
        if oldest is not None:
            oldest.close()
        return found


class _OpenLedger:
    """One ledger, opened by its first question; one that cannot be opened is tried again by the next.

    If its connection leads elsewhere, or has another password, the ledger is opened anew.
    """

    def __init__(self, reference: str, environ: Callable[[str], Mapping[str, str] | None]) -> None:
        self._reference = reference
        self._environ = environ
        self._pool = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="headrace-ledger")
        self._slots = threading.BoundedSemaphore(4 * _CALLS_AT_ONCE)
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._url: URL | None = None
        self._looked_up = float("-inf")

    def submit(self, question: Callable[[Ledger], T]) -> Future[T]:
        if not self._slots.acquire(blocking=False):
            raise _silent(self._reference, "Earlier questions to it have no answer yet.")
        try:
            future = self._pool.submit(self._ask, question)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        with self._lock:
            ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()

    def _ask(self, question: Callable[[Ledger], T]) -> T:
        try:
            return question(self._opened())
        except LedgerUnavailableError:
            # The database may refuse the login because the password has changed. Its text cannot be relied on, so the
            # connection is looked up again after any such error.
            self._looked_up = float("-inf")
            raise

    def _opened(self) -> Ledger:
        with self._lock:
            if self._ledger is None or time.monotonic() - self._looked_up > _LOOK_UP_SECONDS:
                environ = self._environ(self._reference)
                url = engine_url(self._reference, environ)
                if self._ledger is None or url != self._url:
                    before, self._ledger = self._ledger, None
                    if before is not None:
                        before.close()
                    self._ledger = Ledger.open(self._reference, create=False, environ=environ)
                    self._url = url
                self._looked_up = time.monotonic()
            return self._ledger


def _silent(reference: str, what: str) -> LedgerSilentError:
    return LedgerSilentError(
        f"The ledger {reference} does not answer. {what}",
        remedy="Look whether its database runs, and whether the API server can reach it.",
    )
