"""Receivers and batches on a cluster of two executors whose Python has no headrace: the package travels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from headrace.ledger import JobState, ReceiverState
from headrace.stream import SparkSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRANSFORM = """
from pyspark.sql import functions as F

def upper(value):
    import {helper}
    return {helper}.upper(value)

def transform(records):
    return records.select(F.udf(upper, "string")("value").alias("v")).groupBy("v").count().orderBy("v")
"""
HELPER = "def upper(value):\n    return value.decode().upper()\n"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A Master and a Worker of four cores, on loopback; the master's URL."""
    port = free_port()
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
        "PYSPARK_PYTHON": sys.executable,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    url = f"spark://127.0.0.1:{port}"
    roles = {
        "master.Master": ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"],
        "worker.Worker": ["--host", "127.0.0.1", "--webui-port", "0", "--cores", "4", "--memory", "2g", url],
    }
    processes = []
    with (tmp_path / "cluster.log").open("w") as log:
        for role, arguments in roles.items():
            command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}", *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path))
        try:
            yield url
        finally:
            # The worker first, or it would look for its master.
            for process in reversed(processes):
                process.terminate()
                process.wait(30)


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python with all libraries and without headrace: no site, so no .pth file of an editable install."""
    libraries = sysconfig.get_paths()["purelib"]
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{libraries}" exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_the_package_and_the_users_code_reach_executors_that_have_neither(
    cluster: str, bare_python: str, receiver_application: Callable[..., Any], tmp_path: Path
) -> None:
    names = [f"{kind}_{uuid.uuid4().hex}" for kind in ("transform", "helper")]
    files = [tmp_path / f"{name}.py" for name in names]
    files[0].write_text(TRANSFORM.format(helper=names[1]))
    files[1].write_text(HELPER)
    application = receiver_application(
        transform=f"{names[0]}:transform",
        storage={"url": str(tmp_path / "storage"), "shared": True},
        spark=SparkSettings(
            master=cluster,
            py_files=tuple(map(str, files)),
            conf={
                "spark.executor.cores": "2",
                "spark.executor.memory": "512m",
                "spark.cores.max": "4",
                "spark.sql.shuffle.partitions": "2",
            },
        ),
    )
    pythons = {"PYSPARK_PYTHON": bare_python, "PYSPARK_DRIVER_PYTHON": sys.executable}
    process = application.start_job(submit=True, master=cluster, **pythons)
    job = application.running_job(process)
    assert job.attributes["master"] == cluster
    application.produce("a", "b", "a")
    done = application.run_batch(application.allocate_next(), **pythons)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3:5] == ["('A', 2)", "('B', 1)"]

    application.produce("b", "b", "a")
    time_ms = application.allocate_next()
    # The receivers' application has every core of this cluster.
    application.ledger.jobs.request_stop("clicks", "make room")
    assert process.wait(240) == 0, application.log("receiver")
    assert application.job().state is JobState.STOPPED
    assert [row.state for row in application.ledger.receivers.list("clicks")] == [ReceiverState.STOPPED]
    done = application.run_batch(time_ms, "--way", "submit", **pythons)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3:5] == ["('A', 1)", "('B', 2)"]
