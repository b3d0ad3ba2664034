"""Receivers and batches on a cluster of two executors whose Python has no headrace: the package travels."""

from __future__ import annotations

import json
import sys
import sysconfig
import urllib.request
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.integration.spark.cluster.executors import executors, process_of
from tests.support.spark_cluster import SparkCluster

from headrace.ledger import JobState, ReceiverState
from headrace.stream import ConsoleOutput, DeadLetterLimit, ElasticsearchOutput, KafkaInput, SparkSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRANSFORM = """
from pyspark.sql import functions as F

def upper(value):
    import {helper}
    return {helper}.upper(value)

def transform(records):
    return records.select(F.udf(upper, "string")("value").alias("v")).groupBy("v").count().orderBy("v")
"""
HELPER = "from {archived} import upper\n"
ARCHIVED = "def upper(value):\n    return value.decode().upper()\n"


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python with all libraries and without headrace: no site, so no .pth file of an editable install."""
    libraries = sysconfig.get_paths()["purelib"]
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{libraries}" exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def servers(kafka: str, elasticsearch: str) -> tuple[str, str]:
    """The bootstrap servers of Kafka, and the URL of Elasticsearch."""
    return kafka, elasticsearch


def test_bare_executors_get_the_package_and_the_users_code(
    servers: tuple[str, str],
    cluster: SparkCluster,
    bare_python: str,
    receiver_application: Callable[..., Any],
    tmp_path: Path,
) -> None:
    kafka, elasticsearch = servers
    host, _, port = elasticsearch.removeprefix("http://").partition(":")
    names = [f"{kind}_{uuid.uuid4().hex}" for kind in ("transform", "helper", "archived")]
    files = [tmp_path / f"{name}.py" for name in names[:2]]
    files[0].write_text(TRANSFORM.format(helper=names[1]))
    files[1].write_text(HELPER.format(archived=names[2]))
    files.append(tmp_path / "archive.zip")
    with zipfile.ZipFile(files[-1], "w") as archive:
        archive.writestr(f"{names[2]}.py", ARCHIVED)
    topic = f"connected-{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    application = receiver_application(
        # Receivers and batches on executors have the connections from the application.
        inputs=KafkaInput(connection="broker", topics=topic),
        outputs=(
            ConsoleOutput(transform=f"{names[0]}:transform"),
            ElasticsearchOutput(connection="index", index=topic, dead_letter_limit=DeadLetterLimit(share=1)),
        ),
        storage={"url": str(tmp_path / "storage"), "shared": True},
        spark=SparkSettings(
            master=cluster.url,
            py_files=tuple(map(str, files)),
            conf={
                "spark.executor.cores": "2",
                "spark.executor.memory": "512m",
                "spark.cores.max": "4",
                "spark.sql.shuffle.partitions": "2",
            },
        ),
    )
    pythons = {
        "PYSPARK_PYTHON": bare_python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(cluster.conf_dir),
        "AIRFLOW_CONN_BROKER": json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": kafka}}),
        "AIRFLOW_CONN_INDEX": json.dumps({"conn_type": "elasticsearch", "host": host, "port": int(port)}),
    }

    def dead_letters() -> int:
        """The records are no documents, so an executor has written a dead letter of each."""
        urllib.request.urlopen(f"{elasticsearch}/{topic}-dead-letters/_refresh", timeout=30).close()  # noqa: S310
        with urllib.request.urlopen(f"{elasticsearch}/{topic}-dead-letters/_count", timeout=30) as answer:  # noqa: S310
            return int(json.load(answer)["count"])

    process = application.start_job(submit=True, master=cluster.url, **pythons)
    job = application.running_job(process)
    assert job.attributes["master"] == cluster.url
    application.produce("a", "b", "a")
    done = application.run_batch(application.allocate_next(), **pythons)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3:5] == ["('A', 2)", "('B', 1)"]
    assert dead_letters() == 3

    # An executor that comes later has seen nothing of the batches before.
    left = executors(application)
    assert len(left) == 2
    process_of(application, min(left)).kill()
    application.until("another executor", lambda: executors(application).keys() - left.keys())
    application.produce("c", "c", "c")
    done = application.run_batch(application.allocate_next(), **pythons)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3:4] == ["('C', 3)"]
    assert dead_letters() == 6

    application.produce("b", "b", "a")
    time_ms = application.allocate_next()
    # The batch's own application takes as many cores.
    application.ledger.jobs.request_stop("clicks", "make room")
    assert process.wait(240) == 0, application.log("receiver")
    assert application.job().state is JobState.STOPPED
    assert [row.state for row in application.ledger.receivers.all("clicks")] == [ReceiverState.STOPPED]
    done = application.run_batch(time_ms, "--way", "submit", **pythons)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3:5] == ["('A', 1)", "('B', 2)"]
    assert dead_letters() == 9
