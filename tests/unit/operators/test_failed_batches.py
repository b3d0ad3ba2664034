# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Batches that failed are taken up by later runs of the schedule, and nobody clears a run."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest

from headrace.clock import time_text
from headrace.hooks.ledger import register
from headrace.ledger.errors import StepsLostError
from headrace.operators.batch_steps import AllocateBlocksOperator, CheckpointOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.spark_attempt import BatchTaskError
from headrace.operators.wal_spark_submit import EarlierBatchFailedError, WalSparkSubmitOperator
from headrace.runs.retries import failed_batches
from headrace.stream import ConsoleOutput
from headrace.stream_context import StreamContext
from headrace.timetables.micro_batch import from_ms

ONE, TWO = "elasticsearch", "printed"


@pytest.fixture
def stream(stream):
    return stream.model_copy(update={"outputs": (*stream.outputs, ConsoleOutput(id=TWO))})


@pytest.fixture(autouse=True)
def time_for_others(monkeypatch):
    """A run has time for the batches of other runs, however slow the machine is."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep)
    monkeypatch.setattr("headrace.operators.wal_spark_submit.time", clock)


class Runs:
    """Runs of the schedule, one after another: `next` has the next one's time stored, ended and allocated."""

    def __init__(self, stream, source, make_task, until) -> None:
        self.stream, self.source, self.ledger = stream, source, source.ledger
        self._make_task, self.until, self._numbers = make_task, until, count(1)

    def next(self, **fields):
        at_ms = self.source.store(2)
        self.until(lambda: self.ledger.now_ms() >= at_ms)
        task = self._make_task(from_ms(at_ms - 200), run_id=f"run-{next(self._numbers)}", **fields)
        AllocateBlocksOperator(task_id="allocate", stream=self.stream).execute(task.context)
        return at_ms, task

    def define(self, *outputs) -> None:
        """From now on the stream has these outputs."""
        self.stream = self.stream.model_copy(update={"outputs": outputs})
        register(self.ledger, self.stream)

    def without_pause(self) -> None:
        """From now on a batch that was allocated is not left to its own run for a while."""
        limits = self.stream.limits.model_copy(update={"retry_for": timedelta(milliseconds=1)})
        self.stream = self.stream.model_copy(update={"limits": limits})

    def write(self, task, *steps: str) -> None:
        for step in steps:
            WalSparkSubmitOperator(task_id="generate", stream=self.stream, step=step).execute(task.context)

    def fail(self, toy_batch, how: str = "fail", **fields):
        """A run whose first output fails, in that way."""
        at_ms, task = self.next(**fields)
        toy_batch(how)
        with pytest.raises(BatchTaskError):
            self.write(task, ONE)
        toy_batch("ok")
        return at_ms, task

    def state(self, at_ms: int) -> str:
        return self.ledger.batches.get("flights", at_ms).state.value

    def written(self, at_ms: int) -> dict[str, int]:
        rows = self.ledger.attempts.outputs("flights", at_ms)
        return {row.output_id: row.attempt for row in rows if row.state.value == "completed"}


@pytest.fixture
def runs(stream, source, make_task, until, ledger, connectable):
    register(ledger, stream)
    return Runs(stream, source, make_task, until)


def test_the_next_run_takes_up_what_failed_after_its_own_batch_each_output_its_own(stream, runs, toy_batch, ledger):
    failed = [runs.fail(toy_batch)[0] for _ in range(2)]
    at_ms, task = runs.next()
    runs.write(task, TWO)
    assert [runs.written(time_ms) for time_ms in (*failed, at_ms)] == [{TWO: 2}, {TWO: 2}, {TWO: 1}]
    runs.write(task, ONE)
    assert [runs.written(time_ms) for time_ms in failed] == [{TWO: 2, ONE: 3}] * 2
    assert [runs.state(time_ms) for time_ms in failed] == ["completed", "completed"]
    attempt = ledger.attempts.of_batch("flights", failed[0])[-1]
    assert (attempt.attributes["run_id"], attempt.attributes["taken_up"]) == ("run-3", True)
    CheckpointOperator(task_id="checkpoint", stream=stream).execute(task.context)
    assert [event["batch_time_ms"] for event in task.events] == [*failed, at_ms]


class TestMissedTimes:
    """Batch times that hold records, and for which Airflow has no run."""

    @pytest.fixture
    def stream(self, stream):
        limits = stream.limits.model_copy(update={"retry_for": timedelta(hours=1)})
        return stream.model_copy(update={"limits": limits})

    @pytest.fixture
    def missed(self, runs):
        times = []
        for _ in range(2):
            times.append(runs.source.store(2))
            runs.until(lambda: runs.ledger.now_ms() >= times[-1])
        return times

    def test_failed_batches_are_run_by_the_next_runs_without_a_person(self, runs, missed, toy_batch):
        runs.write(runs.next()[1], ONE, TWO)
        assert [runs.state(time_ms) for time_ms in missed] == ["allocated", "allocated"]
        runs.without_pause()
        runs.write(runs.next()[1], ONE, TWO)
        assert [runs.state(time_ms) for time_ms in missed] == ["completed", "completed"]

    def test_each_run_retries_one_failed_batch_even_if_its_own_batch_took_all_the_time(
        self, runs, missed, toy_batch, monkeypatch
    ):
        whole = WalSparkSubmitOperator._run_own_batch

        def slow(operator, run):
            whole(operator, run)
            operator._others_until = 0.0

        monkeypatch.setattr(WalSparkSubmitOperator, "_run_own_batch", slow)
        runs.write(runs.next()[1], ONE, TWO)
        runs.without_pause()
        runs.write(runs.next()[1], ONE, TWO)
        assert [runs.state(time_ms) for time_ms in missed] == ["completed", "allocated"]
        runs.write(runs.next()[1], ONE, TWO)
        assert [runs.state(time_ms) for time_ms in missed] == ["completed", "completed"]

    def test_a_failed_batch_whose_own_run_waits_is_left_to_that_run(self, stream, runs, missed, toy_batch, make_task):
        runs.write(runs.next()[1], ONE, TWO)
        runs.without_pause()
        _, task = runs.next()
        task.waiting_runs.add(from_ms(missed[0] - stream.batch_interval_ms))
        runs.write(task, ONE, TWO)
        assert [runs.state(time_ms) for time_ms in missed] == ["allocated", "completed"]
        own = make_task(from_ms(missed[0] - stream.batch_interval_ms), run_id="own", run_type="backfill")
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(own.context)
        runs.write(own, ONE, TWO)
        assert runs.written(missed[0]) == {ONE: 1, TWO: 2}

    def test_a_run_of_its_own_that_comes_late_finds_it_done(self, stream, runs, missed, toy_batch, make_task, ledger):
        runs.write(runs.next()[1], ONE, TWO)
        runs.without_pause()
        runs.write(runs.next()[1], ONE, TWO)
        own = make_task(from_ms(missed[0] - stream.batch_interval_ms), run_id="own")
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(own.context)
        runs.write(own, ONE, TWO)
        assert len(ledger.attempts.of_batch("flights", missed[0])) == 2


def test_while_the_output_is_away_a_run_does_not_look_at_others_batches(runs, toy_batch, ledger):
    failed, _ = runs.fail(toy_batch)
    runs.fail(toy_batch)
    assert len(ledger.attempts.of_batch("flights", failed)) == 1


def test_what_fails_again_ends_it_for_this_run_and_is_left_alone_for_a_while(runs, toy_batch, ledger, monkeypatch):
    failed = [runs.fail(toy_batch)[0] for _ in range(2)]
    whole = WalSparkSubmitOperator.run_attempt

    def only_its_own(operator, opened, attempt, batch, context):
        if batch.batch_time_ms in failed:
            opened.attempts.fail(attempt, "out of memory")
            raise BatchTaskError("out of memory")
        whole(operator, opened, attempt, batch, context)

    monkeypatch.setattr(WalSparkSubmitOperator, "run_attempt", only_its_own)
    at_ms, task = runs.next()
    runs.write(task, ONE)
    assert runs.written(at_ms) == {ONE: 1}
    assert [len(ledger.attempts.of_batch("flights", time_ms)) for time_ms in failed] == [2, 1]
    # The first has a pause now; the other one has not.
    stream = runs.stream.model_copy(update={"batch_interval": runs.stream.batch_interval * 10_000})
    assert [each.batch.batch_time_ms for each in failed_batches(StreamContext(stream, ledger), at_ms, [ONE])] == [
        failed[1]
    ]


@pytest.mark.parametrize("how", ["code", "final"])
def test_what_failed_by_its_code_is_taken_up_when_the_definition_has_changed(runs, toy_batch, ledger, how):
    failed, _ = runs.fail(toy_batch, how)
    for _ in range(2):
        runs.write(runs.next()[1], ONE)
    assert len(ledger.attempts.of_batch("flights", failed)) == 1
    runs.define(runs.stream.outputs[0].model_copy(update={"refresh": True}), runs.stream.outputs[1])
    runs.write(runs.next()[1], ONE)
    assert runs.written(failed) == {ONE: 2}


def test_a_batch_whose_failed_output_was_removed_stays_failed_until_it_is_given_up(runs, toy_batch, ledger):
    failed, task = runs.fail(toy_batch)
    runs.write(task, TWO)
    runs.define(*runs.stream.outputs[1:])
    runs.write(runs.next()[1], TWO)
    batch = ledger.batches.get("flights", failed)
    assert (batch.state, runs.written(failed)) == ("failed", {TWO: 2})
    assert f"was not written to {ONE!r}, which the definition no longer has" in batch.error
    # Its own run is red too when it is cleared, although its only task has nothing to do.
    with pytest.raises(StepsLostError):
        runs.write(task, TWO)
    assert ledger.batches.abandon_output("flights", failed, ONE, "not needed").state == "completed"


def test_a_batch_whose_only_output_was_renamed_is_written_under_its_first_id(runs, toy_batch, ledger):
    runs.define(runs.stream.outputs[0])
    failed, _ = runs.fail(toy_batch)
    runs.define(ConsoleOutput(id=TWO))
    runs.write(runs.next()[1], TWO)
    assert (runs.state(failed), runs.written(failed)) == ("failed", {})
    runs.define(ConsoleOutput(id=TWO, renamed_from=ONE))
    runs.write(runs.next()[1], TWO)
    assert (runs.state(failed), runs.written(failed)) == ("completed", {ONE: 2})


def test_a_batch_whose_only_output_was_given_up_needs_those_that_the_stream_has_now(runs, toy_batch, ledger):
    runs.define(runs.stream.outputs[0])
    failed, _ = runs.fail(toy_batch)
    three = "printed_too"
    runs.define(ConsoleOutput(id=TWO), ConsoleOutput(id=three))
    ledger.batches.abandon_output("flights", failed, ONE, "replaced")
    runs.without_pause()
    _, task = runs.next()
    runs.write(task, TWO)
    assert (runs.state(failed), runs.written(failed)) == ("allocated", {TWO: 2}), "not without the other one"
    runs.without_pause()
    runs.write(task, three)
    assert (runs.state(failed), runs.written(failed)) == ("completed", {TWO: 2, three: 3})


def test_a_runs_end_reports_the_failure_although_a_task_never_began(runs, toy_batch, ledger):
    failed, task = runs.fail(toy_batch)
    CheckpointOperator(task_id="checkpoint", stream=runs.stream).execute(task.context)
    kinds = [event.kind for event in ledger.events.of_batch("flights", failed)]
    assert kinds.count("batch_failed") == 1


def test_abandoned_batches_and_batches_with_a_live_attempt_are_not_retried(runs, toy_batch, ledger):
    abandoned, _ = runs.fail(toy_batch)
    ledger.batches.abandon("flights", abandoned, "its index is gone")
    held, _ = runs.fail(toy_batch)
    runs.stream = runs.stream.model_copy(
        update={"limits": runs.stream.limits.model_copy(update={"max_concurrent_batches": 3})}
    )
    register(ledger, runs.stream)
    ledger.attempts.begin("flights", held, holder="other", way="connect", lease_ms=60_000, outputs=[ONE])
    runs.write(runs.next()[1], ONE)
    assert (runs.state(abandoned), runs.state(held)) == ("abandoned", "running")


@pytest.mark.parametrize("run_type", ["manual", "backfill"])
def test_a_requested_run_does_its_own_batch_alone(runs, toy_batch, ledger, run_type):
    failed, _ = runs.fail(toy_batch)
    runs.write(runs.next(run_type=run_type)[1], ONE)
    assert len(ledger.attempts.of_batch("flights", failed)) == 1


def test_a_run_takes_up_others_for_a_bounded_time_and_the_next_one_goes_on(runs, toy_batch, monkeypatch):
    failed = [runs.fail(toy_batch)[0] for _ in range(3)]
    times = iter([0.0, 29.0, 31.0])
    with monkeypatch.context() as patched:
        clock = SimpleNamespace(monotonic=lambda: next(times))
        patched.setattr("headrace.operators.wal_spark_submit.time", clock)
        runs.write(runs.next()[1], ONE)
    assert [bool(runs.written(time_ms)) for time_ms in failed] == [True, True, False]
    runs.write(runs.next()[1], ONE)
    assert runs.written(failed[2]) == {ONE: 2}


def test_the_single_task_retries_failed_batches_too(runs, toy_batch, ledger, source, make_task, until):
    at_ms, task = runs.next()
    operator = MicroBatchOperator(task_id="micro_batch", stream=runs.stream)
    toy_batch("fail")
    source.seal()
    with pytest.raises(BatchTaskError):
        operator.execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "failed"
    toy_batch("ok")
    _, task = runs.next()
    source.seal()
    operator.execute(task.context)
    assert runs.state(at_ms) == "completed"
    assert task.events[0]["batch_time_ms"] == at_ms


class TestInOrder:
    @pytest.fixture
    def stream(self, stream):
        return stream.model_copy(update={"ordered": True, "outputs": stream.outputs[:1]})

    def test_allocation_and_checkpoint_go_on_while_the_oldest_fails(self, runs, toy_batch, ledger):
        first, _ = runs.fail(toy_batch)
        second, task = runs.fail(toy_batch)
        CheckpointOperator(task_id="checkpoint", stream=runs.stream).execute(task.context)
        assert [runs.state(time_ms) for time_ms in (first, second)] == ["failed", "allocated"]
        third, task = runs.next()
        runs.write(task, ONE)
        batches = [ledger.batches.get("flights", time_ms) for time_ms in (first, second, third)]
        assert [batch.state.value for batch in batches] == ["completed"] * 3
        assert sorted(batches, key=lambda batch: batch.completed_at_ms) == batches

    def test_a_run_that_catches_up_for_too_long_leaves_the_rest_to_the_next(self, runs, toy_batch, monkeypatch):
        failed = [runs.fail(toy_batch)[0] for _ in range(3)]
        times = iter([0.0, 1.0, 31.0])
        at_ms, task = runs.next()
        clock = SimpleNamespace(monotonic=lambda: next(times))
        with monkeypatch.context() as patched:
            patched.setattr("headrace.operators.wal_spark_submit.time", clock)
            with pytest.raises(EarlierBatchFailedError, match=f"Batch {time_text(at_ms)} is left to the next runs"):
                runs.write(task, ONE)
        assert [runs.state(time_ms) for time_ms in failed] == ["completed", "allocated", "allocated"]
        last_ms, task = runs.next()
        runs.write(task, ONE)
        assert [runs.state(time_ms) for time_ms in (*failed, at_ms, last_ms)] == ["completed"] * 5

    @pytest.mark.parametrize("how", ["code", "final"])
    def test_what_failed_by_its_code_is_not_run_in_vain_by_each_run(self, runs, toy_batch, ledger, how):
        first, _ = runs.fail(toy_batch, how)
        _, task = runs.next()
        with pytest.raises(EarlierBatchFailedError, match="nothing has changed since it failed"):
            runs.write(task, ONE)
        assert len(ledger.attempts.of_batch("flights", first)) == 1


def test_a_batch_that_its_own_run_begins_in_that_moment_is_left_to_it(runs, toy_batch, ledger, monkeypatch):
    failed, _ = runs.fail(toy_batch)
    own = []

    def begun_since_it_was_seen(*asked):
        for each in failed_batches(*asked):
            fields = {"holder": "its own run", "way": "submit", "lease_ms": 60_000, "outputs": [ONE]}
            own.append(ledger.attempts.begin("flights", each.batch.batch_time_ms, **fields))
            yield each

    monkeypatch.setattr("headrace.runs.retries.failed_batches", begun_since_it_was_seen)
    _, task = runs.next()
    runs.write(task, ONE)
    (attempt,) = own
    ledger.attempts.record_output(attempt, ONE, {"created": 1})
    assert runs.written(failed) == {ONE: attempt.number}
