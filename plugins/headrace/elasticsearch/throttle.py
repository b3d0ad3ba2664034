"""Keeps the requests of one task to what the search server takes, and to what the output allows.

A server that answers 429 has too much to do, and no fault. So has one whose answers take long. Both make the task's
requests smaller and fewer (`Throttle`). An output may also have a ceiling, for a cluster that others use too
(`Ceiling`). Both are used from several threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.clock import Clock
from headrace.elasticsearch.errors import IndexingCancelledError
from headrace.elasticsearch.transport import Response, Transport

LEAST_SHARE = 1 / 64
"""The smallest part of a request that is sent at once, unless one document is larger."""
RECOVERY = 1 / 16
"""What each good answer adds to that part."""
SLOW = 1 / 4
"""An answer is slow from this part of ``request_timeout_seconds`` on."""

_GIVEN_UP = "Indexing was given up, since another request failed."
_TOO_MANY_REQUESTS = 429
# With status 429 a server also refuses to write to an index that is read-only because the disk is full.
_BLOCK = "cluster_block_exception"


def is_throttled(status: int, error_type: str) -> bool:
    """Whether an answer, or an item of one, says that the server has too much to do now."""
    return status == _TOO_MANY_REQUESTS and error_type != _BLOCK


class WaitedTime:
    """The time in which at least one thread of a task waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of the ``with`` block."""
        with self._lock:
            if not self._waiting:
                self._since = self._clock.monotonic()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self.seconds += self._clock.monotonic() - self._since


class Throttle:
    """What the answers to a task's requests have shown of how much the server takes.

    Each answer with 429, of a whole request or of items in it, and each slow answer halves the ``share`` of a request
    that is sent at once. Each good answer adds `RECOVERY`. Until the share is whole again, one request of the task is
    in flight at a time. Nothing changes while the server takes all.
    """

    def __init__(self, *, max_seconds: float, timeout_seconds: float, clock: Clock, cancelled: threading.Event) -> None:
        """``max_seconds``: how long a request may get nothing but 429. ``timeout_seconds``: that of each request."""
        self.max_seconds = max_seconds
        self.share = 1.0
        """The part of a request that is sent at once."""
        self.waited = WaitedTime(clock)
        self._slow_seconds = timeout_seconds * SLOW
        self._clock = clock
        self._cancelled = cancelled
        self._changing = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._paused_until = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until a request may be sent, and send it in the ``with`` block.

        Raises IndexingCancelledError when cancelled meanwhile.
        """
        self._wait_for_pause()
        if self.share == 1:
            yield
            return
        with self._one_at_a_time:
            # The requests before this one may have been given up, or been told to wait.
            if self._cancelled.is_set():
                raise IndexingCancelledError(_GIVEN_UP)
            self._wait_for_pause()
            yield

    def _wait_for_pause(self) -> None:
        while (left := self._paused_until - self._clock.monotonic()) > 0:
            with self.waited.counted():
                if self._clock.wait(self._cancelled, left):
                    raise IndexingCancelledError(_GIVEN_UP)

    def pause(self, seconds: float) -> None:
        """Let the task send nothing for so long: the server has named the time (Retry-After)."""
        with self._changing:
            until = self._clock.monotonic() + min(seconds, self.max_seconds)
            self._paused_until = max(self._paused_until, until)

    def rejected(self, share: float) -> None:
        """Note that a request of this share was too much. Several that were sent with one share count once."""
        with self._changing:
            self.share = min(self.share, max(share / 2, LEAST_SHARE))

    def took(self, share: float, seconds: float) -> bool:
        """Note how long a request of this share took, answered or not. Returns whether that is slow."""
        if seconds < self._slow_seconds:
            return False
        self.rejected(share)
        return True

    def passed(self, seconds: float) -> None:
        """Note an answer without 429, and how long it took."""
        if self.share < 1 and seconds < self._slow_seconds:
            with self._changing:
                self.share = min(1.0, self.share + RECOVERY)


class Ceiling:
    """A transport whose requests begin no faster than so many, and so many bytes of bodies, in a second.

    A request begins when the time since the one before is enough for it; the first one, when the time since the task
    began is. So from the beginning on, and between any two requests, no more is sent than the time allows. A request
    without a body counts too. Bytes are counted before compression.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        requests_per_second: float | None,
        bytes_per_second: float | None,
        clock: Clock,
        cancelled: threading.Event,
    ) -> None:
        self._transport = transport
        self._request_seconds = 1 / requests_per_second if requests_per_second else 0.0
        self._byte_seconds = 1 / bytes_per_second if bytes_per_second else 0.0
        self._clock = clock
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._last = clock.monotonic()
        self.waited = WaitedTime(clock)

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Send the request when it may begin. Raises IndexingCancelledError too, when cancelled before."""
        costs = max(self._request_seconds, len(body or b"") * self._byte_seconds)
        with self._lock:
            now = self._clock.monotonic()
            self._last = max(now, self._last + costs)
            left = self._last - now
        if left > 0:
            with self.waited.counted():
                if self._clock.wait(self._cancelled, left):
                    raise IndexingCancelledError(_GIVEN_UP)
        return self._transport.request(method, path, body)

    def close(self) -> None:
        self._transport.close()
