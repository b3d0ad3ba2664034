"""What a server's errors about single documents do to a request, by the kind of each error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.fake_elasticsearch import Action, FakeElasticsearch, error_response

from headrace.elasticsearch.bulk_sender import MAX_OFFENDERS, TRIES_ALONE
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.error_kinds import KIND_OF, ErrorKind
from headrace.elasticsearch.errors import (
    ElasticsearchRefusedError,
    ElasticsearchUnavailableError,
    IndexingError,
)
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.transport import Response
from headrace.stream import ElasticsearchOutput
from headrace.stream.model import StreamDefinitionError

Index = Callable[..., IndexingCounts]
INDEX, LETTERS = "clicks", "clicks-dead-letters"


@pytest.fixture
def index(elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any) -> Index:
    def index_rows(number: int = 20, **options: Any) -> IndexingCounts:
        indexer = Indexer(elasticsearch, make_options(**options), clock=clock)
        return indexer.index([make_rows([{"n": n} for n in range(number)])])

    return index_rows


def fails(ids: set[str], status: int, kind: str) -> Callable[[Action], tuple[int, str, str] | None]:
    return lambda action: (status, kind, "it is this document") if action.id in ids else None


def whole_fails(status: int, kind: str, when: Callable[[Sequence[Action]], bool]) -> Any:
    return lambda actions: error_response(status, kind, "it is what was sent") if when(actions) else None


def has(*ids: str) -> Callable[[Sequence[Action]], bool]:
    return lambda actions: any(action.id in ids for action in actions)


@pytest.mark.parametrize("kind", ["illegal_state_exception", "stack_overflow_error", "exception", "new_exception"])
@pytest.mark.parametrize("whole", [False, True])
def test_one_document_that_breaks_the_server_is_a_dead_letter(
    index: Index, elasticsearch: FakeElasticsearch, kind: str, whole: bool
) -> None:
    if whole:
        elasticsearch.standing_fault = whole_fails(500, kind, has("t+0+7"))
    else:
        elasticsearch.item_fault = fails({"t+0+7"}, 500, kind)
    counts = index()
    assert (counts.created, dict(counts.dead_letter_reasons)) == (19, {kind: 1})
    assert "t+0+7" not in elasticsearch.documents(INDEX)


@pytest.mark.parametrize("whole", [False, True])
def test_one_suspect_above_the_limit_fails_the_batch(
    index: Index, elasticsearch: FakeElasticsearch, whole: bool
) -> None:
    """As many suspects as the limit are dead letters."""

    def fault(number: int) -> None:
        bad = {f"t+0+{n}" for n in range(number)}
        if whole:
            elasticsearch.standing_fault = whole_fails(500, "exception", has(*bad))
        else:
            elasticsearch.item_fault = fails(bad, 500, "exception")

    fault(MAX_OFFENDERS)
    assert index(100).dead_lettered == MAX_OFFENDERS
    fault(MAX_OFFENDERS + 1)
    with pytest.raises(ElasticsearchUnavailableError, match="error_kinds="):
        index(100)


@pytest.mark.parametrize("number", [1, 20, 5000])
@pytest.mark.parametrize("kind", ["exception", "circuit_breaking_exception", "i_o_exception", ""])
@pytest.mark.parametrize("whole", [False, True])
def test_an_ill_server_makes_no_dead_letter_and_few_requests(
    index: Index, elasticsearch: FakeElasticsearch, number: int, kind: str, whole: bool
) -> None:
    if whole:
        elasticsearch.standing_fault = whole_fails(500, kind, lambda _: True)
    else:
        elasticsearch.item_fault = lambda _: (500, kind, "ill")
    with pytest.raises(ElasticsearchUnavailableError):
        index(number)
    assert len(elasticsearch.bulks) < 60
    assert LETTERS not in elasticsearch.indices


@pytest.mark.parametrize("whole", [False, True])
def test_a_server_that_falls_ill_meanwhile_makes_no_dead_letter(
    index: Index, elasticsearch: FakeElasticsearch, whole: bool
) -> None:
    """One document fails at first, and then all do."""
    seen: list[int] = []

    def ill(actions: Sequence[Action]) -> Response | None:
        seen.append(1)
        return error_response(500, "exception", "ill") if len(seen) > 1 else None

    elasticsearch.item_fault = fails({"t+0+7"}, 500, "exception")
    if whole:
        elasticsearch.standing_fault = ill
    else:
        elasticsearch.item_fault = lambda action: (
            (500, "exception", "ill") if len(elasticsearch.bulks) > 1 or action.id == "t+0+7" else None
        )
    with pytest.raises(ElasticsearchUnavailableError):
        index()
    assert len(elasticsearch.bulks) < 60
    assert LETTERS not in elasticsearch.indices


def test_a_lone_document_is_compared_with_an_earlier_requests(index: Index, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.item_fault = fails({"t+0+4"}, 500, "exception")
    counts = index(5, bulk_actions=4, requests_in_flight=1)
    assert (counts.created, counts.dead_lettered) == (4, 1)


def test_the_comparison_changes_nothing_in_the_index(index: Index, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.item_fault = fails({"t+0+7"}, 500, "exception")
    index(write_method="index")
    assert set(elasticsearch.versions(INDEX).values()) == {1}


def test_a_batch_of_one_document_fails_and_names_the_setting(index: Index, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.item_fault = fails({"t+0+0"}, 500, "exception")
    with pytest.raises(ElasticsearchUnavailableError, match=r'500 exception.*error_kinds=\{"exception": "document"\}'):
        index(1)
    assert index(1, error_kinds={"exception": "document"}).dead_lettered == 1


def test_a_document_that_passes_alone_is_no_dead_letter(index: Index, elasticsearch: FakeElasticsearch) -> None:
    tries: list[str] = []

    def passing(action: Action) -> tuple[int, str, str] | None:
        if action.id != "t+0+7":
            return None
        tries.append(action.id)
        return (500, "exception", "not yet") if len(tries) <= TRIES_ALONE else None

    elasticsearch.item_fault = passing
    assert index().created == 20


@pytest.mark.parametrize("kind", ["circuit_breaking_exception", "es_rejected_execution_exception"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_request_too_large_for_the_servers_memory_is_halved(
    index: Index, elasticsearch: FakeElasticsearch, kind: str, whole: bool
) -> None:
    reason = "rejected execution of coordinating operation [operation_bytes=9, max_coordinating_bytes=8]"

    def large(actions: Sequence[Action]) -> Response | None:
        if len(actions) < 4:
            return None
        if whole:
            return error_response(429, kind, reason)
        error = {"status": 429, "error": {"type": kind, "reason": reason}}
        items = [{action.verb: {"_index": INDEX, "_id": action.id, **error}} for action in actions]
        return Response(200, json.dumps({"items": items}).encode())

    elasticsearch.standing_fault = large
    counts = index(20)
    assert (counts.created, counts.dead_lettered) == (20, 0)


def test_a_document_too_large_for_the_memory_is_a_bare_letter(
    index: Index, elasticsearch: FakeElasticsearch, clock: Any
) -> None:
    """The server has not enough memory for it; its letter is without its value."""
    elasticsearch.standing_fault = whole_fails(429, "circuit_breaking_exception", has("t+0+7"))
    counts = index(20, max_retry_seconds=30)
    assert (counts.created, counts.dead_lettered) == (19, 1)
    (letter,) = elasticsearch.documents(LETTERS).values()
    assert "value" not in letter and letter["reason"]["type"] == "circuit_breaking_exception"
    # All of the time for retries, of which the requests themselves take some.
    assert sum(clock.waits) > 15


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (500, "security_exception"),
        (403, "security_exception"),
        (404, "index_not_found_exception"),
        (418, "teapot_exception"),
        (409, "resource_already_exists_exception"),
        (400, "index_closed_exception"),
    ],
)
def test_an_error_that_is_no_documents_fails_the_batch_by_name(
    index: Index, elasticsearch: FakeElasticsearch, status: int, kind: str
) -> None:
    elasticsearch.item_fault = fails({"t+0+7"}, status, kind)
    with pytest.raises(ElasticsearchRefusedError, match=f"{kind}: it is this document"):
        index()


@pytest.mark.parametrize("error", [{"error": "busy with it"}, {"error": {"reason": "busy with it"}}, {}])
@pytest.mark.parametrize("status", [400, 404, 500])
def test_an_error_without_a_type_fails_the_batch(
    index: Index, elasticsearch: FakeElasticsearch, error: dict[str, Any], status: int
) -> None:
    def answer(actions: Sequence[Action]) -> Response | None:
        items = [
            {
                action.verb: {"_index": INDEX, "_id": action.id}
                | ({"status": status, **error} if action.id == "t+0+7" else {"status": 201, "result": "created"})
            }
            for action in actions
        ]
        return Response(200, json.dumps({"items": items}).encode())

    elasticsearch.standing_fault = answer
    with pytest.raises(ElasticsearchRefusedError, match=f"{status}, unknown: "):
        index()


def _answered(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Sequence[Action]], Response]:
    def answer(actions: Sequence[Action]) -> Response:
        items = [
            {action.verb: {"_index": INDEX, "_id": action.id, "status": 201, "result": "created"}} for action in actions
        ]
        return Response(200, json.dumps({"items": change(items)}).encode())

    return answer


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items[1:],
        lambda items: [*items, items[0]],
        lambda items: items[::-1],
        lambda items: [items[0], *items[:-1]],
        lambda items: [{"create": {**item["create"], "_index": "other"}} for item in items],
        lambda items: [{"create": {"_index": INDEX, "_id": item["create"]["_id"], "status": 201}} for item in items],
        lambda items: [{"create": {"_index": INDEX, "result": "created"}} for _ in items],
        lambda _: [1] * 20,
        lambda _: {"0": {}},
        lambda _: None,
    ],
)
def test_an_answer_that_does_not_fit_the_request_fails_visibly(
    index: Index, elasticsearch: FakeElasticsearch, change: Any
) -> None:
    elasticsearch.standing_fault = _answered(change)
    with pytest.raises(IndexingError, match=r"no bulk answer|another order|was written as|refuses"):
        index()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"ok"', b"null"])
def test_a_success_without_json_fails_visibly(index: Index, elasticsearch: FakeElasticsearch, body: bytes) -> None:
    elasticsearch.standing_fault = lambda _: Response(200, body)
    with pytest.raises(ElasticsearchUnavailableError, match="no bulk answer"):
        index()


def _with_conflicts(elasticsearch: FakeElasticsearch, index: Index) -> None:
    index(5)
    elasticsearch.bulks.clear()


def test_documents_that_the_user_may_not_read_fail_the_batch(index: Index, elasticsearch: FakeElasticsearch) -> None:
    _with_conflicts(elasticsearch, index)
    elasticsearch.not_read = {f"t+0+{n}": ("security_exception", "action [..mget..] is unauthorized") for n in range(5)}
    with pytest.raises(ElasticsearchRefusedError, match=r"security_exception.*privileges"):
        index(5)
    with pytest.raises(ElasticsearchRefusedError, match="security_exception"):
        index(5, error_kinds={"security_exception": "document"})


def test_an_unknown_error_in_place_of_a_document_fails_the_batch(
    index: Index, elasticsearch: FakeElasticsearch
) -> None:
    _with_conflicts(elasticsearch, index)
    elasticsearch.not_read = {"t+0+3": ("new_exception", "why")}
    with pytest.raises(ElasticsearchRefusedError, match=r"'t\+0\+3'.*new_exception: why"):
        index(5)
    assert index(5, error_kinds={"new_exception": "document"}).uncompared == 1


def test_a_document_the_server_cannot_parse_now_is_uncompared(index: Index, elasticsearch: FakeElasticsearch) -> None:
    _with_conflicts(elasticsearch, index)
    elasticsearch.not_read = {"t+0+3": ("x_content_parse_exception", "nested too deep")}
    counts = index(5)
    assert (counts.repeated, counts.uncompared) == (4, 1)


@pytest.mark.parametrize("change", [lambda docs: docs[1:], lambda docs: docs[::-1], lambda docs: [None, *docs[1:]]])
def test_an_answer_about_other_documents_fails_the_batch(
    index: Index, elasticsearch: FakeElasticsearch, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    _with_conflicts(elasticsearch, index)
    asked = FakeElasticsearch._mget

    def changed(self: FakeElasticsearch, *args: Any) -> Response:
        return Response(200, json.dumps({"docs": change(asked(self, *args).json()["docs"])}).encode())

    monkeypatch.setattr(FakeElasticsearch, "_mget", changed)
    with pytest.raises(ElasticsearchRefusedError, match="not about those asked for"):
        index(5)


def test_a_user_moves_a_type_of_error_to_each_kind(index: Index, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.item_fault = fails({"t+0+7"}, 400, "document_parsing_exception")
    assert index().dead_lettered == 1
    with pytest.raises(ElasticsearchUnavailableError):
        index(error_kinds={"document_parsing_exception": "passing"})
    for kind in ("credential", "index"):
        with pytest.raises(ElasticsearchRefusedError):
            index(error_kinds={"document_parsing_exception": kind})
    elasticsearch.item_fault = fails({"t+0+7"}, 429, "own_throttle_exception")
    assert index(error_kinds={"own_throttle_exception": "document"}).dead_lettered == 1


@pytest.mark.parametrize(
    "kinds", [{"exception": "success"}, {"version_conflict_engine_exception": "document"}, {"": "document"}]
)
def test_no_error_can_be_moved_to_success(kinds: dict[str, str]) -> None:
    with pytest.raises(StreamDefinitionError, match="error_kinds"):
        ElasticsearchOutput(hosts="http://h:1", index="i", error_kinds=kinds)


def test_every_type_of_the_table_is_written_as_by_the_server() -> None:
    assert all(type_ == type_.lower() and " " not in type_ for type_ in KIND_OF)
    assert set(KIND_OF.values()) == set(ErrorKind)


def test_a_deletion_that_fails_alone_is_a_dead_letter(
    elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any
) -> None:
    rows = make_rows([{"n": 0}, None], keys=[b"a", b"b"])
    elasticsearch.item_fault = fails({"b"}, 500, "exception")
    counts = Indexer(elasticsearch, make_options(document_id="key"), clock=clock).index([rows])
    assert (counts.created, counts.dead_lettered) == (1, 1)
