"""Faults that no healthy server has, from a small HTTP server on loopback that does as a test's script says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch
from tests.support.indexing_options import indexing_options

from headrace.elasticsearch.errors import ElasticsearchRefusedError, ElasticsearchUnavailableError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.target_watch import TargetWatch
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, NoAnswerError, Node

Step = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Passes requests to an Elasticsearch in memory unless there is a step left of the script."""

    protocol_version = "HTTP/1.1"
    server: Server

    def _do(self) -> None:
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        with self.server.lock:
            step = self.server.script.pop(0) if self.server.script else None
        if step is not None:
            step(self)
            return
        answer = self.server.fake.request(self.command, self.path, self.read())
        self.answer(answer.status, answer.body)

    do_GET = do_POST = do_PUT = do_HEAD = _do  # noqa: N815

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fake = FakeElasticsearch()
        self.script: list[Step] = []
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()

    @property
    def node(self) -> Node:
        return Node("http", "127.0.0.1", self.server_address[1])


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


def index(rows: Any, *nodes: Node, authorization: str | None = None, timeout: float = 5, **options: Any) -> Any:
    chosen = indexing_options(**{"max_retry_seconds": 10, **options})
    cluster = Cluster(nodes, authorization=authorization)
    transport = ElasticsearchTransport(cluster, connections=2, timeout_seconds=timeout)
    try:
        return Indexer(transport, chosen).index([rows])
    finally:
        transport.close()


def silence(handler: Handler) -> None:
    """Carry the request out, and answer too late."""
    handler.server.fake.request("POST", handler.path, handler.read())
    time.sleep(0.5)
    handler.close_connection = True


def hang_up(handler: Handler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def half_an_answer(handler: Handler) -> None:
    handler.read()
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    handler.close_connection = True


def says(status: int, kind: str = "some_exception", content_type: str = "application/json") -> Step:
    def step(handler: Handler) -> None:
        handler.read()
        body = json.dumps({"error": {"type": kind, "reason": "why"}, "status": status}).encode()
        handler.answer(status, body, content_type)

    return step


def empty(status: int, **headers: str) -> Step:
    """As a proxy answers, without a body."""

    def step(handler: Handler) -> None:
        handler.read()
        handler.answer(status, b"", **headers)

    return step


PASSING: dict[str, Step] = {
    "the connection is closed": hang_up,
    "half an answer": half_an_answer,
    "the disk is full": says(429, "cluster_block_exception"),
    "no master": says(503, "master_not_discovered_exception"),
    "the state is not recovered": says(503, "cluster_block_exception"),
    "no shard": says(503, "unavailable_shards_exception"),
    "maintenance": says(403, "cluster_block_exception"),
    "a proxy without a server": empty(503),
    "a gateway": says(502, content_type="text/html"),
    "a gateway's retry_budget": empty(504),
    "a request's": empty(408),
}
THROTTLING: dict[str, Step] = {
    "a queue is full": says(429, "es_rejected_execution_exception"),
    "a proxy's limit": empty(429),
    "a proxy's limit for a time": empty(429, **{"retry-after": "1"}),
}
# Of a request's size, or of one of its documents: at its second failure it is halved.
PERHAPS_ITS_OWN: dict[str, Step] = {
    "a circuit breaker": says(429, "circuit_breaking_exception"),
    "an error within": says(500, "null_pointer_exception"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_request_is_sent_again_after_a_temporary_fault(server: Server, rows: Any, fault: Step) -> None:
    server.script = [fault, fault]
    counts = index(rows([b'{"n": 1}', b'{"n": 2}']), server.node)
    assert (counts.created, counts.retries) == (2, 2)
    assert len(server.seen) == 3


@pytest.mark.parametrize("fault", THROTTLING.values(), ids=THROTTLING)
def test_a_throttled_request_is_sent_again_in_smaller_ones(server: Server, rows: Any, fault: Step) -> None:
    server.script = [fault, fault]
    counts = index(rows([b'{"n": 1}'] * 4), server.node)
    assert (counts.created, counts.retries, counts.throttled_requests) == (4, 0, 2)
    assert [len(actions) for _, actions in server.fake.bulks] == [1, 1, 1, 1]
    assert counts.throttled_seconds > (2 if fault is THROTTLING["a proxy's limit for a time"] else 0)


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2015 07:28:00 GMT", "soon", "-5", "9" * 400, "1.5"])
def test_a_time_to_wait_that_is_no_time_is_left_aside(server: Server, rows: Any, value: str) -> None:
    """One that is over, and what is neither seconds nor a time. A number of any length ends with the limit."""
    server.script = [empty(429, **{"retry-after": value})]
    counts = index(rows([b'{"n": 1}']), server.node, max_throttled_seconds=2)
    assert (counts.created, counts.throttled_requests) == (1, 1)


@pytest.mark.parametrize("fault", PERHAPS_ITS_OWN.values(), ids=PERHAPS_ITS_OWN)
def test_a_request_that_may_be_the_fault_is_sent_again_in_halves(server: Server, rows: Any, fault: Step) -> None:
    server.script = [fault, fault]
    counts = index(rows([b'{"n": 1}', b'{"n": 2}']), server.node)
    assert (counts.created, counts.dead_lettered) == (2, 0)
    throttled = fault is PERHAPS_ITS_OWN["a circuit breaker"]
    assert (counts.retries, counts.throttled_requests) == ((0, 2) if throttled else (1, 0))
    assert len(server.seen) == 4


def test_a_timed_out_request_may_have_been_carried_out(server: Server, rows: Any) -> None:
    server.script = [silence]
    counts = index(rows([b'{"n": 1}', b'{"n": 2}']), server.node, timeout=0.2)
    assert (counts.repeated, counts.dead_lettered, counts.retries) == (2, 0, 1)
    assert server.fake.versions("clicks") == {"t+0+0": 1, "t+0+1": 1}


def test_a_server_that_is_down_ends_the_task(rows: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        node = Node("http", "127.0.0.1", unused.getsockname()[1])
    with pytest.raises(ElasticsearchUnavailableError, match="Nothing was dropped"):
        index(rows([b"{}"]), node, max_retry_seconds=0.3)


def test_another_node_takes_over(server: Server, rows: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = Node("http", "127.0.0.1", unused.getsockname()[1])
    counts = index(rows([b'{"n": 1}'] * 50), dead, server.node, bulk_actions=5)
    assert counts.created == 50


def test_the_transport_itself_does_not_retry(server: Server) -> None:
    transport = ElasticsearchTransport(Cluster((server.node,)), connections=1, timeout_seconds=5)
    server.script = [says(503), hang_up]
    assert transport.request("POST", "/clicks/_bulk", b"{}\n").status == 503
    with pytest.raises(NoAnswerError):
        transport.request("POST", "/clicks/_bulk", b"{}\n")
    assert len(server.seen) == 2


def test_too_large_a_request_is_split_though_the_server_hangs_up(server: Server, rows: Any) -> None:
    def too_large(handler: Handler) -> None:
        # As nginx does: the answer comes before the body has been read, and the connection is closed.
        handler.answer(413, b"<html>", "text/html", connection="close")
        handler.close_connection = True

    server.script = [too_large]
    counts = index(rows([b'{"n": 1}'] * 4), server.node)
    assert counts.created == 4
    assert counts.requests >= 3


def items_refused(handler: Handler) -> None:
    """As a real cluster's security answers: the request is carried out, and each item is refused."""
    lines = handler.read().splitlines()
    error = {"type": "security_exception", "reason": "action [indices:data/write/bulk[s]] is unauthorized"}
    item = {"create": {"status": 403, "error": error}}
    handler.answer(200, json.dumps({"items": [item] * (len(lines) // 2)}).encode())


UNAUTHORISED: dict[str, tuple[Step, str]] = {
    "not known": (says(401, "security_exception"), "login"),
    "a proxy's": (empty(401, **{"www-authenticate": "Basic"}), "login"),
    "not allowed": (says(403, "security_exception"), "privileges"),
    "a proxy's refusal": (empty(403), "privileges"),
    "by item": (items_refused, "privileges"),
}


@pytest.mark.parametrize(("fault", "remedy"), UNAUTHORISED.values(), ids=UNAUTHORISED)
def test_refused_credentials_fail_the_batch_without_dead_letters(
    server: Server, rows: Any, fault: Step, remedy: str
) -> None:
    """At once: the request is not sent again."""
    server.script = [fault]
    with pytest.raises(ElasticsearchRefusedError, match=remedy):
        index(rows([b'{"n": 1}', b'{"n": 2}']), server.node)
    assert len(server.seen) == 1
    assert server.fake.indices == {}


def test_credentials_that_end_within_a_batch_lose_nothing(server: Server, rows: Any) -> None:
    def goes_on(handler: Handler) -> None:
        answer = server.fake.request(handler.command, handler.path, handler.read())
        handler.answer(answer.status, answer.body)

    batch = rows([b'{"n": 1}'] * 100)
    server.script = [goes_on, goes_on, goes_on, says(401, "security_exception")]
    with pytest.raises(ElasticsearchRefusedError, match="login"):
        index(batch, server.node, bulk_actions=10, requests_in_flight=1)
    written = len(server.fake.documents("clicks"))
    assert 30 <= written < 100
    counts = index(batch, server.node)
    assert (counts.repeated, counts.created, counts.dead_lettered) == (written, 100 - written, 0)


def test_a_batch_fails_if_its_dead_letters_may_not_be_written(server: Server, rows: Any) -> None:
    def there(handler: Handler) -> None:
        handler.answer(
            200, b'{"clicks-dead-letters": {"settings": {"index": {"provided_name": "clicks-dead-letters"}}}}'
        )

    server.script = [there, items_refused]
    with pytest.raises(ElasticsearchRefusedError, match=r"clicks-dead-letters.*privileges"):
        index(rows([b"junk"]), server.node)
    assert index(rows([b"junk"]), server.node).dead_lettered == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_privilege_is_reported_before_the_first_row(server: Server, status: int) -> None:
    options = indexing_options(hosts=[str(server.node)])
    server.script = [says(status, "security_exception")]
    with pytest.raises(ElasticsearchRefusedError, match="'clicks' with"):
        TargetWatch(options).now()


def test_a_server_without_elasticsearchs_name_gets_no_document(server: Server) -> None:
    options = indexing_options(hosts=[str(server.node)])
    with pytest.raises(ElasticsearchRefusedError, match="neither Elasticsearch nor OpenSearch"):
        TargetWatch(options).check_before()
    assert [(method, path) for method, path, _ in server.seen] == [("GET", "/")]


def test_credentials_are_sent_and_are_in_no_error(server: Server, rows: Any) -> None:
    server.script = [says(401, "security_exception")]
    with pytest.raises(ElasticsearchRefusedError) as caught:
        index(rows([b"{}"]), server.node, authorization="ApiKey hunter2")
    (_, _, headers) = server.seen[0]
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "ApiKey hunter2"
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in repr(error)
        error = error.__cause__ or error.__context__


def test_a_login_page_is_not_taken_as_success(server: Server, rows: Any) -> None:
    def login(handler: Handler) -> None:
        handler.read()
        handler.answer(200, b"<html>please log in</html>", "text/html")

    server.script = [login] * 50
    with pytest.raises(ElasticsearchUnavailableError, match="please log in"):
        index(rows([b"{}"]), server.node, max_retry_seconds=0.2)
