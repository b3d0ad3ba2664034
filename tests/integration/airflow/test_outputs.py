"""Outputs as mapped tasks, and batches in order, under a real Airflow with toys in place of Spark.

The tests are steps of one story, in order: starting an Airflow costs half a minute.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

# The first test waits for Airflow's start as well.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DAG_FILE = "outputs_dags.py"
DAGS = RECEIVER, BATCHES, ORDERED_RECEIVER, ORDERED = (
    "flights_receiver", "flights_batches", "visits_receiver", "visits_batches",
)  # fmt: skip


def finished(installation, dag_id=BATCHES, state=("success", "failed")):
    """The runs that have ended, oldest first."""
    return [run for run in reversed(installation.api.runs(dag_id)) if run["state"] in state]


def states(installation, run) -> dict[str, str]:
    """Task, or output of the mapped one, to state."""
    tasks = installation.api.task_instances(BATCHES, run["dag_run_id"])
    return {task["rendered_map_index"] or task["task_id"]: task["state"] for task in tasks}


def batch_time(run) -> int:
    return int(datetime.fromisoformat(run["data_interval_end"]).timestamp() * 1000)


def written(installation, run) -> dict[str, tuple[str, int]]:
    """What each output's newest attempt came to."""
    with installation.ledger() as ledger:
        rows = ledger.batches.outputs("flights", batch_time(run))
    return {row.output_id: (row.state.value, row.attempt) for row in rows}


def batch_state(installation, run) -> str:
    with installation.ledger() as ledger:
        return ledger.batches.get("flights", batch_time(run)).state.value


def stop_receiving(installation, until, stream: str) -> None:
    installation.api.pause(f"{stream}_receiver")
    with installation.ledger() as ledger:
        ledger.streams.set_desired_state(stream, "stopped")
        ledger.jobs.request_stop(stream, "the test")
        until(lambda: not ledger.jobs.current(stream).alive(ledger.now_ms()), what="the receiver job's end")


@pytest.fixture(scope="module")
def story() -> dict:
    """What a later test wants to know of an earlier one."""
    return {}


def test_each_output_is_a_task_with_its_name(installation, until):
    installation.api.unpause(RECEIVER)
    installation.api.unpause(BATCHES)
    until(lambda: any(set(written(installation, run)) for run in finished(installation)), what="a run with records")
    run = next(run for run in finished(installation) if written(installation, run))
    assert states(installation, run) == {
        "await_blocks": "success",
        "allocate_blocks": "success",
        "search": "success",
        "lake": "success",
        "checkpoint": "success",
        "cleanup": "success",
    }
    assert {state for state, _ in written(installation, run).values()} == {"completed"}


def test_one_failed_output_fails_the_run_though_checkpoint_and_cleanup_run(installation, until, story):
    installation.fail_if.write_text("lake")
    try:
        until(lambda: finished(installation, state=("failed",)), what="a failed run")
    finally:
        installation.fail_if.unlink()
    story["failed"] = run = finished(installation, state=("failed",))[0]
    assert states(installation, run) == {
        "await_blocks": "success",
        "allocate_blocks": "success",
        "search": "success",
        # It wants no retry, while its DAG's tasks have four.
        "lake": "failed",
        "checkpoint": "success",
        "cleanup": "success",
    }
    assert {output: state for output, (state, _) in written(installation, run).items()} == {
        "search": "completed",
        "lake": "failed",
    }
    assert batch_state(installation, run) == "failed"
    log = installation.api.task_log(BATCHES, run["dag_run_id"], "generate_batch", map_index=1)
    assert "the transform said no" in log


@pytest.mark.parametrize("only_failed", [True, False])
def test_what_failed_is_run_alone(installation, until, story, only_failed):
    if not only_failed:
        installation.fail_if.write_text("lake")
        try:
            until(lambda: len(finished(installation, state=("failed",))) >= 1, what="another failed run")
        finally:
            installation.fail_if.unlink()
        story["failed"] = finished(installation, state=("failed",))[-1]
    run = story["failed"]
    before = written(installation, run)
    installation.api.clear(BATCHES, run["dag_run_id"], only_failed=only_failed)
    installation.api.wait_for_run(BATCHES, run["dag_run_id"])
    after = written(installation, run)
    assert after["search"] == before["search"]
    assert after["lake"][0] == "completed"
    assert batch_state(installation, run) == "completed"


def test_a_completed_batch_whose_run_is_cleared_is_run_again_whole(installation, story):
    run = story["failed"]
    before = written(installation, run)
    installation.api.clear(BATCHES, run["dag_run_id"])
    installation.api.wait_for_run(BATCHES, run["dag_run_id"])
    after = written(installation, run)
    assert all(after[output][1] > before[output][1] for output in ("search", "lake"))
    assert batch_state(installation, run) == "completed"


def test_a_run_may_ask_for_one_output(installation, story):
    run = story["failed"]
    before = written(installation, run)
    inside = datetime.fromisoformat(run["data_interval_start"]) + timedelta(seconds=1)
    conf = {"reprocess": True, "outputs": ["lake"]}
    run_id = installation.api.trigger(BATCHES, conf=conf, logical_date=inside)
    asking = installation.api.wait_for_run(BATCHES, run_id)
    after = written(installation, run)
    assert after["search"] == before["search"]
    assert after["lake"][1] > before["lake"][1]
    assert set(states(installation, asking).values()) == {"success"}
    log = installation.api.task_log(BATCHES, run_id, "generate_batch", map_index=0)
    assert "does not ask for search" in log


def test_in_order_one_run_at_a_time_and_nobody_waits_for_ever(installation, until):
    installation.api.pause(BATCHES)
    installation.api.unpause(ORDERED_RECEIVER)
    with installation.ledger() as ledger:
        # With one run at a time their own runs come after those that have to wait for them.
        until(lambda: _missed_by_the_schedule(installation, ledger) >= 2, what="times before the schedule's first")
        installation.api.unpause(ORDERED)
        until(lambda: len(ledger.batches.list("visits", states=["completed"])) >= 5, seconds=240, what="batches")
        stop_receiving(installation, until, "visits")
        until(lambda: not ledger.blocks.unclaimed("visits"), what="the last batch")
        until(lambda: not _unfinished(installation), what="the runs' ends")
        batches = [batch for batch in ledger.batches.list("visits", 1000, oldest_first=True) if batch.records]
        ended = [batch.completed_at_ms for batch in batches]
        assert ended == sorted(ended)
        attempts = [ledger.batches.attempts("visits", batch.batch_time_ms) for batch in batches]
    # The state, then the output: nothing was done twice.
    assert {tuple(step for row in rows for step in row.outputs) for rows in attempts} == {("state", "search")}
    ahead = [row.batch_time_ms for rows in attempts for row in rows if row.attributes.get("ahead")]
    assert ahead[:2] == [batch.batch_time_ms for batch in batches[:2]]
    # The schedule goes on meanwhile.
    assert not [run for run in installation.api.runs(ORDERED) if run["state"] == "failed"]


def _missed_by_the_schedule(installation, ledger) -> int:
    """How many batch times with records end before the first run's interval, which is a later one at each parse."""
    first = datetime.fromisoformat(installation.api.wait_for_dag(ORDERED)["next_dagrun_logical_date"])
    return len([time for time in ledger.blocks.unclaimed("visits") if time.batch_time_ms <= first.timestamp() * 1000])


def _unfinished(installation) -> list:
    return [run for run in installation.api.runs(ORDERED) if run["state"] in ("queued", "running")]
