"""Killed halves of a receiver job: nothing half-alive stays behind, and the next job may begin."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from tests.support.living_process import is_alive

from headrace.ledger import JobState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def application(receiver_application: Callable[..., Any]) -> Iterator[Any]:
    return receiver_application()  # type: ignore[no-any-return]


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The started process and all below it."""
    parent = psutil.Process(process.pid)
    found = [parent, *parent.children(recursive=True)]
    return [each for each in found if is_alive(each)]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def ended(processes: list[psutil.Process]) -> bool:
    return not any(is_alive(each) for each in processes)


# That a driver which plain Python started takes the others with it is in test_shared_job.py.
@pytest.mark.parametrize(("victim", "submit"), [("jvm", True), ("driver", True), ("jvm", False)])
def test_a_killed_half_takes_the_other_and_the_receivers_with_it(application: Any, victim: str, submit: bool) -> None:
    process = application.start_job(submit=submit)
    job = application.running_job(process)
    application.until("a receiver", lambda: application.ledger.receivers.all("clicks"))
    members = family(process)
    java = next(member for member in members if member.name() == "java")
    driver = psutil.Process(job.attributes["pid"])
    workers = [member for member in members if "pyspark.daemon" in command(member)]
    assert workers
    (java if victim == "jvm" else driver).send_signal(signal.SIGKILL)
    application.until("the end of all processes", lambda: ended(members))
    if victim == "jvm":
        # The driver had time for its last wishes.
        assert application.job().state is JobState.FAILED
        assert "JVM is gone" in str(application.job().error)
    else:
        # Nobody was left to tell; the lease runs out.
        assert application.job().state is JobState.RUNNING


def test_a_start_with_too_few_slots_fails_and_says_so(application: Any) -> None:
    # spark-submit's master wins over the stream's, which was checked when it was declared.
    process = application.start_job(submit=True, master="local[1]")
    assert process.wait(240) == 1
    job = application.job()
    assert job.state is JobState.FAILED
    assert "has 1 task slot(s), and each of its 1 receiver(s) occupies one" in str(job.error)


def test_a_start_without_the_secret_fails_before_spark(application: Any) -> None:
    process = application.start_job(HEADRACE_SECRET_KEY="")
    assert process.wait(240) == 1
    assert "HEADRACE_SECRET_KEY is not set" in str(application.job().error)
    assert "Using Spark" not in application.log("receiver")
