# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Batches that failed are tried again by the stream's repair, when it is due, and nobody clears a run."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowSkipException

from headrace.batch.due_batches import _Judge, due_batches
from headrace.clock import time_text
from headrace.hooks.ledger import register
from headrace.ledger.errors import StepsLostError
from headrace.operators import repair_batches
from headrace.operators.batch_steps import AllocateBlocksOperator, CheckpointOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.repair_batches import RepairBatchesOperator, RepairCheckpointOperator, RepairFailedError
from headrace.operators.wal_spark_submit import BatchTaskError, WalSparkSubmitOperator
from headrace.runs.retries import is_held_back
from headrace.stream import ConsoleOutput
from headrace.timetables.micro_batch import from_ms
from headrace.triggers import repair_due
from headrace.triggers.repair_due import RepairDueTrigger

ONE, TWO = "elasticsearch", "printed"


@pytest.fixture
def stream(stream):
    return stream.model_copy(update={"outputs": (*stream.outputs, ConsoleOutput(id=TWO))})


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

    def repair(self, run_type: str = "asset_triggered", **states):
        """A run of the repair; its task."""
        task = self._make_task(None, run_id=f"repair-{next(self._numbers)}", run_type=run_type)
        for name, value in states.items():
            setattr(task, name, value)
        RepairBatchesOperator(task_id="repair", stream=self.stream).execute(task.context)
        return task

    def nothing_is_due(self, **states) -> bool:
        with pytest.raises(AirflowSkipException):
            self.repair(**states)
        return True

    def trigger(self) -> RepairDueTrigger:
        limits = {"retry_for_ms": self.stream.retry_for_ms}
        return RepairDueTrigger(ledger=self.stream.ledger, stream="flights", **limits)

    def state(self, at_ms: int) -> str:
        return self.ledger.batches.get("flights", at_ms).state.value

    def attempts(self, at_ms: int) -> int:
        return len(self.ledger.attempts.of_batch("flights", at_ms))

    def written(self, at_ms: int) -> dict[str, int]:
        rows = self.ledger.attempts.outputs("flights", at_ms)
        return {row.output_id: row.attempt for row in rows if row.state.value == "completed"}


@pytest.fixture
def runs(stream, source, make_task, until, ledger, connectable):
    register(ledger, stream)
    return Runs(stream, source, make_task, until)


def test_a_failed_batch_is_repaired_once_its_output_succeeds(runs, toy_batch, ledger, monkeypatch):
    """The output has succeeded for another batch."""
    failed = [runs.fail(toy_batch)[0] for _ in range(2)]
    assert runs.nothing_is_due()
    assert runs.trigger().poll(ledger) is None
    at_ms, task = runs.next()
    runs.write(task, ONE, TWO)
    event = runs.trigger().poll(ledger)
    assert (event["batch_time_ms"], event["error"]) == (failed[0], "the transform said no")
    repair = runs.repair()
    assert [runs.written(time_ms) for time_ms in failed] == [{ONE: 2, TWO: 2}] * 2
    assert [runs.state(time_ms) for time_ms in failed] == ["completed", "completed"]
    attempt = ledger.attempts.of_batch("flights", failed[0])[-1]
    assert (attempt.attributes["run_id"], attempt.attributes["repair"]) == (repair.run_id, True)
    monkeypatch.setattr("headrace.batch.results._OTHERS", 0)
    CheckpointOperator(task_id="checkpoint", stream=runs.stream).execute(task.context)
    assert [event["batch_time_ms"] for event in task.events] == [at_ms], "a run reports its own batch alone"
    RepairCheckpointOperator(task_id="checkpoint", stream=runs.stream).execute(repair.context)
    assert [event["batch_time_ms"] for event in repair.events] == failed
    # No other run has to write the results of what was repaired.
    assert runs.ledger.results.behind(runs.stream.name) == []


def test_a_run_does_its_own_batch_alone(runs, toy_batch):
    failed, _ = runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    assert runs.attempts(failed) == 1


def test_due_steps_of_a_batch_are_repaired_in_one_attempt(runs, toy_batch, ledger):
    """The steps that are not due wait."""
    at_ms, task = runs.next()
    toy_batch("fail")
    for step in (ONE, TWO):
        with pytest.raises(BatchTaskError):
            runs.write(task, step)
    toy_batch("ok")
    runs.write(runs.next()[1], TWO)
    runs.repair()
    assert runs.written(at_ms) == {TWO: 3}
    runs.write(runs.next()[1], ONE, TWO)
    runs.repair()
    assert runs.written(at_ms) == {TWO: 3, ONE: 4}


class TestMissedTimes:
    """Batch times that hold records, and for which Airflow has no run."""

    @pytest.fixture
    def missed(self, runs, toy_batch):
        times = []
        for _ in range(2):
            times.append(runs.source.store(2))
            runs.until(lambda: runs.ledger.now_ms() >= times[-1])
        runs.write(runs.next()[1], ONE, TWO)
        return times

    def test_they_are_repaired_without_a_person(self, runs, missed, toy_batch):
        assert [runs.state(time_ms) for time_ms in missed] == ["allocated", "allocated"]
        runs.repair()
        assert [runs.state(time_ms) for time_ms in missed] == ["completed", "completed"]
        assert runs.written(missed[0]) == {ONE: 1, TWO: 1}

    def test_the_trigger_leaves_them_to_their_own_runs_for_a_while(self, runs, missed, ledger, monkeypatch):
        assert runs.trigger().poll(ledger) is None
        monkeypatch.setattr(repair_due, "_LEFT_MS", 0)
        limits = runs.stream.limits.model_copy(update={"retry_for": timedelta(milliseconds=1)})
        runs.stream = runs.stream.model_copy(update={"limits": limits})
        assert runs.trigger().poll(ledger)["batch_time_ms"] == missed[0]

    def test_one_whose_own_run_waits_is_left_to_that_run(self, stream, runs, missed, toy_batch, make_task):
        runs.repair(waiting_runs={from_ms(missed[0] - stream.batch_interval_ms)})
        assert [runs.state(time_ms) for time_ms in missed] == ["allocated", "completed"]
        own = make_task(from_ms(missed[0] - stream.batch_interval_ms), run_id="own", run_type="backfill")
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(own.context)
        runs.write(own, ONE, TWO)
        assert runs.written(missed[0]) == {ONE: 1, TWO: 2}

    def test_a_run_of_its_own_that_comes_late_finds_it_done(self, stream, runs, missed, toy_batch, make_task):
        runs.repair()
        own = make_task(from_ms(missed[0] - stream.batch_interval_ms), run_id="own")
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(own.context)
        runs.write(own, ONE, TWO)
        assert runs.attempts(missed[0]) == 1

    def test_of_a_stream_that_coalesces_the_ledger_names_the_run(self, runs, missed, toy_batch, ledger, monkeypatch):
        runs.stream = runs.stream.model_copy(update={"coalesce": True})
        register(ledger, runs.stream)
        monkeypatch.setattr(type(ledger.runs), "of_batch", lambda *_: ["its own"])
        assert runs.nothing_is_due(waiting_runs={"its own"})
        runs.repair()
        assert [runs.state(time_ms) for time_ms in missed] == ["completed", "completed"]


def break_repairs(monkeypatch, *, of: list[int] | None = None) -> None:
    """From now on attempts of repairs fail; only those at the batches ``of``, if it is given."""
    whole = RepairBatchesOperator.run_attempt

    def broken(operator, ledger, attempt, batch, context):
        if of is None or batch.batch_time_ms in of:
            ledger.attempts.fail(attempt, "out of memory")
            raise BatchTaskError("out of memory")
        whole(operator, ledger, attempt, batch, context)

    monkeypatch.setattr(RepairBatchesOperator, "run_attempt", broken)


def test_a_failure_that_may_pass_ends_the_repair_with_its_reason(runs, toy_batch, ledger, monkeypatch):
    """The run of the repair is red."""
    failed = [runs.fail(toy_batch)[0] for _ in range(2)]
    runs.write(runs.next()[1], ONE, TWO)
    break_repairs(monkeypatch)
    with pytest.raises(RepairFailedError, match=f"Batch {time_text(failed[0])} .* has failed again: out of memory"):
        runs.repair()
    assert [runs.attempts(time_ms) for time_ms in failed] == [2, 1]
    # The output may be away again: only another success shows that it is not.
    assert runs.nothing_is_due()


def test_each_due_batch_is_judged_once_when_it_is_its_turn(runs, toy_batch, ledger, monkeypatch):
    limits = runs.stream.limits.model_copy(update={"max_concurrent_batches": 3})
    runs.stream = runs.stream.model_copy(update={"limits": limits})
    register(ledger, runs.stream)
    failed = [runs.fail(toy_batch)[0] for _ in range(3)]
    runs.write(runs.next()[1], ONE, TWO)
    judged, judge, run_attempt = [], _Judge.due, RepairBatchesOperator.run_attempt

    def noted(self, earlier):
        judged.append(earlier.batch_time_ms)
        return judge(self, earlier)

    def meanwhile(self, ledger, attempt, batch, context):
        if batch.batch_time_ms == failed[0]:
            own = {"holder": "its own run", "way": "submit", "lease_ms": 60_000, "outputs": [ONE, TWO]}
            attempt_of_own = ledger.attempts.begin("flights", failed[1], **own)
            for step in (ONE, TWO):
                ledger.attempts.record_output(attempt_of_own, step, {"created": 1})
            ledger.attempts.complete(attempt_of_own)
        run_attempt(self, ledger, attempt, batch, context)

    monkeypatch.setattr(_Judge, "due", noted)
    monkeypatch.setattr(RepairBatchesOperator, "run_attempt", meanwhile)
    runs.repair()
    assert judged == failed
    assert [runs.attempts(time_ms) for time_ms in failed] == [2, 2, 2]
    assert [runs.state(time_ms) for time_ms in failed] == ["completed"] * 3


def test_a_batch_that_fails_each_time_pauses_and_delays_no_other(runs, toy_batch, ledger, monkeypatch):
    poison, other = (runs.fail(toy_batch)[0] for _ in range(2))
    runs.write(runs.next()[1], ONE, TWO)
    break_repairs(monkeypatch, of=[poison])
    with pytest.raises(RepairFailedError):
        runs.repair()
    runs.write(runs.next()[1], ONE, TWO)
    # Its pause is two intervals; a long interval makes it last.
    get = type(ledger.streams).get
    monkeypatch.setattr(
        type(ledger.streams), "get", lambda streams, name: replace(get(streams, name), batch_interval_ms=3_600_000)
    )
    runs.repair()
    assert (runs.attempts(poison), runs.state(other)) == (2, "completed")
    assert runs.nothing_is_due()


@pytest.mark.parametrize("how", ["code", "final"])
def test_a_failure_of_the_code_is_repaired_by_a_new_definition(runs, toy_batch, ledger, how):
    failed, _ = runs.fail(toy_batch, how)
    runs.write(runs.next()[1], ONE)
    trigger = runs.trigger()
    assert trigger.poll(ledger)["batch_time_ms"] == failed, "the code may have changed, which a run finds out"
    assert runs.nothing_is_due()
    trigger._fired_ms -= 20_000
    assert trigger.poll(ledger) is None
    runs.define(runs.stream.outputs[0].model_copy(update={"refresh": True}), runs.stream.outputs[1])
    assert trigger.poll(ledger)["batch_time_ms"] == failed
    runs.repair()
    assert runs.written(failed)[ONE] == 2


def test_a_trigger_that_fired_under_a_clock_ahead_fires_again(runs, toy_batch, ledger):
    runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    trigger = runs.trigger()
    trigger._fired_ms = ledger.now_ms() + 31_536_000_000
    assert trigger.poll(ledger) is not None


def test_a_person_has_everything_tried_at_once(runs, toy_batch):
    by_code, _ = runs.fail(toy_batch, "code")
    passing, _ = runs.fail(toy_batch)
    assert runs.nothing_is_due()
    runs.repair("manual")
    assert [runs.written(time_ms) for time_ms in (by_code, passing)] == [{ONE: 2, TWO: 2}] * 2


def test_while_the_batch_dag_is_paused_only_a_person_repairs(runs, toy_batch):
    failed, _ = runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    assert runs.nothing_is_due(paused=True)
    runs.repair("manual", paused=True)
    assert runs.state(failed) == "completed"


def test_a_batch_stays_failed_until_its_lost_output_is_given_up(runs, toy_batch, ledger):
    failed, task = runs.fail(toy_batch)
    runs.write(task, TWO)
    runs.define(*runs.stream.outputs[1:])
    assert runs.trigger().poll(ledger)["steps"] == []
    assert runs.nothing_is_due()
    batch = ledger.batches.get("flights", failed)
    assert (batch.state, runs.written(failed)) == ("failed", {TWO: 2})
    assert f"was not written to {ONE!r}, which the definition no longer has" in batch.error
    assert runs.trigger().poll(ledger) is None
    # Its own run is red too when it is cleared, although its only task has nothing to do.
    with pytest.raises(StepsLostError):
        runs.write(task, TWO)
    assert ledger.batches.abandon_output("flights", failed, ONE, "not needed").state == "completed"


def test_a_batch_of_a_renamed_output_is_written_under_its_old_id(runs, toy_batch):
    """The renamed output was the batch's only one."""
    runs.define(runs.stream.outputs[0])
    failed, _ = runs.fail(toy_batch)
    runs.define(ConsoleOutput(id=TWO))
    runs.write(runs.next()[1], TWO)
    assert runs.nothing_is_due()
    assert (runs.state(failed), runs.written(failed)) == ("failed", {})
    runs.define(ConsoleOutput(id=TWO, renamed_from=ONE))
    runs.write(runs.next()[1], TWO)
    runs.repair()
    assert (runs.state(failed), runs.written(failed)) == ("completed", {ONE: 2})


def test_a_batch_without_its_only_output_needs_the_present_ones(runs, toy_batch, ledger):
    runs.define(runs.stream.outputs[0])
    failed, _ = runs.fail(toy_batch)
    three = "printed_too"
    runs.define(ConsoleOutput(id=TWO), ConsoleOutput(id=three))
    ledger.batches.abandon_output("flights", failed, ONE, "replaced")
    runs.write(runs.next()[1], TWO)
    runs.repair()
    assert (runs.state(failed), runs.written(failed)) == ("allocated", {TWO: 2}), "not without the other one"
    runs.write(runs.next()[1], three)
    runs.repair()
    assert (runs.state(failed), runs.written(failed)) == ("completed", {TWO: 2, three: 3})


def test_a_runs_end_reports_a_failure_despite_an_unbegun_task(runs, toy_batch, ledger):
    failed, task = runs.fail(toy_batch)
    CheckpointOperator(task_id="checkpoint", stream=runs.stream).execute(task.context)
    kinds = [event.kind for event in ledger.events.of_batch("flights", failed)]
    assert kinds.count("batch_failed") == 1


def test_abandoned_batches_and_those_under_attempt_get_no_repair(runs, toy_batch, ledger):
    abandoned, _ = runs.fail(toy_batch)
    ledger.batches.abandon("flights", abandoned, "its index is gone")
    held, _ = runs.fail(toy_batch)
    runs.stream = runs.stream.model_copy(
        update={"limits": runs.stream.limits.model_copy(update={"max_concurrent_batches": 3})}
    )
    register(ledger, runs.stream)
    ledger.attempts.begin("flights", held, holder="other", way="connect", lease_ms=60_000, outputs=[ONE])
    runs.write(runs.next()[1], ONE, TWO)
    assert runs.nothing_is_due()
    assert (runs.state(abandoned), runs.state(held)) == ("abandoned", "running")


def test_a_batch_whose_repair_was_killed_is_due_after_its_lease(runs, toy_batch, ledger):
    failed, _ = runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    killed = {"holder": "repair", "way": "connect", "outputs": [ONE], "attributes": {"repair": True}}
    ledger.attempts.begin("flights", failed, lease_ms=1, **killed)
    runs.until(lambda: not any(row.alive(ledger.now_ms()) for row in ledger.attempts.running("flights")))
    runs.write(runs.next()[1], ONE, TWO)
    runs.until(lambda: ONE in (runs.trigger().poll(ledger) or {"steps": ()})["steps"])
    runs.repair()
    assert runs.written(failed) == {ONE: 3, TWO: 3}


def test_a_batch_that_its_own_run_just_begins_is_left_to_it(runs, toy_batch, ledger, monkeypatch):
    failed, _ = runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    own = []

    def begun_since_it_was_seen(*asked, **options):
        for due in due_batches(*asked, **options):
            fields = {"holder": "its own run", "way": "submit", "lease_ms": 60_000, "outputs": [ONE]}
            own.append(ledger.attempts.begin("flights", due.batch.batch_time_ms, **fields))
            yield due

    monkeypatch.setattr("headrace.batch.due_batches.due_batches", begun_since_it_was_seen)
    assert runs.nothing_is_due()
    (attempt,) = own
    ledger.attempts.record_output(attempt, ONE, {"created": 1})
    assert runs.written(failed) == {ONE: attempt.number}


def sleeping(monkeypatch):
    """The seconds that tasks sleep, which pass at once by their clock."""
    slept = []
    passing = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    for module in ("wal_spark_submit", "repair_batches"):
        monkeypatch.setattr(f"headrace.operators.{module}.time", passing)
    return slept


def test_a_repair_waits_for_a_held_slot_and_leaves_the_batch(runs, toy_batch, ledger, monkeypatch):
    failed, _ = runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    held, _ = runs.next()
    ledger.attempts.begin("flights", held, holder="other", way="connect", lease_ms=60_000, outputs=[ONE])
    slept = sleeping(monkeypatch)
    assert runs.nothing_is_due()
    assert runs.attempts(failed) == 1
    *waits, pause = slept
    assert sum(waits) == runs.stream.retry_for_ms / 1000
    assert max(waits) <= 0.5, "runs of other batches leave a slot free for a moment only"
    assert pause > 1, "the repair gives way after it"


def test_a_repair_gives_up_though_the_application_starts_too(runs, toy_batch, ledger, monkeypatch):
    """The two waits do not begin each other anew."""
    runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    held, _ = runs.next()
    ledger.attempts.begin("flights", held, holder="other", way="connect", lease_ms=3_600_000, outputs=[ONE])
    ledger.jobs.update(runs.source.job, state="starting")
    slept = sleeping(monkeypatch)
    assert runs.nothing_is_due()
    assert sum(slept) < 300


def test_a_repairs_wait_is_over_by_the_clock(runs, toy_batch, ledger, monkeypatch):
    """Not by its sleeps alone: a busy ledger takes its time too."""
    runs.fail(toy_batch)
    runs.write(runs.next()[1], ONE, TWO)
    held, _ = runs.next()
    ledger.attempts.begin("flights", held, holder="other", way="connect", lease_ms=3_600_000, outputs=[ONE])
    slept = sleeping(monkeypatch)
    begin = type(ledger.attempts).begin

    def slowly(*arguments, **fields):
        slept.append(5.0)
        return begin(*arguments, **fields)

    monkeypatch.setattr(type(ledger.attempts), "begin", slowly)
    assert runs.nothing_is_due()
    assert sum(slept) < runs.stream.retry_for_ms / 1000 + 10


def test_a_run_waits_in_place_for_a_repair_that_holds_the_slot(runs, toy_batch, ledger, monkeypatch):
    failed, _ = runs.fail(toy_batch)
    fields = {"way": "connect", "lease_ms": 60_000, "outputs": [ONE], "attributes": {"repair": True}}
    attempt = ledger.attempts.begin("flights", failed, holder="repair", **fields)
    at_ms, task = runs.next()

    def ends(_seconds):
        ledger.attempts.fail(attempt, "no")

    monkeypatch.setattr("headrace.operators.wal_spark_submit.time", SimpleNamespace(sleep=ends))
    runs.write(task, ONE)
    assert runs.written(at_ms) == {ONE: 1}


def test_a_long_repair_gives_way(runs, toy_batch, monkeypatch):
    failed = [runs.fail(toy_batch)[0] for _ in range(2)]
    runs.write(runs.next()[1], ONE, TWO)
    breaks = []
    monkeypatch.setattr(repair_batches, "_WORK_SECONDS", 0.0)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=breaks.append)
    monkeypatch.setattr(repair_batches, "time", clock)
    runs.repair()
    assert len(breaks) == len(failed)


def test_the_batch_of_the_single_task_is_repaired_too(runs, toy_batch, ledger, source):
    at_ms, task = runs.next()
    operator = MicroBatchOperator(task_id="micro_batch", stream=runs.stream)
    toy_batch("fail")
    source.seal()
    with pytest.raises(BatchTaskError):
        operator.execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "failed"
    toy_batch("ok")
    own_ms, task = runs.next()
    source.seal()
    operator.execute(task.context)
    assert [event["batch_time_ms"] for event in task.events] == [own_ms]
    runs.repair()
    assert runs.state(at_ms) == "completed"


def test_a_repair_keeps_the_parameters_of_the_batchs_own_run(runs, toy_batch, ledger):
    runs.stream = runs.stream.model_copy(update={"parameters": {"limit": 1}})
    register(ledger, runs.stream)
    failed, _ = runs.fail(toy_batch, conf={"parameters": {"limit": 2}})
    runs.write(runs.next()[1], ONE, TWO)
    runs.repair()
    given = [row.attributes.get("parameters") for row in ledger.attempts.of_batch("flights", failed)]
    assert given == [{"limit": 2}, {"limit": 2}]


class TestTrigger:
    def test_it_fires_once_for_the_same_state_and_later_again(self, runs, toy_batch, ledger):
        runs.fail(toy_batch)
        runs.write(runs.next()[1], ONE, TWO)
        trigger = runs.trigger()
        assert trigger.poll(ledger)
        assert trigger.poll(ledger) is None
        trigger._fired_ms -= 20_000
        assert trigger.poll(ledger) is None, "nothing has changed"
        trigger._fired_ms -= 300_000
        assert trigger.poll(ledger)

    def test_it_does_not_fire_while_a_repair_works(self, runs, toy_batch, ledger):
        first, second = (runs.fail(toy_batch)[0] for _ in range(2))
        runs.write(runs.next()[1], ONE, TWO)
        fields = {"way": "connect", "lease_ms": 60_000, "outputs": [ONE], "attributes": {"repair": True}}
        ledger.attempts.begin("flights", first, holder="repair", **fields)
        assert second
        assert runs.trigger().poll(ledger) is None

    def test_a_batch_of_a_clock_ahead_is_not_left_to_its_own_run(self, runs, ledger):
        at_ms, _ = runs.next()
        allocated_ms = ledger.batches.get("flights", at_ms).allocated_at_ms
        trigger = runs.trigger()
        assert trigger._first_due(ledger, allocated_ms + 1, checks_code=True) is None
        assert trigger._first_due(ledger, allocated_ms - 60_000, checks_code=True).batch.batch_time_ms == at_ms

    def test_a_stream_that_never_ran_is_no_error(self, stream, ledger):
        other = RepairDueTrigger(ledger=stream.ledger, stream="other", retry_for_ms=30_000)
        assert other.poll(ledger) is None

    def test_a_healthy_stream_is_one_read(self, runs, toy_batch, ledger, monkeypatch):
        runs.write(runs.next()[1], ONE, TWO)
        monkeypatch.setattr(type(ledger.attempts), "of_batch", None)
        monkeypatch.setattr(type(ledger.attempts), "newest_outputs", None)
        assert runs.trigger().poll(ledger) is None


class TestInOrder:
    @pytest.fixture
    def stream(self, stream):
        return stream.model_copy(update={"ordered": True, "outputs": stream.outputs[:1]})

    def test_the_first_is_repaired_after_a_pause_then_all_in_order(self, runs, toy_batch, ledger):
        first, _ = runs.fail(toy_batch)
        times = [first, *(runs.next()[0] for _ in range(2))]
        runs.until(lambda: runs.trigger().poll(ledger))
        runs.repair()
        batches = [ledger.batches.get("flights", time_ms) for time_ms in times]
        assert [batch.state.value for batch in batches] == ["completed"] * 3
        assert sorted(batches, key=lambda batch: batch.completed_at_ms) == batches

    def test_if_it_fails_again_the_later_ones_wait(self, runs, toy_batch, ledger):
        first, _ = runs.fail(toy_batch)
        second, _ = runs.next()
        toy_batch("fail")
        runs.until(lambda: runs.trigger().poll(ledger))
        with pytest.raises(RepairFailedError, match=f"Batch {time_text(first)}"):
            runs.repair()
        assert [runs.state(time_ms) for time_ms in (first, second)] == ["failed", "allocated"]

    def test_one_queued_behind_a_waiting_run_is_repaired(self, stream, runs, toy_batch):
        first, _ = runs.next()
        date = from_ms(first - stream.batch_interval_ms)
        assert runs.nothing_is_due(waiting_runs={date})
        runs.repair()
        assert runs.state(first) == "completed"

    @pytest.mark.parametrize("how", ["code", "final"])
    def test_what_failed_by_its_code_is_not_tried_in_vain(self, runs, toy_batch, how):
        first, _ = runs.fail(toy_batch, how)
        assert runs.nothing_is_due()
        assert runs.attempts(first) == 1

    def test_a_batch_that_failed_when_run_again_holds_up_nothing(self, runs, toy_batch, ledger):
        first, task = runs.next()
        runs.write(task, ONE)
        begun = {"holder": "other", "way": "connect", "lease_ms": 60_000}
        again = ledger.attempts.begin("flights", first, **begun, force=True)
        ledger.attempts.fail(again, "gone from Kafka")
        assert runs.nothing_is_due()
        at_ms, task = runs.next()
        runs.write(task, ONE)
        assert (runs.state(first), runs.state(at_ms)) == ("failed", "completed")


def test_an_attempt_is_held_back_while_nothing_has_changed(runs, toy_batch, ledger):
    failed, _ = runs.fail(toy_batch, "code")
    (row,) = ledger.attempts.of_batch("flights", failed)
    assert is_held_back(runs.stream, row)
    assert not is_held_back(runs.stream.model_copy(update={"batch_interval": timedelta(seconds=7)}), row)
