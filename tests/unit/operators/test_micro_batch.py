# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""A whole batch in one task."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import TaskDeferred

from headrace.batch.allocation import allocate
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.wal_spark_submit import BatchTaskError
from headrace.stream import ConsoleOutput
from headrace.stream_context import StreamContext
from headrace.timetables.micro_batch import from_ms
from headrace.triggers.ledger import BlocksReadyTrigger


@pytest.fixture
def stream(stream):
    return stream.model_copy(update={"outputs": (*stream.outputs, ConsoleOutput(id="printed"))})


@pytest.fixture
def stored(stream, source, make_task, until):
    """A batch time with records that have ended, and a task of its run."""
    at_ms = source.store()
    until(lambda: source.ledger.now_ms() >= at_ms)
    source.seal()
    return at_ms, make_task(from_ms(at_ms - stream.batch_interval_ms))


def make(stream, **options) -> MicroBatchOperator:
    return MicroBatchOperator(task_id="micro_batch", stream=stream, **options)


def test_one_task_does_all_that_the_five_tasks_do(stream, stored, toy_batch, connectable, ledger):
    at_ms, task = stored
    reported = make(stream).execute(task.context)
    batch = ledger.batches.get("flights", at_ms)
    assert reported == {"batch_time_ms": at_ms, "state": "completed", "records": 3, "blocks": 1}
    assert batch.checkpoint_uri
    (attempt,) = ledger.attempts.of_batch("flights", at_ms)
    assert attempt.outputs == ("elasticsearch", "printed")
    assert [event["records"] for event in task.events] == [3]


def test_blocks_that_are_not_there_yet_are_waited_for_deferred(
    stream, toy_batch, connectable, ledger, source, make_task, monkeypatch, until
):
    monkeypatch.setattr("headrace.triggers.ledger.FIRST_POLL_SECONDS", 0.0)
    at_ms = source.store()
    until(lambda: ledger.now_ms() >= at_ms)
    task = make_task(from_ms(at_ms - stream.batch_interval_ms))
    operator = make(stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    assert isinstance(waiting.value.trigger, BlocksReadyTrigger)
    assert ledger.batches.find("flights", at_ms) is None
    operator.blocks_are_ready(task.context, {"reason": "the grace is over", "complete": False})
    assert ledger.batches.get("flights", at_ms).state.value == "completed"


def test_a_retry_runs_what_is_left_with_a_checkpoint_in_between(stream, stored, toy_batch, connectable, ledger):
    at_ms, task = stored
    toy_batch("fail:printed")
    with pytest.raises(BatchTaskError):
        make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "failed"
    assert task.events == []
    toy_batch("ok")
    make(stream).execute(task.again(try_number=2).context)
    assert [row.outputs for row in ledger.attempts.of_batch("flights", at_ms)] == [
        ("elasticsearch", "printed"),
        ("printed",),
    ]
    assert ledger.batches.get("flights", at_ms).checkpoint_uri


def test_a_wait_for_a_slot_does_not_allocate_again(stream, stored, source, toy_batch, connectable, ledger, until):
    at_ms, task = stored
    operator = make(stream)
    later = source.store()
    until(lambda: ledger.now_ms() >= later)
    allocate(StreamContext(stream, ledger), later)
    holding = ledger.attempts.begin("flights", later, holder="other", way="connect", lease_ms=60_000)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    assert waiting.value.method_name == "slot_may_be_free"
    assert ledger.batches.get("flights", at_ms).state.value == "allocated"
    ledger.attempts.fail(holding, "over")
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"
