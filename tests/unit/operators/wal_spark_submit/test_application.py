"""Where a batch is computed: in the receiver job's application, in one of its own, and which of them is waited for."""

# ruff: noqa: PLR0917 - fixtures are asked for by argument
from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.sdk.exceptions import TaskDeferred
from tests.unit.operators.wal_spark_submit.conftest import make

from headrace.runs.processes import secret_key
from headrace.spark.sessions import current_versions, secret_fingerprint


def test_a_batch_runs_in_the_receivers_application(stream, allocated, toy_process, connectable, ledger, capsys):
    at_ms, task = allocated()
    make(stream).execute(task.context)
    batch = ledger.batches.get("flights", at_ms)
    assert batch.state.value == "completed"
    reported = capsys.readouterr().out
    assert "toy batch by way connect, attempt 1" in reported
    (attempt,) = ledger.attempts.of_batch("flights", at_ms)
    assert attempt.holder == "airflow:flights_batches/run/task/1"


def test_without_an_application_to_connect_to_it_is_submitted(stream, source, allocated, submitted, ledger):
    at_ms, task = allocated()
    ledger.jobs.update(source.job, state="running")
    make(stream).execute(task.context)
    (command,) = submitted
    assert command[0] == "spark-submit"
    assert command[command.index("--way") + 1] == "submit"
    assert ledger.batches.get("flights", at_ms).state.value == "completed"


def test_an_application_that_is_starting_is_waited_for(stream, source, allocated, toy_batch, ledger, capsys):
    at_ms, task = allocated()
    operator = make(stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    assert ledger.attempts.of_batch("flights", at_ms) == []
    ledger.jobs.update(source.job, state="running", attributes={"connect_url": "sc://localhost:15002"})
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert "toy batch by way connect" in capsys.readouterr().out


def test_a_scheduled_run_waits_for_it_longer_than_for_a_slot(stream, allocated, toy_batch):
    """No batch can run before the application has started, so a run that fails first only alarms people."""
    _, task = allocated()
    limits = stream.limits.model_copy(update={"retry_for": timedelta(milliseconds=1)})
    operator = make(stream.model_copy(update={"limits": limits}))
    with pytest.raises(TaskDeferred) as waiting:
        operator.slot_may_be_free(task.context, waited=60.0, waiting_for="application", waiting_since=0.0)
    assert waiting.value.kwargs["waiting_for"] == "application"


def test_the_wait_for_an_application_ends_after_the_start_timeout(stream, allocated, submitted):
    _, task = allocated()
    # After a minute for a slot.
    make(stream).slot_may_be_free(task.context, waited=240.0, waiting_for="application", waiting_since=60.0)
    assert len(submitted) == 1


def test_a_receiver_job_that_is_due_is_waited_for(stream, source, allocated, toy_batch, ledger, capsys):
    """A second application beside the one that comes would take the machine from it."""
    at_ms, task = allocated()
    ledger.jobs.release(source.job, "failed", "its JVM was killed")
    operator = make(stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    assert "(epoch 1) is gone, and the next one is due" in capsys.readouterr().out
    assert ledger.attempts.of_batch("flights", at_ms) == []
    again = ledger.jobs.acquire("flights", holder="the next", lease_ms=60_000)
    ledger.jobs.update(again, state="running", attributes={"connect_url": "sc://localhost:15002"})
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert "toy batch by way connect" in capsys.readouterr().out


def test_a_receiver_job_that_is_overdue_is_not_waited_for(stream, source, allocated, submitted, ledger, make_task):
    _, task = allocated()
    ledger.jobs.release(source.job, "failed", "its JVM was killed")
    make(stream, start_timeout=timedelta(0)).execute(task.context)
    assert len(submitted) == 1


def test_a_batch_of_a_stopped_stream_waits_for_no_receiver_job(stream, source, allocated, submitted, ledger, capsys):
    _, task = allocated()
    ledger.jobs.release(source.job)
    ledger.streams.set_desired_state("flights", "stopped")
    make(stream).execute(task.context)
    assert len(submitted) == 1
    warned = capsys.readouterr().out
    assert "The stream is stopped, and has no receiver job; `headrace streams start flights` starts it." in warned
    assert "each batch is submitted as an application of its own" in warned


def test_a_batch_does_not_run_in_a_job_with_another_secret_key(
    stream, source, allocated, submitted, connectable, ledger, capsys, monkeypatch
):
    def started_with(key: str) -> str:
        monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", key)
        return secret_fingerprint(secret_key("flights"), "flights")

    _, task = allocated()
    ledger.jobs.update(source.job, attributes={"secret_fingerprint": started_with("before")})
    started_with("now")
    make(stream).execute(task.context)
    assert len(submitted) == 1
    reported = capsys.readouterr().out
    assert "another secret key" in reported
    assert "headrace streams stop flights" in reported


def test_a_batch_runs_in_a_job_with_the_same_secret_key(
    stream, source, allocated, toy_batch, connectable, ledger, capsys
):
    _, task = allocated()
    ledger.jobs.update(
        source.job, attributes={"secret_fingerprint": secret_fingerprint(secret_key("flights"), "flights")}
    )
    make(stream).execute(task.context)
    assert "toy batch by way connect" in capsys.readouterr().out


def test_the_way_can_be_chosen(stream, allocated, submitted, connectable):
    _, task = allocated()
    make(stream, way="submit", executor_memory="2g", conf={"spark.x": "1"}).execute(task.context)
    (command,) = submitted
    assert command[command.index("--executor-memory") + 1] == "2g"
    assert "spark.x=1" in command


def _job_of(ledger, stream, version: str):
    """Another receiver job, of a version of headrace, whose application takes batches."""
    lease = ledger.jobs.acquire(
        stream.name, holder=version, lease_ms=60_000, versions=current_versions() | {"headrace": version}
    )
    ledger.jobs.update(lease, state="running", attributes={"connect_url": "sc://localhost:15002"})
    return lease


def test_the_successor_of_an_older_job_is_waited_for(stream, source, allocated, toy_batch, ledger, capsys, monkeypatch):
    at_ms, task = allocated()
    ledger.jobs.release(source.job)
    older = _job_of(ledger, stream, "0.0.1")
    monkeypatch.setattr("headrace.runs.receiver_job.SETTLED_MS", 0)
    operator = make(stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    assert "is being replaced by one of this version: headrace 0.0.1 there" in capsys.readouterr().out
    assert ledger.attempts.of_batch("flights", at_ms) == []
    ledger.jobs.release(older)
    with pytest.raises(TaskDeferred) as still_waiting:
        operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    _job_of(ledger, stream, current_versions()["headrace"])
    operator.slot_may_be_free(task.context, **still_waiting.value.kwargs)
    assert "toy batch by way connect" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["0.0.1", "1000.0"], ids=["older, just begun", "newer"])
def test_beside_a_job_of_another_version_that_stays_a_batch_is_submitted(
    stream, source, allocated, submitted, ledger, capsys, version
):
    _, task = allocated()
    ledger.jobs.release(source.job)
    _job_of(ledger, stream, version)
    make(stream).execute(task.context)
    assert len(submitted) == 1
    assert f"runs with other versions (headrace {version} there" in capsys.readouterr().out
    assert ledger.jobs.current("flights").stop_requested_at_ms is None
