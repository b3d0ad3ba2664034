# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Runs of the schedule that come late, in a stream that coalesces."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped

from headrace.batch.checkpoint import checkpoint_now
from headrace.batch.cleanup import clean_up
from headrace.clock import time_text
from headrace.dags import batch_dag
from headrace.ledger.errors import BatchRemovedError
from headrace.operators.batch_steps import AllocateBlocksOperator, CheckpointOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.stream_context import StreamContext
from headrace.timetables.micro_batch import from_ms


@pytest.fixture
def stream(stream):
    return stream.model_copy(update={"coalesce": True})


@pytest.fixture
def pending(source, until):
    """Three batch times with records, which have ended."""
    times = []
    for _ in range(3):
        times.append(source.store(2))
        until(lambda: source.ledger.now_ms() >= times[-1])
    source.seal()
    return times


@pytest.fixture
def run_of(make_task, stream):
    def make(at_ms: int, **fields):
        return make_task(from_ms(at_ms - stream.batch_interval_ms), **fields)

    return make


def test_one_run_takes_over_what_has_ended_and_its_tasks_agree(
    stream, pending, run_of, toy_batch, connectable, ledger, capsys, caplog
):
    caplog.set_level("INFO")
    first = run_of(pending[0], run_id="first")
    BlocksReadySensor(task_id="await", stream=stream, deferrable=False).execute(first.context)
    reported = AllocateBlocksOperator(task_id="allocate", stream=stream).execute(first.context)
    at_ms = reported["batch_time_ms"]
    assert at_ms >= pending[-1]
    batch = ledger.batches.get("flights", at_ms)
    assert set(pending) <= {*batch.absorbed, at_ms}
    assert (reported["records"], reported["absorbed"]) == (6, len(batch.absorbed))
    assert f"This run takes the batch times up to {time_text(at_ms)} that no run has processed" in caplog.text
    assert f"took over {len(batch.absorbed)} earlier batch time(s)" in capsys.readouterr().out
    WalSparkSubmitOperator(task_id="generate", stream=stream, step="elasticsearch").execute(first.context)
    CheckpointOperator(task_id="checkpoint", stream=stream).execute(first.context)
    done = ledger.batches.get("flights", at_ms)
    assert (done.state.value, done.checkpointed_at_ms is not None) == ("completed", True)


@pytest.fixture
def taken_over(stream, pending, run_of, toy_batch, connectable, ledger):
    """Two batch times that a later batch has taken over, and that batch, which has completed."""
    late = run_of(pending[0], run_id="late")
    at_ms = AllocateBlocksOperator(task_id="allocate", stream=stream).execute(late.context)["batch_time_ms"]
    WalSparkSubmitOperator(task_id="generate", stream=stream, step="elasticsearch").execute(late.context)
    return ledger.batches.get("flights", at_ms)


@pytest.fixture(params=[False, True], ids=["five tasks", "one task"])
def run_batch(request, stream):
    """Run the batch DAG's tasks for a run, in order, until one raises."""
    dag = batch_dag(stream, single_task=request.param)

    def run(task) -> None:
        for each in dag.topological_sort():
            each.execute(task.context)

    return run


SKIPPED = (AirflowSkipException, DownstreamTasksSkipped)


@pytest.mark.parametrize("run_type", ["backfill", "manual"])
def test_a_run_for_a_time_taken_over_is_skipped(run_batch, taken_over, run_of, ledger, run_type, capsys):
    """The run names the batch that took its time over."""
    asked = run_of(taken_over.absorbed[0], run_id="asked", run_type=run_type)
    with pytest.raises(SKIPPED) as skipped:
        run_batch(asked)
    own, by = time_text(taken_over.absorbed[0]), time_text(taken_over.batch_time_ms)
    why = f"batch {by}, which is completed, has taken {own} over. A run with `reprocess` repeats that batch"
    assert asked.xcoms == {"nothing_to_run": why}
    assert why in capsys.readouterr().out
    if skipped.type is DownstreamTasksSkipped:
        later = ["allocate_blocks", "generate_batch.elasticsearch", "checkpoint", "cleanup"]
        assert sorted(skipped.value.tasks) == sorted(later)
    assert asked.events == []
    assert ledger.batches.get("flights", taken_over.batch_time_ms).attempt == taken_over.attempt


def test_runs_of_a_backfill_repeat_the_overtaking_batch_once(run_batch, taken_over, run_of, ledger):
    """The overtaking batch is the one that took their times over."""
    times = [*taken_over.absorbed, taken_over.batch_time_ms]

    def backfill(clear_number: int, order=1) -> list[str]:
        runs = [
            run_of(
                at_ms, run_id=f"backfill__{at_ms}", run_type="backfill", conf={"reprocess": True},
                clear_number=clear_number,
            )
            for at_ms in times[::order]
        ]  # fmt: skip
        done = []
        for run in runs:
            try:
                run_batch(run)
                done.append(run.run_id)
                assert [event["batch_time_ms"] for event in run.events] == [taken_over.batch_time_ms]
            except SKIPPED:
                assert f"run backfill__{times[0]} already repeats that batch" in run.xcoms["nothing_to_run"]
                assert run.events == []
        return done

    assert backfill(0) == [f"backfill__{times[0]}"]
    # The same backfill again, as `completed` clears its runs; then backwards, where another run asks first.
    assert backfill(1) == [f"backfill__{times[0]}"]
    assert backfill(2, order=-1) == [f"backfill__{times[0]}"]
    attempts = ledger.attempts.of_batch("flights", taken_over.batch_time_ms)
    assert [row.attributes["run_id"] for row in attempts] == ["late", *[f"backfill__{times[0]}"] * 3]
    assert ledger.batches.get("flights", taken_over.batch_time_ms).state.value == "completed"
    # Nothing became of the times themselves.
    assert {ledger.batches.get("flights", at_ms).attempt for at_ms in taken_over.absorbed} == {0}


def test_a_person_who_asks_for_one_time_repeats_it_each_time(run_batch, taken_over, run_of, ledger):
    for number in range(2):
        asked = run_of(taken_over.absorbed[1], run_id=f"manual__{number}", run_type="manual", conf={"reprocess": True})
        run_batch(asked)
        assert asked.xcoms == {}
    assert ledger.batches.get("flights", taken_over.batch_time_ms).attempt == taken_over.attempt + 2


def test_an_abandoned_batch_is_not_repeated_for_times_it_took(run_batch, stream, pending, run_of, ledger):
    """It is not repeated for the batch times that it took over."""
    late = run_of(pending[0], run_id="late")
    at_ms = AllocateBlocksOperator(task_id="allocate", stream=stream).execute(late.context)["batch_time_ms"]
    ledger.batches.abandon("flights", at_ms, "it was wrong")
    asked = run_of(pending[0], run_id="asked", run_type="backfill", conf={"reprocess": True})
    with pytest.raises(SKIPPED):
        run_batch(asked)
    assert "which is abandoned, has taken" in asked.xcoms["nothing_to_run"]


def test_a_run_that_loses_its_batch_time_is_skipped(run_batch, stream, source, run_of, ledger, until):
    """Another took the time over after the run began; the run names its batch."""
    first_ms = source.store(2)
    until(lambda: ledger.now_ms() >= first_ms)
    source.seal()
    slow, quick = (run_of(first_ms, run_id=run_id) for run_id in ("slow", "quick"))
    assert ledger.runs.assign("flights", "slow") == first_ms
    until(lambda: ledger.now_ms() >= first_ms + 200)
    by_ms = AllocateBlocksOperator(task_id="allocate", stream=stream).execute(quick.context)["batch_time_ms"]
    with pytest.raises(SKIPPED):
        run_batch(slow)
    assert slow.xcoms == {"nothing_to_run": f"batch {time_text(by_ms)} has taken {time_text(first_ms)} over"}


def test_a_requested_run_with_a_date_takes_its_own_interval(stream, pending, run_of, ledger):
    asked = run_of(pending[1], run_type="backfill")
    assert AllocateBlocksOperator(task_id="allocate", stream=stream).execute(asked.context)["absorbed"] == 0
    assert ledger.batches.get("flights", pending[1]).records == 2
    # What is before it is a batch of its own, so that ranges of offsets do not overlap.
    late = run_of(pending[1], run_id="late")
    assert (
        AllocateBlocksOperator(task_id="allocate", stream=stream).execute(late.context)["batch_time_ms"] == pending[0]
    )


def test_what_one_batch_may_not_hold_is_left_to_the_next_run(stream, pending, run_of, ledger, capsys):
    limits = stream.limits.model_copy(update={"max_coalesced_records": 4})
    small = stream.model_copy(update={"limits": limits})
    first = run_of(pending[0])
    reported = AllocateBlocksOperator(task_id="allocate", stream=small).execute(first.context)
    assert (reported["batch_time_ms"], reported["records"]) == (pending[1], 4)
    assert "1 more batch time(s) with 2 records wait for the next run" in capsys.readouterr().out


@pytest.mark.parametrize("single_task", [False, True])
def test_a_run_whose_time_was_taken_over_runs_nothing(stream, run_of, ledger, source, single_task, until):
    at_ms = source.store()
    until(lambda: ledger.now_ms() >= at_ms)
    # Sealed for an hour ahead by nobody's batch: no later time is left to take.
    ledger.allocations.seal("flights", (ledger.now_ms() // 200 + 20) * 200)
    source.ledger.allocations.allocate(
        "flights", at_ms, manifest_uri="m", manifest_sha256="0", blocks_expected=1,
    )  # fmt: skip
    with DAG("flights_batches", schedule=None):
        task = (MicroBatchOperator if single_task else AllocateBlocksOperator)(task_id="first", stream=stream)
    with pytest.raises(AirflowSkipException if single_task else DownstreamTasksSkipped):
        task.execute(run_of(at_ms, run_id="late").context)


@pytest.fixture
def removed(stream, source, taken_over, until, ledger):
    """The batch that took others over, and they: removed with the stream's history, which is 30 days by default."""
    context = StreamContext(stream, ledger)
    checkpoint_now(context, taken_over.batch_time_ms)
    source.begin()

    def is_removed() -> bool:
        clean_up(context)
        ledger.removal.remove_batches("flights", ledger.now_ms())
        return ledger.batches.page("flights") == []

    # Once the batch has left the remember window, an interval.
    until(is_removed)
    return taken_over


@pytest.mark.parametrize("waits", [True, False], ids=["records wait", "nothing waits"])
def test_a_cleared_run_of_a_removed_batch_says_so(run_batch, stream, source, removed, run_of, ledger, until, waits):
    """It takes no other batch in its place."""
    if waits:
        at_ms = source.store(2)
        until(lambda: ledger.now_ms() >= at_ms)
        source.seal()
    with pytest.raises(BatchRemovedError):
        run_batch(run_of(removed.batch_time_ms, run_id="late", clear_number=1))
    assert ledger.batches.page("flights") == []
    assert len(ledger.blocks.unclaimed("flights")) == waits


def test_a_cleared_task_of_a_run_whose_batch_was_removed_says_so(stream, removed, run_of, connectable, toy_batch):
    task = run_of(removed.batch_time_ms, run_id="late", clear_number=1)
    for operator in (
        WalSparkSubmitOperator(task_id="generate", stream=stream, step="elasticsearch"),
        CheckpointOperator(task_id="checkpoint", stream=stream),
    ):
        with pytest.raises(BatchRemovedError):
            operator.execute(task.context)
