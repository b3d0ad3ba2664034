"""Ids of dead letters: as many letters are kept as are counted, and running again adds none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import Action, FakeElasticsearch

from headrace.elasticsearch.dead_letters import OriginalRecord, dead_letter
from headrace.elasticsearch.errors import DeadLettersRefusedError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.transport import Response
from headrace.elasticsearch.verdicts import Reason

SHARED = "letters"
Letters = Callable[..., list[str]]


@pytest.fixture
def letters(elasticsearch: FakeElasticsearch, make_options: Any, clock: Any) -> Letters:
    """Index rows, which are all rejected, twice; the ids of the letters in the shared index after it."""

    def refuse(action: Action) -> tuple[int, str, str] | None:
        return None if "reason" in action.document else (400, "document_parsing_exception", "why")

    def write(rows: pa.RecordBatch, **options: Any) -> list[str]:
        elasticsearch.item_fault = refuse
        chosen = make_options(dead_letter_index=SHARED, **options)
        for _ in range(2):
            counts = Indexer(elasticsearch, chosen, clock=clock).index([rows])
            assert counts.dead_lettered == rows.num_rows
        return sorted(elasticsearch.documents(SHARED))

    return write


@pytest.mark.parametrize("differs", ["stream_name", "output_id", "index"])
def test_outputs_of_one_dead_letter_index_have_separate_letters(letters: Letters, make_rows: Any, differs: str) -> None:
    """They have separate letters even of one record."""
    named = {"stream_name": "s", "output_id": "o", "index": "i"}
    letters(make_rows([{"n": 1}, {"n": 2}]), **named)
    stored = letters(make_rows([{"n": 1}, {"n": 2}]), **{**named, differs: "x"})
    other = "/".join({**named, differs: "x"}.values())
    assert stored == sorted(["s/o/i/t+0+0", "s/o/i/t+0+1", f"{other}/t+0+0", f"{other}/t+0+1"])


def test_the_first_letter_is_sent_alone_where_the_place_is_new(
    letters: Letters, make_rows: Any, elasticsearch: FakeElasticsearch
) -> None:
    """As documents are: a template or a pipeline may send letters elsewhere too."""
    letters(make_rows([{"n": 1}] * 3), first_alone=True)
    assert [len(actions) for _, actions in elasticsearch.bulks][-2:] == [1, 2]


def test_two_rows_of_one_record_have_letters_that_name_them(letters: Letters, make_rows: Any) -> None:
    rows = make_rows([{"n": 1}, {"n": 2}, {"n": 3}], offsets=[7, 7, 8], line=["a/2", "b", "a/2"])
    stored = letters(rows.rename_columns({"value": "document"}), id_columns=["line"])
    assert stored == ["clicks/t+0+7~a%2F2", "clicks/t+0+7~b", "clicks/t+0+8~a%2F2"]


def test_rows_of_one_record_with_keys_have_letters_naming_them(letters: Letters, make_rows: Any) -> None:
    rows = make_rows([{"n": 1}, {"n": 2}], offsets=[7, 7], keys=[b"a", b"b"]).rename_columns({"value": "document"})
    first, second = letters(rows, document_id="key")
    assert first.startswith("clicks/t+0+7+key+")
    assert second.startswith("clicks/t+0+7+key+")
    changed = make_rows([{"n": 9}], offsets=[7], keys=[b"a"]).rename_columns({"value": "document"})
    assert letters(changed, document_id="key") == [first, second], "a changed document is still that row's"


def test_equal_rows_of_one_record_are_numbered(letters: Letters, make_rows: Any) -> None:
    rows = make_rows([{"n": 1}] * 3, offsets=[7, 7, 7], keys=[b"k"] * 3, rejected_because=["odd"] * 3)
    assert letters(rows, document_id="key") == ["clicks/t+0+7", "clicks/t+0+7/2", "clicks/t+0+7/3"]


@pytest.mark.parametrize("document_id", ["key", "columns"])
def test_equal_rows_without_an_id_have_a_letter_for_each_task(
    letters: Letters, make_rows: Any, document_id: str
) -> None:
    """They were rejected before they had an id."""
    rows = make_rows([{"n": 1}] * 2, offsets=[7, 7], keys=[b"k"] * 2, rejected_because=["odd"] * 2)
    options = {"document_id": document_id} | ({"id_columns": ["key"]} if document_id == "columns" else {})
    first = letters(rows, **options)
    both = letters(rows, task=3, **options)
    assert (len(first), len(both)) == (2, 4)
    assert {id_.rpartition("/")[2] for id_ in set(both) - set(first)} == {"1+3", "2+3"}


def test_rows_of_one_key_with_own_versions_have_a_letter_each(letters: Letters, make_rows: Any) -> None:
    """They differ by their versions alone, and two tasks may have them."""
    options = {"document_id": "key", "version": "version"}
    older = make_rows([{"n": 1}], offsets=[7], keys=[b"k"], version=pa.array([1]))
    newer = make_rows([{"n": 1}], offsets=[7], keys=[b"k"], version=pa.array([2]))
    letters(older, **options)
    assert len(letters(newer, task=3, **options)) == 2


def test_the_letter_of_a_row_with_an_id_is_the_same_in_any_task(letters: Letters, make_rows: Any) -> None:
    """Of the next attempt other tasks may have it."""
    rows = make_rows([{"n": 1}, {"n": 2}], keys=[b"a", b"b"])
    for document_id in ("record", "key"):
        assert letters(rows, document_id=document_id) == letters(rows, task=3, document_id=document_id)
    rejected = make_rows([{"n": 1}], offsets=[7], rejected_because=["odd"])
    assert letters(rejected) == letters(rejected, task=3)


def test_an_id_too_long_for_elasticsearch_becomes_its_digest(make_options: Any, make_rows: Any) -> None:
    options = make_options(stream_name="s" * 63, output_id="o" * 63, index="i" * 241)
    rows = make_rows([{"n": 1}, {"n": 2}]).set_column(0, "topic", pa.array(["t" * 249] * 2))
    ids = [dead_letter(rows, row, Reason("r", ""), options).id for row in (0, 1)]
    assert len(set(ids)) == 2
    assert all(len(id_.encode()) <= 512 and id_.startswith(f"{'s' * 63}/{'o' * 63}/") for id_ in ids)


ROLLS_OVER = {"letters-000002": {"aliases": {SHARED: {"is_write_index": True}}, "settings": {"index": {}}}}
DATA_STREAM = {"letters-000001": {"aliases": {}, "settings": {"index": {}}, "data_stream": SHARED}}


@pytest.mark.parametrize("described", [ROLLS_OVER, DATA_STREAM], ids=["rolls over", "data stream"])
def test_letters_are_not_written_where_one_may_be_there_twice(
    elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any, described: Any
) -> None:
    """After a rollover a batch that is run again would add its letters, and could not withdraw those before."""
    elasticsearch.descriptions[SHARED] = described
    indexer = Indexer(elasticsearch, make_options(dead_letter_index=SHARED), clock=clock)
    with pytest.raises(DeadLettersRefusedError, match="'letters' is ") as refused:
        indexer.index([make_rows([b"junk"])])
    assert "dead_letter_index" in (refused.value.remedy or "")
    assert not elasticsearch.documents(SHARED)


@pytest.mark.parametrize("concrete", ["clicks", "clicks-1"])
def test_letters_are_not_written_among_the_outputs_own_documents(
    elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any, concrete: str
) -> None:
    described = {concrete: {"aliases": {SHARED: {}, "clicks": {}}, "settings": {"index": {}}}}
    elasticsearch.descriptions = {SHARED: described, "clicks": described}
    indexer = Indexer(elasticsearch, make_options(dead_letter_index=SHARED), clock=clock)
    match = f"'letters' is an alias of '{concrete}', the output's own index"
    with pytest.raises(DeadLettersRefusedError, match=match):
        indexer.index([make_rows([b"junk"])])


def test_letters_are_not_written_where_a_data_stream_would_be(
    elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for ``logs-orders-dead-letters``, by Elasticsearch's own template for ``logs-*-*``."""
    reason = (
        "cannot create index with name [letters], because it matches with template [logs] that creates data streams "
        "only, use create data stream api instead"
    )
    refusal = Response(400, b'{"error":{"type":"illegal_argument_exception","reason":"%b"}}' % reason.encode())
    answer = elasticsearch.request

    def request(method: str, path: str, body: bytes | None = None) -> Response:
        return refusal if method == "PUT" else answer(method, path, body)

    monkeypatch.setattr(elasticsearch, "request", request)
    indexer = Indexer(elasticsearch, make_options(dead_letter_index=SHARED), clock=clock)
    with pytest.raises(DeadLettersRefusedError, match=r"'letters' would be a data stream, .* template \[logs\]"):
        indexer.index([make_rows([b"junk"])])


def test_a_letter_gets_no_record_that_may_be_another_topics(
    elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any
) -> None:
    """Without an incarnation, the record may be that of an earlier topic of the name."""

    class Records:
        def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord:
            assert incarnation == 2
            return OriginalRecord(b"key", b"value")

    rows = make_rows([b"junk", b"junk"], incarnations=[0, 2], n=["a", "b"]).rename_columns({"value": "document"})
    options = make_options(dead_letter_index=SHARED, document_id="columns", id_columns=["n"], batch_time_ms=1)
    counts = Indexer(elasticsearch, options, originals=Records(), clock=clock).index([rows])
    assert counts.dead_lettered == 2
    letters = sorted(elasticsearch.documents(SHARED).values(), key=lambda letter: letter["offset"])
    assert [(letter.get("incarnation"), letter.get("value")) for letter in letters] == [(None, None), (2, "dmFsdWU=")]
