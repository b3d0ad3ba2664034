"""The example that posts to a webhook, with a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from examples.webhook.webhook import PassingFailure, Webhook

from headrace.connections import Connection, variable_name
from headrace.listeners import BatchCompleted, BatchInfo, DeadLetters
from headrace.listeners.bus import overridden

LETTERS = DeadLetters(
    event_id=7, at_ms=1, stream="flights", batch_time_ms=1000, output_id="index", attempt=1, records=3,
    reasons={"mapper_parsing_exception": 3},
)  # fmt: skip


class Server(ThreadingHTTPServer):
    """Answers with the statuses of ``answers`` in their order, then with 200."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[int] = []
        self.posts: list[tuple[str | None, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.headers.get("Authorization"), body))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def batch(failures: dict[str, str]) -> BatchCompleted:
    info = BatchInfo(
        batch_time_ms=1000, interval_ms=1000, records=5, blocks=1, payload_bytes=9, late_records=0,
        submitted_at_ms=1001, attempt=1, started_at_ms=1002, completed_at_ms=1003, failures=failures,
    )  # fmt: skip
    return BatchCompleted(event_id=8, at_ms=1003, stream="flights", batch=info)


def test_what_a_person_should_know_is_posted_with_its_event(server: Server) -> None:
    webhook = Webhook(server.url)
    webhook.on_batch_completed(batch({}))
    webhook.on_batch_completed(batch({"index": "the index is read-only"}))
    webhook.on_dead_letters(LETTERS)
    webhook.on_dead_letters(replace(LETTERS, exceeded="more than the 2 of dead_letter_limit.number"))
    webhook.close()
    (_, failed), (_, letters), (_, exceeding) = server.posts
    assert failed["kind"] == "batch_failed"
    assert "index: the index is read-only" in failed["text"]
    assert (letters["event"]["event_id"], letters["event"]["reasons"]) == (7, {"mapper_parsing_exception": 3})
    assert "dead_letter_limit" not in letters["text"]
    assert exceeding["text"].endswith(", more than the 2 of dead_letter_limit.number: it fails")
    assert "on_block_added" not in overridden(webhook)


def test_an_event_is_posted_again_while_the_server_has_no_time(server: Server) -> None:
    server.answers = [503, 429, 500]
    Webhook(server.url, longest_wait_seconds=0.0).on_dead_letters(LETTERS)
    assert [body["event"]["event_id"] for _, body in server.posts] == [7] * 4


def test_retries_end(server: Server) -> None:
    server.answers = [503] * 10
    with pytest.raises(PassingFailure, match="503"):
        Webhook(server.url, attempts=3, longest_wait_seconds=0.0).on_dead_letters(LETTERS)
    assert len(server.posts) == 3


def test_what_the_server_refuses_is_not_posted_again(server: Server) -> None:
    server.answers = [404]
    with pytest.raises(RuntimeError, match="404"):
        Webhook(server.url, longest_wait_seconds=0.0).on_dead_letters(LETTERS)
    assert len(server.posts) == 1


def test_a_server_that_is_away_is_tried_again(server: Server) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(PassingFailure) as failure:
        Webhook(url, attempts=2, longest_wait_seconds=0.0).on_dead_letters(LETTERS)
    assert "/hook" not in str(failure.value)


def test_the_url_and_the_token_come_from_a_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection("alerts", "http", host=server.url, password="a token")
    monkeypatch.setenv(variable_name("alerts"), connection.to_json())
    webhook = Webhook(connection="alerts")
    webhook.start(SimpleNamespace())  # type: ignore[arg-type]
    webhook.on_dead_letters(LETTERS)
    assert server.posts[0][0] == "Bearer a token"


@pytest.mark.parametrize("given", [{}, {"url": "http://localhost", "connection": "alerts"}])
def test_either_a_url_or_a_connection_is_needed(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="either"):
        Webhook(**given)  # type: ignore[arg-type]
