# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Ordered streams: a run does what comes before it, and nobody waits for a run that waits for it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from airflow.sdk.exceptions import TaskDeferred

from headrace.batch.allocation import allocate
from headrace.clock import time_text
from headrace.hooks.ledger import register
from headrace.operators.batch_steps import AllocateBlocksOperator, CheckpointOperator
from headrace.operators.spark_attempt import BatchTaskError
from headrace.operators.wal_spark_submit import EarlierBatchFailedError, WalSparkSubmitOperator
from headrace.stream_context import StreamContext
from headrace.timetables.micro_batch import from_ms


@pytest.fixture
def stream(stream):
    return stream.model_copy(update={"ordered": True})


@pytest.fixture
def after(allocated, source, until):
    """Batch times that somebody else ought to run, then one with its task."""

    def make(earlier: int = 1):
        times = []
        for _ in range(earlier):
            times.append(source.store(2))
            until(lambda: source.ledger.now_ms() >= times[-1])
        return times, *allocated()

    return make


def run(stream, task) -> None:
    WalSparkSubmitOperator(task_id="generate", stream=stream, step="elasticsearch").execute(task.context)


def states(ledger, *times) -> list[str]:
    return [ledger.batches.get("flights", at_ms).state.value for at_ms in times]


def order(ledger, *times) -> list[int]:
    return sorted(times, key=lambda at_ms: ledger.batches.get("flights", at_ms).completed_at_ms)


def test_earlier_batches_without_a_run_are_allocated_and_run_first_in_order(
    stream, after, toy_batch, connectable, ledger, capsys
):
    earlier, at_ms, task = after(3)
    run(stream, task)
    assert states(ledger, *earlier, at_ms) == ["completed"] * 4
    assert order(ledger, at_ms, *earlier) == [*earlier, at_ms]
    assert (
        f"Batch {time_text(earlier[0])} comes before {time_text(at_ms)} and is allocated, and no task runs it"
        in capsys.readouterr().out
    )


def checkpointed(stream, task) -> list[int]:
    """The batch times of the events after this task's run."""
    CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
    return [event["batch_time_ms"] for event in task.events]


def test_the_runs_of_earlier_batches_find_them_completed_and_emit_no_event(
    stream, after, toy_batch, connectable, ledger, make_task
):
    (first,), at_ms, task = after()
    run(stream, task)
    own = make_task(from_ms(first - stream.batch_interval_ms), run_id="own")
    AllocateBlocksOperator(task_id="allocate", stream=stream).execute(own.context)
    run(stream, own)
    assert ledger.batches.get("flights", first).attempt == 1
    assert checkpointed(stream, task) == [first, at_ms]
    assert checkpointed(stream, own) == []
    cleared = own.again(run_id="own", clear_number=1)
    run(stream, cleared)
    assert ledger.batches.get("flights", first).attempt == 2
    assert checkpointed(stream, cleared) == [first]
    assert checkpointed(stream, task.again(clear_number=1)) == []


def test_a_run_emits_the_events_of_earlier_batches_although_its_own_batch_fails(
    stream, after, toy_batch, connectable, ledger, monkeypatch
):
    (first,), at_ms, task = after()
    whole = WalSparkSubmitOperator.run_attempt

    def but_not_the_last(operator, opened, attempt, batch, context):
        if batch.batch_time_ms == at_ms:
            opened.attempts.fail(attempt, "no")
            raise BatchTaskError("no")
        whole(operator, opened, attempt, batch, context)

    monkeypatch.setattr(WalSparkSubmitOperator, "run_attempt", but_not_the_last)
    with pytest.raises(BatchTaskError):
        run(stream, task)
    assert states(ledger, first, at_ms) == ["completed", "failed"]
    assert checkpointed(stream, task) == [first]


def test_a_backfill_runs_again_what_a_scheduled_run_did_first(stream, after, toy_batch, connectable, ledger, make_task):
    (first,), _, task = after()
    run(stream, task)
    later = make_task(from_ms(first - stream.batch_interval_ms), run_type="backfill", started=datetime.now(UTC))
    run(stream, later)
    assert ledger.batches.get("flights", first).attempt == 2


def test_a_backfill_does_not_run_again_what_its_run_of_a_later_batch_did_first(
    stream, after, toy_batch, connectable, ledger, make_task
):
    (first,), _, task = after()
    run(stream, task.again(run_type="backfill", run_id="backfill__later"))
    earlier = make_task(
        from_ms(first - stream.batch_interval_ms),
        run_type="backfill",
        run_id="backfill__earlier",
        started=datetime.now(UTC),
    )
    run(stream, earlier)
    assert ledger.batches.get("flights", first).attempt == 1


def test_a_failed_batch_that_is_run_ahead_keeps_its_runs_parameters(
    stream, after, toy_batch, connectable, ledger, make_task
):
    stream = stream.model_copy(update={"parameters": {"limit": 1}})
    register(ledger, stream)
    (first,), _, task = after()
    own = make_task(from_ms(first - stream.batch_interval_ms), {"parameters": {"limit": 2}}, run_id="own")
    AllocateBlocksOperator(task_id="allocate", stream=stream).execute(own.context)
    toy_batch("fail")
    with pytest.raises(BatchTaskError):
        run(stream, own)
    toy_batch("ok")
    run(stream, task)
    given = [row.attributes.get("parameters") for row in ledger.attempts.of_batch("flights", first)]
    assert given == [{"limit": 2}, {"limit": 2}]
    assert checkpointed(stream, task)[0] == first


def test_a_live_attempt_at_an_earlier_batch_is_waited_for(stream, after, toy_batch, connectable, ledger):
    (first,), at_ms, task = after()
    allocate(StreamContext(stream, ledger), first)
    attempt = ledger.attempts.begin("flights", first, holder="other", way="connect", lease_ms=60_000)
    operator = WalSparkSubmitOperator(task_id="generate", stream=stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    ledger.attempts.fail(attempt, "over")
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert states(ledger, first, at_ms) == ["completed", "completed"]


def test_an_attempt_that_begins_after_the_check_is_not_fenced(
    stream, after, toy_batch, connectable, ledger, monkeypatch
):
    (first,), at_ms, task = after()
    allocate(StreamContext(stream, ledger), first)
    begun = []

    def meanwhile(operator, opened, batch, steps):
        if batch.batch_time_ms == first:
            begun.append(opened.attempts.begin("flights", first, holder="own", way="connect", lease_ms=60_000))

    monkeypatch.setattr(WalSparkSubmitOperator, "await_application", meanwhile)
    with pytest.raises(TaskDeferred):
        run(stream, task)
    ledger.attempts.renew(*begun)
    assert states(ledger, first, at_ms) == ["running", "allocated"]


def test_if_it_fails_this_fails_with_its_error_and_the_retry_does_the_same(
    stream, after, toy_batch, connectable, ledger
):
    (first,), at_ms, task = after()
    toy_batch("fail")
    for try_number in (1, 2):
        with pytest.raises(EarlierBatchFailedError, match=f"Batch {time_text(first)} comes first") as failed:
            run(stream, task.again(try_number=try_number))
    assert "the transform said no" in str(failed.value) or "exit code 1" in str(failed.value)
    assert states(ledger, first, at_ms) == ["failed", "allocated"]
    toy_batch("ok")
    run(stream, task.again(try_number=3))
    assert states(ledger, first, at_ms) == ["completed", "completed"]


def test_an_earlier_batch_that_another_attempt_takes_over_is_waited_for(
    stream, after, toy_batch, connectable, ledger, monkeypatch
):
    (first,), at_ms, task = after()

    def overtaken(operator, *_args, **_kwargs):
        newer = ledger.attempts.begin("flights", first, holder="newer", way="connect", lease_ms=60_000)
        operator.newer = newer
        raise RuntimeError("the process gave way")

    operator = WalSparkSubmitOperator(task_id="generate", stream=stream)
    with monkeypatch.context() as patched:
        patched.setattr(WalSparkSubmitOperator, "_run_process", overtaken)
        with pytest.raises(TaskDeferred) as waiting:
            operator.execute(task.context)
    ledger.attempts.record_output(operator.newer, "elasticsearch", {})
    ledger.attempts.complete(operator.newer)
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert states(ledger, first, at_ms) == ["completed", "completed"]


def test_a_batch_that_failed_when_it_was_run_again_holds_up_nothing(stream, after, toy_batch, connectable, ledger):
    (first,), at_ms, task = after()
    allocate(StreamContext(stream, ledger), first)
    begun = {"holder": "other", "way": "connect", "lease_ms": 60_000}
    attempt = ledger.attempts.begin("flights", first, **begun)
    ledger.attempts.record_output(attempt, "elasticsearch", {})
    ledger.attempts.complete(attempt)
    again = ledger.attempts.begin("flights", first, **begun, force=True)
    ledger.attempts.fail(again, "gone from Kafka")
    run(stream, task)
    # Nor was it run ahead: whoever asked for it again does that.
    assert states(ledger, first, at_ms) == ["failed", "completed"]
    assert ledger.batches.get("flights", first).attempt == again.number


def test_an_earlier_batch_that_nothing_can_cure_is_waited_for_until_it_is_given_up(
    stream, after, toy_batch, connectable, ledger, capsys
):
    (first,), at_ms, task = after()
    toy_batch("final")
    with pytest.raises(EarlierBatchFailedError, match=f"Batch {time_text(first)} comes first"):
        run(stream, task)
    toy_batch("ok")
    # Nobody tries in vain what has failed for good, nor fails for it.
    operator = WalSparkSubmitOperator(task_id="generate", stream=stream, step="elasticsearch")
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.again(try_number=2, run_type="manual").context)
    assert f"`headrace batches abandon flights {time_text(first)} --reason WHY`" in capsys.readouterr().out
    assert len(ledger.attempts.of_batch("flights", first)) == 1
    ledger.batches.abandon("flights", first, "its log is damaged")
    operator.slot_may_be_free(task.again(try_number=2, run_type="manual").context, **waiting.value.kwargs)
    assert states(ledger, first, at_ms) == ["abandoned", "completed"]
