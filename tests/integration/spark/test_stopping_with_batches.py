"""A graceful stop while queries of batches run in the job's application."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.spark.test_receiver_coupling import ended, family

from headrace.hooks.spark_submit import StreamSparkSubmitHook
from headrace.ledger import JobState
from headrace.runs import receiver_job
from headrace.spark.job_token import derive_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# A receiver job of another version, whose JVM has a thread that a Spark Connect server leaves behind now and then:
# asked for a session while it stops, its session manager starts its clean-up once more (seen with twelve queries).
JOB = """
from headrace.spark.receiving import job_application, receiver_process
from headrace.spark.termination import run_and_leave

start = job_application.start_application

def start_with_thread(*arguments, **options):
    application = start(*arguments, **options)
    jvm = application.spark._jvm
    clean_up = jvm.java.util.concurrent.Executors.newSingleThreadScheduledExecutor()
    clean_up.scheduleAtFixedRate(jvm.java.lang.Thread(), 1, 1, jvm.java.util.concurrent.TimeUnit.SECONDS)
    return application

job_application.start_application = start_with_thread
versions = receiver_process.current_versions
receiver_process.current_versions = lambda: versions() | {"headrace": "0.0.1"}
run_and_leave(receiver_process.main)
"""
# Two sessions with a query each that never ends.
CLIENT = """
import sys, threading
from headrace.spark.connect_sessions import remote_session

url, token = sys.argv[1], sys.stdin.readline().strip()
for _ in range(2):
    query = remote_session(url, token).sql("SELECT reflect('java.lang.Thread', 'sleep', bigint(3600000))")
    threading.Thread(target=query.collect).start()
print("sent", flush=True)
"""


def test_a_replaced_jobs_processes_end_though_its_queries_do_not(
    receiver_application: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older job is replaced; neither its queries nor its sessions end by themselves."""
    application = receiver_application()
    stream = application.stream
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", application.environment()["HEADRACE_SECRET_KEY"])
    (tmp_path / "receiver.py").write_text(JOB)
    arguments = ["--ledger", stream.ledger, "--stream", stream.name]
    hook = StreamSparkSubmitHook(stream, application_args=arguments, name="headrace receiver clicks", receivers=1)
    spark_submit, *rest = hook.command(str(tmp_path / "receiver.py"))
    process = application.start([str(Path(sys.executable).parent / spark_submit), *rest], "receiver")
    job = application.running_job(process)

    clients = [_client(application, job), _client(application, job)]
    clients[0].kill()
    members = family(process)
    monkeypatch.setattr(receiver_job, "SETTLED_MS", 0)
    assert "is being replaced" in str(receiver_job.replace_older_job(application.ledger, stream.name))
    # 10 s for the receivers, 10 s for batches (ten intervals), 30 s for Spark, and what a busy machine takes.
    application.until("the end of all processes", lambda: ended(members), 120)
    last = application.job()
    assert (last.state, last.error) == (JobState.STOPPED, None)
    assert "a newer version: headrace 0.0.1 there" in str(last.stop_reason)


def _client(application: Any, job: Any) -> subprocess.Popen[str]:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, job.attributes["connect_url"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=application.environment(),
        text=True,
    )
    application.processes.append(client)
    assert client.stdin
    assert client.stdout
    token = derive_token(application.environment()["HEADRACE_SECRET_KEY"], job.stream, job.epoch)
    client.stdin.write(token + "\n")
    client.stdin.flush()
    assert client.stdout.readline() == "sent\n"
    return client
