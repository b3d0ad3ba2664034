"""What an operator does by the API: the words before, what happens, who did it, and who may not."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.batch.time_range import TimeRange
from headrace.errors import REPAIR
from headrace.ledger.states import DesiredState, EventKind
from headrace.ui.api.airflow_side import Run
from headrace.ui.api.requests import time_ms
from headrace.views.stream_state import DagFacts

from .conftest import Api


def _failed(api: Api) -> str:
    return str(api.get("/streams/orders-3/batches", state="failed", order="oldest")["batches"][0]["batch_time"])


def _completed(api: Api, name: str = "orders") -> str:
    return str(api.get(f"/streams/{name}/batches", state="completed")["batches"][0]["batch_time"])


def test_stopping_and_starting_are_recorded_with_who_and_why(own_api: Api) -> None:
    preview = own_api.get("/streams/orders/stop/preview")
    assert preview["refused"] is None
    assert "store what they have read" in preview["will"]
    own_api.post("/streams/orders/stop", {"reason": "the index moves"})
    with own_api.ledger() as ledger:
        assert ledger.streams.get("orders").desired_state is DesiredState.STOPPED
        assert ledger.jobs.current("orders").stop_reason == "op: the index moves"
        (event,) = ledger.events.latest("orders", [EventKind.STREAM_STATE_CHANGED])
        assert event.payload == {"desired_state": "stopped", "by": "op", "reason": "the index moves"}
    assert own_api.get("/streams/orders/start/preview")["refused"] is None
    own_api.post("/streams/orders/start")
    with own_api.ledger() as ledger:
        assert ledger.streams.get("orders").desired_state is DesiredState.RUNNING
    assert "not stopped" in own_api.post("/streams/orders/start", status=409)["detail"]


def test_starting_says_that_the_receiver_dag_is_paused(own_api: Api) -> None:
    own_api.airflow.dags["orders-5_receiver"] = DagFacts("orders-5_receiver", paused=True)
    assert "unpause it" in own_api.get("/streams/orders-5/start/preview")["will"]


def test_a_batch_is_run_again_by_clearing_its_run(own_api: Api) -> None:
    time = _failed(own_api)
    run = Run("orders-3_batches", "scheduled__1", "failed")
    own_api.airflow.runs["orders-3_batches", time_ms(time, "t")] = run
    preview = own_api.get(f"/streams/orders-3/batches/{time}/run/preview")
    assert preview["refused"] is None
    assert "Run scheduled__1 of orders-3_batches is cleared" in preview["will"]
    own_api.post(f"/streams/orders-3/batches/{time}/run", {"reason": "mapping corrected"})
    assert own_api.airflow.done == [("clear", "scheduled__1", "mapping corrected")]
    with own_api.ledger() as ledger:
        (event,) = ledger.events.latest("orders-3", [EventKind.OPERATOR_ACTION])
        assert event.payload == {"action": "run", "by": "op", "reason": "mapping corrected"}
        assert event.batch_time_ms == time_ms(time, "t")


def test_without_a_run_or_for_some_outputs_one_is_triggered(own_api: Api) -> None:
    time = _failed(own_api)
    own_api.post(f"/streams/orders-3/batches/{time}/run")
    own_api.airflow.runs["orders-3_batches", time_ms(time, "t")] = Run("orders-3_batches", "r", "failed")
    own_api.post(f"/streams/orders-3/batches/{time}/run", {"outputs": ["elasticsearch"]})
    assert own_api.airflow.done == [
        ("trigger", "orders-3_batches", {"reprocess": True}),
        ("trigger", "orders-3_batches", {"reprocess": True, "outputs": ["elasticsearch"]}),
    ]


def test_a_run_that_did_not_complete_the_batch_is_not_cleared(own_api: Api) -> None:
    """It would find the batch done, and do nothing: the repair completed it, for example."""
    time = _failed(own_api)
    at_ms, how = time_ms(time, "t"), {"holder": "h", "way": "connect", "lease_ms": 1_000}
    own_api.airflow.runs["orders-3_batches", at_ms] = Run("orders-3_batches", "scheduled__1", "failed")
    with own_api.ledger() as ledger:
        for run_id, fails in (("scheduled__1", True), ("other", False)):
            attempt = ledger.attempts.begin("orders-3", at_ms, **how, attributes={"run_id": run_id})
            if fails:
                ledger.attempts.fail(attempt, "no answer")
                continue
            for output in attempt.outputs:
                ledger.attempts.record_output(attempt, output, {})
            ledger.attempts.complete(attempt)
    preview_path = f"/streams/orders-3/batches/{time}/run/preview"
    assert "A run of orders-3_batches starts" in own_api.get(preview_path)["will"]
    own_api.post(f"/streams/orders-3/batches/{time}/run")
    assert own_api.airflow.done == [("trigger", "orders-3_batches", {"reprocess": True})]
    own_api.airflow.runs["orders-3_batches", at_ms] = Run("orders-3_batches", "other", "success")
    assert "Run other of orders-3_batches is cleared" in own_api.get(preview_path)["will"]


@pytest.mark.parametrize(
    ("conf", "completes", "cleared"),
    [
        ({"reprocess": True, "outputs": ["elasticsearch"]}, False, False),
        ({"reprocess": True, "outputs": ["elasticsearch"]}, True, False),
        # A batch that is not complete keeps the parameters that were asked for; the repair keeps them too.
        ({"parameters": {"rate": 2}}, False, True),
        ({"parameters": {"rate": 2}}, True, False),
        # As Airflow's trigger form sends options that were not chosen.
        ({"reprocess": True, "outputs": [], "parameters": {}}, True, True),
    ],
)
def test_a_run_that_would_not_run_the_whole_batch_is_not_cleared(
    own_api: Api, conf: dict[str, Any], completes: bool, cleared: bool
) -> None:
    time = _failed(own_api)
    at_ms, how = time_ms(time, "t"), {"holder": "h", "way": "connect", "lease_ms": 1_000}
    own_api.airflow.runs["orders-3_batches", at_ms] = Run("orders-3_batches", "asked", "success", conf)
    with own_api.ledger() as ledger:
        attempt = ledger.attempts.begin("orders-3", at_ms, **how, attributes={"run_id": "asked"})
        if completes:
            for output in attempt.outputs:
                ledger.attempts.record_output(attempt, output, {})
            ledger.attempts.complete(attempt)
        else:
            ledger.attempts.fail(attempt, "no answer")
    says = "Run asked of orders-3_batches is cleared" if cleared else "A run of orders-3_batches starts"
    assert says in own_api.get(f"/streams/orders-3/batches/{time}/run/preview")["will"]
    own_api.post(f"/streams/orders-3/batches/{time}/run")
    done = ("clear", "asked", None) if cleared else ("trigger", "orders-3_batches", {"reprocess": True})
    assert own_api.airflow.done == [done]


def test_a_batch_whose_run_is_running_is_not_run_again(own_api: Api) -> None:
    time = _failed(own_api)
    own_api.airflow.runs["orders-3_batches", time_ms(time, "t")] = Run("orders-3_batches", "r", "running")
    assert "is running" in own_api.get(f"/streams/orders-3/batches/{time}/run/preview")["refused"]
    assert "is running" in own_api.post(f"/streams/orders-3/batches/{time}/run", status=409)["detail"]
    assert own_api.airflow.done == []


def test_a_batch_that_is_not_allocated_is_not_run(own_api: Api) -> None:
    path = "/streams/orders/batches/2020-01-01T00:00:00Z/run"
    assert "There is no batch" in own_api.get(f"{path}/preview")["refused"]
    own_api.post(path, status=409)


def test_the_run_of_another_batch_time_is_not_the_batchs_own(own_api: Api) -> None:
    # An old one: the newest is of the latest interval that has ended, whose time the ledger would give this run too.
    time = own_api.get("/streams/orders/batches", state="completed", order="oldest")["batches"][0]["batch_time"]
    at_ms = time_ms(time, "t")
    # A late run whose interval ends at this time; the ledger gave it a later batch time.
    own_api.airflow.runs["orders_batches", at_ms] = Run("orders_batches", "late", "success")
    with own_api.ledger() as ledger:
        assert ledger.runs.assign("orders", "late") != at_ms
    assert own_api.get(f"/streams/orders/batches/{time}")["links"]["run"] is None
    assert (
        "a run of orders_batches starts" in own_api.get(f"/streams/orders/batches/{time}/run/preview")["will"].lower()
    )


def test_an_attempt_of_a_range_links_to_its_task(own_api: Api) -> None:
    """Its run is not the batch's own."""
    time = _completed(own_api)
    at_ms = time_ms(time, "t")
    # A person may give two DAGs' runs the same id.
    own_api.airflow.runs["orders_batches", at_ms - 1] = Run("orders_batches", "tuesday", "success")
    with own_api.ledger() as ledger:
        ledger.attempts.begin(
            "orders", at_ms, holder="airflow:orders_again/tuesday/run_again/2", way="connect", lease_ms=1, force=True,
            attributes={**TimeRange(0, at_ms, "tuesday").attributes, "run_id": "tuesday"},
        )  # fmt: skip
    batch = own_api.get(f"/streams/orders/batches/{time}")
    task = "/dags/orders_again/runs/tuesday"
    links = batch["all_attempts"][-1]["links"]
    assert (links["run"], links["logs"]) == (task, f"{task}/tasks/run_again")
    assert "tuesday" not in str(batch["links"]["run"])


def test_the_logs_of_a_batch_are_those_of_its_newest_attempt(own_api: Api) -> None:
    """The logs are those of that attempt's task."""
    time = _failed(own_api)
    at_ms = time_ms(time, "t")
    own_api.airflow.runs["orders-3_batches", at_ms] = Run("orders-3_batches", "scheduled__1", "failed")
    holder = "airflow:orders-3_repair/scheduled__2/repair_batches/1"
    with own_api.ledger() as ledger:
        attributes = {"run_id": "scheduled__2", REPAIR: True}
        ledger.attempts.begin("orders-3", at_ms, holder=holder, way="connect", lease_ms=1, attributes=attributes)
    links = own_api.get(f"/streams/orders-3/batches/{time}")["links"]
    assert links["run"] == "/dags/orders-3_batches/runs/scheduled__1"
    assert links["logs"] == "/dags/orders-3_repair/runs/scheduled__2/tasks/repair_batches"
    del own_api.airflow.runs["orders-3_batches", at_ms]
    links = own_api.get(f"/streams/orders-3/batches/{time}")["links"]
    assert links.get("run") is None
    assert links["logs"] == "/dags/orders-3_repair/runs/scheduled__2/tasks/repair_batches"


def test_abandoning_needs_a_reason_and_makes_a_gap(own_api: Api) -> None:
    time = _failed(own_api)
    assert "cannot be undone" in own_api.get(f"/streams/orders-3/batches/{time}/abandon/preview")["will"]
    own_api.post(f"/streams/orders-3/batches/{time}/abandon", {}, 422)
    own_api.post(f"/streams/orders-3/batches/{time}/abandon", {"reason": "  "}, 422)
    own_api.post(f"/streams/orders-3/batches/{time}/abandon", {"reason": "damaged for good"})
    gaps = own_api.get("/streams/orders-3/gaps")["gaps"]
    assert {gap["reason"] for gap in gaps} == {"batch abandoned: damaged for good"}
    assert {gap["batch_time"] for gap in gaps} == {time}
    with own_api.ledger() as ledger:
        (event,) = ledger.events.latest("orders-3", [EventKind.BATCH_ABANDONED])
        assert event.payload["by"] == "op"
    own_api.post(f"/streams/orders-3/batches/{time}/abandon", {"reason": "again"}, 409)


def test_one_output_of_a_batch_is_given_up(own_api: Api) -> None:
    time = _failed(own_api)
    address = f"/streams/orders-3/batches/{time}"
    assert "needs no output nosuch" in own_api.get(f"{address}/abandon/preview", output="nosuch")["refused"]
    (output,) = own_api.get(address)["outputs"]
    preview = own_api.get(f"{address}/abandon/preview", output=output["id"])
    assert (preview["refused"], "are not written there" in preview["will"]) == (None, True)
    # The batch would need nothing.
    body = {"reason": "replaced", "output": output["id"]}
    assert "the stream has none" in own_api.post(f"{address}/abandon", body, 409)["detail"]
    with own_api.ledger() as ledger:
        row = ledger.streams.get("orders-3")
        settings = {"batch_interval_ms": row.batch_interval_ms, "block_interval_ms": row.block_interval_ms}
        ledger.streams.register("orders-3", row.definition, outputs=[*row.outputs, "copy"], **settings)
    assert "the batch is allocated now" in own_api.post(f"{address}/abandon", body)["done"]
    found = {each["id"]: (each["state"], each["error"]) for each in own_api.get(address)["outputs"]}
    assert found == {output["id"]: ("abandoned", "replaced"), "copy": ("not written", None)}


def test_a_completed_batch_is_not_abandoned(own_api: Api) -> None:
    time = _completed(own_api)
    assert "completed" in own_api.get(f"/streams/orders/batches/{time}/abandon/preview")["refused"]
    own_api.post(f"/streams/orders/batches/{time}/abandon", {"reason": "x"}, 409)


def test_a_batch_is_replayed_by_a_replay_dag_of_the_stream_only(own_api: Api) -> None:
    time = _completed(own_api)
    path = f"/streams/orders/batches/{time}/replay"
    assert "no replay DAG" in own_api.get(f"{path}/preview", target="orders-2_v2")["refused"]
    own_api.post(path, {"target": "orders-2_v2"}, 409)
    own_api.airflow.hidden = {"orders_v2"}
    own_api.post(path, {"target": "orders_v2"}, 409)
    own_api.airflow.hidden = set()
    own_api.post(path, {"target": "orders_v2"})
    assert own_api.airflow.done == [("trigger", "orders_v2", {})]


_ACTIONS: list[tuple[str, Any]] = [
    ("/streams/orders/stop", {}),
    ("/streams/orders/start", {}),
    ("/streams/orders/batches/{time}/run", {}),
    ("/streams/orders/batches/{time}/abandon", {"reason": "x"}),
    ("/streams/orders/batches/{time}/replay", {"target": "orders_v2"}),
    ("/streams/orders/dead-letters/replay", {"output": "elasticsearch"}),
]


@pytest.mark.parametrize(("path", "body"), _ACTIONS)
def test_a_viewer_is_refused_and_changes_nothing(own_api: Api, path: str, body: Any) -> None:
    address = path.format(time=_completed(own_api))
    own_api.post(address, body, 403, user="viewer")
    assert own_api.airflow.done == []
    with own_api.ledger() as ledger:
        assert ledger.events.latest("orders", [EventKind.STREAM_STATE_CHANGED, EventKind.OPERATOR_ACTION]) == []


def test_the_table_of_actions_has_them_all(own_api: Api) -> None:
    paths = own_api.client.get("/headrace/api/openapi.json").json()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    own = {f"/api/v1{path}".replace("/orders", "/{name}").replace("{time}", "{batch_time}") for path, _ in _ACTIONS}
    assert posts == own


@pytest.mark.parametrize(("path", "body"), _ACTIONS)
def test_a_form_or_a_page_of_another_origin_is_refused(own_api: Api, path: str, body: Any) -> None:
    address = "/headrace/api/v1" + path.format(time=_completed(own_api))
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        answer = own_api.client.post(address, content="{}", headers={"X-User": "op", "Content-Type": kind})
        assert answer.status_code == 415
    for origin in ("cross-site", "same-site"):
        own_api.post(path.format(time=_completed(own_api)), body, 403, **{"Sec-Fetch-Site": origin})
    assert own_api.airflow.done == []
    with own_api.ledger() as ledger:
        assert ledger.streams.get("orders").desired_state is DesiredState.RUNNING


def test_a_request_with_a_token_needs_no_proof_of_its_origin(own_api: Api) -> None:
    own_api.post("/streams/orders/stop", **{"Sec-Fetch-Site": "cross-site", "Authorization": "Bearer x"})
