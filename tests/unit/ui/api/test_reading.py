"""What the API says of streams and batches, over a real ledger."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sqlalchemy import update

from headrace.ledger import Ledger
from headrace.ledger.batches.tables import batches

from .conftest import BATCHES, Api

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")


def test_the_list_has_each_stream_with_its_state_and_reason(api: Api) -> None:
    answer = api.get("/streams")
    assert answer["problems"] == []
    states = {stream["name"]: stream["state"] for stream in answer["streams"]}
    assert states["orders-3"] == "failing"
    assert states["orders-6"] == "stalled"
    assert states["orders-7"] == "starting"
    failing = next(stream for stream in answer["streams"] if stream["name"] == "orders-3")
    assert "document_parsing_exception" in failing["reason"]
    assert "3 times" in failing["reason"]
    assert failing["remedy"]
    assert TIME.match(failing["since"])
    assert failing["oldest_unfinished"]["state"] == "failed"
    assert len(failing["sparklines"]["total_delay"]) == 30
    assert failing["may"] == {"read": True, "operate": True}


def test_a_viewer_may_read_and_not_operate(api: Api) -> None:
    assert {s["may"]["operate"] for s in api.get("/streams", user="viewer")["streams"]} == {False}


def test_anonymous_gets_401_from_every_route_of_the_api(api: Api) -> None:
    paths = api.client.get("/headrace/api/openapi.json").json()["paths"]
    assert len(paths) > 15
    for path, methods in paths.items():
        address = "/headrace" + path.format(name="orders", batch_time="2026-11-23T06:30:00Z", dag_id="orders_batches")
        for method in methods:
            answer = api.client.request(method, address, json={}, headers={"X-User": "anonymous"})
            assert answer.status_code == 401, (method, path)


def test_a_hidden_stream_is_left_out_and_404(api: Api) -> None:
    api.airflow.hidden = {"orders_batches"}
    names = [stream["name"] for stream in api.get("/streams")["streams"]]
    assert "orders" not in names
    assert "orders-2" in names
    hidden = api.get("/streams/orders", 404)
    assert hidden["detail"] == api.get("/streams/nothing", 404)["detail"].replace("nothing", "orders")
    for path in ("/timeline", "/batches", "/events", "/gaps", "/stop/preview", "/dead-letters"):
        api.get(f"/streams/orders{path}", 404)
    api.post("/streams/orders/stop", status=404)


def test_a_missing_ledger_is_a_problem_and_the_others_are_shown(api: Api, tmp_path: Any) -> None:
    api.airflow.ledger_urls = [f"sqlite:///{tmp_path}/nothing.db"]
    answer = api.get("/streams")
    assert len(answer["streams"]) == 7
    (problem,) = answer["problems"]
    assert problem["ledger"].endswith("nothing.db")
    assert "There is no ledger" in problem["error"]
    assert not (tmp_path / "nothing.db").exists()


def test_a_stream_in_detail(api: Api) -> None:
    answer = api.get("/streams/orders-4")
    assert answer["definition"]["name"] == "orders-4"
    assert answer["receiver_job"]["state"] == "running"
    (receiver,) = answer["receivers"]
    assert receiver["state"] == "paused"
    assert "0.4 GiB" in receiver["paused_reason"]
    assert (receiver["host"], receiver["executor"], receiver["last_error"]) == ("worker-1", "3", None)
    assert receiver["late_records"] is None
    assert receiver["sealed_through"] <= receiver["heartbeat_at"]
    assert [(partition["watermark"], partition["drained"]) for partition in answer["partitions"]] == [(None, None)] * 2
    assert [partition["next_offset"] for partition in answer["partitions"]] == [
        BATCHES * 20_000 + 300,
        BATCHES * 20_000,
    ]
    assert answer["log"]["limit_bytes"] == 1 << 30
    assert answer["counts"]["batches"] == {"completed": BATCHES}
    # Of the newest 30 batches, whose numbers are 30 to 59; every fiftieth has two.
    assert answer["counts"]["dead_letters"] == {"elasticsearch": 2}
    assert "token" not in str(answer["receiver_job"])
    well = {"name": "webhook", "dropped": 0, "missed": 0, "failed": 0, "error": None, "slow": None}
    assert answer["listeners"] == [well]
    assert api.get("/streams/orders-2")["listeners"] == [{**well, "dropped": 12}]


def test_a_receivers_last_error_has_its_time_and_stack(api: Api) -> None:
    (receiver,) = api.get("/streams/orders-3")["receivers"]
    error = receiver["last_error"]
    assert error["text"] == "OSError: no route to host"
    assert 'File "shop.py", line 7, in read' in error["stack"]
    assert error["at"] <= receiver["heartbeat_at"]


def test_a_timeline_has_batches_and_samples_in_order(api: Api) -> None:
    answer = api.get("/streams/orders/timeline", points=1000)
    times = [batch["batch_time"] for batch in answer["batches"]]
    assert len(times) == BATCHES
    assert times == sorted(times)
    assert not answer["thinned"]
    assert len(answer["samples"]) == BATCHES
    batch = answer["batches"][5]
    parts = [part for part in batch["phases"].values() if part is not None]
    assert sum(parts) == pytest.approx(batch["total_delay"] + batch["phases"]["checkpointing"])


def test_a_thinned_timeline_keeps_the_slowest_batches(api: Api) -> None:
    every = api.get("/streams/orders/timeline", points=1000)
    answer = api.get("/streams/orders/timeline", **{"from": every["from"], "until": every["until"], "points": 10})
    assert answer["thinned"]
    assert len(answer["batches"]) <= 10
    slowest = max(batch["total_delay"] for batch in every["batches"])
    assert max(batch["total_delay"] for batch in answer["batches"]) == slowest
    assert len(answer["parts"]) == len(answer["batches"])
    delays = sorted(batch["total_delay"] for batch in every["batches"])
    whole = answer["whole"]
    assert whole["total_delay"]["median"] == delays[(len(delays) - 1) // 2]
    assert whole["total_delay"]["maximum"] == slowest
    assert whole["batches"] == sum(part["batches"] for part in answer["parts"]) == BATCHES
    assert len(answer["samples"]) <= 10


def test_batch_times_taken_over_are_folded_into_the_batchs_line(own_api: Api) -> None:
    api = own_api
    with Ledger.open(api.url) as ledger:
        newest, before, *_ = ledger.batches.page("orders-5", 2)
        taken_ms = before.batch_time_ms
        with ledger._database.write() as connection:
            of_stream = batches.c.stream == "orders-5"
            for time_ms, values in (
                (taken_ms, {"state": "absorbed", "absorbed_by_ms": newest.batch_time_ms}),
                (newest.batch_time_ms, {"absorbed": (taken_ms,)}),
            ):
                connection.execute(
                    update(batches).where(of_stream, batches.c.batch_time_ms == time_ms).values(**values)
                )
    every = api.get("/streams/orders-5/batches", limit=500)["batches"]
    folded = api.get("/streams/orders-5/batches", limit=500, folded="true")["batches"]
    assert len(folded) == len(every) - 1
    assert (folded[0]["absorbed"], folded[0]["first_time"]) == (1, every[1]["batch_time"])
    assert every[1]["state"] == "absorbed"


@pytest.mark.parametrize("order", ["newest", "oldest", "records", "processing_time", "total_delay"])
def test_pages_in_any_order_have_each_batch_once(api: Api, order: str) -> None:
    seen: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(10):
        page = api.get("/streams/orders-3/batches", order=order, limit=25, **({"cursor": cursor} if cursor else {}))
        seen += page["batches"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len({batch["batch_time"] for batch in seen}) == len(seen) == BATCHES
    assert page["total_by_state"] == {"completed": BATCHES - 3, "failed": 3}
    key = "batch_time" if order in ("newest", "oldest") else order
    values = [batch[key] if batch[key] is not None else -1 for batch in seen]
    assert values == sorted(values, reverse=order != "oldest")


def test_batches_are_filtered_by_state_and_time(api: Api) -> None:
    failed = api.get("/streams/orders-3/batches", state="failed")["batches"]
    assert [batch["state"] for batch in failed] == ["failed"] * 3
    assert all("document_parsing_exception" in batch["error"] for batch in failed)
    first = failed[-1]["batch_time"]
    earlier = api.get("/streams/orders-3/batches", until=first)["batches"]
    assert len(earlier) == 50
    assert all(batch["batch_time"] < first for batch in earlier)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/streams/orders/batches", {"cursor": "nonsense"}),
        ("/streams/orders/batches", {"cursor": "5", "order": "records"}),
        ("/streams/orders/batches", {"state": "asleep"}),
        ("/streams/orders/batches", {"from": "yesterday"}),
        ("/streams/orders/batches", {"from": "²"}),
        ("/streams/orders/batches", {"limit": 0}),
        ("/streams/orders/timeline", {"from": "2026-11-23T07:00Z", "until": "2026-11-23T06:00Z"}),
        ("/streams/orders/events", {"kind": "nothing"}),
        ("/streams/orders/events", {"before_id": "9" * 40}),
        ("/streams/orders/events", {"before_id": -1}),
        ("/streams/orders/gaps", {"before_id": "9" * 40}),
        ("/streams/orders/batches", {"cursor": "9" * 40}),
        ("/streams/orders/batches", {"cursor": f"{'9' * 40}.5", "order": "records"}),
        ("/streams/orders/batches", {"cursor": "9" * 5_000}),
        ("/streams/orders/batches", {"from": "999999999999999"}),
        ("/streams/orders/batches/999999999999999", {}),
        ("/streams/orders/timeline", {"until": "999999999999999"}),
        ("/streams/orders/timeline", {"until": "0001-01-01"}),
        ("/streams/orders/timeline", {"until": "9999-12-31T23:59:59-12:00"}),
    ],
)
def test_bad_parameters_are_422(api: Api, path: str, params: dict[str, Any]) -> None:
    assert api.get(path, 422, **params)["detail"]


@pytest.mark.parametrize("until", ["1654-01-01", "100000000000000", "9998-12-31"])
def test_a_timeline_of_any_time_that_is_accepted_is_answered(api: Api, until: str) -> None:
    assert api.get("/streams/orders/timeline", until=until, points=1000)["batches"] is not None


def test_a_failed_batch_in_detail(api: Api) -> None:
    failed = api.get("/streams/orders-3/batches", state="failed", order="oldest")["batches"][0]
    answer = api.get(f"/streams/orders-3/batches/{failed['batch_time']}")
    assert [attempt["state"] for attempt in answer["all_attempts"]] == ["failed"] * 3
    (output,) = answer["outputs"]
    assert (output["kind"], output["state"], output["retries"]) == ("elasticsearch", "failed", 2)
    assert "document_parsing_exception" in output["error"]
    assert [part["until_offset"] - part["from_offset"] for part in answer["ranges"]] == [answer["records"] // 2] * 2
    assert [event["kind"] for event in answer["events"]] == ["batch_allocated", "batch_started", "batch_failed"]
    assert answer["links"]["grid"] == "/dags/orders-3_batches"
    assert answer["where"] == "kafka"


def test_a_batch_that_does_not_exist_is_404(api: Api) -> None:
    assert "no batch" in api.get("/streams/orders/batches/2020-01-01T00:00:00Z", 404)["detail"]


def test_events_are_paged_newest_first(api: Api) -> None:
    first = api.get("/streams/orders/events", limit=10)
    second = api.get("/streams/orders/events", limit=10, before_id=first["next_before_id"])
    ids = [event["id"] for event in first["events"] + second["events"]]
    assert len(ids) == 20
    assert ids == sorted(ids, reverse=True)
    assert "block_added" not in {event["kind"] for event in first["events"]}
    assert api.get("/streams/orders/events", kind="block_added")["events"]


def test_the_page_of_a_run_finds_its_stream_and_batch(api: Api) -> None:
    assert api.get("/dags/orders_receiver") == {"stream": "orders", "batch_time": None}
    api.get("/dags/somebody_elses", 404)


def test_no_page_of_the_api_loads_scripts_from_elsewhere(api: Api) -> None:
    assert api.client.get("/headrace/api/openapi.json").status_code == 200
    for path in ("/api/docs", "/docs", "/redoc"):
        assert api.client.get(f"/headrace{path}").status_code == 404


def test_answers_are_not_cached_and_not_framed_elsewhere(api: Api) -> None:
    answer = api.client.get("/headrace/api/v1/streams", headers={"X-User": "admin"})
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "SAMEORIGIN"
