from __future__ import annotations

import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url
from tests.support.scheduling import SPARING

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
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen in {seconds} s")


@pytest.fixture(scope="session")
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
    """A real Airflow with toy_dags.py, whose streams' ledger is the connection `flights_ledger`."""

    def __init__(self, folder: Path, database_url: str, ledger_url: str) -> None:
        self.folder = folder
        self.ledger_connection = _connection("headrace_ledger", ledger_url)
        self.fail_if = folder / "fail"
        dags = folder / "dags"
        dags.mkdir()
        self._dag_file = Path(shutil.copy(HERE / "toy_dags.py", dags))
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
            config=SPARING,
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

    def stop_receiving(self, stream: str) -> None:
        """Stop the receiver job, and wait for its end."""
        self.api.pause(f"{stream}_receiver")
        with self.ledger() as ledger:
            ledger.streams.set_desired_state(stream, "stopped")
            ledger.jobs.request_stop(stream, "the test")
            _until(lambda: not ledger.jobs.current(stream).alive(ledger.now_ms()), what="the receiver job's end")

    def end_schedule(self, stream: str, at: datetime) -> None:
        """Let no run begin for intervals that begin after ``at``; those asked for do."""
        (self.folder / f"{stream}_schedule_ends").write_text(at.isoformat())
        # Airflow parses a changed file at once.
        self._dag_file.touch()
        details = f"/dags/{stream}_batches/details"
        _until(lambda: self.api.request("GET", details)["end_date"] is not None, what="the end of the schedule")

    def begin_story(self, dag_ids: Sequence[str]) -> None:
        """Start what a story before this one has killed, if it failed; wait until the DAGs are known."""
        for component in self.airflow.components.values():
            if not component.alive:
                component.start()
        for dag_id in dag_ids:
            self.api.wait_for_dag(dag_id)

    def end_story(self, dag_ids: Sequence[str]) -> None:
        """Let nothing of it go on: pause its DAGs, stop its streams."""
        for pattern in ("fail", "hold", "held.*"):
            for file in self.folder.glob(pattern):
                file.unlink()
        for dag_id in dag_ids:
            self.api.pause(dag_id)
        with self.ledger() as ledger:
            for stream in ledger.streams.all():
                if f"{stream.name}_receiver" in dag_ids:
                    ledger.streams.set_desired_state(stream.name, "stopped")
                    ledger.jobs.request_stop(stream.name, "its story is over")


_INSTALLATION = pytest.StashKey[Installation]()


@pytest.fixture(scope="session")
def migrated_database(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a database with Airflow's schema, to be copied: its migrations take a quarter of a start."""
    name = "migrated_airflow"
    folder = tmp_path_factory.mktemp("airflow")
    Airflow(folder, database_url=postgres_server.create_database(name), dags_folder=folder / "dags").prepare()
    return name


@pytest.fixture(scope="session")
def airflow_with_toys(
    request: pytest.FixtureRequest, postgres_server: PostgresServer, migrated_database: str
) -> Iterator[Installation]:
    """One for all stories, whose streams are their own: a start takes 40 s of a processor."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-airflow-"))
    # Airflow refuses backfills on SQLite while anything else runs.
    databases = [f"{name}_{uuid.uuid4().hex[:8]}" for name in ("airflow", "ledger")]
    airflow_url = postgres_server.create_database(databases[0], template=migrated_database, settings=DATABASE_SETTINGS)
    made = Installation(folder, airflow_url, postgres_server.create_database(databases[1]))
    try:
        with made.airflow:
            request.session.stash[_INSTALLATION] = made
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for name in databases:
            postgres_server.drop_database(name)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop it after the last story: an Airflow that has nothing to do takes a quarter of a core until the session ends.

    `Installation.begin_story` would start it again.
    """
    made = item.session.stash.get(_INSTALLATION, None)
    if made is not None and (nextitem is None or HERE not in nextitem.path.parents):
        made.airflow.stop()


@pytest.fixture(scope="module")
def installation(request: pytest.FixtureRequest, airflow_with_toys: Installation) -> Iterator[Installation]:
    """The test module's DAGS are known to Airflow, and paused."""
    airflow_with_toys.begin_story(request.module.DAGS)
    yield airflow_with_toys
    airflow_with_toys.end_story(request.module.DAGS)
