"""A server that has too much to do gets smaller and fewer requests; one with a ceiling gets no more than that."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import Action, FakeElasticsearch, error_response
from tests.support.json_server import JsonHandler, JsonServer

from headrace.clock import SystemClock
from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.bulk_sender import BulkSender, SentRequest
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import ElasticsearchUnavailableError, IndexingCancelledError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.throttle import LEAST_SHARE, RECOVERY, Ceiling, Throttle, is_throttled
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, NoAnswerError, Response

FULL = "es_rejected_execution_exception"
PRESSURE = "rejected execution of coordinating operation [coordinating_operation_bytes=9, max_coordinating_bytes=8]"
ROWS = 256


class Task:
    """One task's sender, and the clock on which it waits."""

    def __init__(self, server: FakeElasticsearch, options: Any, clock: Any) -> None:
        self.server, self.options, self.clock = server, options, clock
        self.sender = BulkSender(server, options, clock=clock, cancelled=threading.Event(), jitter=random.Random(1))

    def send(self, rows: pa.RecordBatch) -> SentRequest:
        prepared = prepare_rows(rows, self.options).prepared
        assert prepared is not None
        self.server.bulks.clear()
        return self.sender.send(prepared, np.arange(len(prepared)))

    @property
    def sizes(self) -> list[int]:
        """The documents of each request since ``send`` was called."""
        return [len(actions) for _, actions in self.server.bulks]


@pytest.fixture
def task(elasticsearch: FakeElasticsearch, make_options: Any, clock: Any) -> Callable[..., Task]:
    return lambda **options: Task(elasticsearch, make_options(**options), clock)


@pytest.fixture
def batch(make_rows: Any) -> Callable[[int], pa.RecordBatch]:
    """Rows of one size each; ``number``: of the batch, so that no two have the same ids."""
    return lambda number: make_rows([{"n": 100}] * ROWS, offsets=range(1000 * (number + 1), 1000 * (number + 1) + ROWS))


def too_many(actions: Sequence[Action]) -> Response:
    return error_response(429, FULL, f"queue is full, {len(actions)} documents")


def test_a_429_halves_requests_and_good_answers_restore_them(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any
) -> None:
    """By a sixteenth for each answer."""
    one = task()
    elasticsearch.faults.extend([too_many, too_many])
    counts = one.send(batch(0)).counts
    assert one.sizes == [256, 128, 64, 64, 96, 32]
    assert (counts.created, counts.throttled_requests, counts.retries) == (256, 2, 0)
    assert one.send(batch(1)).counts.throttled_requests == 0
    assert one.sizes == [128, 128]
    for number in range(2, 6):
        one.send(batch(number))
    assert one.sizes == [256]
    assert one.sender.throttle.share == 1


def test_a_429_of_some_items_halves_later_requests(task: Any, elasticsearch: FakeElasticsearch, batch: Any) -> None:
    one = task()
    left = {"t+0+1007", "t+0+1009"}

    def full_shard(action: Action) -> tuple[int, str, str] | None:
        if action.id not in left:
            return None
        left.discard(action.id)
        return 429, FULL, "queue is full"

    elasticsearch.item_fault = full_shard
    counts = one.send(batch(0)).counts
    assert (one.sizes, counts.created, counts.throttled_requests, counts.retries) == ([256, 2], 256, 1, 0)
    one.send(batch(1))
    assert one.sizes[0] == 144


def test_requests_in_flight_at_one_time_halve_once(task: Any) -> None:
    throttle = task().sender.throttle
    throttle.rejected(1.0)
    throttle.rejected(1.0)
    assert throttle.share == 1 / 2
    for _ in range(20):
        throttle.rejected(throttle.share)
    assert throttle.share == LEAST_SHARE
    throttle.passed(0)
    assert throttle.share == LEAST_SHARE + RECOVERY


def test_a_document_is_sent_whole_however_small_requests_are(task: Any, make_rows: Any) -> None:
    one = task()
    for _ in range(20):
        one.sender.throttle.rejected(one.sender.throttle.share)
    assert one.send(make_rows([{"n": "x" * 9000}, {"n": 1}])).counts.created == 2
    assert one.sizes == [1, 1]


@pytest.mark.parametrize(
    "slow",
    [
        lambda actions: Response(503, b"{}", seconds=20),
        lambda actions: NoAnswerError("timed out", 60),
    ],
)
def test_a_request_that_took_long_is_repeated_in_smaller_ones(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, slow: Any
) -> None:
    """At its size it would time out again."""
    one = task(request_timeout_seconds=60)
    elasticsearch.faults.extend([slow, slow])
    counts = one.send(batch(0)).counts
    assert one.sizes[:3] == [256, 128, 64]
    assert (counts.created + counts.repeated, counts.retries, counts.slow_requests) == (256, 2, 2)


def test_slow_answers_make_later_requests_smaller(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = FakeElasticsearch.request
    seconds = iter([15.0, 14.9, *[0.0] * 50])

    def request(*args: Any) -> Response:
        answer = asked(*args)
        return Response(answer.status, answer.body, seconds=next(seconds))

    monkeypatch.setattr(FakeElasticsearch, "request", request)
    one = task(request_timeout_seconds=60)
    counts = one.send(batch(0)).counts
    assert (counts.slow_requests, counts.retries, counts.throttled_requests) == (1, 0, 0)
    one.send(batch(1))
    assert one.sizes == [128, 128]


def test_an_answer_as_usual_changes_no_request(task: Any, elasticsearch: FakeElasticsearch, batch: Any) -> None:
    """Nor does an error that is no sign of load."""
    one = task()
    elasticsearch.faults.append(lambda _: error_response(503, "unavailable_shards_exception", "not ready"))
    counts = one.send(batch(0)).counts
    assert one.sizes == [256, 256]
    assert not {"throttled_requests", "slow_requests", "throttled_seconds", "ceiling_seconds"} & counts.to_dict().keys()


@pytest.mark.parametrize(
    ("status", "error_type"),
    [(429, FULL), (429, "unknown"), (429, "cluster_block_exception"), (503, FULL)],
)
def test_a_429_about_a_full_disk_is_a_failure(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, status: int, error_type: str
) -> None:
    one = task(max_retry_seconds=20, max_throttled_seconds=100)
    elasticsearch.standing_fault = lambda _: error_response(status, error_type, "why")
    throttled = status == 429 and error_type in {FULL, "unknown"}
    assert is_throttled(status, error_type) == throttled
    state = "been throttled by the server for 100 s" if throttled else "made no progress for 20 s"
    with pytest.raises(ElasticsearchUnavailableError, match=rf"has {state} .*: {status} {error_type}: why"):
        one.send(batch(0))


def test_429s_do_not_use_up_the_time_for_retries(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, clock: Any
) -> None:
    one = task(max_retry_seconds=0.5, max_throttled_seconds=300)
    reset = lambda _: NoAnswerError("reset")  # noqa: E731
    elasticsearch.faults.extend([reset, *[too_many] * 11, reset])
    assert one.send(batch(0)).counts.created == 256
    assert clock.monotonic() > 20


def test_documents_that_exist_are_asked_for_again_after_429(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a 409 is a repetition is asked of the same server."""
    one = task(max_retry_seconds=0.5, max_throttled_seconds=300)
    one.send(batch(0))
    asked = elasticsearch.request

    def busy_for_a_while(method: str, path: str, body: bytes | None = None) -> Response:
        return too_many([]) if path.endswith("_mget") and clock.monotonic() < 60 else asked(method, path, body)

    monkeypatch.setattr(elasticsearch, "request", busy_for_a_while)
    assert one.send(batch(0)).counts.repeated == 256
    assert one.sender.waited_seconds[0] > 50


def test_failures_between_429s_have_no_more_time(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, clock: Any
) -> None:
    """The time for 429 ends, whatever else happens meanwhile."""
    one = task(max_retry_seconds=30, max_throttled_seconds=60)
    answers = iter(range(10_000))
    elasticsearch.standing_fault = lambda actions: too_many(actions) if next(answers) % 2 else NoAnswerError("reset")
    with pytest.raises(ElasticsearchUnavailableError):
        one.send(batch(0))
    assert clock.monotonic() < 100


def test_a_throttled_task_says_so(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = task(max_throttled_seconds=60)
    elasticsearch.standing_fault = too_many
    with caplog.at_level(logging.WARNING), pytest.raises(ElasticsearchUnavailableError):
        one.send(batch(0))
    first, *_ = (record.getMessage() for record in caplog.records)
    assert first.startswith("Indexing into 'clicks' has been throttled by the server for 2 s. Requests go on for ")
    assert f"429 {FULL}: queue is full" in first


def test_the_time_named_by_the_server_is_waited_for(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, clock: Any
) -> None:
    one = task()
    elasticsearch.faults.append(lambda _: Response(429, b"{}", retry_after_seconds=17))
    one.send(batch(0))
    assert 17 <= clock.monotonic() < 18
    assert 17 <= one.sender.waited_seconds[0] < 18


def test_a_time_that_is_too_long_ends_with_the_limit(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, clock: Any
) -> None:
    elasticsearch.standing_fault = lambda _: Response(429, b"{}", retry_after_seconds=86_400)
    with pytest.raises(ElasticsearchUnavailableError, match="throttled by the server for 50 s"):
        task(max_throttled_seconds=50).send(batch(0))
    assert clock.monotonic() < 52


def test_other_requests_wait_for_the_named_time_too(clock: Any) -> None:
    throttle = Throttle(max_seconds=300, timeout_seconds=60, clock=clock, cancelled=threading.Event())
    throttle.pause(12)
    throttle.pause(5)
    with throttle.turn():
        assert 12 <= clock.monotonic() < 13
    assert 12 <= throttle.waited.seconds < 13


def test_a_time_named_to_one_request_holds_for_the_task(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()
    throttle = Throttle(max_seconds=300, timeout_seconds=60, clock=clock, cancelled=cancelled)
    budget = RetryBudget("It", max_seconds=1, clock=clock, cancelled=cancelled, throttle=throttle)
    # Another thread comes while this one waits.
    waits: list[float] = []
    monkeypatch.setattr(clock, "wait", lambda _, seconds: bool(waits.append(seconds)))
    budget.wait_throttled("429", at_least=17)
    assert sum(waits) == 17
    monkeypatch.setattr(clock, "wait", lambda _, seconds: seconds == 17)
    with pytest.raises(IndexingCancelledError), throttle.turn():
        pass


def test_questions_about_an_index_are_throttled_too(task: Any, elasticsearch: FakeElasticsearch, clock: Any) -> None:
    one = task(max_retry_seconds=0.5, max_throttled_seconds=300)
    answers = [Response(429, b"{}", retry_after_seconds=20), *[too_many([])] * 8, Response(200, b"{}")]
    asked = SimpleNamespace(request=lambda *_: answers.pop(0))
    budget = one.sender.retry_budget(one.options.target)
    assert request_with_retries(asked, budget, "GET", "/clicks").status == 200  # type: ignore[arg-type]
    assert clock.monotonic() > 20
    assert one.sender.waited_seconds[0] > 20


def test_requests_shrink_although_others_pass_meanwhile(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their answers make the task's requests larger again, but not those that were refused."""
    one = task(max_throttled_seconds=100)
    waits = clock.wait

    def others_pass(*args: Any) -> bool:
        for _ in range(16):
            one.sender.throttle.passed(0)
        return bool(waits(*args))

    monkeypatch.setattr(clock, "wait", others_pass)
    elasticsearch.standing_fault = lambda actions: error_response(429, FULL, PRESSURE) if len(actions) > 100 else None
    assert one.send(batch(0)).counts.created == 256
    assert one.sizes == [256, 128, 64, 64, 128, 64, 64]


def test_a_429_among_other_failures_halves_and_is_a_retry(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any
) -> None:
    one = task()
    left = {"t+0+1003": 429, "t+0+1005": 503}

    def fails(action: Action) -> tuple[int, str, str] | None:
        status = left.pop(action.id, None)
        return None if status is None else (status, FULL, "not now")

    elasticsearch.item_fault = fails
    counts = one.send(batch(0)).counts
    assert (counts.created, counts.retries, counts.throttled_requests) == (256, 1, 0)
    one.send(batch(1))
    assert one.sizes[0] == 144


def test_letters_are_throttled_and_counted_as_documents_are(
    elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any
) -> None:
    """The questions about their index are below the ceiling, too."""
    elasticsearch.faults.extend([too_many, too_many])
    options = make_options(max_requests_per_second=0.5)
    counts = Indexer(elasticsearch, options, clock=clock).index([make_rows([b"junk"])])
    assert (counts.dead_lettered, counts.throttled_requests, counts.retries) == (1, 2, 0)
    assert len(elasticsearch.requests) == 5
    assert clock.monotonic() >= 10


def test_a_request_that_waits_ends_when_cancelled(clock: Any) -> None:
    cancelled = threading.Event()
    throttle = Throttle(max_seconds=300, timeout_seconds=60, clock=clock, cancelled=cancelled)
    throttle.pause(12)
    cancelled.set()
    with pytest.raises(IndexingCancelledError), throttle.turn():
        pass
    ceiling = Ceiling(
        FakeElasticsearch(), requests_per_second=0.1, bytes_per_second=None, clock=clock, cancelled=cancelled
    )
    with pytest.raises(IndexingCancelledError):
        ceiling.request("GET", "/")


@pytest.mark.parametrize("items", [False, True])
def test_a_server_short_of_memory_is_throttling(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, items: bool
) -> None:
    """It answers 429 with a text about bytes: smaller requests pass."""

    def pressed(actions: Sequence[Action]) -> Response | None:
        if len(actions) <= 32:
            return None
        error = error_response(429, FULL, PRESSURE)
        if not items:
            return error
        each = [{action.verb: {"_index": "clicks", "_id": action.id, **error.json()}} for action in actions]
        return Response(200, json.dumps({"items": each}).encode())

    one = task()
    elasticsearch.standing_fault = pressed
    counts = one.send(batch(0)).counts
    assert one.sizes[:4] == [256, 128, 64, 32]
    assert (counts.created, counts.retries) == (256, 0)
    assert counts.throttled_requests >= 3


def test_a_server_short_of_memory_has_the_time_for_429(
    task: Any, elasticsearch: FakeElasticsearch, batch: Any, clock: Any
) -> None:
    one = task(max_retry_seconds=5, max_throttled_seconds=200)
    elasticsearch.standing_fault = lambda _: (
        error_response(429, "circuit_breaking_exception", "Data too large") if clock.monotonic() < 120 else None
    )
    counts = one.send(batch(0)).counts
    assert (counts.created, counts.retries, len(counts.dead_letter_reasons)) == (256, 0, 0)


KEYS = {"document_id": "key", "version": "version"}


def versions_of(*numbers: int) -> dict[str, Any]:
    return {"version": pa.array(numbers, pa.int64())}


@pytest.fixture
def refused_once(elasticsearch: FakeElasticsearch) -> None:
    """The document of version 1 gets 429 at its first try."""
    refused = []

    def full(action: Action) -> tuple[int, str, str] | None:
        if action.version != 1 or refused:
            return None
        refused.append(action.id)
        return 429, FULL, "queue is full"

    elasticsearch.item_fault = full


@pytest.mark.usefixtures("refused_once")
@pytest.mark.parametrize("write_method", ["create", "index"])
def test_an_item_sent_again_after_429_does_not_overtake(
    task: Any, elasticsearch: FakeElasticsearch, make_rows: Any, write_method: str
) -> None:
    rows = make_rows([{"n": "old"}, {"n": "new"}], keys=[b"a", b"a"], offsets=[1, 2], **versions_of(1, 2))
    counts = task(**KEYS, write_method=write_method).send(rows).counts
    assert (counts.created, counts.superseded, counts.throttled_requests) == (1, 1, 1)
    assert elasticsearch.documents("clicks") == {"a": {"n": "new"}}


@pytest.mark.usefixtures("refused_once")
@pytest.mark.parametrize("write_method", ["create", "index"])
def test_an_item_sent_again_stays_behind_a_later_request(
    task: Any, elasticsearch: FakeElasticsearch, make_rows: Any, write_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's next request has the same key, and passes while the first one waits."""
    one = task(**KEYS, write_method=write_method)
    next_rows = make_rows([{"n": "new"}, None], keys=[b"a", b"b"], offsets=[3, 4], **versions_of(2, 2))
    waits = one.clock.wait

    def meanwhile(*args: Any) -> bool:
        if elasticsearch.versions("clicks").get("a") != 2:
            one.send(next_rows)
        return bool(waits(*args))

    monkeypatch.setattr(one.clock, "wait", meanwhile)
    first = make_rows([{"n": "old"}, {"n": "old"}], keys=[b"a", b"b"], offsets=[1, 2], **versions_of(1, 1))
    counts = one.send(first).counts
    assert (counts.created, counts.superseded) == (1, 1)
    assert elasticsearch.documents("clicks") == {"a": {"n": "new"}}


def test_a_ceiling_spaces_requests_from_the_beginning_on(clock: Any) -> None:
    server = FakeElasticsearch()
    ceiling = Ceiling(server, requests_per_second=4, bytes_per_second=None, clock=clock, cancelled=threading.Event())
    begun = []
    for _ in range(8):
        ceiling.request("GET", "/")
        begun.append(clock.monotonic())
    assert all(at >= 0.25 * (place + 1) for place, at in enumerate(begun))
    assert begun[-1] < 2.1
    clock.advance(60_000)
    for _ in range(4):
        ceiling.request("GET", "/")
    assert 62.5 < clock.monotonic() < 63, "time without requests is no credit for later ones"
    assert 2.7 < ceiling.waited.seconds < 2.9


@pytest.fixture
def counting() -> Iterator[Any]:
    """A server that takes every document, and notes when each request came and how large it was."""

    seen: list[tuple[float, int]] = []

    class Counting(JsonHandler):
        def do_POST(self) -> None:  # noqa: N802 - http.server's name
            body = self.rfile.read(int(self.headers["content-length"]))
            seen.append((time.monotonic(), len(body)))
            ids = [json.loads(line)["create"]["_id"] for line in body.splitlines()[::2]]
            items = [{"create": {"_index": "clicks", "_id": i, "result": "created", "status": 201}} for i in ids]
            self.answer(200, json.dumps({"items": items}).encode())

    server = JsonServer(Counting)
    yield server.url, seen
    server.close()


def index(url: str, options: Any, batches: Sequence[pa.RecordBatch]) -> IndexingCounts:
    transport = ElasticsearchTransport(Cluster.of(options), connections=2, timeout_seconds=30)
    try:
        return Indexer(transport, options).index(batches)
    finally:
        transport.close()


@pytest.mark.parametrize("ceiling", [{"max_requests_per_second": 20.0}, {"max_bytes_per_second": 30_000}])
def test_tasks_at_once_stay_below_the_ceiling(
    counting: Any, make_options: Any, make_rows: Any, ceiling: dict[str, float]
) -> None:
    """Counted by the server, over three tasks with two requests in flight each, and at every moment."""
    url, seen = counting
    tasks = 3
    options = make_options(hosts=[url], bulk_actions=20, **ceiling)
    rows = [
        make_rows([{"n": "x" * 30}] * 200, offsets=range(1000 * number, 1000 * number + 200)) for number in range(tasks)
    ]
    started = time.monotonic()
    with ThreadPoolExecutor(tasks) as pool:
        counts = list(
            pool.map(lambda number: index(url, options.for_task(number, 0, tasks), [rows[number]]), range(tasks))
        )
    assert sum(each.created for each in counts) == 600
    assert all(each.ceiling_seconds > 0 for each in counts)
    (most,) = ceiling.values()
    amounts = [1 if "max_requests_per_second" in ceiling else size for _, size in seen]
    assert sum(amounts) > most, "otherwise the ceiling has nothing to do"
    sent = 0
    for (at, _), amount in zip(seen, amounts, strict=True):
        sent += amount
        assert sent <= most * (at - started)


def test_a_throttling_server_gets_all_documents_over_http(make_options: Any, make_rows: Any) -> None:
    """It takes at most 64 documents in a request, and its answer has no body."""
    documents: dict[str, Any] = {}
    sizes: list[int] = []

    class Throttling(JsonHandler):
        def do_POST(self) -> None:  # noqa: N802 - http.server's name
            lines = self.rfile.read(int(self.headers["content-length"])).splitlines()
            sizes.append(len(lines) // 2)
            if len(lines) // 2 > 64:
                self.send_response(429)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            items = []
            for action, document in zip(lines[::2], lines[1::2], strict=True):
                id_ = json.loads(action)["create"]["_id"]
                documents[id_] = json.loads(document)
                items.append({"create": {"_index": "clicks", "_id": id_, "result": "created", "status": 201}})
            self.answer(200, json.dumps({"items": items}).encode())

    server = JsonServer(Throttling)
    options = make_options(hosts=[server.url], requests_in_flight=1)
    try:
        counts = index(server.url, options, [make_rows([{"n": 100}] * 512, offsets=range(1000, 1512))])
    finally:
        server.close()
    assert (counts.created, counts.retries, len(documents)) == (512, 0, 512)
    assert sizes[:4] == [512, 256, 128, 64]
    assert counts.throttled_requests == sum(size > 64 for size in sizes)
    assert counts.throttled_seconds > 0
    assert IndexingCounts.from_dict(counts.to_dict()) == counts


@pytest.mark.parametrize("moment", ["given up", "told to wait"])
def test_a_request_whose_turn_comes_looks_again(moment: str, clock: Any) -> None:
    """At what happened to the requests before it."""
    cancelled = threading.Event()
    throttle = Throttle(max_seconds=300, timeout_seconds=60, clock=clock, cancelled=cancelled)
    throttle.rejected(1.0)
    begun: list[float] = []
    ended: list[BaseException] = []

    def second() -> None:
        try:
            with throttle.turn():
                begun.append(clock.monotonic())
        except IndexingCancelledError as error:
            ended.append(error)

    other = threading.Thread(target=second)
    with throttle.turn():
        other.start()
        other.join(0.05)
        cancelled.set() if moment == "given up" else throttle.pause(17)
    other.join(20)
    assert (len(ended), len(begun)) == ((1, 0) if moment == "given up" else (0, 1))
    assert not begun or begun[0] >= 17


def test_one_request_at_a_time_while_throttled() -> None:
    throttle = Throttle(max_seconds=300, timeout_seconds=60, clock=SystemClock(), cancelled=threading.Event())
    throttle.rejected(1.0)
    entered = threading.Event()

    def second() -> None:
        with throttle.turn():
            entered.set()

    other = threading.Thread(target=second)
    with throttle.turn():
        other.start()
        assert not entered.wait(0.05)
    other.join(20)
    assert entered.is_set()
    for _ in range(16):
        throttle.passed(0)
    with throttle.turn(), throttle.turn():
        assert throttle.share == 1
