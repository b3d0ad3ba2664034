# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""How the operator requests a stream of a shared job, and starts the job's process; the process is a toy."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from airflow.sdk.exceptions import TaskDeferred

from headrace.connections import resolve
from headrace.hooks.ledger import register
from headrace.ledger import JobState
from headrace.ledger.errors import LeaseHeldError
from headrace.ledger.receiving.jobs import REQUESTED_OF
from headrace.operators.kafka_receiver import KafkaReceiverOperator, ReceiverJobError, newest_log
from headrace.runs.receiver_job import connections_of_others, request_job, start_if_absent
from headrace.stream import KafkaInput, Stream

SPARK = {"master": "local[4]", "job": "shared"}


@pytest.fixture
def shared(stream, ledger):
    """Two streams of one shared job."""
    made = [Stream(**{**stream.model_dump(mode="json"), "name": name, "spark": SPARK}) for name in ("flights", "hops")]
    for each in made:
        register(ledger, each)
    return made


def operator_of(stream, **options) -> KafkaReceiverOperator:
    return KafkaReceiverOperator(task_id="receive", stream=stream, **{"poll_interval": 0.05, **options})


def start(operator, context) -> None:
    with pytest.raises(TaskDeferred):
        operator.execute(context)


def test_the_streams_of_a_shared_job_get_one_process(shared, toy, ledger, task, make_task):
    toy("shared")
    first, second = map(operator_of, shared)
    start(first, task.context)
    start(second, make_task().context)
    assert first._process.alive()
    assert second._process is None
    jobs = [ledger.jobs.current(stream.name) for stream in shared]
    assert [job.attributes["pid"] for job in jobs] == [first._process.pid] * 2
    assert [(job.state, job.attributes[REQUESTED_OF]) for job in jobs] == [(JobState.RUNNING, None)] * 2
    assert newest_log("@shared") == str(first._process.log)


@pytest.mark.skipif(sys.platform != "linux", reason="processes have an identity on Linux only")
def test_a_killed_process_is_started_again_by_the_next_request(shared, toy, ledger, task, make_task, until):
    toy("shared")
    first = operator_of(shared[0])
    start(first, task.context)
    os.kill(first._process.pid, signal.SIGKILL)
    until(lambda: not first._process.alive())
    again = operator_of(shared[0])
    start(again, make_task().context)
    assert again._process.alive()
    assert ledger.jobs.current("flights").epoch == 2
    assert ledger.shared_jobs.current("shared").epoch == 2


def test_a_process_that_cannot_start_fails_the_task_with_its_log(shared, toy, ledger, task):
    """It leaves no request."""
    toy("crash")
    with pytest.raises(ReceiverJobError, match=r"ended with exit code 1(.|\n)*no such master"):
        operator_of(shared[0]).execute(task.context)
    assert ledger.jobs.current("flights").state is JobState.FAILED
    assert ledger.jobs.requests("shared") == []
    assert not ledger.shared_jobs.current("shared").alive(ledger.now_ms()), "the next try starts one at once"


def test_a_request_that_nobody_adopts_in_time_fails_the_task(shared, toy, ledger, task):
    toy("shared")
    ledger.shared_jobs.acquire("shared", holder="a process that hangs", lease_ms=60_000)
    operator = operator_of(shared[0], start_timeout=1)
    with pytest.raises(ReceiverJobError, match=r"was not running after 1 s|its lease was not renewed"):
        operator.execute(task.context)
    assert operator._process is None
    assert ledger.jobs.requests("shared") == []


def test_a_task_takes_up_the_request_of_the_try_before_it(shared, toy, ledger, task):
    toy("shared")
    request_job(ledger, shared[0], revision=1, holder="the try before", lease_ms=60_000)
    operator = operator_of(shared[0])
    start(operator, task.context)
    assert operator._process.alive()
    assert ledger.jobs.current("flights").epoch == 1


def test_a_killed_task_leaves_the_process_to_the_other_streams(shared, toy, ledger, task):
    """It asks its own stream to stop."""
    toy("shared")
    operator = operator_of(shared[0])
    start(operator, task.context)
    operator.on_kill()
    assert ledger.jobs.current("flights").stop_requested_at_ms is not None
    assert operator._process.alive()


def test_the_request_of_a_killed_task_is_ended(shared, ledger):
    request_job(ledger, shared[0], revision=1, holder="a task", lease_ms=60_000)
    operator_of(shared[0]).on_kill()
    assert ledger.jobs.current("flights").state is JobState.FAILED
    assert ledger.jobs.requests("shared") == []


def test_a_stream_has_one_request(shared, ledger):
    request_job(ledger, shared[0], revision=1, holder="one", lease_ms=60_000)
    with pytest.raises(LeaseHeldError, match="held by one"):
        request_job(ledger, shared[0], revision=1, holder="two", lease_ms=60_000)


def test_of_two_tasks_one_starts_the_process(shared, ledger):
    """A failed start lets the next one try."""

    def fail():
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        start_if_absent(ledger, "shared", holder="one", start=fail)
    process = object()
    assert start_if_absent(ledger, "shared", holder="two", start=lambda: process) is process
    assert start_if_absent(ledger, "shared", holder="three", start=fail) is None


def test_the_process_gets_the_connections_of_all_its_streams(shared, ledger, monkeypatch):
    def declare(name: str, connection: str, **changes):
        source = KafkaInput(connection=connection, topics="x")
        register(ledger, shared[0].model_copy(update={"name": name, "inputs": (source,), **changes}))

    declare("hops", "kafka_hops")
    declare("undefined", "kafka_undefined")
    declare("elsewhere", "kafka_elsewhere", spark=shared[0].spark.model_copy(update={"job": "other"}))
    for name in ("HOPS", "ELSEWHERE"):
        text = json.dumps({"conn_type": "kafka", "host": name.lower(), "port": 9092})
        monkeypatch.setenv(f"AIRFLOW_CONN_KAFKA_{name}", text)
    others = connections_of_others(ledger, shared[0])
    assert set(others) == {"AIRFLOW_CONN_KAFKA_HOPS"}
    assert resolve("kafka_hops", others).host == "hops"
