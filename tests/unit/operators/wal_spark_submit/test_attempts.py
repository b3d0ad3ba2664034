"""The attempts of a batch: how they end, and which definition they run by."""

# ruff: noqa: PLR0917 - fixtures are asked for by argument
from __future__ import annotations

import threading
from subprocess import CalledProcessError

import pytest
from airflow.sdk import RetryAction
from tests.unit.operators.wal_spark_submit.conftest import make

from headrace.hooks.ledger import register
from headrace.operators.spark_attempt import BatchTaskError
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.runs.retries import BatchRetryPolicy
from headrace.spark.batch_command import definition_of
from headrace.stream import ConsoleOutput


def test_a_failed_batch_fails_the_task_and_can_be_run_again(stream, allocated, toy_process, connectable, ledger):
    at_ms, task = allocated()
    toy_process("fail")
    with pytest.raises(BatchTaskError, match="exit code 1"):
        make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).error == "the transform said no"
    toy_process("ok")
    make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).attempt == 2


@pytest.mark.parametrize(("how", "first"), [("code", RetryAction.DEFAULT), ("final", RetryAction.FAIL)])
def test_lost_data_is_not_tried_again_and_a_failure_of_the_code_once(
    stream, allocated, toy_batch, connectable, ledger, how, first
):
    at_ms, task = allocated()
    toy_batch(how)
    with pytest.raises(BatchTaskError) as failed:
        make(stream).execute(task.context)
    assert BatchRetryPolicy(30).evaluate(failed.value, 1, 30).action is first
    assert BatchRetryPolicy(30).evaluate(failed.value, 2, 30).action is RetryAction.FAIL
    (attempt,) = ledger.attempts.of_batch("flights", at_ms)
    assert attempt.state.value == "failed"


def test_a_batch_that_is_given_up_between_its_tries_ends_them_well(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    toy_batch("fail")
    with pytest.raises(BatchTaskError):
        make(stream).execute(task.context)
    ledger.batches.abandon("flights", at_ms, "its index is gone")
    make(stream).execute(task.again(try_number=2).context)
    assert [row.number for row in ledger.attempts.of_batch("flights", at_ms)] == [1]
    (gap,) = ledger.gaps.page("flights")
    assert (gap.batch_time_ms, gap.until_offset - gap.from_offset) == (at_ms, 3)


def test_the_error_of_a_submitted_batch_begins_with_what_its_application_reported(
    stream, source, allocated, submitted, toy_batch, ledger
):
    _, task = allocated()
    ledger.jobs.update(source.job, state="running")
    toy_batch("fail")
    # The last lines of spark-submit may be the JVM's alone.
    with pytest.raises(BatchTaskError, match=r"^the transform said no\n.*exit status 1"):
        make(stream).execute(task.context)


def test_an_application_that_ended_badly_after_it_completed_the_batch_has_no_cause_to_name(
    stream, source, allocated, submitted, toy_batch, ledger
):
    at_ms, task = allocated()
    ledger.jobs.update(source.job, state="running")
    toy_batch("late")
    with pytest.raises(CalledProcessError):
        make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"


def test_an_end_without_completion_is_a_failure(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    toy_batch("silent")
    with pytest.raises(BatchTaskError, match="is running"):
        make(stream).execute(task.context)
    (attempt,) = ledger.attempts.of_batch("flights", at_ms)
    assert attempt.state.value == "failed"


def test_a_warning_of_the_batchs_process_is_one_in_the_tasks_log(stream, allocated, toy_process, connectable, capsys):
    _, task = allocated()
    toy_process("warn")
    make(stream).execute(task.context)
    lines = [line for line in capsys.readouterr().out.splitlines() if "toy batch" in line or ": 429" in line]
    assert ["[warning" in line for line in lines] == [False, True]


def test_an_attempt_that_dies_after_its_last_record_is_seen_to_be_complete_by_the_retry(
    stream, allocated, toy_process, connectable, ledger
):
    at_ms, task = allocated()
    toy_process("die")
    with pytest.raises(BatchTaskError, match="signal 9"):
        make(stream, step="elasticsearch").execute(task.context)
    make(stream, step="elasticsearch").execute(task.again(try_number=2).context)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"
    assert len(ledger.attempts.of_batch("flights", at_ms)) == 1


def test_a_completed_batch_is_not_run_again_unless_asked(stream, allocated, toy_batch, connectable, ledger, make_task):
    at_ms, task = allocated()
    make(stream).execute(task.context)
    make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).attempt == 1
    asked = task.again(conf={"reprocess": True}, run_id="asking")
    make(stream).execute(asked.context)
    assert ledger.batches.get("flights", at_ms).attempt == 2
    make(stream).execute(asked.context)
    assert ledger.batches.get("flights", at_ms).attempt == 2


def test_an_empty_batch_completes_without_spark(stream, allocated, ledger, capsys):
    at_ms, task = allocated(records=0)
    make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"
    assert "without Spark" in capsys.readouterr().out


def test_the_console_heading_of_an_empty_batch_is_printed_by_a_plain_process(stream, allocated, toy_batch, capsys):
    printed = stream.model_copy(update={"outputs": (*stream.outputs, ConsoleOutput())})
    _, task = allocated(records=0)
    make(printed, way="submit").execute(task.context)
    assert "toy batch by way submit" in capsys.readouterr().out


def test_a_batch_without_allocation_says_what_to_do(stream, ledger, make_task):
    from headrace.timetables.micro_batch import from_ms

    with pytest.raises(BatchTaskError, match="allocate_blocks"):
        make(stream).execute(make_task(from_ms(1_700_000_000_000)).context)


def test_killing_the_task_ends_its_process(stream, allocated, toy_process, connectable, ledger, until):
    at_ms, task = allocated()
    toy_process("hang")
    operator = make(stream)
    failures = []

    def run():
        try:
            operator.execute(task.context)
        except BatchTaskError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: operator._process is not None)
    until(lambda: ledger.attempts.of_batch("flights", at_ms))
    operator.on_kill()
    thread.join(20)
    assert not thread.is_alive()
    assert "was asked to end" in failures[0]
    assert ledger.batches.get("flights", at_ms).state.value == "failed"


def test_a_later_attempt_takes_the_batch_from_a_zombie(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    zombie = ledger.attempts.begin("flights", at_ms, holder="zombie", way="connect", lease_ms=60_000)
    make(stream).execute(task.context)
    states = [row.state.value for row in ledger.attempts.of_batch("flights", at_ms)]
    assert states == ["fenced", "completed"]
    with pytest.raises(Exception, match="newer attempt"):
        ledger.attempts.complete(zombie)


def test_an_attempt_keeps_its_definition_while_tasks_register_another(
    stream, allocated, toy_batch, connectable, ledger, monkeypatch
):
    """A deploy happens between the beginning of the attempt and the start of its process, and again before its end."""
    at_ms, task = allocated()
    deployed = stream.model_copy(update={"outputs": (stream.outputs[0].model_copy(update={"index": "deployed"}),)})
    written = []
    run_attempt = WalSparkSubmitOperator.run_attempt

    def register_another(operator, ledger, attempt, batch, context):
        register(ledger, deployed)
        written.append(definition_of(attempt, ledger).output("elasticsearch").index)
        return run_attempt(operator, ledger, attempt, batch, context)

    monkeypatch.setattr(WalSparkSubmitOperator, "run_attempt", register_another)
    make(stream).execute(task.context)
    make(deployed).execute(task.again(conf={"reprocess": True}, run_id="again").context)
    assert written == ["flights", "deployed"]
    assert [row.revision for row in ledger.attempts.of_batch("flights", at_ms)] == [1, 2]


def test_the_attempt_of_a_killed_task_says_so(stream, allocated, toy_batch, connectable, ledger, monkeypatch):
    """Its supervisor is gone, and its next line in the log breaks the pipe."""

    def broken(_):
        raise BrokenPipeError(32, "Broken pipe")

    at_ms, task = allocated()
    monkeypatch.setattr(WalSparkSubmitOperator, "_run_process", broken)
    with pytest.raises(BrokenPipeError):
        make(stream).execute(task.context)
    (row,) = ledger.attempts.of_batch("flights", at_ms)
    assert row.error == "The Airflow task was killed: its supervisor is gone, with the worker or by itself."
