"""One embedded stack for the tests of this folder, with a stream of the tests' own that runs on it.

Nothing is faked: Kafka, Elasticsearch, Postgres and Airflow are real, the stream's DAG file and transform stand in a
folder outside the repository, and whatever a test does to them it does from outside.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.clicks import DAG_FILE as CLICKS_DAG_FILE
from tests.system.orders import DAG_FILE, TRANSFORM_FILE, Orders

from headrace.devstack.postgres import PostgresServer
from headrace.devstack.stack import Stack, StackOptions
from headrace.devstack.state import STACK_VARIABLE, end_stack_processes
from headrace.ledger import Ledger


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """The running stack."""
    # Not below pytest's own temporary folder: that is closed to others, and Postgres runs as nobody under root.
    data = Path(tempfile.mkdtemp(prefix="headrace-system-"))
    data.chmod(0o755)
    dags = data / "dags"
    dags.mkdir()
    (dags / "orders.py").write_text(DAG_FILE)
    (dags / "orders_transform.py").write_text(TRANSFORM_FILE)
    (dags / "clicks.py").write_text(CLICKS_DAG_FILE)
    # What other tests of this process start later is not the stack's.
    with pytest.MonkeyPatch.context() as environment:
        for name in (STACK_VARIABLE, "HEADRACE_DATA"):
            environment.setenv(name, "")
        environment.setenv("ORDERS_STORAGE", str(data / "storage"))
        environment.setenv("CLICKS_STORAGE", str(data / "storage"))
        environment.setenv("CLICKS_FILES", str(data / "clicks"))
        stack = Stack(StackOptions(data=data, dags=dags, plugins=data / "plugins"))
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


@pytest.fixture(scope="package")
def orders(stack: Stack, ledger: Ledger) -> Orders:
    """The stream, its DAGs unpaused."""
    orders = Orders(stack, ledger)
    orders.begin()
    return orders
