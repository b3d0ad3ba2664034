"""Reading and replaying dead letters where the caller takes long over each; test_dlq.py has the real Elasticsearch."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.fake_elasticsearch import Action, FakeElasticsearch

from headrace.clock import SystemClock
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.dead_letter_index import (
    IDS_PAGE,
    PAGE,
    DeadLetterIndex,
    DeadLetterReplay,
    LetterFilter,
    StoredLetter,
)
from headrace.elasticsearch.errors import ElasticsearchUnavailableError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.transport import Response
from headrace.stream import ElasticsearchOutput


class Searches:
    """An index of letters whose scrolls can be closed, as Elasticsearch closes them after two minutes."""

    def __init__(self, letters: int) -> None:
        self.ids = [f"letter-{number}" for number in range(letters)]
        self.scrolls: dict[str, list[str]] = {}
        self.attempts: dict[str, int] = {}
        self.fields: dict[str, dict[str, Any]] = {}
        """Other fields of a letter than its attempt and its index."""
        self.written_anew: set[str] = set()
        self.busy: dict[str, int] = {}
        """How often the deletion of a letter is rejected because the cluster is busy."""

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        if path == "/":
            return replace(self._answer({"version": {"number": "9.2.1"}}), product="Elasticsearch")
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

    def _source(self, id_: str) -> dict[str, Any]:
        of_attempt = {"attempt": self.attempts[id_]} if id_ in self.attempts else {}
        return {"index": "clicks", **of_attempt, **self.fields.get(id_, {})}

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
        administration = Administration(searches, "http://fake:9200", max_retry_seconds=1, clock=clock)
        return DeadLetterIndex(administration, make_options().target)

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


def test_a_deletion_that_a_busy_cluster_rejects_is_resent_alone(letters_in: Any) -> None:
    searches = Searches(4)
    searches.attempts = dict.fromkeys(searches.ids, 1)
    searches.written_anew = {"letter-3"}
    searches.busy = {"letter-1": 2}
    assert letters_in(searches).withdraw(10_000, 3) == 3
    assert searches.ids == ["letter-3"]
    searches.busy = {"letter-3": 1_000_000}
    with pytest.raises(ElasticsearchUnavailableError, match="429 es_rejected_execution_exception: the queue is full"):
        letters_in(searches).withdraw(10_000, 3)


OLD = '{"clicks": "shop-clicks"}'
"""A mapping, before the topic of a letter without an index was added."""


@pytest.mark.parametrize(
    ("name", "of_names", "replay", "left"),
    [
        ('{"clicks": "shop-clicks", "refunds": "shop-refunds"}', True, "", ["replayed"]),
        (OLD, True, "", []),
        ("clicks", False, "", ["elsewhere", "replayed"]),
        (OLD.upper(), True, "v2", ["unnamed", "named", "clicks", "elsewhere"]),
    ],
    ids=["an edited definition", "the same one", "a plain index now", "another replay"],
)
def test_letters_of_names_that_were_edited_are_withdrawn(
    letters_in: Any, name: str, of_names: bool, replay: str, left: list[str]
) -> None:
    """Those of another replay stay, and those that one index before and now has left behind in another."""
    searches = Searches(0)
    searches.fields = {
        "unnamed": {"index": OLD, "index_names": OLD},
        "named": {"index": "shop-clicks", "index_names": OLD},
        "clicks": {"index": "clicks"},
        "elsewhere": {"index": "sales"},
        "replayed": {"index": "shop-clicks", "index_names": OLD, "replay": "v2"},
    }
    searches.ids, searches.attempts = list(searches.fields), dict.fromkeys(searches.fields, 1)
    index = letters_in(searches)
    index._target = replace(index._target, name=name, owner=replace(index._target.owner, replay=replay))
    index.withdraw(10_000, 2, of_names=of_names)
    assert searches.ids == left


LETTERS = "clicks-dead-letters"


class Notes(DeadLetterIndex):
    """Remembers what is noted, instead of asking a server that can search."""

    def __init__(self) -> None:
        self.noted: dict[str, Mapping[str, Any]] = {}

    def prepare_notes(self) -> None: ...

    def note(self, notes: Sequence[tuple[StoredLetter, Mapping[str, Any]]]) -> list[StoredLetter]:
        self.noted |= {letter.id: changed for letter, changed in notes}
        return []


def refuse_bad(action: Action) -> tuple[int, str, str] | None:
    bad = isinstance(action.document, dict) and action.document.get("n") == "bad"
    return (400, "document_parsing_exception", "no long") if bad else None


@pytest.fixture
def letters(elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any) -> Any:
    """Index rows of which some are refused; the letters that come of it."""

    def make(*batches: Any, **options: Any) -> list[StoredLetter]:
        elasticsearch.item_fault = refuse_bad
        Indexer(elasticsearch, make_options(**options), clock=clock).index(batches)
        elasticsearch.item_fault = None
        return [StoredLetter(id_, (0, 1), fields) for id_, fields in elasticsearch.documents(LETTERS).items()]

    return make


@pytest.fixture
def replay(elasticsearch: FakeElasticsearch, make_options: Any, clock: Any) -> Any:
    def run(letters: Any, **options: Any) -> tuple[Any, dict[str, Mapping[str, Any]]]:
        notes = Notes()
        replaying = DeadLetterReplay(elasticsearch, make_options(**options), notes, clock=clock)
        return replaying.replay(letters), notes.noted

    return run


def test_a_replay_indexes_the_rejected_documents_exact_bytes(
    letters: Any, replay: Any, make_rows: Any, elasticsearch: Any
) -> None:
    untouched = letters(make_rows([b'{"n":"bad",  "x": 1.10}']))
    assert untouched[0].document == b'{"n":"bad",  "x": 1.10}'
    made = letters(make_rows([b'{"n":"bad","y":"\xc3\xa9"}'], offsets=[5]).rename_columns({"value": "document"}))
    (transformed,) = [letter for letter in made if letter.id == "clicks/t+0+5"]
    assert transformed.document == b'{"n":"bad","y":"\xc3\xa9"}'
    counts, noted = replay([*untouched, transformed])
    assert (counts.replayed, counts.documents.created) == (2, 2)
    assert noted.keys() == {"clicks/t+0+0", "clicks/t+0+5"}
    assert elasticsearch.documents("clicks")["t+0+5"] == {"n": "bad", "y": "é"}


def test_a_letter_refused_again_gets_the_new_reason(
    letters: Any, replay: Any, make_rows: Any, elasticsearch: FakeElasticsearch
) -> None:
    """The letter is not marked as replayed."""
    refused = letters(make_rows([{"n": "bad"}, {"n": "bad"}]))
    elasticsearch.item_fault = lambda action: (400, "mapper_parsing_exception", "why") if action.id == "t+0+1" else None
    counts, noted = replay(refused)
    assert (counts.replayed, counts.refused, counts.refused_because) == (1, 1, {"mapper_parsing_exception": 1})
    assert noted["clicks/t+0+1"] == {"reason": {"type": "mapper_parsing_exception", "text": "why"}}
    assert list(noted["clicks/t+0+0"]) == ["replayed_at"]


def test_letters_with_and_without_versions_are_replayed_together(letters: Any, replay: Any, make_rows: Any) -> None:
    by_key = letters(make_rows([{"n": "bad"}], keys=[b"k"], offsets=[9]), document_id="key")
    by_record = [StoredLetter("r", (0, 1), {**by_key[0].fields, "document_id": "r", "version": None})]
    counts, noted = replay([*by_key, *by_record], document_id="key")
    assert (counts.replayed, noted.keys()) == (2, {"clicks/t+0+9", "r"})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"value_is_document": False, "document_text": None}, "holds no document"),
        ({"value": None}, "holds no document"),
        ({"value_is_document": None}, "holds no document"),
        ({"document_id": None}, "has no id"),
        ({"index": "another"}, "give that index with --index"),
    ],
    ids=["a tombstone of the transform's", "too large", "from an earlier version", "no usable id", "elsewhere"],
)
def test_a_letter_without_a_document_or_id_stays_with_the_reason(
    letters: Any, replay: Any, make_rows: Any, fields: dict[str, Any], why: str
) -> None:
    (letter,) = letters(make_rows([{"n": "bad"}]))
    counts, noted = replay([StoredLetter(letter.id, (0, 1), {**letter.fields, **fields})])
    assert (counts.left, counts.replayed, noted) == (1, 0, {})
    assert why in next(iter(counts.left_because))


@pytest.mark.parametrize(
    ("fields", "topic", "index", "why"),
    [
        ({"index_names": OLD, "index": OLD}, "clicks", {"clicks": "shop-clicks"}, "it has no index"),
        ({"index_names": OLD, "index": OLD}, "clicks", "shop-clicks", "it has no index"),
        ({"index_names": OLD, "index": "shop-clicks"}, "clicks", {"clicks": "shop-clicks", "refunds": "r"}, None),
        ({"index_names": OLD, "index": "shop-clicks"}, "clicks", {"clicks": "r", "refunds": "shop-clicks"}, "--index"),
        ({"index_names": OLD, "index": "shop-clicks"}, "clicks", "shop-clicks", None),
        ({"index": "clicks"}, "clicks", "{topic}", None),
        ({"index": "clicks"}, None, "{topic}", None),
        ({"index": "clicks"}, "clicks", "shop-{topic}", "--index"),
    ],
)
def test_a_letter_is_replayed_where_its_row_may_still_belong(
    fields: dict[str, Any], topic: str | None, index: Any, why: str | None
) -> None:
    """The definition was edited since."""
    output = ElasticsearchOutput(hosts="http://h:1", index=index)
    options = IndexingOptions.of(output, Target.of(output, "shop"), batch_time_ms=0)
    held = {"topic": topic, "value": "e30=", "value_is_document": True, "document_id": "clicks+0+1"}
    found = DeadLetterReplay(FakeElasticsearch(), options, Notes(), clock=SystemClock()).cannot(
        StoredLetter("l", (0, 1), {**held, **fields})
    )
    assert found is None if why is None else why in (found or "")


def test_a_letter_of_a_row_that_the_transform_rejected_is_left(letters: Any, replay: Any, make_rows: Any) -> None:
    rejected = letters(make_rows([b'{"n": 1}'], rejected_because=["odd"]))
    assert replay(rejected)[0].left == 1


def test_many_letters_are_replayed_page_by_page(letters: Any, replay: Any, make_rows: Any) -> None:
    many = letters(make_rows([{"n": "bad"}] * (2 * PAGE + 1)))
    counts, noted = replay(iter(many))
    assert (counts.letters, counts.replayed, len(noted)) == (2 * PAGE + 1,) * 3


def test_a_fault_of_the_index_fails_the_replay_not_the_letters(
    letters: Any, replay: Any, make_rows: Any, elasticsearch: FakeElasticsearch
) -> None:
    from headrace.elasticsearch.errors import ElasticsearchRefusedError

    refused = letters(make_rows([{"n": "bad"}]))
    elasticsearch.item_fault = lambda _: (403, "security_exception", "no")
    with pytest.raises(ElasticsearchRefusedError, match="privileges"):
        replay(refused)


def test_a_stored_letter_gives_back_its_record_or_none(letters: Any, make_rows: Any) -> None:
    (letter,) = letters(make_rows([b"\xff junk"], keys=[b"k"]))
    assert letter.coordinates == ("t", 0, 0, 1)
    assert (letter.record.key, letter.record.value, letter.record.headers) == (b"k", b"\xff junk", ())
    without = {**letter.fields, "value": None}
    assert StoredLetter("x", (0, 1), without).record is None, "its value was too large to be kept"
    tombstone = {name: value for name, value in without.items() if name != "value_bytes"}
    letter_record = StoredLetter("x", (0, 1), tombstone).record
    assert letter_record is not None
    assert letter_record.value is None
    damaged = {**letter.fields, "value": base64.b64encode(b"x").decode() + "!"}
    assert StoredLetter("x", (0, 1), damaged).record is None


def test_a_filter_becomes_a_query_for_one_stream_and_output() -> None:
    query = LetterFilter(from_ms=1, until_ms=2, partition=0, until_offset=9, replayed=True).query("s", "o")["bool"]
    assert query["must_not"] == []
    assert {"term": {"stream": "s"}} in query["filter"]
    assert {"term": {"output": "o"}} in query["filter"]
    assert {"term": {"partition": 0}} in query["filter"]
    assert {"range": {"batch_time": {"gte": 1, "lte": 2}}} in query["filter"]
    assert {"range": {"offset": {"lte": 9}}} in query["filter"]
    assert len(query["filter"]) == 5
