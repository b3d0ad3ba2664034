"""An S3 server, and a proxy before it that loses answers and records requests."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer


class LosingProxy:
    """Passes bytes to the server, and records the first line of each request in ``requests``.

    Where one of these says so of the first line of a PUT: with ``loses`` the answer never comes back and the connection
    ends; with ``mutes`` the answer never comes back and the connection stays open; with ``holds`` the server does not
    get the request either.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.loses: Callable[[bytes], bool] = lambda line: False
        self.mutes: Callable[[bytes], bool] = lambda line: False
        self.holds: Callable[[bytes], bool] = lambda line: False
        self.lost: list[bytes] = []
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._server_port))
        lose = threading.Event()
        mute = threading.Event()

        def answers() -> None:
            with contextlib.suppress(OSError):
                # The server has done its work when it answers, but for its leave to send the body. Where the answer is
                # lost, the client sees the connection end.
                while (data := server.recv(65536)) and (data.startswith(b"HTTP/1.1 100") or not lose.is_set()):
                    if data.startswith(b"HTTP/1.1 100") or not mute.is_set():
                        client.sendall(data)
            for connection in () if mute.is_set() else (client, server):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=answers, daemon=True).start()
        with client, server, contextlib.suppress(OSError):
            while data := client.recv(65536):
                line = data.split(b"\r\n", 1)[0]
                self._trouble(line, lose, mute)
                if not (line.startswith(b"PUT ") and self.holds(line)):
                    server.sendall(data)

    def _trouble(self, line: bytes, lose: threading.Event, mute: threading.Event) -> None:
        if line.startswith((b"GET ", b"HEAD ", b"PUT ", b"DELETE ")):
            self.requests.append(line)
        if line.startswith(b"PUT ") and self.mutes(line):
            mute.set()
        if line.startswith(b"PUT ") and self.loses(line):
            self.lost.append(line)
            lose.set()


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    ).create_bucket(Bucket="bucket")
    yield port
    server.stop()


@pytest.fixture
def proxy(server_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[LosingProxy]:
    """The way to the server, with the environment by which s3fs finds it, as a user sets it."""
    import s3fs

    made = LosingProxy(server_port)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        # Of botocore, so that a test of lost answers does not wait for all of its own.
        "AWS_MAX_ATTEMPTS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    yield made
    s3fs.S3FileSystem.clear_instance_cache()
    made.close()
