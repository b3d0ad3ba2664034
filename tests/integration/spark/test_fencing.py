"""Zombies of real processes: suspended past their leases, replaced, and woken. What they then do counts for nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.living_process import is_alive

from headrace.ledger import AttemptState, BatchState, JobState
from headrace.ledger.batches.tables import AttemptRow
from headrace.spark.attempts.batch_server import socket_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FIRST_LOOK_SECONDS = 240.0
# Of a job, which is renewed every 5 s while Spark starts, and of a batch.
JOB_LEASE_MS = 15_000
BATCH_LEASE_MS = 3_000

TRANSFORM = """
import os
import time
from pyspark.sql import functions as F

def transform(records, batch):
    folder = {folder!r}
    number = batch.attempt
    def marked(value):
        # The first attempt waits in its task until it is let go.
        if number == 1 and not os.path.exists(folder + "/go"):
            open(folder + "/started", "w").close()
            while not os.path.exists(folder + "/go"):
                time.sleep(0.1)
        return value.decode()
    return records.select(F.udf(marked, "string")("value").alias("value"))
"""


@pytest.fixture(scope="module")
def application(application_of: Callable[[str], Any]) -> Iterator[Any]:
    """A stream whose first attempts wait for the file "go"; nothing of it runs yet."""
    made = application_of(TRANSFORM)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)


def attempts(application: Any, time_ms: int) -> list[AttemptRow]:
    return application.ledger.attempts.of_batch("clicks", time_ms)  # type: ignore[no-any-return]


def suspend_past_lease(application: Any, pid: int, over: Callable[[], bool]) -> None:
    os.kill(pid, signal.SIGSTOP)
    application.until("the end of its lease", over)


def test_one_of_two_jobs_at_once_ends_and_names_the_lease_holder(application: Any) -> None:
    both = [application.start_job(name=f"job-{number}", lease_ms=JOB_LEASE_MS) for number in range(2)]
    application.until("the end of one", lambda: any(process.poll() is not None for process in both))
    (lost,) = [number for number, process in enumerate(both) if process.poll() is not None]
    assert both[lost].returncode == 75
    job = application.running_job(both[1 - lost], f"job-{1 - lost}")
    assert [row.epoch for row in application.ledger.jobs.page("clicks")] == [1]
    reported = application.log(f"job-{lost}")
    assert f"is held by {job.holder}" in reported
    assert f"process {job.attributes['pid']} on {job.attributes['host']}) since 2" in reported
    assert "To take over, stop it by `headrace streams stop clicks`" in reported
    assert "Traceback" not in reported


def test_a_batchs_driver_past_its_lease_cannot_report_success(application: Any) -> None:
    folder: Path = application.folder
    application.produce("one", "two")
    time_ms = application.allocate_next()
    # The batch's driver is then a process that this server forks, and the command waits for it.
    application.until("the batch server", socket_path(application.stream.ledger, "clicks").exists)
    command = application.start(application.batch_command(time_ms, "--lease-ms", str(BATCH_LEASE_MS)), "zombie")
    application.until("its task", (folder / "started").exists)
    zombie = application.forked_batch(time_ms)
    suspend_past_lease(
        application, zombie.pid, lambda: not attempts(application, time_ms)[0].alive(application.ledger.now_ms())
    )
    second = application.run_batch(time_ms)
    assert second.returncode == 0, second.stderr
    completed = application.ledger.batches.get("clicks", time_ms)
    # Its work ends well now, and its driver wakes up to tell of it.
    (folder / "go").touch()
    zombie.resume()
    assert command.wait(FIRST_LOOK_SECONDS) == 75, application.log("zombie")
    assert [attempt.state for attempt in attempts(application, time_ms)] == [
        AttemptState.FENCED,
        AttemptState.COMPLETED,
    ]
    assert application.ledger.batches.get("clicks", time_ms) == completed
    assert (completed.state, completed.attempt) == (BatchState.COMPLETED, 2)


def test_a_jobs_driver_past_its_lease_gives_way_to_the_next(application: Any) -> None:
    zombie = next(process for process in application.processes if process.poll() is None)
    before = application.job()
    family = psutil.Process(zombie.pid).children(recursive=True)
    suspend_past_lease(application, zombie.pid, lambda: not application.job().alive(application.ledger.now_ms()))
    # Its receivers hold leases of their own, and go on until somebody takes the stream over.
    application.produce("three")
    received = application.until("its block", lambda: application.ledger.batches.next_unclaimed("clicks"))
    successor = application.start_job(name="successor", lease_ms=JOB_LEASE_MS)
    application.until("the takeover", lambda: application.job().epoch == before.epoch + 1)
    after = application.running_job(successor, "successor")
    application.until("a receiver", lambda: _receiving(application, after.epoch))
    old = application.ledger.jobs.page("clicks")[1]
    assert (old.state, old.epoch) == (JobState.FAILED, before.epoch)
    assert f"{after.holder} took over" in str(old.error)

    zombie.send_signal(signal.SIGCONT)
    assert zombie.wait(FIRST_LOOK_SECONDS) == 75, application.log("job-0") + application.log("job-1")
    application.until("the end of its family", lambda: not any(map(is_alive, family)), 60)
    application.produce("four", "five")
    assert application.job().epoch == after.epoch
    assert application.job().alive(application.ledger.now_ms()), "the zombie's end was its own alone"
    # Every record once: the batches' ranges follow each other without a hole or an overlap.
    (partition,) = application.ledger.positions.all("clicks")
    application.until("the last records", lambda: application.ledger.positions.all("clicks")[0].next_offset == 5)
    reached = 2
    while reached < 5:
        at_ms = application.allocate_next()
        (taken,) = application.ledger.batches.inputs("clicks", at_ms)
        assert taken.from_offset == reached
        reached = taken.until_offset
    assert received
    assert partition.error is None


def _receiving(application: Any, epoch: int) -> bool:
    return any(
        row.job_epoch == epoch and row.state.value == "running" for row in application.ledger.receivers.all("clicks")
    )
