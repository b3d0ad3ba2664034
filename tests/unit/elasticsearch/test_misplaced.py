"""Documents that a pipeline or a template sends to another place: few of them are sent, and they are taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch, Stored, error_response

from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.bulk_sender import BulkSender, SentRequest
from headrace.elasticsearch.errors import ElasticsearchRefusedError

Send = Callable[..., SentRequest]


@pytest.fixture
def send(elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any, clock: Any) -> Send:
    def send(values: list[Any], **fields: Any) -> SentRequest:
        options = make_options(**fields)
        sender = BulkSender(elasticsearch, options, clock=clock, cancelled=threading.Event())
        prepared = prepare_rows(make_rows(values), options).prepared
        assert prepared is not None
        return sender.send(prepared, np.arange(len(prepared)))

    return send


def reroute(elasticsearch: FakeElasticsearch, to: Callable[[Any], str | None]) -> None:
    """Let a pipeline give documents another index."""
    carry_out = elasticsearch._carry_out

    def elsewhere(index: str, action: Any) -> Any:
        index = to(action) or index
        return {"_index": index, **carry_out(index, action)}

    elasticsearch._carry_out = elsewhere  # type: ignore[method-assign]


def test_what_a_pipeline_has_created_elsewhere_is_deleted_there(send: Send, elasticsearch: FakeElasticsearch) -> None:
    """Only some documents are rerouted, after others were written in their place."""
    elasticsearch.indices["clicks-2026"] = {}
    reroute(elasticsearch, lambda action: "clicks-2026" if action.document["n"] >= 2 else None)
    with pytest.raises(
        ElasticsearchRefusedError, match=r"'t\+0\+2' .*into index 'clicks-2026'.*2 documents .* were deleted again"
    ):
        send([{"n": n} for n in range(4)])
    assert elasticsearch.documents("clicks-2026") == {}
    assert len(elasticsearch.documents("clicks")) == 2


def test_a_document_that_was_there_before_is_not_deleted(send: Send, elasticsearch: FakeElasticsearch) -> None:
    reroute(elasticsearch, lambda _: "others")
    elasticsearch.indices["others"] = {"t+0+0": Stored(1, {"n": 0})}
    with pytest.raises(ElasticsearchRefusedError, match=r"1 are still there: 't\+0\+0' in 'others'"):
        send([{"n": 1}])
    assert list(elasticsearch.documents("others")) == ["t+0+0"]


def test_documents_that_may_not_be_deleted_are_named(
    send: Send, elasticsearch: FakeElasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    reroute(elasticsearch, lambda _: "others")
    forbidden = error_response(403, "security_exception", "action [indices:data/write/delete] is unauthorized")
    monkeypatch.setattr(elasticsearch, "_delete", lambda _: forbidden)
    with pytest.raises(ElasticsearchRefusedError, match=r"2 are still there: 't\+0\+0' in 'others', 't\+0\+1' in"):
        send([{"n": 1}, {"n": 2}])


def test_the_first_document_is_sent_alone_where_the_place_is_new(send: Send, elasticsearch: FakeElasticsearch) -> None:
    send([{"n": n} for n in range(4)], first_alone=True)
    assert [len(actions) for _, actions in elasticsearch.bulks] == [1, 3]
    elasticsearch.bulks.clear()
    send([{"n": n} for n in range(4)])
    assert [len(actions) for _, actions in elasticsearch.bulks] == [4]


def test_a_refused_first_document_shows_no_wrong_place(send: Send, elasticsearch: FakeElasticsearch) -> None:
    """Few documents are sent alone nevertheless."""
    elasticsearch.item_fault = lambda action: (
        (400, "document_parsing_exception", "no") if action.document["n"] < 9 else None
    )
    sent = send([{"n": n} for n in range(12)], first_alone=True)
    assert [len(actions) for _, actions in elasticsearch.bulks] == [1, 1, 1, 9]
    assert (sent.counts.created, len(sent.rejected)) == (3, 9)


def test_an_index_that_would_be_a_data_stream_gets_one_document(send: Send, elasticsearch: FakeElasticsearch) -> None:
    """A template makes it a data stream, and the document is deleted again."""
    backing = ".ds-clicks-2026.11.28-000001"
    reroute(elasticsearch, lambda _: backing)
    elasticsearch.descriptions["clicks"] = {backing: {"data_stream": "clicks", "aliases": {}}}
    with pytest.raises(ElasticsearchRefusedError, match=r"'clicks' is a data stream.*1 documents .* deleted again"):
        send([{"n": n} for n in range(4)], first_alone=True)
    assert [len(actions) for _, actions in elasticsearch.bulks] == [1]
    assert elasticsearch.documents(backing) == {}


def test_an_alias_deleted_while_a_batch_is_written_is_no_index(send: Send, elasticsearch: FakeElasticsearch) -> None:
    with pytest.raises(ElasticsearchRefusedError, match="is not an alias") as refused:
        send([{"n": 1}], through_alias=True)
    assert "creates no index of an alias's name" in str(refused.value)
    assert "clicks" not in elasticsearch.indices
