"""One embedded stack for the tests of this folder, with a stream of the tests' own that runs on it.

Nothing is faked: Kafka, Elasticsearch, Postgres and Airflow are real, the stream's DAG file and transform stand in a
folder outside the repository, and whatever a test does to them it does from outside.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from examples.demo.stack import dags_folder
from examples.demo.word_count_demo import LineServer
from tests.support.ledger_rules import broken_rules
from tests.support.scheduling import SPARING
from tests.system.clicks import DAG_FILE as CLICKS_DAG_FILE
from tests.system.orders import DAG_FILE, STREAM, TRANSFORM_FILE, Orders
from tests.system.parcels import DAG_FILE as PARCELS_DAG_FILE
from tests.system.parcels import HAS_CELERY, celery_config

from headrace.devstack.postgres import PostgresServer
from headrace.devstack.stack import Stack, StackOptions
from headrace.devstack.state import STACK_VARIABLE, end_stack_processes
from headrace.ledger import Ledger
from headrace.ledger.states import DesiredState

EndStream = Callable[[str], None]


@pytest.fixture(scope="package")
def lines() -> Iterator[LineServer]:
    """The server of the lines whose words dags/word_count.py counts."""
    server = LineServer()
    yield server
    server.close()


@pytest.fixture(scope="package")
def stack(lines: LineServer) -> Iterator[Stack]:
    """The running stack."""
    # Not below pytest's own temporary folder: that is closed to others, and Postgres runs as nobody under root.
    data = Path(tempfile.mkdtemp(prefix="headrace-system-"))
    data.chmod(0o755)
    dags = data / "dags"
    dags.mkdir()
    (dags / "orders.py").write_text(DAG_FILE)
    (dags / "orders_transform.py").write_text(TRANSFORM_FILE)
    (dags / "clicks.py").write_text(CLICKS_DAG_FILE)
    if HAS_CELERY:
        (dags / "parcels.py").write_text(PARCELS_DAG_FILE)
    for file in ("word_count.py", "word_count_transform.py", "deployment.py"):
        shutil.copy(dags_folder() / file, dags)
    # What other tests of this process start later is not the stack's.
    with pytest.MonkeyPatch.context() as environment:
        for name in (STACK_VARIABLE, "HEADRACE_DATA"):
            environment.setenv(name, "")
        environment.setenv("ORDERS_STORAGE", str(data / "storage"))
        # Of the files in dags/.
        environment.setenv("HEADRACE_STORAGE", str(data / "storage"))
        environment.setenv("HEADRACE_LEDGER", "connection:headrace_ledger")
        environment.setenv("HEADRACE_LINES", lines.address)
        environment.setenv("CLICKS_STORAGE", str(data / "storage"))
        environment.setenv("CLICKS_FILES", str(data / "clicks"))
        environment.setenv("CLICKS_SCHEDULE_ENDS", str(data / "clicks_schedule_ends"))
        stack = Stack(StackOptions(data=data, dags=dags, plugins=data / "plugins"))
        assert stack.airflow is not None
        stack.airflow.config |= SPARING
        if HAS_CELERY:
            stack.airflow.config |= celery_config(stack.airflow)
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()
            left = end_stack_processes(stack.state.id, stack.state.recorded_processes())
            PostgresServer(data / "postgres").wipe()
            shutil.rmtree(data, ignore_errors=True)
    assert left == [], "these outlived the stack"


@pytest.fixture(scope="package")
def ledger(stack: Stack) -> Iterator[Ledger]:
    """The stream's ledger."""
    address = stack.state.services["postgres"].address
    assert address is not None
    with Ledger.open(address) as ledger:
        yield ledger


@pytest.fixture(autouse=True)
def rules_hold(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, the rules of the ledger's rows hold for all streams of the stack."""
    yield
    if "ledger" in request.fixturenames:
        ledger: Ledger = request.getfixturevalue("ledger")
        broken = {row.name: broken_rules(ledger, row.name) for row in ledger.streams.all()}
        assert not any(broken.values()), broken


@pytest.fixture(scope="package")
def end_stream(stack: Stack, ledger: Ledger) -> EndStream:
    """Ends a stream's runs and its job, to leave the machine to the others."""

    def end(stream: str) -> None:
        assert stack.airflow is not None
        for kind in ("batches", "receiver"):
            stack.airflow.api().pause(f"{stream}_{kind}")
        ledger.streams.set_desired_state(stream, DesiredState.STOPPED)
        ledger.jobs.request_stop(stream, "its tests are over")

    return end


@pytest.fixture(scope="module")
def orders(stack: Stack, ledger: Ledger, end_stream: EndStream) -> Iterator[Orders]:
    """The stream, its DAGs unpaused."""
    orders = Orders(stack, ledger)
    orders.begin()
    yield orders
    end_stream(STREAM)
