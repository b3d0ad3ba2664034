"""What Airflow does not have: a DAG with a guessed id, and a connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from airflow.models.dag import DagModel
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session

from headrace.connections import ConnectionNotFoundError
from headrace.ui.api import airflow_server
from headrace.ui.api.airflow_server import AirflowServer
from headrace.ui.api.airflow_side import Caller


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


def test_a_missing_connection_is_an_error_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionNotFoundError, match="no connection 'missing'"):
        AirflowServer().environ("connection:missing")
    monkeypatch.setenv("AIRFLOW_CONN_THERE", "sqlite:////tmp/x.db")
    assert list(AirflowServer().environ("connection:there") or ()) == ["AIRFLOW_CONN_THERE"]
