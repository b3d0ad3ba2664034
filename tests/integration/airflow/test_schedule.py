"""A stream's DAGs under a real Airflow, toys in place of Spark: schedule, states, crashes.

The tests are steps of one story, in order. One task does a batch here: in the DAG of more, their states after a failure
are in the story of outputs (test_outputs.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DAGS = RECEIVER, BATCHES = "landings_receiver", "landings_batches"
INTERVAL = timedelta(seconds=10)
REPOSITORY = Path(__file__).parents[3]


def job(installation):
    with installation.ledger() as ledger:
        found = ledger.jobs.current("landings")
        return found, found is not None and found.alive(ledger.now_ms())


def finished(installation, dag_id=BATCHES):
    return [run for run in installation.api.runs(dag_id) if run["state"] in ("success", "failed")]


def test_airflow_has_no_import_errors(installation):
    assert installation.api.import_errors() == {}


def test_the_receiver_dag_starts_the_job_and_waits_deferred(installation, until):
    installation.api.unpause(RECEIVER)
    until(lambda: job(installation)[1], what="the receiver job's lease")
    (run,) = installation.api.runs(RECEIVER)
    until(
        lambda: installation.api.task_states(RECEIVER, run["dag_run_id"]) == {"receive": "deferred"},
        what="the task's deferral",
    )
    log = installation.api.task_log(RECEIVER, run["dag_run_id"], "receive")
    assert "writes its log to" in log
    assert "http://127.0.0.1:4040" in installation.api.xcom(RECEIVER, run["dag_run_id"], "receive", "_link_SparkUiLink")


def test_a_dag_of_another_file_waits_for_the_stream_by_its_name(installation, until):
    file = (REPOSITORY / "dags" / "flights_watch.py").read_text()
    for here, there in {
        "from deployment import LEDGER\n": "",
        'STREAM = "flights"': 'STREAM = "landings"\nLEDGER = "connection:flights_ledger"',
    }.items():
        assert here in file
        file = file.replace(here, there)
    (installation.folder / "dags" / "flights_watch.py").write_text(file)
    installation.api.wait_for_dag("flights_watch")
    installation.api.unpause("flights_watch")
    run_id = installation.api.trigger("flights_watch")
    run = installation.api.wait_for_run("flights_watch", run_id)
    assert run["state"] == "success"
    assert installation.api.task_states("flights_watch", run_id) == {"is_received": "success", "report": "success"}
    # No batch has run yet.
    assert installation.api.xcom("flights_watch", run_id, "report") == {"records": 0, "late_records": 0}
    installation.api.pause("flights_watch")
    assert installation.api.import_errors() == {}


def test_batch_times_before_the_schedules_first_run_are_repaired(installation, until):
    # Until there are times that no run of the schedule will be about: at each parse, the first run becomes a later one.
    """All later batch times have scheduled runs that follow the clock."""
    until(lambda: _missed_by_the_schedule(installation), what="a batch time before the schedule's first")
    installation.api.unpause(BATCHES)
    until(lambda: len(finished(installation)) >= 3, what="runs")
    upto_ms = max(_batch_time(run) for run in finished(installation))
    until(lambda: not _gaps(installation, upto_ms), what="all batches so far")
    runs = installation.api.runs(BATCHES)
    assert {run["state"] for run in finished(installation)} == {"success"}
    for run in runs:
        start, end = (datetime.fromisoformat(run[f"data_interval_{part}"]) for part in ("start", "end"))
        assert end - start == INTERVAL
        assert start.timestamp() % INTERVAL.total_seconds() == 0
        assert run["logical_date"] == run["data_interval_start"]
    assert {run["run_type"] for run in runs} == {"scheduled"}
    with installation.ledger() as ledger:
        first = ledger.batches.page("landings", oldest_first=True)[0]
        assert first.batch_time_ms < min(map(_batch_time, runs))
        # Every offset from the first on, in one batch each.
        reached = 0
        for batch in ledger.batches.page("landings", oldest_first=True):
            if batch.batch_time_ms <= upto_ms:
                (taken,) = ledger.batches.inputs("landings", batch.batch_time_ms)
                assert taken.from_offset == reached
                reached = taken.until_offset
        assert reached > 0


def _missed_by_the_schedule(installation) -> bool:
    first = datetime.fromisoformat(installation.api.wait_for_dag(BATCHES)["next_dagrun_logical_date"])
    with installation.ledger() as ledger:
        ends = [time.batch_time_ms for time in ledger.blocks.unclaimed("landings")]
    return bool(ends) and ends[0] <= first.timestamp() * 1000


def _gaps(installation, upto_ms: int) -> set[int]:
    """The times up to ``upto_ms`` that have records and no completed batch."""
    with installation.ledger() as ledger:
        first_ms = min(
            [time.batch_time_ms for time in ledger.blocks.unclaimed("landings")]
            + [batch.batch_time_ms for batch in ledger.batches.page("landings", oldest_first=True)]
        )
        done = {batch.batch_time_ms for batch in ledger.batches.page("landings", states=["completed"])}
        return set(range(first_ms, upto_ms + 1, int(INTERVAL.total_seconds() * 1000))) - done


def test_a_failed_batch_fails_its_run_and_completes_when_cleared(installation, until):
    installation.fail_if.touch()
    try:
        until(lambda: any(run["state"] == "failed" for run in finished(installation)), what="a failed run")
    finally:
        installation.fail_if.unlink()
    failed = [run for run in finished(installation) if run["state"] == "failed"][-1]
    assert installation.api.task_states(BATCHES, failed["dag_run_id"]) == {"micro_batch": "failed"}
    assert "the transform said no" in installation.api.task_log(BATCHES, failed["dag_run_id"], "micro_batch")
    installation.api.clear(BATCHES, failed["dag_run_id"])
    installation.api.wait_for_run(BATCHES, failed["dag_run_id"], timeout=300)
    with installation.ledger() as ledger:
        assert ledger.batches.get("landings", _batch_time(failed)).state.value == "completed"


@dataclass(frozen=True)
class Held:
    """A process of toy_batch.py that goes on until the file "hold" is gone."""

    batch_time_ms: int
    attempt: int
    pid: int


def _held(installation) -> Held | None:
    names = [file.name for file in installation.folder.glob("held.*")]
    return Held(*map(int, names[0].split(".")[1:])) if names else None


def _attempt_states(installation, held: Held) -> dict[int, str]:
    """The state of the attempt held and of those after it, by number."""
    with installation.ledger() as ledger:
        rows = ledger.attempts.of_batch("landings", held.batch_time_ms)
    return {row.number: row.state.value for row in rows if row.number >= held.attempt}


def _mark(installation, run_id: str, state: str) -> None:
    installation.api.request(
        "PATCH", f"/dags/{RECEIVER}/dagRuns/{run_id.replace('+', '%2B')}/taskInstances/receive", {"new_state": state}
    )


def _batch_time(run) -> int:
    return int(datetime.fromisoformat(run["data_interval_end"]).timestamp() * 1000)


def test_a_completed_batch_is_run_again_when_a_run_asks_for_it(installation):
    done = next(run for run in finished(installation) if run["state"] == "success")
    inside = datetime.fromisoformat(done["data_interval_start"]) + timedelta(seconds=1)
    with installation.ledger() as ledger:
        before = ledger.batches.get("landings", _batch_time(done))
    run_id = installation.api.trigger(BATCHES, conf={"reprocess": True}, logical_date=inside)
    run = installation.api.wait_for_run(BATCHES, run_id, timeout=300)
    assert run["data_interval_start"] == done["data_interval_start"]
    with installation.ledger() as ledger:
        after = ledger.batches.get("landings", _batch_time(done))
    assert after.attempt == before.attempt + 1
    assert (after.records, after.manifest_sha256) == (before.records, before.manifest_sha256)


def test_a_backfill_runs_intervals_that_no_run_has_taken(installation, until):
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=1)
    installation.api.backfill(BATCHES, start, start + INTERVAL)
    wanted = {start, start + INTERVAL}

    def done():
        return {
            datetime.fromisoformat(run["logical_date"])
            for run in finished(installation)
            if run["run_type"] == "backfill" and run["state"] == "success"
        }

    until(lambda: done() == wanted, what="the backfill")
    with installation.ledger() as ledger:
        for date in wanted:
            assert ledger.batches.get("landings", int((date + INTERVAL).timestamp() * 1000)).state.value == "completed"


def test_a_receiver_job_survives_killed_triggerer_and_scheduler(installation, until):
    before, alive = job(installation)
    assert alive
    for name in ("triggerer", "scheduler"):
        installation.airflow.components[name].kill()
    for name in ("triggerer", "scheduler"):
        installation.airflow.components[name].start()
    with installation.ledger() as ledger:
        ledger.jobs.request_stop("landings", "the test")
    run = installation.api.runs(RECEIVER)[-1]
    installation.api.wait_for_run(RECEIVER, run["dag_run_id"], timeout=300)
    # @continuous: the next run starts the next job.
    until(lambda: job(installation)[1] and job(installation)[0].epoch == before.epoch + 1, what="the next job")


def test_a_batchs_next_try_takes_over_while_the_first_still_runs(installation, until):
    """As when a scheduler dies: Airflow begins another try, and the first attempt is fenced."""
    hold = installation.fail_if.with_name("hold")
    hold.touch()
    try:
        held = until(lambda: _held(installation), what="a batch that runs")
        # Airflow's process around the task is cut off: it would end the first try once it hears of another.
        supervisor = psutil.Process(held.pid).parents()[1]
        supervisor.suspend()
        try:
            scheduler = installation.airflow.components["scheduler"]
            scheduler.kill()
            scheduler.start()
            until(lambda: len(_attempt_states(installation, held)) > 1, what="the next try")
            assert list(_attempt_states(installation, held).values()) == ["fenced", "running"]
        finally:
            supervisor.resume()
    finally:
        hold.unlink()
    (run,) = [run for run in installation.api.runs(BATCHES) if _batch_time(run) == held.batch_time_ms]
    installation.api.wait_for_run(BATCHES, run["dag_run_id"], timeout=300)
    assert list(_attempt_states(installation, held).values()) == ["fenced", "completed"]
    # What follows is about the receiver job.
    installation.api.pause(BATCHES)


def test_a_mark_that_no_trigger_heard_is_heard_by_the_next_run(installation, until):
    before, alive = job(installation)
    assert alive
    (run,) = [run for run in installation.api.runs(RECEIVER) if run["state"] == "running"]
    run_id = run["dag_run_id"]
    until(lambda: installation.api.task_states(RECEIVER, run_id) == {"receive": "deferred"}, what="the deferral")
    triggerer = installation.airflow.components["triggerer"]
    triggerer.kill()
    _mark(installation, run_id, "failed")
    until(lambda: job(installation)[0].stop_reason, what="the next run's task")
    triggerer.start()
    until(lambda: job(installation)[1] and job(installation)[0].epoch == before.epoch + 1, what="the next job")
    with installation.ledger() as ledger:
        assert ledger.jobs.page("landings")[1].state.value == "stopped"


def test_marking_the_deferred_task_stops_the_job(installation, until):
    before, _ = job(installation)
    run = until(
        lambda: next((run for run in installation.api.runs(RECEIVER) if run["state"] == "running"), None), what="a run"
    )
    run_id = run["dag_run_id"]
    until(lambda: installation.api.task_states(RECEIVER, run_id) == {"receive": "deferred"}, what="the deferral")
    # Airflow tells a trigger of its task's end only once it runs: about a second after the deferral.
    logs = installation.folder / "airflow" / "logs" / f"dag_id={RECEIVER}" / f"run_id={run_id}"
    until(lambda: any(logs.rglob("*.trigger.*")), what="the trigger")
    installation.api.pause(RECEIVER)
    _mark(installation, run_id, "failed")
    # By its state: on a busy machine a job may be silent for longer than its lease, and go on.
    until(lambda: job(installation)[0].state.value != "running", what="the job's end")
    stopped, _ = job(installation)
    assert stopped.epoch == before.epoch
    assert stopped.state.value == "stopped"
