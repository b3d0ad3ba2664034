"""Answers that a registry does not give, but what stands in its place: a gateway, a proxy, an overloaded server.

Its own answers are tested with a real registry (tests/integration/spark/test_registry.py).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.connections import Connection
from headrace.registry.client import (
    Registry,
    RegistryPathError,
    RegistryRefusedError,
    RegistrySettingError,
    RegistryUnavailableError,
    SchemaUnknownError,
)

Answer = tuple[int, bytes]


class Gateway(ThreadingHTTPServer):
    """Gives one answer to every question; "trickle" gives a byte each tenth of a second."""

    answer: Answer | None = (200, b"{}")
    asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.server.asked += 1
        status, body = self.server.answer or (200, b"x" * 1000)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # Who asks may have left.
        with contextlib.suppress(OSError):
            for byte in range(len(body)) if self.server.answer is None else ():
                self.wfile.write(body[byte : byte + 1])
                self.wfile.flush()
                time.sleep(0.1)
            if self.server.answer is not None:
                self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def registry_of(gateway: Gateway) -> Callable[..., Registry]:
    def make(*, seconds: float = 15.0, **fields: Any) -> Registry:
        address = {"host": f"http://127.0.0.1:{gateway.server_port}", **fields}
        return Registry(Connection(f"schemas_{time.monotonic_ns()}", "http", **address), seconds=seconds)

    return make


def test_an_answer_without_a_schema_is_not_taken_for_one(
    gateway: Gateway, registry_of: Callable[..., Registry]
) -> None:
    """It would be kept for good."""
    for body in ({}, {"status": "ok"}, {"schema": ""}, {"schema": 1}):
        gateway.answer = (200, json.dumps(body).encode())
        with pytest.raises(RegistryPathError, match="has no schema in its answer"):
            registry_of().schema(1)
    gateway.answer = (200, b'{"schema": "x", "schemaType": "XML"}')
    with pytest.raises(RegistryPathError, match="of the format 'XML', which is none of AVRO"):
        registry_of().schema(1)


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (200, b"<html>", RegistryPathError, "something else than JSON"),
        (401, b'{"error_code": 401, "message": "no"}', RegistryRefusedError, r"refuses .*: no \(HTTP 401\)"),
        (403, b'{"error_code": 40301, "message": "no"}', RegistryRefusedError, "HTTP 403"),
        (404, b'{"error_code": 404, "message": "HTTP 404"}', SchemaUnknownError, "has no schema 1.*path"),
        (404, b'{"error_code": 40403, "message": "not found"}', SchemaUnknownError, "has no schema 1.*refused_ids"),
        (422, b'{"error_code": 42202, "message": "bad"}', RegistryUnavailableError, "HTTP 422: bad"),
        (500, b"", RegistryUnavailableError, "HTTP 500"),
    ],
)
def test_an_answer_is_named_by_what_it_means(  # noqa: PLR0917
    gateway: Gateway, registry_of: Callable[..., Registry], status: int, body: bytes, error: Any, words: str
) -> None:
    gateway.answer = (status, body)
    with pytest.raises(error, match=words):
        registry_of().schema(1)


def test_an_id_of_zero_may_be_one_of_eight_bytes(gateway: Gateway, registry_of: Callable[..., Registry]) -> None:
    gateway.answer = (404, b'{"error_code": 40403, "message": "not found"}')
    with pytest.raises(SchemaUnknownError, match=r"has no schema 0: ids begin at 1.*eight bytes.*0 in refused_ids"):
        registry_of().schema(0)


def test_a_busy_registry_is_asked_once_more(gateway: Gateway, registry_of: Callable[..., Registry]) -> None:
    gateway.answer = (503, b"")
    with pytest.raises(RegistryUnavailableError, match="HTTP 503"):
        registry_of().schema(1)
    assert gateway.asked == 2


def test_an_answer_has_an_end(gateway: Gateway, registry_of: Callable[..., Registry]) -> None:
    """Each byte comes in time, and the whole would take minutes."""
    gateway.answer = None
    with pytest.raises(RegistryUnavailableError, match="did not end within 1 s"):
        registry_of(seconds=1.0).schema(1)


def test_a_connection_that_no_client_takes_is_named(registry_of: Callable[..., Registry]) -> None:
    with pytest.raises(RegistrySettingError, match="cannot be used for a schema registry"):
        registry_of(extra={"client_key": __file__}).schema(1)
