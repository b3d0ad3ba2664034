"""Which DAGs are those of a stream, and who may see a stream that several DAGs, or none, declare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.ledger import Ledger
from headrace.ui.api.airflow_server import Declaration, combined
from headrace.views.stream_state import DagFacts
from headrace.views.streams import Placed

from .conftest import Api


def test_all_dags_that_declare_themselves_the_batch_dag_are_kept_without_one_with_the_default_id() -> None:
    (found,) = combined(Declaration(each, "orders", "ledger", "batches") for each in ("a_copy", "z_copy"))
    assert found.batch_dag_ids == ("a_copy", "z_copy")


def test_no_dag_hides_a_stream_from_the_users_of_the_dag_with_the_default_id() -> None:
    ids = ("a_copy", "orders_batches", "z_copy")
    (found,) = combined(Declaration(each, "orders", "ledger", "batches") for each in ids)
    assert found.batch_dag_ids == ("orders_batches",)


def test_a_stream_without_a_batch_dag_gets_the_default_id() -> None:
    (found,) = combined([Declaration("mine", "orders", "ledger", "receiver")])
    assert (found.batch_dag_ids, found.receiver_dag_id) == (("orders_batches",), "mine")


def test_a_batch_dag_that_writes_the_ledgers_reference_differently_does_not_decide_alone() -> None:
    places = {
        each.ledger: each
        for each in combined(
            [
                Declaration("orders_batches", "orders", "sqlite:////data/ledger.db", "batches"),
                Declaration("mine", "orders", "sqlite:////data//ledger.db", "batches"),
                Declaration("my_receiver", "orders", "connection:the_same_database", "receiver"),
                Declaration("clicks_batches", "clicks", "sqlite:////data/ledger.db", "batches"),
            ]
        )
        if each.name == "orders"
    }
    assert {reference: set(each.batch_dag_ids) for reference, each in places.items()} == {
        "sqlite:////data/ledger.db": {"orders_batches"},
        "sqlite:////data//ledger.db": {"orders_batches", "mine"},
        "connection:the_same_database": {"orders_batches", "mine"},
    }
    assert places["sqlite:////data//ledger.db"].batch_dag_id == "mine"


def test_a_stale_dag_declares_nothing_but_still_decides_about_access() -> None:
    own = Declaration("orders_batches", "orders", "ledger", "batches", stale=True)
    assert list(combined([own])) == []
    (found,) = combined([own, Declaration("mine", "orders", "ledger", "batches")])
    assert (found.batch_dag_id, found.batch_dag_ids) == ("mine", ("mine", "orders_batches"))


@pytest.fixture
def copied(api: Api) -> Api:
    """The stream "orders" with a second DAG that declares itself its batch DAG."""
    first, *others = api.airflow.streams
    api.airflow.streams = [replace(first, other_batch_dag_ids=("a_copy",)), *others]
    return api


def _names(api: Api) -> list[str]:
    return [stream["name"] for stream in api.get("/streams")["streams"]]


def test_a_copied_dag_is_a_problem_in_the_list(copied: Api) -> None:
    found = copied.get("/streams")
    assert "orders" in [stream["name"] for stream in found["streams"]]
    (problem,) = found["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("several_batch_dags", None, ["orders"])
    assert "orders_batches, a_copy" in problem["error"]


@pytest.mark.parametrize("hidden", ["orders_batches", "a_copy"])
def test_the_right_on_one_of_several_batch_dags_is_not_enough(copied: Api, hidden: str) -> None:
    copied.airflow.hidden = {hidden}
    assert "orders" not in _names(copied)
    copied.get("/streams/orders", 404)
    copied.post("/streams/orders/stop", status=404)
    copied.get("/dags/orders_receiver", 404)
    (problem,) = copied.get("/streams")["problems"]
    assert hidden not in problem["error"]


def test_acting_needs_the_right_on_each_batch_dag(copied: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    may = copied.airflow.may
    monkeypatch.setattr(
        copied.airflow,
        "may",
        lambda caller, method, dag_id, *, runs=False: (
            may(caller, method, dag_id, runs=runs) and (method == "GET" or dag_id != "a_copy")
        ),
    )
    assert copied.get("/streams/orders")["may"] == {"read": True, "operate": False}
    assert {each["name"] for each in copied.get("/streams")["streams"] if not each["may"]["operate"]} == {"orders"}
    assert "a_copy" in copied.post("/streams/orders/stop", status=403)["detail"]


@pytest.fixture
def claimed(api: Api) -> Api:
    """The stream "orders" with a second DAG that names the same ledger by another spelling of its URL."""
    claims = [("orders_batches", api.url), ("mine", api.url.replace("ledger.db", "./ledger.db"))]
    api.airflow.streams = list(combined(Declaration(dag_id, "orders", url, "batches") for dag_id, url in claims))
    return api


def test_another_spelling_of_the_ledgers_reference_gives_no_further_rights(claimed: Api) -> None:
    claimed.airflow.hidden = {"orders_batches"}
    assert "orders" not in _names(claimed)
    claimed.get("/streams/orders", 404)
    claimed.post("/streams/orders/stop", status=404)
    claimed.get("/dags/mine", 404)
    problems = claimed.get("/streams")["problems"]
    (problem,) = [each for each in problems if each["kind"] == "several_batch_dags"]
    assert "mine and 1 that you may not read" in problem["error"]
    assert "orders_batches" not in str(problems)
    claimed.airflow.hidden = set()
    assert claimed.get("/streams/orders")["name"] == "orders"


def test_a_reference_of_the_configuration_gives_no_further_rights(api: Api) -> None:
    first, *others = api.airflow.streams
    api.airflow.streams = [replace(first, ledger="sqlite:////nowhere/x.db", batch_dag_id="secret"), *others]
    api.airflow.hidden = {"secret"}
    assert "orders" not in _names(api)
    api.get("/streams/orders", 404)


def test_a_stream_that_no_dag_declares_needs_the_right_on_the_default_id(api: Api) -> None:
    api.airflow.streams, api.airflow.ledger_urls = [], [api.url]
    api.airflow.hidden = {"orders_batches"}
    assert "orders" not in _names(api)
    assert "orders-2" in _names(api)
    api.get("/streams/orders", 404)
    api.get("/streams/orders-2")


def test_a_stream_that_is_not_in_its_ledger_yet_is_a_problem_of_its_own_kind(api: Api) -> None:
    api.airflow.streams.append(Placed("new", api.url, "new_batches", "new_receiver"))
    (problem,) = api.get("/streams")["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("not_registered", api.url, ["new"])


@pytest.mark.parametrize("ledger", ["the same", "missing"])
def test_a_stream_whose_dags_are_paused_is_new_and_nothing_is_wrong(api: Api, tmp_path: Path, ledger: str) -> None:
    url = api.url if ledger == "the same" else f"sqlite:///{tmp_path}/new.db"
    api.airflow.streams.append(Placed("new", url, "new_batches", "new_receiver"))
    api.airflow.dags = {dag_id: DagFacts(dag_id, paused=True) for dag_id in ("new_batches", "new_receiver")}
    (problem,) = api.get("/streams")["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("new", url, ["new"])
    assert "Unpause its DAGs new_receiver and new_batches" in problem["error"]
    api.airflow.dags["new_batches"] = DagFacts("new_batches", running=1)
    (problem,) = api.get("/streams")["problems"]
    assert problem["kind"] == ("not_registered" if ledger == "the same" else "ledger_unreadable")


def test_a_stream_of_a_second_ledger_with_the_same_name_is_a_problem_of_its_own_kind(api: Api, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    with Ledger.open(other) as ledger:
        ledger.streams.register("orders", '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
    api.airflow.ledger_urls = [other]
    (problem,) = api.get("/streams")["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("same_name", other, ["orders"])


def test_a_stream_that_moved_is_shown_from_the_ledger_in_which_its_dags_declare_it(api: Api, tmp_path: Path) -> None:
    new = f"sqlite:///{tmp_path}/new.db"
    with Ledger.open(new) as ledger:
        ledger.streams.register("orders", '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
    moved = [each for each in api.airflow.streams if each.name == "orders"]
    # The old ledger comes first: DAGs declare other streams in it.
    others = [each for each in api.airflow.streams if each.name != "orders"]
    api.airflow.streams = [*others, *(replace(each, ledger=new) for each in moved)]
    found = api.get("/streams")
    (orders,) = (each for each in found["streams"] if each["name"] == "orders")
    assert (orders["ledger"], orders["batch_dag_id"]) == (new, "orders_batches")
    (problem,) = found["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("same_name", api.url, ["orders"])
    assert new in problem["error"]


def test_a_refused_url_is_not_shown_and_names_only_readable_streams(api: Api) -> None:
    url = "postgresql+psycopg://someone:secret@host/db"
    first = api.airflow.streams[0]
    api.airflow.streams = [replace(first, name=name, batch_dag_id=f"{name}_b", ledger=url) for name in ("one", "two")]
    api.airflow.hidden = {"two_b"}
    found = api.get("/streams")
    assert "secret" not in str(found)
    (problem,) = found["problems"]
    assert (problem["kind"], problem["ledger"]) == ("ledger_unreadable", "invalid ledger")
    assert problem["streams"] == ["one"]
    api.airflow.hidden |= {"one_b"}
    assert api.get("/streams")["problems"] == []
