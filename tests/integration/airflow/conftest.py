from __future__ import annotations

import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from headrace.connections import variable_name
from headrace.devstack.airflow import DATABASE_SETTINGS, Airflow
from headrace.devstack.postgres import PostgresServer
from headrace.ledger import Ledger

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


# Far more than a slow machine takes: a run of five tasks is ten seconds on a quiet one, and a minute on a busy one.
_TIMEOUT_SECONDS = 600.0


def _until(condition: Callable[[], object], seconds: float = _TIMEOUT_SECONDS, what: str = "it") -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.25)
    raise AssertionError(f"{what} did not happen in {seconds} s")


@pytest.fixture
def until() -> Callable[..., object]:
    return _until


def _connection(kind: str, url: str) -> dict[str, object]:
    parts = make_url(url)
    return {
        "conn_type": kind,
        "host": parts.host,
        "port": parts.port,
        "login": parts.username,
        "password": Path(str(parts.query["passfile"])).read_text().strip().rpartition(":")[2],
        "schema": parts.database,
    }


class Installation:
    """A real Airflow with one DAG file, whose streams' ledger is the connection `flights_ledger`."""

    def __init__(self, folder: Path, database_url: str, ledger_url: str, *, dag_file: str) -> None:
        self.folder = folder
        self.ledger_connection = _connection("headrace_ledger", ledger_url)
        self.fail_if = folder / "fail"
        dags = folder / "dags"
        dags.mkdir()
        shutil.copy(HERE / dag_file, dags)
        self.airflow = Airflow(
            folder / "airflow",
            database_url=database_url,
            migrated=True,
            dags_folder=dags,
            plugins_folder=REPOSITORY / "plugins",
            connections={
                "flights_ledger": self.ledger_connection,
                "airflow_db": _connection("postgres", database_url),
            },
            environment={
                "HEADRACE_TOYS": str(HERE),
                "HEADRACE_FOLDER": str(folder),
                "FAIL_IF": str(self.fail_if),
            },
        )

    @property
    def api(self):
        return self.airflow.api()

    def ledger(self) -> Ledger:
        variable = {variable_name("flights_ledger"): json.dumps(self.ledger_connection)}
        return Ledger.open("connection:flights_ledger", environ=variable)


@pytest.fixture(scope="session")
def migrated_database(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a database with Airflow's schema, to be copied: its migrations take a quarter of a start."""
    name = "migrated_airflow"
    folder = tmp_path_factory.mktemp("airflow")
    Airflow(folder, database_url=postgres_server.create_database(name), dags_folder=folder / "dags").prepare()
    return name


@pytest.fixture(scope="module")
def installation(
    request: pytest.FixtureRequest, postgres_server: PostgresServer, migrated_database: str
) -> Iterator[Installation]:
    """With the test module's DAG_FILE; its DAGS are known to Airflow, and paused."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-airflow-"))
    # Airflow refuses backfills on SQLite while anything else runs.
    databases = [f"{name}_{uuid.uuid4().hex[:8]}" for name in ("airflow", "ledger")]
    airflow_url = postgres_server.create_database(databases[0], template=migrated_database, settings=DATABASE_SETTINGS)
    ledger_url = postgres_server.create_database(databases[1])
    made = Installation(folder, airflow_url, ledger_url, dag_file=request.module.DAG_FILE)
    try:
        with made.airflow:
            for dag_id in request.module.DAGS:
                made.api.wait_for_dag(dag_id)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for name in databases:
            postgres_server.drop_database(name)
