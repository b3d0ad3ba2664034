"""The receiver job and batches over Spark Connect: real processes, real Kafka, one application for all tests."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.living_process import is_alive

from headrace.clock import time_text
from headrace.ledger import AttemptState, BatchState, JobState
from headrace.processes import PROCESS, has_ended
from headrace.receiver.tracker import find_sign
from headrace.spark.attempts.batch_server import socket_path
from headrace.spark.connect_sessions import ConnectRefusedError
from headrace.spark.job_token import derive_token
from headrace.wal.storage import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRET = "a secret for the tests"
# Several engineers' JVMs may share the machine.
FIRST_LOOK_SECONDS = 240.0

TRANSFORM = """
import os
import time
from headrace.listeners import StreamListener
from pyspark.sql import functions as F

class Heard(StreamListener):
    def note(self, event):
        with open({folder!r} + "/heard", "a") as file:
            print(event.event_id, type(event).__name__, file=file)

    on_streaming_started = on_receiver_started = on_receiver_stopped = on_block_added = note
    on_batch_submitted = on_batch_started = on_batch_completed = note
    on_output_operation_started = on_output_operation_completed = note

def transform(records, batch):
    folder = {folder!r}
    def marked(value):
        # Whoever finds the file "slow" sleeps: the first attempt of a test, not the second.
        if os.path.exists(folder + "/slow"):
            open(folder + "/started", "w").close()
            time.sleep(300)
        return value.decode().upper()
    return records.select(F.udf(marked, "string")("value").alias("value"))
"""


@pytest.fixture(scope="module")
def application(application_of: Callable[[str], Any]) -> Any:
    """A running receiver job, started by plain Python, with a transform from a folder of code."""
    made = application_of(TRANSFORM, listener="Heard")
    made.running_job(made.start_job())
    return made


def test_sparks_own_ports_and_folders_are_closed_to_other_users(application: Any) -> None:
    """Beside the Connect server: the driver's port, the block manager's, the pages, and the folder of the blocks."""
    job = application.ledger.jobs.current("clicks")
    pages = job.attributes["ui_url"]
    api = f"{pages}/api/v1/applications/{job.attributes['application_id']}"
    settings = dict(_json(f"{api}/environment")["sparkProperties"])
    (driver,) = _json(f"{api}/allexecutors")
    for port in (settings["spark.driver.port"], driver["hostPort"].rpartition(":")[2]):
        assert b"Expected SaslMessage" in _unauthenticated(int(port)), (
            "it read the request of a client without a secret"
        )
    folder = Path(settings["spark.local.dir"])
    assert folder.stat().st_mode & 0o077 == 0
    assert list(folder.glob("blockmgr-*")), "Spark's blocks are there"
    # Not the one that warms Spark up, which ends.
    jobs = _json(f"{api}/jobs?status=running")
    running = [each["jobId"] for each in jobs if "running receiver" in each.get("description", "")]
    assert running, "the receivers' jobs"
    with urllib.request.urlopen(f"{pages}/jobs/") as answer:  # noqa: S310 - Spark's own page
        assert b"/jobs/job/kill" not in answer.read()
    for job_id in running:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{pages}/jobs/job/kill/?id={job_id}", data=b"").close()  # noqa: S310
    application.produce("still", "received")
    application.run_batch(application.allocate_next())
    assert {*running} <= {each["jobId"] for each in _json(f"{api}/jobs?status=running")}


def _json(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:  # noqa: S310 - Spark's own address
        return json.load(answer)


def _unauthenticated(port: int) -> bytes:
    """The answer to a request of Spark's network protocol (``MessageEncoder``) by a client that has no secret."""
    body = b"\x00" * 16
    request = struct.pack(">BQI", 3, 1, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(struct.pack(">Q", 8 + len(request)) + request)
        return client.recv(65_536)


def test_a_batch_runs_in_the_receivers_application(application: Any) -> None:
    application.produce("one", "two")
    time_ms = application.allocate_next()
    done = application.run_batch(time_ms, "--json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith(f"Time: {time_ms} ms")
    assert lines[3:5] == ["ONE", "TWO"], "the user's module travelled by value"
    result = json.loads(lines[-1])
    assert (result["records"], result["attempt"], result["outputs"]["console"]["printed"]) == (2, 1, 2)
    assert application.ledger.batches.get("clicks", time_ms).state is BatchState.COMPLETED
    assert "attempt 1, connect" in done.stderr
    again = application.run_batch(time_ms)
    assert (again.returncode, again.stdout) == (0, "")
    assert "has completed by attempt 1" in again.stderr


def test_spark_names_its_jobs_by_stream_batch_time_and_output(application: Any) -> None:
    application.produce("named")
    time_ms = application.allocate_next()
    assert application.run_batch(time_ms).returncode == 0
    expected = f"clicks: batch {time_text(time_ms)}, output console, attempt 1"
    found: dict[str, Any] = {}
    # Spark's pages follow its events with a delay.
    for _ in range(120):
        found = {job.get("description", ""): job for job in spark_jobs(application)}
        if expected in found:
            break
        time.sleep(0.5)
    assert expected in found
    assert found[expected]["jobGroup"] == f"headrace/clicks/{time_ms}/1/console"
    receivers = {name: job["status"] for name, job in found.items() if "receiver" in name}
    assert receivers == {"Streaming job running receiver 0 (clicks, input records)": "RUNNING"}, found


def spark_jobs(application: Any) -> list[dict[str, Any]]:
    """The jobs of the application, as Spark's own pages list them."""
    attributes = application.job().attributes
    url = f"{attributes['ui_url']}/api/v1/applications/{attributes['application_id']}/jobs"
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the driver's own page
        jobs: list[dict[str, Any]] = json.load(answer)
    return jobs


def test_the_lease_has_the_versions_and_the_connect_url(application: Any) -> None:
    job = application.job()
    assert job.versions["pyspark"]
    assert job.attributes["connect_url"].startswith("sc://localhost:")
    assert (job.attributes["task_slots"], job.attributes["batch_slots"]) == (3, 2)
    assert psutil.pid_exists(job.attributes["pid"])
    assert job.attributes[PROCESS]["pid"] == job.attributes["pid"]
    assert not has_ended(job.attributes[PROCESS])


@pytest.mark.parametrize("secret", ["another secret", ""])
def test_a_wrong_token_is_refused_and_a_missing_secret_reported(application: Any, secret: str) -> None:
    application.produce("three")
    time_ms = application.allocate_next()
    refused = application.run_batch(time_ms, HEADRACE_SECRET_KEY=secret)
    assert refused.returncode == 1
    assert ("Invalid authentication token" if secret else "HEADRACE_SECRET_KEY is not set") in refused.stderr
    assert application.ledger.batches.get("clicks", time_ms).state is BatchState.FAILED
    assert application.run_batch(time_ms).returncode == 0, "with the right one it runs"


def test_a_client_without_a_token_is_refused(application: Any) -> None:
    code = (
        "from pyspark.sql.connect.session import SparkSession\n"
        f"SparkSession(connection={application.job().attributes['connect_url']!r}).range(1).count()\n"
    )
    refused = subprocess.run(
        [sys.executable, "-c", code],
        env=application.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode != 0
    assert "No authentication token provided" in refused.stderr


def test_a_session_with_a_wrong_token_is_an_error_with_a_remedy(application: Any) -> None:
    from headrace.spark.connect_sessions import remote_session

    with pytest.raises(ConnectRefusedError, match="same HEADRACE_SECRET_KEY"):
        remote_session(application.job().attributes["connect_url"], "wrong")


def test_the_token_is_on_no_command_line_and_not_in_the_ledger(application: Any) -> None:
    job = application.job()
    token = derive_token(SECRET, "clicks", job.epoch)
    for process in application.job_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            assert token not in " ".join(process.cmdline())
            assert SECRET not in " ".join(process.cmdline())
    for file in application.folder.glob("ledger.db*"):
        content = file.read_bytes()
        assert token.encode() not in content
        assert SECRET.encode() not in content


def test_everything_listens_on_loopback(application: Any) -> None:
    listening = {
        connection.laddr.ip
        for process in application.job_processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}


def test_a_later_attempt_ends_the_earlier_ones_work(application: Any) -> None:
    application.produce("four")
    time_ms = application.allocate_next()
    first = _stuck(application, time_ms, "first")
    second = application.run_batch(time_ms)
    assert second.returncode == 0, second.stderr
    assert first.wait(FIRST_LOOK_SECONDS) == 75, application.log("first")
    states = [attempt.state for attempt in application.ledger.attempts.of_batch("clicks", time_ms)]
    assert states == [AttemptState.FENCED, AttemptState.COMPLETED]


def test_sigterm_ends_a_batch_and_its_jobs_and_nothing_else(application: Any) -> None:
    application.produce("five")
    time_ms = application.allocate_next()
    stuck = _stuck(application, time_ms, "stuck")
    stuck.send_signal(signal.SIGTERM)
    assert stuck.wait(FIRST_LOOK_SECONDS) == 143, application.log("stuck")
    row = application.ledger.batches.get("clicks", time_ms)
    assert row.state is BatchState.FAILED
    assert "SIGTERM" in str(row.error)
    assert application.run_batch(time_ms).returncode == 0
    assert application.job().state is JobState.RUNNING
    assert [receiver.restarts for receiver in application.ledger.receivers.all("clicks")] == [0]


def test_a_batchs_process_is_forked_from_the_jobs_server(application: Any) -> None:
    application.until("the batch server", socket_path(application.stream.ledger, "clicks").exists)
    application.produce("six")
    time_ms = application.allocate_next()
    caller = _stuck(application, time_ms, "killed")
    application.forked_batch(time_ms).kill()
    assert caller.wait(FIRST_LOOK_SECONDS) == -signal.SIGKILL
    assert application.run_batch(time_ms).returncode == 0
    assert application.job().state is JobState.RUNNING


def _stuck(application: Any, time_ms: int, name: str) -> subprocess.Popen[str]:
    """A batch whose task sleeps; the next one's will not."""
    (application.folder / "slow").touch()
    (application.folder / "started").unlink(missing_ok=True)
    process = application.start(application.batch_command(time_ms, "--lease-ms", "3000"), name)
    application.until("the batch's task", (application.folder / "started").exists)
    (application.folder / "slow").unlink()
    return process


def test_a_second_job_is_refused_while_the_first_is_alive(application: Any) -> None:
    second = application.start_job()
    assert second.wait(FIRST_LOOK_SECONDS) == 75
    assert "is held by" in application.log("receiver")


def test_a_stop_request_drains_and_ends_well(application: Any) -> None:
    # The last test of this module: it stops the application.
    process = application.processes[0]
    family = application.job_processes()
    folder = open_storage(application.stream.folder_url)
    sign = find_sign(folder)
    assert sign is not None and application.ledger.now_ms() - sign.written_ms < sign.lease_ms
    application.ledger.jobs.request_stop("clicks", "the tests are over")
    assert process.wait(FIRST_LOOK_SECONDS) == 0, application.log("receiver")
    application.until("the end of its processes", lambda: not any(map(is_alive, family)))
    assert not socket_path(application.stream.ledger, "clicks").exists()
    assert find_sign(folder) is None
    job = application.job()
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert not [position for position in application.ledger.positions.all("clicks") if position.error]
    heard = [line.split() for line in (application.folder / "heard").read_text().splitlines()]
    ids, events = [int(event_id) for event_id, _ in heard], [event for _, event in heard]
    assert ids == sorted(set(ids)), "an event came twice, or not in its order"
    assert events[:2] == ["StreamingStarted", "ReceiverStarted"]
    story = ["BlockAdded", "BatchSubmitted", "BatchStarted", "OutputOperationStarted", "OutputOperationCompleted"]
    assert [events.index(each) for each in story] == sorted(events.index(each) for each in story)
    assert {"BatchCompleted", "ReceiverStopped"} <= set(events)
    (status,) = job.attributes["listeners"].values()
    assert status == {"dropped": 0, "missed": 0, "failed": 0}
