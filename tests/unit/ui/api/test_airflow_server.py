"""What Airflow has and does not have: streams in serialised DAGs, a DAG with a guessed id, a connection.

Which DAGs are those of a stream, and who may see a stream that several DAGs, or none, declare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from airflow.models.base import Base
from airflow.models.dag import DagModel, DagTag
from airflow.models.dagrun import DagRun
from airflow.models.errors import ParseImportError
from airflow.models.serialized_dag import SerializedDagModel
from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.orm import Session

from headrace.connections import ConnectionNotFoundError
from headrace.ledger import Ledger
from headrace.ui.api import airflow_server
from headrace.ui.api.airflow_server import AirflowServer, Declaration, DeclaredStreams, LedgerNotAllowedError, combined
from headrace.ui.api.airflow_side import Caller, Run
from headrace.ui.api.catalogue import OpenLedgers
from headrace.views.stream_state import DagFacts
from headrace.views.streams import Placed

from .conftest import Api


def test_nobody_has_a_right_on_a_dag_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_engine("sqlite://")
    DagModel.__table__.create(engine)
    with engine.begin() as connection:
        row = {"bundle_name": "b", "max_active_tasks": 1, "max_consecutive_failed_dag_runs": 0, "max_active_runs": 1}
        row["has_task_concurrency_limits"] = False
        connection.execute(insert(DagModel.__table__).values(dag_id="orders_batches", **row))

    @contextmanager
    def session() -> Iterator[Session]:
        with Session(engine) as opened:
            yield opened

    # An auth manager that allows everything, as for an administrator.
    allowing = SimpleNamespace(is_authorized_dag=lambda **_: True)
    monkeypatch.setattr(airflow_server, "create_session", session)
    monkeypatch.setattr(airflow_server, "get_auth_manager", lambda: allowing)
    monkeypatch.setattr(DagModel, "get_team_name", lambda _: None)
    assert AirflowServer().may(Caller("admin"), "GET", "orders_batches")
    assert not AirflowServer().may(Caller("admin"), "GET", "guessed_batches")


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Three DAGs of one stream: "orders_batches" is stale, "mine" is not, "other" has no tag."""
    engine = create_engine("sqlite://")
    tables = [model.__table__ for model in (DagModel, DagTag, DagRun, SerializedDagModel, ParseImportError)]
    Base.metadata.create_all(engine, tables)
    row = {"bundle_name": "b", "max_active_tasks": 1, "max_consecutive_failed_dag_runs": 0, "max_active_runs": 1}
    row["has_task_concurrency_limits"] = False
    now = datetime(2026, 11, 23, tzinfo=UTC)
    with engine.begin() as connection:
        for number, (dag_id, stale) in enumerate([("orders_batches", True), ("mine", False), ("other", False)]):
            document = {"headrace": {"stream": "orders", "ledger": "connection:x", "kind": "batches"}}
            tasks = [{"__var": {"doc_json": json.dumps(document)}}]
            connection.execute(
                insert(DagModel.__table__).values(dag_id=dag_id, is_stale=stale, relative_fileloc=f"{dag_id}.py", **row)
            )
            if dag_id != "other":
                connection.execute(insert(DagTag.__table__).values(dag_id=dag_id, name="headrace"))
            # An older version of the DAG declares another stream.
            for age, data in ((0, {"dag": {"tasks": tasks}}), (1, {"dag": {"tasks": []}})):
                connection.execute(
                    insert(SerializedDagModel.__table__).values(
                        id=UUID(int=10 * number + age),
                        dag_id=dag_id,
                        data=data,
                        created_at=now - timedelta(days=age),
                        last_updated=now,
                        dag_hash=f"{age}",
                        dag_version_id=UUID(int=10 * number + age),
                    )
                )

    @contextmanager
    def session() -> Iterator[Session]:
        with Session(engine) as opened:
            yield opened

    monkeypatch.setattr(airflow_server, "create_session", session)
    return engine


def test_streams_are_read_from_serialised_dags_even_stale_ones(database: Engine) -> None:
    (found,) = DeclaredStreams().all()
    assert (found.name, found.ledger) == ("orders", "connection:x")
    assert (found.batch_dag_id, found.batch_dag_ids) == ("mine", ("mine", "orders_batches"))


def test_a_stream_whose_file_has_an_import_error_stays_with_it(database: Engine) -> None:
    trace = (
        "Traceback (most recent call last):\n  File 'orders_batches.py', line 3\nNameError: name 'x' is not defined\n"
    )
    wrong = {"filename": "orders_batches.py", "bundle_name": "b", "stacktrace": trace}
    with database.begin() as connection:
        connection.execute(insert(ParseImportError.__table__).values(**wrong))
    (found,) = DeclaredStreams().all()
    assert found.batch_dag_id == "orders_batches"
    facts = AirflowServer().facts(["orders_batches", "mine"])
    assert facts["orders_batches"].import_error == "NameError: name 'x' is not defined"
    assert facts["mine"].import_error is None


@pytest.mark.parametrize("conf", [None, {"outputs": ["a"]}])
def test_a_run_has_the_conf_that_it_was_triggered_with(database: Engine, conf: dict[str, Any] | None) -> None:
    row = {"dag_id": "mine", "run_id": "r", "run_type": "manual", "state": "success", "conf": conf}
    # There is no table of log templates.
    row |= {"run_after": datetime(2026, 11, 23, tzinfo=UTC), "log_template_id": None}
    with database.begin() as connection:
        connection.execute(insert(DagRun.__table__).values(row))
    assert AirflowServer().run("mine", "r") == Run("mine", "r", "success", conf or {})


def test_a_ledgers_server_that_only_a_dag_names_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql+psycopg://me@elsewhere.example/db"
    ledgers = OpenLedgers(AirflowServer().environ)
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setattr("headrace.ledger.Ledger.open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(LedgerNotAllowedError, match="names a ledger by the URL of a server") as refused:
        ledgers.ask(url, lambda _: None)
    assert "[headrace] ledgers" in str(refused.value)
    monkeypatch.setenv("AIRFLOW__HEADRACE__LEDGERS", f"headrace_ledger_default, {url}")
    assert AirflowServer().environ(url) is None
    assert AirflowServer().environ("sqlite:////data/ledger.db") is None
    ledgers.close()


@pytest.mark.parametrize("kind", ["postgres", "mysql", "http", ""])
def test_another_servers_connection_is_not_used_as_a_ledger(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A DAG names the connection as its ledger."""
    connection = {"conn_type": kind, "host": "shop.example", "login": "me", "password": "hunter2"}
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps(connection))
    with pytest.raises(
        LedgerNotAllowedError, match=r"'shop' as its ledger.*add its id to \[headrace\] ledgers"
    ) as refused:
        AirflowServer().environ("connection:shop")
    assert "hunter2" not in str(refused.value)
    # A stream's own connections, to Kafka or an output, are of other types.
    assert list(AirflowServer().connection("shop")) == ["AIRFLOW_CONN_SHOP"]
    monkeypatch.setenv("AIRFLOW__HEADRACE__LEDGERS", "another, shop")
    assert list(AirflowServer().environ("connection:shop") or ()) == ["AIRFLOW_CONN_SHOP"]


def test_a_connection_of_the_ledgers_type_needs_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MINE", '{"conn_type": "headrace_ledger", "host": "db.example", "login": "me"}')
    assert list(AirflowServer().environ("connection:mine") or ()) == ["AIRFLOW_CONN_MINE"]


def test_a_missing_connection_is_an_error_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionNotFoundError, match="no connection 'missing'"):
        AirflowServer().environ("connection:missing")
    monkeypatch.setenv("AIRFLOW_CONN_THERE", "sqlite:////tmp/x.db")
    assert list(AirflowServer().environ("connection:there") or ()) == ["AIRFLOW_CONN_THERE"]


def test_all_dags_declared_as_batch_dag_are_kept_without_default() -> None:
    """No DAG has the default id."""
    (declared,) = combined(Declaration(each, "orders", "ledger", "batches") for each in ("a_copy", "z_copy"))
    assert declared.batch_dag_ids == ("a_copy", "z_copy")


def test_no_dag_hides_a_stream_from_the_default_dags_users() -> None:
    """The default DAG is the one with the default id."""
    ids = ("a_copy", "orders_batches", "z_copy")
    (declared,) = combined(Declaration(dag_id, "orders", "ledger", "batches") for dag_id in ids)
    assert declared.batch_dag_ids == ("orders_batches",)


def test_a_stream_without_a_batch_dag_gets_the_default_id() -> None:
    (declared,) = combined([Declaration("mine", "orders", "ledger", "receiver")])
    assert (declared.batch_dag_ids, declared.receiver_dag_id) == (("orders_batches",), "mine")


def test_a_batch_dag_of_another_spelling_does_not_decide_alone() -> None:
    """It writes the ledger's reference differently."""
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


def test_a_stale_dag_declares_nothing_but_decides_about_access() -> None:
    own = Declaration("orders_batches", "orders", "ledger", "batches", stale=True)
    assert list(combined([own])) == []
    (declared,) = combined([own, Declaration("mine", "orders", "ledger", "batches")])
    assert (declared.batch_dag_id, declared.batch_dag_ids) == ("mine", ("mine", "orders_batches"))


@pytest.fixture
def copied(api: Api) -> Api:
    """The stream "orders" with a second DAG that declares itself its batch DAG."""
    first, *others = api.airflow.streams
    api.airflow.streams = [replace(first, other_batch_dag_ids=("a_copy",)), *others]
    return api


def _names(api: Api) -> list[str]:
    return [stream["name"] for stream in api.get("/streams")["streams"]]


def test_a_copied_dag_is_a_problem_in_the_list(copied: Api) -> None:
    answer = copied.get("/streams")
    assert "orders" in [stream["name"] for stream in answer["streams"]]
    (problem,) = answer["problems"]
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
    assert {stream["name"] for stream in copied.get("/streams")["streams"] if not stream["may"]["operate"]} == {
        "orders"
    }
    assert "a_copy" in copied.post("/streams/orders/stop", status=403)["detail"]


@pytest.fixture
def claimed(api: Api) -> Api:
    """The stream "orders" with a second DAG that names the same ledger by another spelling of its URL."""
    claims = [("orders_batches", api.url), ("mine", api.url.replace("ledger.db", "./ledger.db"))]
    api.airflow.streams = list(combined(Declaration(dag_id, "orders", url, "batches") for dag_id, url in claims))
    return api


def test_another_spelling_of_the_ledger_gives_no_further_rights(claimed: Api) -> None:
    """It is the ledger's reference that is spelled in another way."""
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


def test_a_reference_of_the_configuration_gives_no_more_rights(api: Api) -> None:
    first, *others = api.airflow.streams
    api.airflow.streams = [replace(first, ledger="sqlite:////nowhere/x.db", batch_dag_id="secret"), *others]
    api.airflow.hidden = {"secret"}
    assert "orders" not in _names(api)
    api.get("/streams/orders", 404)


def test_an_undeclared_stream_needs_the_right_on_the_default_id(api: Api) -> None:
    api.airflow.streams, api.airflow.ledger_urls = [], [api.url]
    api.airflow.hidden = {"orders_batches"}
    assert "orders" not in _names(api)
    assert "orders-2" in _names(api)
    api.get("/streams/orders", 404)
    api.get("/streams/orders-2")


def test_an_unregistered_stream_is_a_problem_of_its_own_kind(api: Api) -> None:
    api.airflow.streams.append(Placed("new", api.url, "new_batches", "new_receiver"))
    (problem,) = api.get("/streams")["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("not_registered", api.url, ["new"])


@pytest.mark.parametrize("ledger", ["the same", "missing"])
def test_a_stream_with_paused_dags_is_new_and_nothing_is_wrong(api: Api, tmp_path: Path, ledger: str) -> None:
    url = api.url if ledger == "the same" else f"sqlite:///{tmp_path}/new.db"
    api.airflow.streams.append(Placed("new", url, "new_batches", "new_receiver"))
    api.airflow.dags = {dag_id: DagFacts(dag_id, paused=True) for dag_id in ("new_batches", "new_receiver")}
    (problem,) = api.get("/streams")["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("new", url, ["new"])
    assert "Unpause its DAGs new_receiver and new_batches" in problem["error"]
    api.airflow.dags["new_batches"] = DagFacts("new_batches", running=1)
    (problem,) = api.get("/streams")["problems"]
    assert problem["kind"] == ("not_registered" if ledger == "the same" else "ledger_unreadable")


def test_a_second_ledgers_namesake_is_a_problem_of_its_own_kind(api: Api, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    with Ledger.open(other) as ledger:
        ledger.streams.register("orders", '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
    api.airflow.ledger_urls = [other]
    (problem,) = api.get("/streams")["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("same_name", other, ["orders"])


def test_a_moved_stream_is_shown_from_its_declared_ledger(api: Api, tmp_path: Path) -> None:
    """The declared ledger is the one that its DAGs name."""
    new = f"sqlite:///{tmp_path}/new.db"
    with Ledger.open(new) as ledger:
        ledger.streams.register("orders", '{"outputs": []}', batch_interval_ms=1_000, block_interval_ms=200)
    moved = [stream for stream in api.airflow.streams if stream.name == "orders"]
    # The old ledger comes first: DAGs declare other streams in it.
    others = [stream for stream in api.airflow.streams if stream.name != "orders"]
    api.airflow.streams = [*others, *(replace(moved_stream, ledger=new) for moved_stream in moved)]
    answer = api.get("/streams")
    (orders,) = (stream for stream in answer["streams"] if stream["name"] == "orders")
    assert (orders["ledger"], orders["batch_dag_id"]) == (new, "orders_batches")
    (problem,) = answer["problems"]
    assert (problem["kind"], problem["ledger"], problem["streams"]) == ("same_name", api.url, ["orders"])
    assert new in problem["error"]


def test_a_refused_url_is_not_shown_and_names_readable_streams(api: Api) -> None:
    """Streams that may not be read are not named."""
    url = "postgresql+psycopg://someone:secret@host/db"
    first = api.airflow.streams[0]
    api.airflow.streams = [replace(first, name=name, batch_dag_id=f"{name}_b", ledger=url) for name in ("one", "two")]
    api.airflow.hidden = {"two_b"}
    answer = api.get("/streams")
    assert "secret" not in str(answer)
    (problem,) = answer["problems"]
    assert (problem["kind"], problem["ledger"]) == ("ledger_unreadable", "invalid ledger")
    assert problem["streams"] == ["one"]
    api.airflow.hidden |= {"one_b"}
    assert api.get("/streams")["problems"] == []
