"""The end of an HTTP request: a total, besides the timeout of each wait of its socket.

A socket's timeout begins again with each byte. A server or a proxy that answers with a byte each half second kept a
request, and so its batch, without end. A large answer over a slow link takes long too, and is let through: each
`BYTES_PER_SECOND` bytes give the request another second, up to `LONGEST` times its timeout.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

import urllib3

BYTES_PER_SECOND = 16 * 1024
"""The slowest link on which a request may take longer than its timeout."""
LONGEST = 10
"""The most that a request may take, in timeouts."""

_LOOKED_FOR_AGAIN_SECONDS = 0.1


class Deadline:
    """Ends the request that this thread sends meanwhile: its socket is shut down, which ends every call on it."""

    def __init__(self, timeout_seconds: float, sent_bytes: int) -> None:
        self.seconds = timeout_seconds
        """How long the request may take."""
        self.passed = False
        self._longest = timeout_seconds * LONGEST
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._over = False
        self._line: socket.socket | None = None
        self._line_is_own = False
        self.progressed(sent_bytes)
        self._timer = self._waiting(self.seconds)

    def __enter__(self) -> Self:
        _CURRENT.deadline = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _CURRENT.deadline = None
        with self._lock:
            self._over = True
        self._timer.cancel()
        if self._line is not None and self._line_is_own:
            self._line.close()

    def progressed(self, number: int) -> None:
        """Extend the time by what so many bytes take on the slowest link."""
        self.seconds = min(self.seconds + number / BYTES_PER_SECOND, self._longest)

    def watch(self, line: socket.socket) -> None:
        """Name the connection that the request uses."""
        with self._lock:
            if self._line is not None and self._line_is_own:
                self._line.close()
            self._line, self._line_is_own = line, False

    def takes_over(self, line: socket.socket) -> bool:
        """Whether the request still uses this connection, which its owner closes: then it is closed at the end.

        An answer that ends with its connection is read after http.client has closed its own object of it.
        """
        self._line_is_own = self._line is line
        return self._line_is_own

    def _waiting(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        return timer

    def _end(self) -> None:
        with self._lock:
            if self._over:
                return
            left = self._started + self.seconds - time.monotonic()
            if left > 0 or self._line is None:
                # Without a connection there is nothing to end yet: connecting has a timeout of its own.
                self._timer = self._waiting(max(left, _LOOKED_FOR_AGAIN_SECONDS))
                return
            self.passed = True
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)


_CURRENT = threading.local()


def _current() -> Deadline | None:
    deadline: Deadline | None = getattr(_CURRENT, "deadline", None)
    return deadline


class _Watched:
    """What both kinds of connections add: they name their socket to the `Deadline` of the thread that uses them."""

    _line: socket.socket | None = None

    def _new_conn(self) -> socket.socket:
        connected: socket.socket = super()._new_conn()  # type: ignore[misc]
        # A duplicate, since TLS takes the socket over: it is watched from the handshake on.
        self._close_line()
        self._line = connected.dup()
        self._watch()
        return connected

    def request(self, *args: Any, **settings: Any) -> None:
        self._watch()
        super().request(*args, **settings)  # type: ignore[misc]

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        self._close_line()

    def _watch(self) -> None:
        deadline = _current()
        if deadline is not None and self._line is not None:
            deadline.watch(self._line)

    def _close_line(self) -> None:
        line, self._line = self._line, None
        deadline = _current()
        if line is not None and (deadline is None or not deadline.takes_over(line)):
            line.close()


class WatchedConnection(_Watched, urllib3.connection.HTTPConnection):
    """A connection whose requests end by their `Deadline`."""


class WatchedTlsConnection(_Watched, urllib3.connection.HTTPSConnection):
    """The same by TLS."""


def watched(pool: urllib3.HTTPConnectionPool) -> urllib3.HTTPConnectionPool:
    """The pool, with connections whose requests end by their `Deadline`."""
    secure = isinstance(pool, urllib3.HTTPSConnectionPool)
    pool.ConnectionCls = WatchedTlsConnection if secure else WatchedConnection
    return pool
