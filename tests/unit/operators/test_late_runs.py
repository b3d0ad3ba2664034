# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Runs of the schedule that come late, in a stream that coalesces."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped

from headrace.clock import time_text
from headrace.operators.allocate_blocks import AllocateBlocksOperator
from headrace.operators.checkpoint import CheckpointOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.sensors.blocks_ready import BlocksReadySensor
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
    assert f"This run takes the batch times up to {from_ms(at_ms).isoformat()} that nobody has run" in caplog.text
    assert f"It took over {len(batch.absorbed)} earlier batch time(s)" in capsys.readouterr().out
    WalSparkSubmitOperator(task_id="generate", stream=stream, step="elasticsearch").execute(first.context)
    CheckpointOperator(task_id="checkpoint", stream=stream).execute(first.context)
    done = ledger.batches.get("flights", at_ms)
    assert (done.state.value, done.checkpointed_at_ms is not None) == ("completed", True)
    # Its time was taken over; when somebody asks for it by its date, there is nothing to run.
    asked = run_of(pending[0], run_id="asked", run_type="manual")
    assert AllocateBlocksOperator(task_id="allocate", stream=stream).execute(asked.context)["fresh"] is False
    WalSparkSubmitOperator(task_id="generate", stream=stream, step="elasticsearch").execute(asked.context)
    assert f"Batch {time_text(pending[0])} is absorbed, so there is nothing to run" in capsys.readouterr().out


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
