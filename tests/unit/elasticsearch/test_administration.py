"""Administration, whose requests an Elasticsearch in memory answers."""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch

from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.document_mapping import MappingBody
from headrace.elasticsearch.errors import (
    ElasticsearchRefusedError,
    ElasticsearchUnavailableError,
    UnsuitableTargetError,
)
from headrace.elasticsearch.retry_budget import RetryBudget
from headrace.elasticsearch.search_server import ask_server
from headrace.elasticsearch.target import ConcreteIndex
from headrace.elasticsearch.transport import NoAnswerError, Response
from headrace.stream import DeadLetterTopic, ElasticsearchOutput


class Answers:
    """Gives these answers, one after another, and remembers the requests. Says ``who`` it is."""

    def __init__(self, *answers: Response | NoAnswerError, who: Response | NoAnswerError | None = None) -> None:
        self._answers = deque(answers)
        self.who: Response | NoAnswerError = who or ELASTICSEARCH
        self.asked_who = 0
        self.requests: list[tuple[str, str, Any]] = []

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        if path == "/":
            self.asked_who += 1
            if isinstance(self.who, NoAnswerError):
                raise self.who
            return self.who
        self.requests.append((method, path.partition("?")[0], json.loads(body) if body else None))
        answer = self._answers.popleft()
        if isinstance(answer, NoAnswerError):
            raise answer
        return answer

    def close(self) -> None: ...


def answer(status: int, body: Any) -> Response:
    return Response(status, json.dumps(body).encode())


def error(status: int, kind: str = "es_rejected_execution_exception") -> Response:
    return answer(status, {"error": {"type": kind, "reason": "why"}, "status": status})


ELASTICSEARCH = replace(answer(200, {"version": {"number": "9.2.1"}}), product="Elasticsearch")


@pytest.fixture
def administer(clock: Any) -> Any:
    def make(transport: Any, max_retry_seconds: float = 30) -> Administration:
        return Administration(transport, "http://fake:9200", max_retry_seconds=max_retry_seconds, clock=clock)

    return make


def ask(administration: Administration, **options: Any) -> Any:
    return administration.ask("Asking", "clicks", "GET", "/clicks", **options)


def test_a_request_is_repeated_after_a_passing_fault(administer: Any, clock: Any) -> None:
    faults = [error(429), error(503), NoAnswerError("reset"), answer(200, {"clicks": {}})]
    assert ask(administer(Answers(*faults))) == {"clicks": {}}
    assert len(clock.waits) == 3


def test_a_request_fails_if_there_is_no_answer_for_too_long(administer: Any) -> None:
    with pytest.raises(ElasticsearchUnavailableError, match=r"Asking has made no progress for 1 s .*: reset"):
        ask(administer(Answers(*[NoAnswerError("reset")] * 50), max_retry_seconds=1))
    with pytest.raises(ElasticsearchUnavailableError, match=r"Asking failed: reset"):
        ask(administer(Answers(NoAnswerError("reset")), max_retry_seconds=0))


@pytest.mark.parametrize(("status", "remedy"), [(401, "login"), (403, "privileges"), (400, "Correct the index")])
def test_a_refusal_is_an_error_with_its_remedy(administer: Any, status: int, remedy: str) -> None:
    with pytest.raises(ElasticsearchRefusedError, match=rf"'clicks' with {status}, some_exception: why.*{remedy}"):
        ask(administer(Answers(error(status, "some_exception"))))


def test_a_missing_index_is_none_or_an_error(administer: Any) -> None:
    missing = error(404, "index_not_found_exception")
    assert ask(administer(Answers(missing)), missing_is_none=True) is None
    with pytest.raises(ElasticsearchRefusedError, match="index_not_found_exception"):
        ask(administer(Answers(missing)))


def page(*ids: str, failed: int = 0) -> Response:
    hits = {"hits": [{"_id": id_} for id_ in ids]}
    return answer(200, {"_scroll_id": "s", "hits": hits, "_shards": {"failed": failed}})


CLOSED = answer(200, {"succeeded": True})
LOST = {
    "expired": error(404, "search_context_missing_exception"),
    "a shard is missing": page("c", failed=1),
    "no answer": NoAnswerError("reset"),
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_a_search_whose_scroll_was_lost_is_started_again(administer: Any, lost: Response | NoAnswerError) -> None:
    """The same page requested again would be the next one."""
    answers = Answers(page("a", "b"), lost, CLOSED, page("a"), page("d"), page(), CLOSED)
    assert administer(answers).ids("Asking", "clicks", {}) == ["a", "d"]
    assert [(method, path) for method, path, _ in answers.requests] == [
        *(("POST", "/clicks/_search"), ("POST", "/_search/scroll"), ("DELETE", "/_search/scroll")),
        *(("POST", "/clicks/_search"), ("POST", "/_search/scroll"), ("POST", "/_search/scroll")),
        ("DELETE", "/_search/scroll"),
    ]


def test_a_scroll_that_is_lost_again_and_again_is_an_error(administer: Any) -> None:
    answers = [page("a"), LOST["expired"], CLOSED] * 50
    with pytest.raises(ElasticsearchUnavailableError, match="404 search_context_missing_exception: why"):
        administer(Answers(*answers), max_retry_seconds=1).ids("Asking", "clicks", {})


def test_there_are_no_ids_in_an_index_that_is_missing(administer: Any) -> None:
    assert administer(Answers(error(404, "index_not_found_exception"))).ids("Asking", "clicks", {}) == []


ELASTIC = "You Know, for Search"
OTHERS = {
    "OpenSearch 1": (200, {"version": {"distribution": "opensearch", "number": "1.3.20"}}, "is OpenSearch 1.3.20"),
    "OpenSearch 4": (200, {"version": {"distribution": "opensearch", "number": "4.0.0"}}, "is OpenSearch 4.0.0"),
    "Elasticsearch 7": (200, {"version": {"number": "7.17.29"}, "tagline": ELASTIC}, "is Elasticsearch 7.17.29"),
    "Elasticsearch 10": (200, {"version": {"number": "10.0.1"}, "tagline": ELASTIC}, "is Elasticsearch 10.0.1"),
    "one with a version": (200, {"version": {"number": "9.2.1"}}, "neither Elasticsearch nor .* a version 9.2.1"),
    "one without": (404, "nothing here", "neither Elasticsearch nor OpenSearch, by its answer to GET /: 404"),
    "one that lists versions": (200, {"version": ["9.2.1"]}, "neither Elasticsearch nor OpenSearch"),
}


@pytest.mark.parametrize("server", OTHERS.values(), ids=OTHERS)
def test_another_server_is_refused_by_every_request_alike(
    administer: Any, clock: Any, server: tuple[int, Any, str]
) -> None:
    """A write is refused by it as every other request is."""
    status, said, error_text = server
    who = answer(status, said)
    with pytest.raises(ElasticsearchRefusedError, match=error_text) as by_request:
        ask(administer(Answers(who=who)))
    with pytest.raises(ElasticsearchRefusedError, match=error_text) as by_write:
        ask_server(Answers(who=who), never_again(clock), "http://fake:9200")
    assert str(by_request.value) == str(by_write.value)
    assert "http://fake:9200" in str(by_write.value)
    assert "Elasticsearch 8 or 9, OpenSearch 2 or 3" in str(by_write.value)


def never_again(clock: Any) -> RetryBudget:
    return RetryBudget("Asking", max_seconds=0, clock=clock, cancelled=threading.Event())


SUPPORTED_SERVERS = {
    "Elasticsearch 8.19.21": replace(answer(200, {"version": {"number": "8.19.21"}}), product="Elasticsearch"),
    "Elasticsearch 9.1.0": answer(200, {"version": {"number": "9.1.0"}, "tagline": ELASTIC}),
    "Elasticsearch": replace(answer(400, {"error": "no handler found"}), product="Elasticsearch"),
    "OpenSearch 2.19.6": answer(200, {"version": {"distribution": "opensearch", "number": "2.19.6"}}),
    "OpenSearch 3.3.2": answer(200, {"version": {"distribution": "opensearch", "number": "3.3.2"}}),
}


@pytest.mark.parametrize("name", SUPPORTED_SERVERS)
def test_a_supported_server_is_recognised_by_its_answer(clock: Any, name: str) -> None:
    assert str(ask_server(Answers(who=SUPPORTED_SERVERS[name]), never_again(clock), "here")) == name


@pytest.mark.parametrize("failure", [error(503), error(429), NoAnswerError("reset")], ids=str)
def test_a_failed_question_about_the_server_is_asked_again(administer: Any, failure: Response | NoAnswerError) -> None:
    """The failure is never taken for the answer."""
    answers = Answers(answer(200, {}), answer(200, {}), who=failure)
    administration = administer(answers, max_retry_seconds=1)
    with pytest.raises(ElasticsearchUnavailableError):
        ask(administration)
    assert answers.asked_who > 1
    assert answers.requests == [], "nothing is requested of a server that is not known"
    answers.who = SUPPORTED_SERVERS["OpenSearch 2.19.6"]
    ask(administration)
    asked = answers.asked_who
    ask(administration)
    assert answers.asked_who == asked


@pytest.mark.parametrize("status", [401, 403])
def test_a_user_who_may_not_ask_who_the_server_is_can_write(clock: Any, status: int) -> None:
    ask_server(Answers(who=error(status)), never_again(clock), "http://fake:9200")


def test_the_server_is_asked_who_it_is_once(administer: Any) -> None:
    answers = Answers(answer(200, {}), answer(200, {}))
    administration = administer(answers)
    ask(administration)
    ask(administration)
    assert answers.asked_who == 1


def test_the_concrete_index_is_the_same_as_a_write_finds(administer: Any, elasticsearch: FakeElasticsearch) -> None:
    administration = administer(elasticsearch)
    assert administration.concrete_index("clicks") is None
    elasticsearch.indices["clicks"] = {}
    assert administration.concrete_index("clicks") == ConcreteIndex("clicks", "uuid of clicks")
    elasticsearch.descriptions["clicks"] = {"clicks-1": {"aliases": {"clicks": {"is_write_index": True}}}}
    with pytest.raises(UnsuitableTargetError, match="rolls over"):
        administration.concrete_index("clicks")


def alias_of(index: str) -> Response:
    return answer(200, {index: {"aliases": {"live": {}}, "settings": {"index": {"uuid": "u"}}}})


NEW = answer(200, {"new": {"aliases": {}, "settings": {"index": {"uuid": "v"}}}})


def test_an_output_whose_two_names_are_of_one_index_cannot_write(administer: Any) -> None:
    output = ElasticsearchOutput(hosts="http://h:1", index="live", dead_letter_index="letters")
    answers = Answers(alias_of("new"), alias_of("new"))
    with pytest.raises(UnsuitableTargetError, match="'live' and 'letters' are names of one index, 'new'"):
        administer(answers).check_writable(output)
    answers = Answers(alias_of("new"), alias_of("other"), answer(200, {}), answer(200, {"has_all_requested": True}))
    administer(answers).check_writable(output)


@pytest.mark.parametrize("answers", [(), (answer(200, {"has_all_requested": True}),)])
def test_what_an_output_without_names_needs_is_not_asked(administer: Any, answers: tuple[Response, ...]) -> None:
    """Its dead letters are in a topic; and of an index that a record names alone, a superuser has the privileges."""
    letters = DeadLetterTopic(topic="letters", bootstrap_servers="h:1")
    index = "orders-{topic}" if answers else "{topic}"
    output = ElasticsearchOutput(hosts="http://h:1", index=index, dead_letter_topic=letters)
    given = Answers(*answers)
    administer(given).check_writable(output)
    assert len(given.requests) == len(answers)


def test_an_alias_moves_in_one_request_with_its_properties(administer: Any) -> None:
    held = answer(200, {"old": {"aliases": {"live": {"filter": {"term": {"a": 1}}, "search_routing": "x"}}}})
    answers = Answers(alias_of("old"), NEW, held, answer(200, {"acknowledged": True}))
    assert administer(answers).move_alias("live", "new") == "old"
    actions = [
        {"remove": {"index": "old", "alias": "live", "must_exist": True}},
        {"add": {"index": "new", "alias": "live", "filter": {"term": {"a": 1}}, "search_routing": "x"}},
    ]
    assert answers.requests[-1] == ("POST", "/_aliases", {"actions": actions})


def test_an_alias_that_points_to_the_index_already_is_left_alone(administer: Any) -> None:
    answers = Answers(alias_of("new"), NEW)
    assert administer(answers).move_alias("live", "new") == "new"
    assert all(method == "GET" for method, _, _ in answers.requests)


def test_an_alias_that_was_moved_meanwhile_stays_where_it_is(administer: Any) -> None:
    held = answer(200, {"old": {"aliases": {"live": {}}}})
    with pytest.raises(ElasticsearchRefusedError, match="aliases_not_found_exception"):
        administer(Answers(alias_of("old"), NEW, held, error(404, "aliases_not_found_exception"))).move_alias(
            "live", "new"
        )


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([error(404)], "neither an index nor an alias"),
        ([alias_of("live")], "is an index itself"),
        ([alias_of("old"), error(404)], "'new' is not the name of an index"),
        ([alias_of("old"), alias_of("other")], "'new' is not the name of an index"),
    ],
)
def test_only_an_alias_of_one_index_moves_and_only_to_an_index(
    administer: Any, answers: list[Response], says: str
) -> None:
    with pytest.raises(UnsuitableTargetError, match=says):
        administer(Answers(*answers)).move_alias("live", "new")


BODY: Any = {"mappings": {"properties": {"n": {"type": "long"}}}}


@pytest.mark.parametrize("kind", MappingBody)
def test_what_another_made_meanwhile_is_compared(administer: Any, kind: MappingBody) -> None:
    name = kind.value.replace("-", "_")
    there = {"clicks-1": BODY} if kind is MappingBody.MAPPING else {f"{name}s": [{"name": "clicks", name: BODY}]}
    made = Answers(error(404), error(400, "resource_already_exists_exception"), answer(200, there))
    assert administer(made).create(kind, "clicks", BODY) == []
    path = kind.path("clicks")
    assert made.requests == [("GET", path, None), ("PUT", path, BODY), ("GET", path, None)]


def test_an_index_that_may_not_be_made_is_an_error(administer: Any) -> None:
    refusing = Answers(error(404), error(403, "security_exception"), error(404))
    with pytest.raises(ElasticsearchRefusedError, match="security_exception"):
        administer(refusing).create(MappingBody.MAPPING, "clicks", BODY)


def test_what_exists_gets_no_request_but_the_question(administer: Any) -> None:
    existing = Answers(answer(200, {"clicks": {"mappings": {}}}))
    assert administer(existing).create(MappingBody.MAPPING, "clicks", BODY) == ["mappings.properties is missing"]
    assert [method for method, _, _ in existing.requests] == ["GET"]


def test_what_is_no_single_index_is_not_compared(administer: Any) -> None:
    several = Answers(answer(200, {"clicks-1": BODY, "clicks-2": BODY}))
    with pytest.raises(UnsuitableTargetError, match="an alias of 2 indices"):
        administer(several).create(MappingBody.MAPPING, "clicks", BODY)
