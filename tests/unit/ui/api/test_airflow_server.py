"""What Airflow has and does not have: streams in serialised DAGs, a DAG with a guessed id, a connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
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
from headrace.ui.api import airflow_server
from headrace.ui.api.airflow_server import AirflowServer, DeclaredStreams, LedgerNotAllowedError
from headrace.ui.api.airflow_side import Caller
from headrace.ui.api.catalogue import OpenLedgers


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
    tables = [each.__table__ for each in (DagModel, DagTag, DagRun, SerializedDagModel, ParseImportError)]
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


def test_streams_are_read_from_serialised_dags_also_from_stale_ones(database: Engine) -> None:
    (found,) = DeclaredStreams().all()
    assert (found.name, found.ledger) == ("orders", "connection:x")
    assert (found.batch_dag_id, found.batch_dag_ids) == ("mine", ("mine", "orders_batches"))


def test_a_stream_whose_file_cannot_be_imported_stays_and_has_the_error(database: Engine) -> None:
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


def test_the_server_of_a_ledger_that_only_a_dag_names_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_missing_connection_is_an_error_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionNotFoundError, match="no connection 'missing'"):
        AirflowServer().environ("connection:missing")
    monkeypatch.setenv("AIRFLOW_CONN_THERE", "sqlite:////tmp/x.db")
    assert list(AirflowServer().environ("connection:there") or ()) == ["AIRFLOW_CONN_THERE"]
