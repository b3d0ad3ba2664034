"""Reading dead letters while the caller takes long over each; test_dlq.py has the real Elasticsearch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.dead_letter_index import IDS_PAGE, PAGE, DeadLetterIndex, LetterFilter
from headrace.elasticsearch.errors import ElasticsearchUnavailableError
from headrace.elasticsearch.transport import Response
from headrace.testing.fake_elasticsearch import official_client


class Searches:
    """An index of letters whose scrolls can be closed, as Elasticsearch closes them after two minutes."""

    def __init__(self, letters: int) -> None:
        self.ids = [f"letter-{number}" for number in range(letters)]
        self.scrolls: dict[str, list[str]] = {}
        self.attempts: dict[str, int] = {}
        self.written_anew: set[str] = set()
        self.busy: dict[str, int] = {}
        """How often the deletion of a letter is rejected because the cluster is busy."""

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        lines = (body or b"{}").splitlines()
        asked = json.loads(lines[0])
        if path == "/_search/scroll":
            return self._scroll(method, asked["scroll_id"])
        if "/_bulk" in path:
            return self._answer({"items": [{"delete": self._delete(json.loads(line)["delete"])} for line in lines]})
        if "scroll=" in path:
            self.scrolls["s"] = list(self.ids)
            return self._hits(self._page("s", asked["size"]), "s")
        if path.partition("?")[0].endswith("/_search"):
            (chosen,) = [term["ids"]["values"] for term in asked["query"]["bool"]["filter"] if "ids" in term]
            return self._hits([id_ for id_ in self.ids if id_ in chosen][: asked["size"]], None)
        return self._answer({})

    def close(self) -> None: ...

    def _scroll(self, method: str, scroll: str) -> Response:
        if method == "DELETE":
            del self.scrolls[scroll]
            return self._answer({})
        if scroll not in self.scrolls:
            return Response(404, b'{"error": {"type": "search_context_missing_exception"}}')
        return self._hits(self._page(scroll, IDS_PAGE), scroll)

    def _page(self, scroll: str, size: int) -> list[str]:
        left = self.scrolls[scroll]
        self.scrolls[scroll] = left[size:]
        return left[:size]

    def _hits(self, ids: list[str], scroll: str | None) -> Response:
        hits = [{"_id": id_, "_seq_no": 1, "_primary_term": 1, "_source": self._source(id_)} for id_ in ids]
        shards = {"successful": 1, "skipped": 0, "total": 1}
        found = {"hits": {"hits": hits}, "_shards": shards}
        return self._answer({**found, **({} if scroll is None else {"_scroll_id": scroll})})

    def _source(self, id_: str) -> dict[str, int]:
        return {"attempt": self.attempts[id_]} if id_ in self.attempts else {}

    def _delete(self, action: dict[str, Any]) -> dict[str, Any]:
        assert (action["if_seq_no"], action["if_primary_term"]) == (1, 1)
        if self.busy.get(action["_id"], 0):
            self.busy[action["_id"]] -= 1
            return {"status": 429, "error": {"type": "es_rejected_execution_exception", "reason": "the queue is full"}}
        if action["_id"] in self.written_anew:
            return {"status": 409}
        self.ids.remove(action["_id"])
        return {"status": 200}

    def _answer(self, body: Any) -> Response:
        return Response(200, json.dumps(body).encode())


@pytest.fixture
def letters_in(make_options: Any, clock: Any) -> Callable[[Searches], DeadLetterIndex]:
    def index(searches: Searches) -> DeadLetterIndex:
        administration = Administration(official_client(searches), max_retry_seconds=1, clock=clock)
        return DeadLetterIndex(administration, make_options())

    return index


def test_letters_are_read_on_after_any_scroll_has_expired(letters_in: Any) -> None:
    searches = Searches(2 * IDS_PAGE + 3)
    found = []
    for letter in letters_in(searches).find(LetterFilter()):
        assert searches.scrolls == {}, "nothing is kept open while a letter is worked on"
        found.append(letter.id)
    assert found == searches.ids


def test_a_letter_that_is_gone_when_its_page_is_read_is_left_out(letters_in: Any) -> None:
    searches = Searches(2 * PAGE)
    letters = letters_in(searches).find(LetterFilter())
    first = next(letters)
    del searches.ids[PAGE + 1]
    assert [first.id, *(letter.id for letter in letters)] == searches.ids


def test_no_more_letters_are_read_than_asked_for(letters_in: Any) -> None:
    index = letters_in(Searches(500))
    assert len(list(index.find(LetterFilter(), limit=120, contents=False))) == 120
    assert list(letters_in(Searches(0)).find(LetterFilter())) == []


def test_letters_of_earlier_attempts_are_withdrawn_and_no_others(letters_in: Any) -> None:
    searches = Searches(5)
    searches.attempts = {"letter-0": 1, "letter-1": 2, "letter-2": 3, "letter-3": 1}
    searches.written_anew = {"letter-3"}
    assert letters_in(searches).withdraw(10_000, 3) == 2
    assert searches.ids == ["letter-2", "letter-3", "letter-4"], "one of this attempt, one just written, one without"


def test_a_deletion_that_a_busy_cluster_rejects_is_sent_again_alone(letters_in: Any) -> None:
    searches = Searches(4)
    searches.attempts = dict.fromkeys(searches.ids, 1)
    searches.written_anew = {"letter-3"}
    searches.busy = {"letter-1": 2}
    assert letters_in(searches).withdraw(10_000, 3) == 3
    assert searches.ids == ["letter-3"]
    searches.busy = {"letter-3": 1_000_000}
    with pytest.raises(ElasticsearchUnavailableError, match="429 es_rejected_execution_exception: the queue is full"):
        letters_in(searches).withdraw(10_000, 3)
