"""The operator of a batch's outputs, and a spark-submit that runs the toy in its place.

Where a batch is computed: in the receiver job's application, in one of its own, and which of them is waited for.

The attempts of a batch: how they end, and which definition they run by.

Waits for other batches of the stream that take up its slots.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from subprocess import CalledProcessError

import pytest
from airflow.sdk.exceptions import TaskDeferred
from tests.unit.operators.toy_micro_batch import InThisProcess

from headrace.airflow_versions import RetryAction
from headrace.batch.due_batches import was_interrupted
from headrace.hooks.ledger import register
from headrace.ledger.errors import SlotBusyError
from headrace.operators.wal_spark_submit import BatchTaskError, WalSparkSubmitOperator
from headrace.runs.processes import secret_key
from headrace.runs.retries import BatchRetryPolicy
from headrace.spark.attempts.batch_command import definition_of
from headrace.spark.job_token import secret_fingerprint
from headrace.spark.versions import MixedSparkError, current_versions
from headrace.stream import ConsoleOutput


def make(stream, **options) -> WalSparkSubmitOperator:
    return WalSparkSubmitOperator(task_id="generate", stream=stream, **options)


@pytest.fixture
def submitted(monkeypatch, toy_batch):
    """What would go to spark-submit; it runs the toy."""
    from headrace.hooks.spark_submit import StreamSparkSubmitHook

    commands = []

    def submit(hook, application="", **kwargs):
        commands.append(hook.command(application))
        batch = InThisProcess([sys.executable, application, *hook._application_args], env=hook.environment())
        if batch.returncode:
            raise CalledProcessError(batch.returncode, commands[-1])

    monkeypatch.setattr(StreamSparkSubmitHook, "submit", submit)
    return commands


# ruff: noqa: PLR0917 - fixtures are asked for by argument


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
        operator.slot_may_be_free(task.context, waited=60.0, waiting_for="application", application_waited=60.0)
    assert waiting.value.kwargs["waiting_for"] == "application"


def test_the_wait_for_an_application_ends_at_the_start_timeout(stream, allocated, submitted):
    _, task = allocated()
    # After a minute for a slot, in whatever order.
    make(stream).slot_may_be_free(task.context, waited=240.0, waiting_for="slot", application_waited=180.0)
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
    assert "each batch is submitted as a Spark application of its own" in warned


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
def test_a_batch_is_submitted_beside_a_job_of_another_version(
    stream, source, allocated, submitted, ledger, capsys, version
):
    """The job of the other version stays."""
    _, task = allocated()
    ledger.jobs.release(source.job)
    _job_of(ledger, stream, version)
    make(stream).execute(task.context)
    assert len(submitted) == 1
    assert f"runs with other versions (headrace {version} there" in capsys.readouterr().out
    assert ledger.jobs.current("flights").stop_requested_at_ms is None


# ruff: noqa: PLR0917 - fixtures are asked for by argument


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
def test_lost_data_is_not_tried_again_and_code_failures_once(
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


def test_a_batch_given_up_between_its_tries_ends_them_well(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    toy_batch("fail")
    with pytest.raises(BatchTaskError):
        make(stream).execute(task.context)
    ledger.batches.abandon("flights", at_ms, "its index is gone")
    make(stream).execute(task.again(try_number=2).context)
    assert [row.number for row in ledger.attempts.of_batch("flights", at_ms)] == [1]
    (gap,) = ledger.gaps.page("flights")
    assert (gap.batch_time_ms, gap.until_offset - gap.from_offset) == (at_ms, 3)


def test_the_error_of_a_submitted_batch_begins_with_its_report(stream, source, allocated, submitted, toy_batch, ledger):
    """The report is what the batch's application said."""
    _, task = allocated()
    ledger.jobs.update(source.job, state="running")
    toy_batch("fail")
    # The last lines of spark-submit may be the JVM's alone.
    with pytest.raises(BatchTaskError, match=r"^the transform said no\n.*exit status 1"):
        make(stream).execute(task.context)


def test_an_application_that_ends_badly_when_done_has_no_cause(stream, source, allocated, submitted, toy_batch, ledger):
    """It completed the batch, so there is no cause to name."""
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


def test_a_retry_sees_that_a_dead_attempt_was_complete(stream, allocated, toy_process, connectable, ledger):
    """The attempt died after its last record."""
    at_ms, task = allocated()
    toy_process("die")
    with pytest.raises(BatchTaskError, match="signal 9"):
        make(stream, step="elasticsearch").execute(task.context)
    assert was_interrupted(ledger.attempts.of_batch("flights", at_ms)[-1])
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
    assert "no Spark is needed" in capsys.readouterr().out


def test_a_plain_process_prints_an_empty_batchs_console_heading(stream, allocated, toy_batch, capsys):
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
    assert "was ended by SIGTERM" in failures[0]
    assert ledger.batches.get("flights", at_ms).state.value == "failed"
    (row,) = ledger.attempts.of_batch("flights", at_ms)
    assert was_interrupted(row)


def test_the_execution_timeout_ends_a_process_that_hangs(stream, allocated, toy_process, connectable, ledger, expire):
    at_ms, task = allocated()
    toy_process("hang")
    operator = make(stream)
    expire(operator, task)
    (row,) = ledger.attempts.of_batch("flights", at_ms)
    assert (row.state.value, row.error) == ("failed", "The Airflow task ran for longer than its execution_timeout.")
    assert not was_interrupted(row)


def test_a_later_attempt_takes_the_batch_from_a_zombie(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    zombie = ledger.attempts.begin("flights", at_ms, holder="zombie", way="connect", lease_ms=60_000)
    make(stream).execute(task.context)
    states = [row.state.value for row in ledger.attempts.of_batch("flights", at_ms)]
    assert states == ["fenced", "completed"]
    with pytest.raises(Exception, match="newer attempt"):
        ledger.attempts.complete(zombie)


def test_an_attempt_keeps_its_definition_beside_newer_ones(
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

    def broken(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    at_ms, task = allocated()
    monkeypatch.setattr(WalSparkSubmitOperator, "_run_application", broken)
    with pytest.raises(BrokenPipeError):
        make(stream).execute(task.context)
    (row,) = ledger.attempts.of_batch("flights", at_ms)
    assert row.error == "The Airflow task was killed: its supervisor process has ended, alone or with the worker."


# ruff: noqa: PLR0917 - fixtures are asked for by argument


def test_other_batches_in_the_slot_are_waited_for_deferred(stream, allocated, toy_batch, connectable, ledger):
    first, _ = allocated()
    at_ms, task = allocated()
    other = ledger.attempts.begin("flights", first, holder="other", way="connect", lease_ms=60_000)
    operator = make(stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    assert waiting.value.method_name == "slot_may_be_free"
    ledger.attempts.fail(other, "over")
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"


def test_other_batches_in_the_slot_are_waited_for_in_place(
    stream, allocated, toy_batch, connectable, ledger, capsys, monkeypatch
):
    """Tasks are not deferred in this case."""
    first, _ = allocated()
    at_ms, task = allocated()
    other = ledger.attempts.begin("flights", first, holder="another run", way="connect", lease_ms=60_000)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            ledger.attempts.fail(other, "over")

    monkeypatch.setattr("headrace.operators.wal_spark_submit.time.sleep", sleep)
    make(stream, deferrable=False, slot_poll=timedelta(milliseconds=100)).execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"
    assert slept == [0.1] * 3
    assert capsys.readouterr().out.count("another run") == 1, "why it waits is said once"


def test_a_wait_in_place_for_the_slot_ends_at_the_slot_timeout(stream, allocated, toy_batch, connectable, ledger):
    first, _ = allocated()
    _, task = allocated()
    ledger.attempts.begin("flights", first, holder="other", way="connect", lease_ms=60_000)
    operator = make(
        stream, deferrable=False, slot_poll=timedelta(milliseconds=10), slot_timeout=timedelta(milliseconds=30)
    )
    with pytest.raises(SlotBusyError, match="other"):
        operator.execute(task.context)


def test_a_deferred_wait_for_the_slot_ends_at_the_slot_timeout(stream, allocated, toy_batch, connectable, ledger):
    first, _ = allocated()
    _, task = allocated()
    ledger.attempts.begin("flights", first, holder="other", way="connect", lease_ms=60_000)
    with pytest.raises(TaskDeferred) as waiting:
        make(stream).execute(task.context)
    with pytest.raises(SlotBusyError, match="other"):
        make(stream).slot_may_be_free(task.context, **{**waiting.value.kwargs, "waited": 10_000.0})


def test_no_attempt_begins_with_two_versions_of_spark_together(stream, allocated, connectable, ledger, monkeypatch):
    """Both are in one folder."""
    at_ms, task = allocated()
    monkeypatch.setattr("importlib.metadata.version", {"pyspark": "4.3.0", "pyspark-client": "4.2.0"}.get)
    with pytest.raises(MixedSparkError):
        make(stream).execute(task.context)
    assert list(ledger.attempts.of_batch("flights", at_ms)) == []
