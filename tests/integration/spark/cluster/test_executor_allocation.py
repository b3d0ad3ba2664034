"""Executors of a receiver job on a standalone cluster follow the batches, and the one with the receiver stays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.spark.cluster.executors import executors, running
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


class Scaled:
    """A receiver job with as many executors as fit, and what it has of them when one has been released."""

    def __init__(self, application: Any, cluster: SparkCluster) -> None:
        self.application = application
        self.environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_CONF_DIR": str(cluster.conf_dir)}
        self.process = application.start_job(**self.environment)
        application.running_job(self.process)
        first = application.until(
            "as many executors as fit", lambda: len(found := executors(application)) == 3 and found
        )
        self.with_receiver = application.until("the receiver", self.running)

        def two_are_left() -> bool:
            run_short_batch(application)
            return len(executors(application)) == 2

        application.until("the release of an executor", two_are_left)
        ((kind, released),) = self.events()
        assert (kind, released["left"]) == ("executor_released", 2)
        assert released["ratio"] <= 0.3
        released_log = f"{application.job().attributes['application_id']}/{released['executor']}/stderr"
        (self.log,) = [path.read_text() for path in cluster.conf_dir.parent.rglob(released_log)]
        application.until("the slots that are left", lambda: application.job().attributes["batch_slots"] == 1)
        self.left = executors(application).keys()
        assert self.left == first.keys() - {released["executor"]}
        assert set(self.with_receiver) <= self.left

        # One executor more could go by its ratio, but the receiver would have taken the last task slot.
        for _ in range(2):
            run_short_batch(application)

    def running(self) -> list[str]:
        """The executors with a task."""
        return [each for each, tasks in running(self.application).items() if tasks]

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        kinds = [EventKind.EXECUTORS_REQUESTED, EventKind.EXECUTOR_RELEASED]
        page = self.application.ledger.events.page("clicks", kinds=kinds)
        return [(str(event.kind), event.payload) for event in page]

    def end(self) -> None:
        """Stop the job, whose receiver was never started again."""
        assert [row.restarts for row in self.application.ledger.receivers.all("clicks")] == [0]
        # Spark shows the last batch's task for a moment after its end.
        self.application.until("the receiver's task alone", lambda: self.running() == self.with_receiver)
        self.application.ledger.jobs.request_stop("clicks", "the end of the test")
        assert self.process.wait(240) == 0, self.application.log("receiver")


@pytest.fixture
def make_scaled(
    cluster: SparkCluster, receiver_application: Callable[..., Any], tmp_path: Path
) -> Callable[[str], Scaled]:
    """Builds a `Scaled` with ``spark.decommission.enabled``."""

    def make(decommission: str) -> Scaled:
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
        return Scaled(application, cluster)

    return make


def test_executors_are_released_and_requested_by_batch_duration(make_scaled: Callable[[str], Scaled]) -> None:
    scaled = make_scaled("false")
    application = scaled.application
    assert "ecommission" not in scaled.log

    application.produce("x")
    done = application.run_batch(application.allocate_next(), **scaled.environment)
    assert done.returncode == 0, done.stderr
    grown = application.until("one more executor", lambda: len(found := executors(application)) == 3 and found)
    assert scaled.left < grown.keys()
    application.until("its slot for batches", lambda: application.job().attributes["batch_slots"] == 2)
    (_, (kind, requested)) = scaled.events()
    assert (kind, requested["executors"], requested["live"]) == ("executors_requested", 3, 2)
    assert requested["ratio"] >= 0.9
    scaled.end()


def test_an_executor_is_decommissioned_if_spark_is_told_to(make_scaled: Callable[[str], Scaled]) -> None:
    scaled = make_scaled("true")
    assert "ecommission" in scaled.log
    assert executors(scaled.application).keys() == scaled.left, "no other was requested in its place"
    scaled.end()
