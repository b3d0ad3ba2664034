"""Receives the events of an HTTP service."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

from headrace.checks.connecting import Checked
from headrace.connections import resolve
from headrace.receiver import Receiver

_ANSWER_SECONDS = 10.0


class HttpReceiver(Receiver):
    """Stores each page together with the id of its last event, and so begins there after a restart."""

    def __init__(self, connection: str, path: str, every_seconds: float) -> None:
        self._connection = connection
        self._path = path
        self._every_seconds = every_seconds
        self._stopped = threading.Event()

    def on_start(self) -> None:
        self.start_thread(self._receive)

    def on_stop(self) -> None:
        self._stopped.set()

    def _receive(self) -> None:
        # An error of a request ends the thread: it is reported, and the receiver starts again.
        while not self.is_stopped:
            events = page(self._connection, self._path, after=self.position)
            if events:
                self.store([json.dumps(event) for event in events], position=events[-1]["id"])
            else:
                self._stopped.wait(self._every_seconds)


def page(conn_id: str, path: str, *, after: int | None) -> list[dict[str, Any]]:
    """The events after this id, or the first ones. Raises OSError, and ConnectionNotFoundError."""
    connection = resolve(conn_id)
    kind = HTTPSConnection if connection.schema == "https" else HTTPConnection
    headers = {}
    if connection.login:
        login = base64.b64encode(f"{connection.login}:{connection.password or ''}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    with closing(kind(str(connection.host), connection.port, timeout=_ANSWER_SECONDS)) as server:
        server.request("GET", path if after is None else f"{path}?after={after}", headers=headers)
        answer = server.getresponse()
        if answer.status != HTTPStatus.OK:
            raise OSError(f"{connection.host} answers {answer.status} {answer.reason}")
        events: list[dict[str, Any]] = json.load(answer)
        return events


def check(source: Any) -> Iterator[Checked]:
    """Whether the server answers."""
    name, where = f"input {source.id}", f"connection {source.connection}, {source.path}"
    try:
        page(source.connection, source.path, after=None)
    except OSError as error:
        yield Checked(name, where, f"The server does not answer: {error}.", "Correct the connection.")
    else:
        yield Checked(name, where)
