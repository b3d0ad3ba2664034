"""A stream whose tasks a Celery worker runs, while its process is killed, and while all that it has started is."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from tests.system.conftest import EndStream
from tests.system.killing import kill_session
from tests.system.parcels import HAS_CELERY, STREAM, CeleryWorker, Parcels

from headrace.devstack.stack import Stack
from headrace.ledger import Ledger

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not HAS_CELERY, reason="needs apache-airflow-providers-celery, of requirements-dev.txt"),
]


@pytest.fixture
def worker(stack: Stack) -> Iterator[CeleryWorker]:
    worker = CeleryWorker(stack)
    with worker:
        yield worker


def test_a_receiver_job_outlives_its_task_and_its_celery_worker(
    stack: Stack, ledger: Ledger, worker: CeleryWorker, end_stream: EndStream
) -> None:
    parcels = Parcels(stack, ledger)
    parcels.begin()
    job = parcels.running_job()
    process = psutil.Process(job.attributes["pid"])
    parcels.send_and_find()
    task = parcels.receiver_task()
    log = parcels.api.task_log(f"{STREAM}_receiver", str(task["dag_run_id"]), "receive")
    # Its log is in a folder: the task cannot know that this worker is the only one.
    assert "workers on other hosts do not see it" in log

    # The worker's process, as by a restart of its service: the job goes on.
    worker.kill()
    worker.start()
    parcels.send_and_find()
    assert process.is_running()
    assert ledger.jobs.current(STREAM).epoch == job.epoch  # type: ignore[union-attr]

    # All that its host, or its container, ran: the next worker starts the next job.
    worker.kill()
    kill_session(process.pid)
    worker.start()
    assert parcels.running_job(after=job.epoch).epoch == job.epoch + 1
    parcels.send_and_find()
    assert ledger.gaps.page(STREAM) == []
    end_stream(STREAM)
