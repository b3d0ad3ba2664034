"""Executors of a receiver job on a standalone cluster follow the batches, and the one with the receiver stays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.spark.executors import executors, running
from tests.support.spark_cluster import SparkCluster

from headrace.ledger import EventKind
from headrace.stream import ConsoleOutput, ExecutorAllocation, SparkSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Longer than the interval of a batch on any machine.
LONG_BATCHES = """
import time

def transform(records):
    time.sleep(5)
    return records
"""


def run_short_batch(application: Any) -> None:
    """A batch that begins and ends in the ledger only: its time is no question of the machine's."""
    application.produce("x")
    time_ms = application.allocate_next()
    ledger = application.ledger
    attempt = ledger.attempts.begin("clicks", time_ms, holder="test", way="connect", lease_ms=60_000)
    for output in attempt.outputs:
        ledger.attempts.record_output(attempt, output, {})
    ledger.attempts.complete(attempt)


@pytest.mark.parametrize("decommission", ["false", "true"], ids=["killed", "decommissioned"])
def test_executors_are_released_and_requested_by_how_long_batches_take(
    cluster: SparkCluster,
    server_folder: Path,
    receiver_application: Callable[..., Any],
    tmp_path: Path,
    decommission: str,
) -> None:
    code = tmp_path / "long_batches.py"
    code.write_text(LONG_BATCHES)
    application = receiver_application(
        outputs=ConsoleOutput(transform="long_batches:transform"),
        batch_interval="4 s",
        storage={"url": str(tmp_path / "storage"), "shared": True},
        spark=SparkSettings(
            master=cluster.url,
            py_files=(str(code),),
            executors=ExecutorAllocation(maximum=3, scaling_interval="3 s"),
            conf={
                "spark.executor.cores": "1",
                "spark.executor.memory": "512m",
                "spark.cores.max": "3",
                "spark.decommission.enabled": decommission,
                "spark.sql.shuffle.partitions": "2",
            },
        ),
    )
    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_CONF_DIR": str(cluster.conf_dir)}

    def events() -> list[tuple[str, dict[str, Any]]]:
        kinds = [EventKind.EXECUTORS_REQUESTED, EventKind.EXECUTOR_RELEASED]
        return [(str(event.kind), event.payload) for event in application.ledger.events.page("clicks", kinds=kinds)]

    process = application.start_job(**environment)
    application.running_job(process)
    first = application.until("as many executors as fit", lambda: len(found := executors(application)) == 3 and found)
    with_receiver = application.until("the receiver", lambda: [each for each, n in running(application).items() if n])

    def two_are_left() -> bool:
        run_short_batch(application)
        return len(executors(application)) == 2

    application.until("the release of an executor", two_are_left)
    ((kind, released),) = events()
    assert (kind, released["left"]) == ("executor_released", 2)
    assert released["ratio"] <= 0.3
    logs = [each.read_text() for each in server_folder.rglob(f"{released['executor']}/stderr")]
    assert len(logs) == 1
    assert ("ecommission" in logs[0]) == (decommission == "true")
    application.until("the slots that are left", lambda: application.job().attributes["batch_slots"] == 1)
    left = executors(application).keys()
    assert left == first.keys() - {released["executor"]}
    assert set(with_receiver) <= left

    # One executor more could go by its ratio, but the receiver would have taken the last task slot.
    for _ in range(2):
        run_short_batch(application)

    application.produce("x")
    done = application.run_batch(application.allocate_next(), **environment)
    assert done.returncode == 0, done.stderr
    grown = application.until("one more executor", lambda: len(found := executors(application)) == 3 and found)
    assert left < grown.keys()
    application.until("its slot for batches", lambda: application.job().attributes["batch_slots"] == 2)
    (_, (kind, requested)) = events()
    assert (kind, requested["executors"], requested["live"]) == ("executors_requested", 3, 2)
    assert requested["ratio"] >= 0.9

    assert [row.restarts for row in application.ledger.receivers.all("clicks")] == [0], "it was never started again"
    assert [each for each, n in running(application).items() if n] == with_receiver
    application.ledger.jobs.request_stop("clicks", "the end of the test")
    assert process.wait(240) == 0, application.log("receiver")
