"""Reading indices over HTTP, from a server that is told what to answer."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.errors import DemoError, NotAnsweringError
from examples.demo.proof import DeadLetter, Document, Place


class Fake:
    """Answers requests in order, and remembers them."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.asked.append((self.command, self.path.partition("?")[0], json.loads(body) if body else None))
                status, answer = fake.answers.pop(0)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - the names of http.server

            def log_message(self, *_: object) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()


def page(*hits: tuple[str, Any]) -> tuple[int, Any]:
    return 200, {"_scroll_id": "s", "hits": {"hits": [{"_id": name, "_source": source} for name, source in hits]}}


# Elasticsearch leaves empty lists out when fields are filtered.
LAST_PAGE: tuple[int, Any] = (200, {"_scroll_id": "s"})


def test_all_pages_are_read(fake: Fake) -> None:
    fake.answers = [(200, {}), page(("t+0+0", {"n": 0})), page(("t+0+1", {"n": 1})), LAST_PAGE, (200, {})]
    documents = list(ElasticsearchSide(fake.url).documents("flights"))
    assert documents == [Document("t+0+0", {"n": 0}), Document("t+0+1", {"n": 1})]
    assert [path for _, path, _ in fake.asked] == ["/flights/_refresh", "/flights/_search", *["/_search/scroll"] * 3]


def test_dead_letters_have_their_place_and_bytes(fake: Fake) -> None:
    value = base64.b64encode(b"\xff{").decode()
    letters = page(
        ("t+0+0", {"topic": "t", "partition": 0, "offset": 0, "value": value}),
        ("t+0+1", {"topic": "t", "partition": 0, "offset": 1}),
        ("row+1", {"value": ""}),
    )
    fake.answers = [(200, {}), letters, LAST_PAGE, (200, {})]
    assert list(ElasticsearchSide(fake.url).dead_letters("dead")) == [
        DeadLetter("t+0+0", Place("t", 0, 0), b"\xff{"),
        DeadLetter("t+0+1", Place("t", 0, 1), None),
        DeadLetter("row+1", None, b""),
    ]


def test_a_missing_index_is_an_error_for_documents_not_letters(fake: Fake) -> None:
    fake.answers = [(404, {"error": "index_not_found_exception"})] * 3
    side = ElasticsearchSide(fake.url)
    assert list(side.dead_letters("dead")) == []
    assert side.count("dead") == 0
    with pytest.raises(DemoError, match="index_not_found"):
        list(side.documents("flights"))


def test_an_index_whose_shard_has_not_started_is_asked_later(fake: Fake) -> None:
    fake.answers = [(503, {"error": "no_shard_available_action_exception"})]
    with pytest.raises(NotAnsweringError, match="no_shard_available"):
        ElasticsearchSide(fake.url).count("dead")


def test_a_refusal_is_reported_in_full(fake: Fake) -> None:
    fake.answers = [(400, {"error": "resource_already_exists_exception"})]
    with pytest.raises(DemoError, match=r"400 to PUT /flights: .*already_exists"):
        ElasticsearchSide(fake.url).create_index("flights", {})
    ((_, _, body),) = fake.asked
    assert body["settings"]["number_of_replicas"] == 0


def test_a_server_that_is_gone() -> None:
    with pytest.raises(NotAnsweringError, match="does not answer"):
        ElasticsearchSide("http://127.0.0.1:9").count("flights")
