"""Where Spark is asked to run a receiver, and where it is seen to run."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.receiving.scheduling_policy import Executor
from headrace.spark.receiver_executors import executor_of_group, executors_of, placed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
