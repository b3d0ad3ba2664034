# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Tasks that run one step of a batch each, side by side or one after another."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import TaskDeferred

from headrace.batch.next_attempt import NextAttempt
from headrace.operators.wal_spark_submit import AttemptFencedInSparkError, BatchTaskError, WalSparkSubmitOperator
from headrace.stream import ConsoleOutput, State

ONE, TWO = "elasticsearch", "printed"


@pytest.fixture
def stream(stream):
    return stream.model_copy(update={"outputs": (*stream.outputs, ConsoleOutput(id=TWO)), "parameters": {"limit": 3}})


def run(stream, step, task, **options) -> None:
    WalSparkSubmitOperator(task_id="generate", stream=stream, step=step, **options).execute(task.context)


def state(ledger, at_ms) -> str:
    return ledger.batches.get("flights", at_ms).state.value


def done(ledger, at_ms) -> list[tuple[str, int]]:
    rows = ledger.attempts.outputs("flights", at_ms)
    return sorted((row.output_id, row.attempt) for row in rows if row.state.value == "completed")


def test_a_batch_completes_with_its_last_step(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    run(stream, ONE, task)
    assert state(ledger, at_ms) != "completed"
    run(stream, TWO, task)
    assert state(ledger, at_ms) == "completed"
    assert done(ledger, at_ms) == [(ONE, 1), (TWO, 2)]


def test_what_failed_is_tried_again_alone(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    run(stream, ONE, task)
    toy_batch(f"fail:{TWO}")
    with pytest.raises(BatchTaskError):
        run(stream, TWO, task)
    assert state(ledger, at_ms) == "failed"
    toy_batch("ok")
    run(stream, TWO, task.again(try_number=2))
    assert state(ledger, at_ms) == "completed"
    assert done(ledger, at_ms) == [(ONE, 1), (TWO, 3)]


def test_all_tasks_of_a_cleared_run_do_their_part_again_once(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    for step in (ONE, TWO):
        run(stream, step, task)
    for _ in range(2):
        for step in (ONE, TWO):
            run(stream, step, task.again(clear_number=1))
    assert done(ledger, at_ms) == [(ONE, 3), (TWO, 4)]
    assert state(ledger, at_ms) == "completed"


def test_a_backfill_runs_a_completed_batch_again(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    for how in ({}, {"run_id": "backfill", "run_type": "backfill"}):
        for step in (ONE, TWO):
            run(stream, step, task.again(**how))
    assert done(ledger, at_ms) == [(ONE, 3), (TWO, 4)]


def test_outputs_that_were_not_asked_for_say_so_and_do_nothing(
    stream, allocated, toy_batch, connectable, ledger, capsys
):
    at_ms, task = allocated()
    asking = task.again(conf={"outputs": [TWO]})
    for step in (ONE, TWO):
        run(stream, step, asking)
    assert done(ledger, at_ms) == [(TWO, 1)]
    assert f"This run does not ask for {ONE}" in capsys.readouterr().out


def test_parameters_reach_the_process_by_the_attempt(stream, allocated, toy_batch, connectable, ledger, capsys):
    stream = stream.model_copy(update={"parameters": {"limit": 1}})
    at_ms, task = allocated()
    # More than a command line takes, and nothing for all to see.
    given = {"limit": "x" * 200_000}
    operator = WalSparkSubmitOperator(task_id="generate", stream=stream, step=ONE)
    operator.execute(task.again(conf={"parameters": given}).context)
    assert f"parameters {given}" in capsys.readouterr().out
    assert not any("xxx" in argument for argument in operator._arguments)
    assert [row.attributes["parameters"] for row in ledger.attempts.of_batch("flights", at_ms)] == [given]
    run(stream, TWO, task)
    assert "parameters None" in capsys.readouterr().out


def test_the_live_attempt_of_another_run_is_waited_for(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    run(stream, ONE, task)
    begun = {"holder": "other", "way": "connect", "lease_ms": 60_000}
    other = ledger.attempts.begin("flights", at_ms, **begun, outputs=[TWO], attributes={"run_id": "other"})
    operator = WalSparkSubmitOperator(task_id="generate", stream=stream, step=TWO)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    ledger.attempts.record_output(other, TWO, {})
    ledger.attempts.complete(other)
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert len(ledger.attempts.of_batch("flights", at_ms)) == 2
    assert state(ledger, at_ms) == "completed"


@pytest.mark.parametrize("try_number", [1, 2])
def test_so_is_that_of_another_run_with_the_same_id(stream, allocated, toy_batch, connectable, ledger, try_number):
    """Of a second Airflow, of the DAG's former id, or of a run that was deleted: ids have the batch time."""
    at_ms, task = allocated()
    run_elsewhere = {"run_id": "run", "run_started": "2026-01-01T00:00:01+00:00", "try_number": try_number}
    begun = {"holder": "other", "way": "connect", "lease_ms": 60_000}
    other = ledger.attempts.begin("flights", at_ms, **begun, attributes=run_elsewhere)
    with pytest.raises(TaskDeferred):
        run(stream, ONE, task)
    assert ledger.attempts.of_batch("flights", at_ms)[0].alive(ledger.now_ms())
    ledger.attempts.fail(other, "over")
    run(stream, ONE, task)
    assert done(ledger, at_ms) == [(ONE, 2)]


def test_so_is_one_that_begins_in_the_same_moment(stream, allocated, toy_batch, connectable, ledger, monkeypatch):
    """The runs of two Airflows, or two that a person triggers at once."""
    at_ms, task = allocated()
    look = NextAttempt.awaited
    begun = []

    def look_just_before(following):
        found = look(following)
        if not begun:
            other = {"holder": "other", "way": "connect", "lease_ms": 60_000, "attributes": {"run_id": "other"}}
            begun.append(ledger.attempts.begin("flights", at_ms, **other))
        return found

    monkeypatch.setattr(NextAttempt, "awaited", look_just_before)
    with pytest.raises(TaskDeferred):
        run(stream, ONE, task)
    (other,) = ledger.attempts.of_batch("flights", at_ms)
    assert other.alive(ledger.now_ms())
    ledger.attempts.fail(begun[0], "over")
    run(stream, ONE, task)
    assert done(ledger, at_ms) == [(ONE, 2)]


def test_a_try_that_wakes_up_beside_a_later_one_leaves_it_alone(stream, allocated, toy_batch, connectable, ledger):
    """Airflow took the first for dead; it was suspended."""
    at_ms, task = allocated()
    second = WalSparkSubmitOperator(task_id="generate", stream=stream, step=ONE)
    # It has begun, and runs for long.
    second.run_attempt = lambda *_: None
    second.execute(task.again(try_number=2).context)
    with pytest.raises(AttemptFencedInSparkError, match="A later try of this task has taken over the batch"):
        run(stream, ONE, task)
    (attempt,) = ledger.attempts.of_batch("flights", at_ms)
    assert attempt.alive(ledger.now_ms())
    # A retry that comes after it takes over: it is the zombie then.
    run(stream, ONE, task.again(try_number=3))
    assert [row.state.value for row in ledger.attempts.of_batch("flights", at_ms)] == ["fenced", "completed"]


def test_a_batch_is_complete_if_its_attempt_died_after_recording(stream, allocated, toy_batch, ledger):
    at_ms, task = allocated()
    begun = {"holder": "dead", "way": "connect", "lease_ms": 1}
    dead = ledger.attempts.begin("flights", at_ms, **begun)
    for step in dead.outputs:
        ledger.attempts.record_output(dead, step, {})
    assert state(ledger, at_ms) == "running"
    run(stream, dead.outputs[0], task)
    assert state(ledger, at_ms) == "completed"


def test_a_state_is_updated_before_the_outputs_of_it(stream, allocated, toy_batch, connectable, ledger):
    stateful = stream.model_copy(update={"state": State(update="m:f", fields="k STRING", keys="k")})
    at_ms, task = allocated()
    with pytest.raises(TaskDeferred):
        run(stateful, ONE, task)
    run(stateful, "state", task)
    run(stateful, ONE, task)
    assert [step for step, _ in done(ledger, at_ms)] == [ONE, "state"]
