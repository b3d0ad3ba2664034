"""A request ends, however its answer comes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.elasticsearch import deadline as module
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, NoAnswerError, Node

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n"
Trickle = Callable[[socket.socket, threading.Event], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Trickle], Node]]:
    over = threading.Event()
    listening: list[socket.socket] = []

    def start(answer: Trickle) -> Node:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)

        def accept() -> None:
            connected, _ = server.accept()
            with connected:
                try:
                    answer(connected, over)
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        return Node("http", "127.0.0.1", server.getsockname()[1])

    yield start
    over.set()
    for server in listening:
        server.close()


def trickled(connected: socket.socket, over: threading.Event, text: bytes) -> None:
    """A byte each 20 ms."""
    for byte in text:
        if over.wait(0.02):
            return
        connected.sendall(bytes([byte]))


def trickled_body(connected: socket.socket, over: threading.Event) -> None:
    connected.recv(65536)
    connected.sendall(HEAD)
    trickled(connected, over, b" " * 40000)


def trickled_head(connected: socket.socket, over: threading.Event) -> None:
    connected.recv(65536)
    trickled(connected, over, b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40000)


def trickled_without_length(connected: socket.socket, over: threading.Event) -> None:
    connected.recv(65536)
    connected.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    trickled(connected, over, b" " * 40000)


def trickled_handshake(connected: socket.socket, over: threading.Event) -> None:
    """The beginning of a TLS record of 16 KiB."""
    connected.recv(65536)
    trickled(connected, over, b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc" + b"\x03" * 16000)


@pytest.mark.parametrize(
    ("scheme", "answer"),
    [
        ("http", trickled_body),
        ("http", trickled_head),
        ("http", trickled_without_length),
        ("https", trickled_handshake),
    ],
)
def test_a_request_whose_answer_trickles_ends(serve: Any, scheme: str, answer: Trickle) -> None:
    node = serve(answer)
    transport = ElasticsearchTransport(
        Cluster((Node(scheme, node.host, node.port),)), connections=1, timeout_seconds=0.3
    )
    with pytest.raises(NoAnswerError, match=r"had not ended after|timed out"):
        transport.request("GET", "/")
    transport.close()


def test_a_large_answer_that_progresses_is_not_cut(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes twice the timeout."""
    monkeypatch.setattr(module, "BYTES_PER_SECOND", 4 * 1024)

    def slow(connected: socket.socket, over: threading.Event) -> None:
        connected.recv(65536)
        connected.sendall(HEAD)
        for _ in range(10):
            connected.sendall(b" " * 4000)
            over.wait(0.2)

    transport = ElasticsearchTransport(Cluster((serve(slow),)), connections=1, timeout_seconds=1)
    started = time.monotonic()
    assert len(transport.request("GET", "/").body) == 40000
    assert time.monotonic() - started > 1
    transport.close()


def test_an_answer_that_progresses_without_end_ends(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(connected: socket.socket, over: threading.Event) -> None:
        connected.recv(65536)
        connected.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while not over.is_set():
            connected.sendall(b" " * 64 * 1024)
            over.wait(0.01)

    monkeypatch.setattr(module, "LONGEST", 2)
    transport = ElasticsearchTransport(Cluster((serve(endless),)), connections=1, timeout_seconds=1)
    with pytest.raises(NoAnswerError, match="had not ended after 2 s"):
        transport.request("GET", "/")
    transport.close()
