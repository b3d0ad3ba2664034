# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Ordered streams: a batch waits for its turn before it is allocated, and no run waits for ever."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped, TaskDeferred

from headrace.batch.allocation import allocate
from headrace.clock import time_text
from headrace.dags import batch_dag
from headrace.ledger.errors import NotItsTurnError
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.stream_context import StreamContext
from headrace.timetables.micro_batch import from_ms


@pytest.fixture
def stream(stream):
    return stream.model_copy(update={"ordered": True})


@pytest.fixture
def after(source, until, make_task, stream):
    """Batch times that nobody runs, then one with its task."""

    def make(earlier: int = 1, **run):
        times = []
        for _ in range(earlier + 1):
            times.append(source.store(2))
            until(lambda: source.ledger.now_ms() >= times[-1])
        source.seal()
        *missed, at_ms = times
        return missed, at_ms, make_task(from_ms(at_ms - stream.batch_interval_ms), **run)

    return make


@pytest.fixture(params=[False, True], ids=["five tasks", "one task"])
def first_task(request, stream):
    """The first task of the batch DAG."""
    (root,) = batch_dag(stream, single_task=request.param).roots
    return root


def state(ledger, at_ms: int) -> str | None:
    batch = ledger.batches.find("flights", at_ms)
    return None if batch is None else batch.state.value


def complete(ledger, *times) -> None:
    for at_ms in times:
        attempt = ledger.attempts.begin("flights", at_ms, holder="repair", way="connect", lease_ms=60_000)
        ledger.attempts.record_output(attempt, "elasticsearch", {})
        ledger.attempts.complete(attempt)


def test_earlier_times_are_allocated_and_waited_for_first(after, first_task, toy_batch, connectable, ledger):
    """That happens before the run's own batch."""
    missed, at_ms, task = after(2)
    with pytest.raises(TaskDeferred) as waiting:
        first_task.execute(task.context)
    assert [state(ledger, time_ms) for time_ms in (*missed, at_ms)] == ["allocated", "allocated", None]
    trigger = waiting.value.trigger
    assert trigger.poll(ledger) is None
    complete(ledger, *missed)
    event = trigger.poll(ledger)
    assert event == {"turn": True, "reason": "no earlier batch is unfinished"}
    getattr(first_task, waiting.value.method_name)(task.context, event)
    assert state(ledger, at_ms) == ("completed" if first_task.task_id == "micro_batch" else None)


@pytest.mark.parametrize("run_type", ["scheduled", "asset_triggered"])
def test_a_run_whose_turn_does_not_come_is_skipped_and_says_why(after, first_task, ledger, run_type):
    (missed,), at_ms, task = after(run_type=run_type)
    with pytest.raises(TaskDeferred) as waiting:
        first_task.execute(task.context)
    trigger = waiting.value.trigger
    assert trigger.parameters["until_ms"] <= ledger.now_ms() + 30_000
    trigger.parameters["until_ms"] = 0
    event = trigger.poll(ledger)
    with pytest.raises((AirflowSkipException, DownstreamTasksSkipped)):
        getattr(first_task, waiting.value.method_name)(task.context, event)
    why = task.xcoms["nothing_to_run"]
    assert f"batch {time_text(missed)} comes first, and is allocated" in why
    assert "flights_repair runs the earlier batch again" in why
    assert state(ledger, at_ms) is None, "the next run takes it"


def test_a_requested_run_whose_turn_does_not_come_fails(after, first_task, ledger):
    _, _, task = after(run_type="manual")
    with pytest.raises(TaskDeferred) as waiting:
        first_task.execute(task.context)
    trigger = waiting.value.trigger
    assert trigger.parameters["until_ms"] > ledger.now_ms() + 1_000_000
    with pytest.raises(NotItsTurnError, match="headrace batches abandon flights TIME"):
        getattr(first_task, waiting.value.method_name)(task.context, {"turn": False, "reason": "no"})


def test_a_run_that_takes_earlier_times_over_does_not_wait(stream, after, first_task, toy_batch, connectable, ledger):
    coalescing = stream.model_copy(update={"coalesce": True})
    first_task.stream = coalescing
    # By now more intervals may have ended than are sealed: that wait is not what this is about.
    first_task.deferrable = False
    missed, _, task = after(2)
    first_task.execute(task.context)
    assert [state(ledger, time_ms) for time_ms in missed] in ([None, None], ["absorbed", "absorbed"])


def test_a_batch_that_has_completed_before_does_not_wait(after, stream, ledger):
    (missed,), at_ms, task = after()
    allocate(StreamContext(stream, ledger), missed)
    allocate(StreamContext(stream, ledger), at_ms)
    complete(ledger, missed, at_ms)
    begun = {"holder": "other", "way": "connect", "lease_ms": 60_000, "force": True}
    ledger.attempts.fail(ledger.attempts.begin("flights", missed, **begun), "gone from Kafka")
    BlocksReadySensor(task_id="await", stream=stream).execute(task.context)


def test_a_sensor_that_does_not_defer_waits_in_place(after, stream, ledger, monkeypatch):
    (missed,), _, task = after()
    looks = []

    def completed_meanwhile(trigger, opened):
        looks.append(trigger)
        complete(opened, missed)
        return {"turn": True, "reason": ""}

    monkeypatch.setattr("headrace.triggers.ledger.TurnTrigger.poll_until_it_fires", completed_meanwhile)
    BlocksReadySensor(task_id="await", stream=stream, deferrable=False).execute(task.context)
    assert len(looks) == 1


def test_a_cleared_task_waits_for_the_batchs_turn_too(after, stream, toy_batch, connectable, ledger):
    """Not its run: the wait before the allocation is over."""
    (missed,), at_ms, task = after()
    for time_ms in (missed, at_ms):
        allocate(StreamContext(stream, ledger), time_ms)
    operator = WalSparkSubmitOperator(task_id="generate", stream=stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    complete(ledger, missed)
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert state(ledger, at_ms) == "completed"
