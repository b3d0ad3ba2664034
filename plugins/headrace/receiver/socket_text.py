"""`SocketText`: lines of text from a TCP server, as Spark's ``socketTextStream``.

    ReceiverInput(
        id="lines", receiver="headrace.receiver:SocketText", arguments={"host": "localhost", "port": 9999},
        value_decoder=Utf8Decoder(),
    )

A socket cannot be asked for a line again. So lines that were received and not yet stored are lost if the process dies:
at most once. Lines that were stored are in the log exactly once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from headrace.receiver.receiver import Receiver

_RECEIVE_BYTES = 64 << 10
# A connection without a line feed for this long is no text.
_MAX_LINE_BYTES = 1 << 20
_CONNECT_SECONDS = 10.0


class SocketText(Receiver):
    """Connects to ``host``:``port`` and stores each line without its line feed. When the connection ends, the receiver
    connects again after two seconds."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None

    def on_start(self) -> None:
        self.start_thread(self._receive)

    def on_stop(self) -> None:
        connected = self._socket
        if connected is not None:
            # Wakes the thread, which may wait in recv().
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        with socket.create_connection(self._address, timeout=_CONNECT_SECONDS) as connected:
            connected.settimeout(None)
            self._socket = connected
            for lines in self._lines(connected):
                self.store(lines)
        if not self.is_stopped:
            self.restart("The server has closed the connection")

    def _lines(self, connected: socket.socket) -> Iterator[list[bytes]]:
        """The lines, as many at a time as have arrived."""
        rest = b""
        while not self.is_stopped and (data := connected.recv(_RECEIVE_BYTES)):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes came from {self._address}")
            if lines:
                yield [line.removesuffix(b"\r") for line in lines]
        if rest:
            yield [rest]
