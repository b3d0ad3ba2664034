"""The route of one record's way: over a real ledger and log; the cases themselves are in tests/unit/views/trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.support.page_server import NoAirflow
from tests.unit.fsck.conftest import INTERVAL_MS, STREAM, TIMES, Shop, empty_ledger, make_shop

from headrace.ui.api import requests
from headrace.ui.api.app import create_app
from headrace.ui.api.requests import SLOW_AT_ONCE, KeySearches
from headrace.views import trace_records
from headrace.views.streams import Placed
from headrace.views.trace_records import search_key

from .conftest import Api

__all__ = ["empty_ledger", "make_shop"]


@pytest.fixture
def shop_api(make_shop: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Shop, Api]]:
    """A stream with a completed batch and a block that waits."""
    monkeypatch.setattr(trace_records, "ANSWER_SECONDS", 0.05)
    shop: Shop = make_shop()
    shop.store()
    shop.clock.advance(INTERVAL_MS)
    shop.allocate(TIMES[0])
    shop.complete(TIMES[0])
    shop.store()
    url = shop.stream.ledger
    airflow = NoAirflow(streams=[Placed(STREAM, url, f"{STREAM}_batches", f"{STREAM}_receiver")])
    root = FastAPI()
    app = create_app(airflow, ledger_seconds=600)
    root.mount("/headrace", app)
    yield shop, Api(TestClient(root), airflow, app, url)
    app.state.ledgers.close()


def test_a_record_is_traced_by_its_coordinates(shop_api: tuple[Shop, Api]) -> None:
    _, api = shop_api
    answer = api.get(f"/streams/{STREAM}/trace", topic="clicks", partition=0, offset=1)
    assert answer["search"] is None
    record = answer["record"]
    assert record["position"] == {
        "input": "clicks", "topic": "clicks", "topic_id": "id-1", "incarnation": 1, "partition": 0, "offset": 1
    }  # fmt: skip
    assert record["state"] == "in_batch"
    assert record["record"]["value"] == {"text": "1", "encoding": "utf-8", "size": 1}
    assert record["record"]["timestamp"] == "2023-11-14T22:13:20.000Z"
    assert record["batch"]["batch_time"] == "2023-11-14T22:13:30.000Z"
    assert (record["block"]["in_log"], record["block"]["sequence"]) == (True, 0)
    assert [attempt["state"] for attempt in record["attempts"]] == ["completed"]
    assert [(output["output_id"], output["outcome"]) for output in record["outputs"]] == [("console", "written")]


def test_a_key_is_searched_in_the_log(shop_api: tuple[Shop, Api]) -> None:
    _, api = shop_api
    search = api.get(f"/streams/{STREAM}/trace", key="cup")["search"]
    assert (search["matches"], search["searched_records"], search["complete"]) == ([], 10, True)
    assert search["from"] == "2023-11-14T22:13:30.000Z"


def test_searches_for_a_key_have_an_end_and_few_run_at_once(
    shop_api: tuple[Shop, Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, api = shop_api
    api.app.state.key_searches = KeySearches(seconds=15, at_once=1)
    refused, bounds = [], []

    def search(*given: Any, **named: Any) -> Any:
        bounds.append(named["max_seconds"])
        # While this one runs, another one is asked for.
        refused.append(api.get(f"/streams/{STREAM}/trace", 503, key="cup"))
        return search_key(*given, **named)

    monkeypatch.setattr(requests, "search_key", search)
    for _ in range(2):
        assert api.get(f"/streams/{STREAM}/trace", key="cup")["search"]["complete"]
    assert bounds == [15, 15]
    assert [refusal["detail"] for refusal in refused] == [
        "As many searches for keys as may run at once in this API server are running: 1."
    ] * 2
    assert "within 15 s" in refused[0]["remedy"]


@pytest.mark.parametrize("path", ["trace", "dead-letters", "dead-letters/replay/preview"])
def test_requests_that_ask_other_servers_are_few_at_once(shop_api: tuple[Shop, Api], path: str) -> None:
    """Else they take all threads of the server, which answers Airflow's tasks too."""
    _, api = shop_api
    places = api.app.state.slow_requests
    for _ in range(SLOW_AT_ONCE):
        assert places.acquire(blocking=False)
    try:
        answer = api.client.get(f"/headrace/api/v1/streams/{STREAM}/{path}")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert api.get(f"/streams/{STREAM}")["name"] == STREAM
    finally:
        for _ in range(SLOW_AT_ONCE):
            places.release()
    for _ in range(2 * SLOW_AT_ONCE):
        assert api.client.get(f"/headrace/api/v1/streams/{STREAM}/trace").status_code == 422, "its place is free again"


def test_a_missing_record_is_404_and_another_form_is_422(shop_api: tuple[Shop, Api]) -> None:
    """The stream does not have the missing record."""
    _, api = shop_api
    path = f"/streams/{STREAM}/trace"
    assert "not seen a topic 'x'" in api.get(path, 404, topic="x", partition=0, offset=1)["detail"]
    for params in ({}, {"topic": "clicks"}, {"key": "a", "document_id": "b"}):
        assert api.get(path, 422, **params)["detail"].startswith("Give topic, partition and offset")  # type: ignore[arg-type]
    assert api.get(path, 422, topic="clicks", partition=-1, offset=1)
    assert api.get("/streams/none/trace", 404, key="a")
