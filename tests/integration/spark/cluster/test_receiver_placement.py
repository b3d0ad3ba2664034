"""Receivers on a standalone cluster: an executor each, and another one when theirs is lost."""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from tests.integration.spark.cluster.executors import process_of, running
from tests.support.spark_cluster import SparkCluster

from headrace.ledger import EventKind
from headrace.ledger.receiving.tables import ReceiverRow
from headrace.receiver.placement import Executor
from headrace.spark.receiving.executors import executor_of_group, executors_of, placed
from headrace.stream import KafkaInput, SparkSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def receivers(application: Any) -> list[ReceiverRow]:
    rows: list[ReceiverRow] = application.ledger.receivers.all("clicks")
    return rows


def test_a_receivers_job_prefers_its_locations(spark: SparkSession) -> None:
    context = spark.sparkContext
    rdd = placed(context, {"a": 1}, [Executor("host1", "3"), "host2", Executor("under_scored", "4")])
    for each in (rdd, rdd.map(lambda item: [item])):
        # As the scheduler asks: a derived RDD has the preferences of what it derives from.
        preferred = context._jsc.sc().getPreferredLocs(each._jrdd.rdd(), 0)
        found = [preferred.apply(index).toString() for index in range(preferred.size())]
        assert found == ["executor_host1_3", "host2", "under_scored"]
    assert rdd.map(lambda item: [item]).collect() == [[{"a": 1}]]
    assert placed(context, {"a": 1}, []).collect() == [{"a": 1}]


def test_where_a_job_runs_is_known_while_it_does(spark: SparkSession, tmp_path: Path) -> None:
    context = spark.sparkContext
    assert executors_of(context) == [], "the driver is none"
    group, over = f"headrace/{uuid.uuid4()}", tmp_path / "over"
    assert executor_of_group(context, group) is None

    def wait(path: str) -> None:
        until = time.monotonic() + 60
        while not Path(path).exists() and time.monotonic() < until:
            time.sleep(0.05)

    def run() -> None:
        context.setJobGroup(group, "waits")
        context.parallelize([str(over)], 1).foreach(wait)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until = time.monotonic() + 50
        while (found := executor_of_group(context, group)) is None:
            assert time.monotonic() < until, "no task was seen to run"
            time.sleep(0.05)
        assert found.executor_id == "driver"
    finally:
        over.touch()
        thread.join()
    assert executor_of_group(context, group) is None


def test_receivers_are_spread_and_outlive_a_task_and_an_executor(
    kafka: str, cluster: SparkCluster, receiver_application: Callable[..., Any], tmp_path: Path
) -> None:
    topics = [f"placed-{uuid.uuid4().hex}" for _ in range(2)]
    # Held: a client that is dropped ends its questions unanswered.
    admin = AdminClient({"bootstrap.servers": kafka})
    for created in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        created.result()
    application = receiver_application(
        inputs=KafkaInput(bootstrap_servers=kafka, topics=topics, receivers=2),
        storage={"url": str(tmp_path / "storage"), "shared": True},
        spark=SparkSettings(
            master=cluster.url,
            run_batches="submit",
            conf={
                "spark.executor.cores": "2",
                "spark.executor.memory": "512m",
                "spark.cores.max": "4",
                # Both executors are up before receivers are placed.
                "spark.scheduler.minRegisteredResourcesRatio": "1.0",
                "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
            },
        ),
    )
    producer = Producer({"bootstrap.servers": kafka})

    def received(records: int) -> None:
        """One more of each topic gets into the log."""
        for topic in topics:
            producer.produce(topic, value="x")
        assert producer.flush(30) == 0
        application.until(
            f"{records} records of each topic",
            lambda: [row.next_offset for row in application.ledger.positions.all("clicks")] == [records] * 2,
        )

    def run_on_an_executor_each() -> bool:
        # Registered too, which a task may do long after its begin: the end of an instance that never registered counts
        # as no restart. Records come meanwhile, since the other receiver takes its partition.
        tasks = sorted(running(application).values())
        return tasks == [1, 1] and all(row.host for row in receivers(application))

    # No batch connects, so no secret is needed.
    environment = {"SPARK_CONF_DIR": str(cluster.conf_dir), "HEADRACE_SECRET_KEY": ""}
    job = application.running_job(application.start_job(PYSPARK_PYTHON=sys.executable, **environment))
    assert job.attributes["connect_url"] is None, "there is no Spark Connect server"
    assert "Connect" not in application.log("receiver")
    received(1)
    planned = re.findall(r"receiver (\S+) is to run on executor (\d+) on", application.log("receiver"))
    assert len(planned) == len(set(dict(planned).values())) == 2
    application.until("a receiver on each executor", run_on_an_executor_each)

    def restarts() -> list[int]:
        # Not epochs: a receiver that waits for a task slot begins one with every try.
        return sorted(row.restarts for row in receivers(application))

    # A failed task: its Python is gone.
    first = min(running(application))
    for each in process_of(application, first).children(recursive=True):
        each.kill()
    application.until("a receiver's restart", lambda: sum(restarts()) >= 1)
    received(2)
    application.until("its return to where it was", run_on_an_executor_each)
    assert restarts() == [0, 1]

    # A lost executor.
    process_of(application, first).kill()
    application.until("a receiver's restart", lambda: sum(restarts()) >= 2)
    received(3)
    application.until("two tasks", lambda: sum(running(application).values()) == 2)
    assert first not in running(application)
    assert restarts() in ([0, 2], [1, 1])
    events = application.ledger.events.page("clicks", kinds=[EventKind.RECEIVER_ERROR])
    errors = [str(event.payload["error"]) for event in events]
    # Besides, a receiver may wait until the executor that was lost is replaced, so that batches keep a slot.
    ends = [error for error in errors if " waits: " not in error]
    assert len(ends) == 2, errors
    assert all("starts again" in end for end in ends)
    assert not any("Spark retried" in end for end in ends), "the first try has the reason"
