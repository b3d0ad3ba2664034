"""Outputs as tasks, and batches in order, under a real Airflow with toys in place of Spark.

The tests are steps of one story, in order.
"""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.clock import time_text
from headrace.devstack.airflow_api import AirflowApiError

# The first test waits for Airflow's start as well.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[3]
DAGS = RECEIVER, BATCHES, ORDERED_RECEIVER, ORDERED = (
    "flights_receiver", "flights_batches", "visits_receiver", "visits_batches",
)  # fmt: skip


def finished(installation, dag_id=BATCHES, state=("success", "failed")):
    """The runs that have ended, oldest first."""
    return [run for run in reversed(installation.api.runs(dag_id)) if run["state"] in state]


def states(installation, run) -> dict[str, str]:
    """Task, or the id of the output that it writes, to state."""
    tasks = installation.api.task_states(BATCHES, run["dag_run_id"])
    return {task_id.removeprefix("generate_batch."): state for task_id, state in tasks.items()}


def batch_time(installation, run) -> int:
    """What the ledger gave the run, which a late one's date does not say; else the end of its interval."""
    with installation.ledger() as ledger:
        taken = ledger.runs.find("flights", run["dag_run_id"])
    return taken or int(datetime.fromisoformat(run["data_interval_end"]).timestamp() * 1000)


def written(installation, run) -> dict[str, tuple[str, int]]:
    """What each output's newest attempt came to."""
    at_ms = batch_time(installation, run)
    with installation.ledger() as ledger:
        rows = ledger.attempts.outputs("flights", at_ms)
    return {row.output_id: (row.state.value, row.attempt) for row in rows}


def batches(installation) -> list:
    """The batches that are not a part of another one, oldest first."""
    with installation.ledger() as ledger:
        rows = ledger.batches.page("flights", 1000, oldest_first=True)
    return [row for row in rows if row.absorbed_by_ms is None]


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


def test_a_late_run_takes_over_ended_batch_times_as_one_batch(installation, until):
    hold = installation.fail_if.with_name("hold")
    hold.touch()
    try:
        with installation.ledger() as ledger:
            until(lambda: len(ledger.blocks.unclaimed("flights")) >= 4, what="three batch times that have ended")
    finally:
        hold.unlink()
    late = until(lambda: next((row for row in batches(installation) if len(row.absorbed) >= 2), None), what="a batch")
    until(
        lambda: (
            [row.state.value for row in batches(installation) if row.batch_time_ms == late.batch_time_ms]
            == ["completed"]
        ),
        what="its end",
    )
    with installation.ledger() as ledger:
        # Every offset from the first on, in one batch each.
        reached = 0
        for row in batches(installation):
            for taken in ledger.batches.inputs("flights", row.batch_time_ms):
                assert taken.from_offset == reached
                reached = taken.until_offset
    assert {run["state"] for run in finished(installation)} == {"success"}


def test_an_output_that_was_away_catches_up_by_the_repair_alone(installation, until):
    """Runs fail while it is away and stay failed; the repair completes their batches."""
    installation.fail_if.write_text("lake")
    try:
        until(lambda: len(finished(installation, state=("failed",))) >= 2, what="failed runs")
    finally:
        installation.fail_if.unlink()
    failed = finished(installation, state=("failed",))
    for run in failed:
        assert states(installation, run) == {
            "await_blocks": "success",
            "allocate_blocks": "success",
            "search": "success",
            "lake": "failed",
            "checkpoint": "success",
            "cleanup": "success",
        }
    log = installation.api.task_log(BATCHES, failed[0]["dag_run_id"], "generate_batch.lake")
    assert "the transform said no" in log
    times = [batch_time(installation, run) for run in failed]
    assert len(set(times)) == len(times)

    def left() -> list[int]:
        return [
            row.batch_time_ms
            for row in batches(installation)
            if row.batch_time_ms <= times[-1] and row.state.value != "completed"
        ]

    until(lambda: not left(), what="the end of what failed")
    # Nobody cleared anything: the runs are as red as they were, and the batches have been done by the repair.
    with installation.ledger() as ledger:
        for at_ms in times:
            last = ledger.attempts.of_batch("flights", at_ms)[-1]
            assert (last.outputs, last.attributes["repair"]) == (("lake",), True)
            assert last.holder.startswith("airflow:flights_repair/asset_triggered__")
    runs = {run["dag_run_id"]: run["state"] for run in installation.api.runs(BATCHES)}
    assert {runs[run["dag_run_id"]] for run in failed} == {"failed"}


@pytest.fixture(scope="module")
def quiet(installation, until) -> None:
    """The stream is not received any more, and runs begin only where they are asked for: each takes its tasks' time."""
    installation.stop_receiving("flights")
    with installation.ledger() as ledger:
        until(lambda: not ledger.blocks.unclaimed("flights"), what="the last batch")
    installation.end_schedule("flights", datetime.now(UTC))
    until(lambda: not _under_way(installation, BATCHES), what="the ends of runs")


@pytest.mark.usefixtures("quiet")
def test_runs_of_absorbed_times_name_the_batch_or_repeat_it_once(installation, until):
    """They repeat the batch only if the backfill asks for it."""
    late = next(row for row in batches(installation) if len(row.absorbed) >= 2)
    first, last = (date_of(at_ms) for at_ms in (late.absorbed[0], late.absorbed[-1]))

    def backfill(begin) -> dict[str, dict]:
        """The task states of a backfill over these times, by run."""

        def runs_of_these() -> list:
            runs = installation.api.runs(BATCHES, limit=500)
            return [run for run in runs if first <= datetime.fromisoformat(run["logical_date"]) <= last]

        def all_ended() -> bool:
            return all(run["state"] in ("success", "failed") for run in runs_of_these())

        # A backfill leaves out a run that is under way.
        until(all_ended, what="the end of the late run")
        backfill_id = begin()
        until(all_ended, what="the end of the backfill's runs")
        runs = runs_of_these()
        with suppress(AirflowApiError):  # Airflow has seen its end.
            installation.api.request("PUT", f"/backfills/{backfill_id}/cancel")
        assert {run["state"] for run in runs} == {"success"}, "a DAG run has no state for what was skipped"
        assert {run["run_type"] for run in runs} == {"backfill"}
        assert len(runs) >= len(late.absorbed)
        return {run["dag_run_id"]: states(installation, run) for run in runs}

    def why(run_id: str) -> str:
        return installation.api.xcom(BATCHES, run_id, "await_blocks", "nothing_to_run")

    skipped = {"await_blocks": "success"} | dict.fromkeys(
        ("allocate_blocks", "search", "lake", "checkpoint", "cleanup"), "skipped"
    )
    named = f"batch {time_text(late.batch_time_ms)}, which is completed, has taken "
    plain = backfill(
        lambda: installation.api.backfill(
            BATCHES, first, last, reprocess_behavior="completed", max_active_runs=4, dag_run_conf={}
        )
    )
    for run_id, tasks in plain.items():
        assert tasks == skipped
        assert why(run_id).startswith(named)
    log = installation.api.task_log(BATCHES, run_id, "await_blocks", try_number=_tries(installation, run_id))
    assert f"Nothing to run: {named}" in log
    before = late.attempt
    asking = backfill(lambda: _as_documented(installation, first, last))
    (repeating,) = [run_id for run_id, tasks in asking.items() if tasks != skipped]
    assert set(asking.pop(repeating).values()) == {"success"}
    for run_id in asking:
        assert f"and run {repeating} already repeats that batch" in why(run_id)
    with installation.ledger() as ledger:
        # One attempt for each of the two outputs.
        assert ledger.batches.get("flights", late.batch_time_ms).attempt == before + 2


def _as_documented(installation, first: datetime, last: datetime) -> int:
    """Run the calls of docs/airflow.md about a down time, for these logical dates; the backfill's id."""
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "docs" / "airflow.md").read_text(), re.DOTALL)
    (calls,) = [block for block in blocks if "call() {" in block]
    (recipe,) = [block for block in blocks if "With `call` as above" in block]
    script = calls[: calls.index("\n\n")] + "\n" + recipe
    for here, there in {
        "http://localhost:8080": installation.airflow.url,
        "…": installation.airflow.password(),
        "2026-11-21T14:00:00Z": first.isoformat(),
        "2026-11-21T16:00:00Z": last.isoformat(),
    }.items():
        assert here in script
        script = script.replace(here, there)
    assert f'"dag_id": "{BATCHES}"' in script
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["id"])


def date_of(at_ms: int) -> datetime:
    """The logical date of a batch's run: the start of its interval."""
    return datetime.fromtimestamp((at_ms - 20_000) / 1000, UTC)


def _tries(installation, run_id: str) -> int:
    tasks = installation.api.task_instances(BATCHES, run_id)
    return next(task["try_number"] for task in tasks if task["task_id"] == "await_blocks")


@pytest.fixture
def done(installation):
    """The newest run that has succeeded and written all outputs of its batch."""
    return next(run for run in reversed(finished(installation, state=("success",))) if _wrote_all(installation, run))


def _wrote_all(installation, run) -> bool:
    """Whether the run did it itself: a run may find its batch written by one that was late, or by the repair.

    Not for a batch without records: those of the last runs may end after the schedule, and a run for such a time has no
    tasks.
    """
    at_ms = batch_time(installation, run)
    with installation.ledger() as ledger:
        batch, attempts = ledger.batches.find("flights", at_ms), ledger.attempts.of_batch("flights", at_ms)
    own = [row for row in attempts if row.attributes.get("run_id") == run["dag_run_id"]]
    written = {output for row in own if row.state.value == "completed" for output in row.outputs}
    return batch is not None and batch.records > 0 and written == {"search", "lake"}


@pytest.mark.usefixtures("quiet")
def test_a_completed_batch_of_a_cleared_run_is_run_again_whole(installation, done):
    before = written(installation, done)
    installation.api.clear(BATCHES, done["dag_run_id"])
    installation.api.wait_for_run(BATCHES, done["dag_run_id"])
    after = written(installation, done)
    assert all(after[output][1] > before[output][1] for output in ("search", "lake"))
    assert {state for state, _ in after.values()} == {"completed"}


@pytest.mark.usefixtures("quiet")
def test_a_run_may_ask_for_one_output(installation, done):
    before = written(installation, done)
    inside = datetime.fromtimestamp(batch_time(installation, done) / 1000, UTC) - timedelta(seconds=1)
    conf = {"reprocess": True, "outputs": ["lake"]}
    run_id = installation.api.trigger(BATCHES, conf=conf, logical_date=inside)
    asking = installation.api.wait_for_run(BATCHES, run_id)
    assert set(states(installation, asking).values()) == {"success"}
    after = written(installation, done)
    assert after["search"] == before["search"]
    assert after["lake"][1] > before["lake"][1]
    log = installation.api.task_log(BATCHES, run_id, "generate_batch.search")
    assert "does not ask for search" in log


def test_a_misspelt_option_fails_the_run_at_once(installation):
    at = datetime.now(UTC) - timedelta(days=1)
    run_id = installation.api.trigger(BATCHES, conf={"reproces": True}, logical_date=at)
    installation.api.wait_for_run(BATCHES, run_id, states=("failed",))
    (task,) = [each for each in installation.api.task_instances(BATCHES, run_id) if each["task_id"] == "await_blocks"]
    assert (task["state"], task["try_number"]) == ("failed", 1)
    log = installation.api.task_log(BATCHES, run_id, "await_blocks")
    assert "'reproces', which is not an option here. Did you mean 'reprocess'?" in log


def test_in_order_one_run_at_a_time_and_no_run_waits_forever(installation, until):
    installation.api.unpause(ORDERED_RECEIVER)
    with installation.ledger() as ledger:
        # With one run at a time their own runs come after those that have to wait for them.
        until(lambda: _missed_by_the_schedule(installation, ledger) >= 2, what="times before the schedule's first")
        installation.api.unpause(ORDERED)
        # Each takes a run of its own: more of them than are asked for would only take a slow machine longer.
        until(lambda: len(_times_of(ledger)) >= 4, what="batch times")
        installation.stop_receiving("visits")
        until(lambda: not ledger.blocks.unclaimed("visits"), what="the last batch")
        until(lambda: not _under_way(installation, ORDERED) and not _left(ledger), what="the ends of runs and batches")
        done = [batch for batch in ledger.batches.page("visits", 1000, oldest_first=True) if batch.records]
        ended = [batch.completed_at_ms for batch in done]
        assert len(ended) >= 4
        assert ended == sorted(ended)
        attempts = [ledger.attempts.of_batch("visits", batch.batch_time_ms) for batch in done]
    # The state, then the output: nothing was done twice.
    assert {tuple(step for row in rows for step in row.outputs) for rows in attempts} == {("state", "search")}
    repaired = [row.batch_time_ms for rows in attempts for row in rows if "repair" in row.attributes]
    assert {batch.batch_time_ms for batch in done[:2]} <= {*repaired}, "no run of the schedule has their dates"
    # A run whose turn does not come is skipped, and the schedule goes on meanwhile.
    assert not [run for run in installation.api.runs(ORDERED) if run["state"] == "failed"]


def _left(ledger) -> list:
    """The batches of records that have not completed."""
    return [row for row in ledger.batches.page("visits", 1000) if row.records and row.state.value != "completed"]


def _missed_by_the_schedule(installation, ledger) -> int:
    """How many batch times with records end before the first run's interval, which is a later one at each parse."""
    first = datetime.fromisoformat(installation.api.wait_for_dag(ORDERED)["next_dagrun_logical_date"])
    return len([time for time in ledger.blocks.unclaimed("visits") if time.batch_time_ms <= first.timestamp() * 1000])


def _times_of(ledger) -> set[int]:
    """The batch times with records so far, with a batch or without one."""
    waiting = {time.batch_time_ms for time in ledger.blocks.unclaimed("visits")}
    return waiting | {row.batch_time_ms for row in ledger.batches.page("visits") if row.records}


def _under_way(installation, dag_id: str) -> list:
    return [run for run in installation.api.runs(dag_id) if run["state"] in ("queued", "running")]
