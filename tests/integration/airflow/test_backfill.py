"""Batches in time under a real Airflow: down-time, backfills by API, CLI and UI, runs for one batch time, replays.

The tests are steps of one story, in order. One task does a batch here; the story of outputs (test_outputs.py) has the
DAG of more.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.devstack.airflow import airflow_command
from headrace.devstack.airflow_api import AirflowApiError

# The first test waits for Airflow's start, and for five batch times to pass.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DAGS = RECEIVER, BATCHES, REPLAY = "taps_receiver", "taps_batches", "taps_replay_v2"
INTERVAL_MS = 10_000
REPOSITORY = Path(__file__).parents[3]


def date_of(at_ms: int) -> datetime:
    """The logical date of a batch's run: the start of its interval."""
    return datetime.fromtimestamp((at_ms - INTERVAL_MS) / 1000, UTC)


def batch_time(run) -> int:
    return int(datetime.fromisoformat(run["data_interval_end"]).timestamp() * 1000)


def batch_of(installation, at_ms: int):
    with installation.ledger() as ledger:
        return ledger.batches.find("taps", at_ms)


def attempts(installation, times) -> list[int]:
    return [batch_of(installation, at_ms).attempt for at_ms in times]


@pytest.fixture(scope="module")
def story() -> dict:
    """What a later test wants to know of an earlier one."""
    return {}


@pytest.fixture
def times(story) -> list[int]:
    """Three batch times with records, all of them completed."""
    return story["down"][2:]


@pytest.fixture
def run_backfill(installation, until):
    """Wait until a backfill has run, and close it; its runs as they were started."""

    def finish(dag_id: str, backfill_id: int, times) -> list[dict]:
        dates = {date_of(at_ms).isoformat() for at_ms in times}

        def ended():
            runs = [run for run in installation.api.runs(dag_id, limit=500) if _date(run) in dates]
            return runs if all(run["state"] in ("success", "failed") for run in runs) else None

        try:
            runs = until(ended, what="the end of the backfill's runs")
        except AssertionError as error:
            raise AssertionError(f"{error}; {_unfinished(installation, dag_id, dates)}") from None
        # The scheduler looks every 30 s whether a backfill is over, and a DAG has one at a time.
        try:
            installation.api.request("PUT", f"/backfills/{backfill_id}/cancel")
        except AirflowApiError as error:
            assert error.status == http.client.CONFLICT, error
        # What was cancelled before its turn has no start.
        started = [run for run in runs if run["run_type"] == "backfill" and run["start_date"]]
        return sorted(started, key=lambda run: run["start_date"])

    return finish


def _unfinished(installation, dag_id: str, dates: set[str]) -> str:
    """The runs of these dates that are not over, with their tasks and the attempts that hold a slot."""
    runs = [run for run in installation.api.runs(dag_id, limit=500) if _date(run) in dates]
    tasks = {
        run["dag_run_id"]: (run["state"], installation.api.task_states(dag_id, run["dag_run_id"]))
        for run in runs
        if run["state"] not in ("success", "failed")
    }
    with installation.ledger() as ledger:
        running = [
            attempt
            for batch in ledger.batches.page("taps", 50, ["running"])
            for attempt in ledger.attempts.of_batch("taps", batch.batch_time_ms)
            if attempt.ended_at_ms is None
        ]
    return f"runs: {tasks}; attempts: {running}"


def _date(run) -> str | None:
    return run["logical_date"] and datetime.fromisoformat(run["logical_date"]).isoformat()


def test_each_batch_time_missed_by_a_scheduler_has_its_own_run(installation, until, story):
    """The scheduler was down for five batch times, and each of them is caught up by itself."""
    installation.api.unpause(BATCHES)
    installation.api.unpause(RECEIVER)
    until(lambda: _completed_with_records(installation), what="a first batch")
    scheduler = installation.airflow.components["scheduler"]
    scheduler.kill()
    with installation.ledger() as ledger:
        first_ms = ledger.streams.get("taps").batch_time_after(ledger.now_ms()) + INTERVAL_MS
        story["down"] = down = [first_ms + n * INTERVAL_MS for n in range(5)]
        until(lambda: ledger.now_ms() > down[-1], what="five batch times")
        assert [time.batch_time_ms for time in ledger.blocks.unclaimed("taps") if time.batch_time_ms in down] == down
        installation.stop_receiving("taps")
        installation.end_schedule("taps", date_of(ledger.now_ms() + INTERVAL_MS))
        scheduler.start()
        until(lambda: not ledger.blocks.unclaimed("taps"), what="the last batch")
        until(lambda: all(_is_complete(installation, at_ms) for at_ms in down), what="the missed batches")

        reached = 0
        for batch in ledger.batches.page("taps", 1000, oldest_first=True):
            for taken in ledger.batches.inputs("taps", batch.batch_time_ms):
                assert taken.from_offset == reached
                reached = taken.until_offset
            for block in ledger.allocations.blocks_of("taps", batch.batch_time_ms):
                assert batch.batch_time_ms - INTERVAL_MS <= block.info.cut_time_ms < batch.batch_time_ms
        (position,) = ledger.positions.all("taps")
        assert reached == position.next_offset
    runs = [batch_time(run) for run in installation.api.runs(BATCHES, limit=500)]
    assert [runs.count(at_ms) for at_ms in down] == [1] * 5
    assert attempts(installation, down) == [1] * 5


def test_a_backfill_leaves_alone_what_has_a_run(installation, run_backfill, times):
    body = {"dag_id": BATCHES, "from_date": date_of(times[0]).isoformat(), "to_date": date_of(times[-1]).isoformat()}
    asked = installation.api.request("POST", "/backfills/dry_run", body)
    assert asked["total_entries"] == 0
    backfill = installation.api.backfill(BATCHES, date_of(times[0]), date_of(times[-1]))
    assert run_backfill(BATCHES, backfill, times) == []
    assert attempts(installation, times) == [1] * 3


def test_a_backfill_runs_completed_batches_with_the_same_records(installation, run_backfill, times):
    before = [batch_of(installation, at_ms) for at_ms in times]
    backfill = installation.api.backfill(
        BATCHES, date_of(times[0]), date_of(times[-1]), reprocess_behavior="completed", max_active_runs=2
    )
    runs = run_backfill(BATCHES, backfill, times)
    assert [batch_time(run) for run in runs] == times
    assert {run["state"] for run in runs} == {"success"}
    assert _most_at_once(runs) <= 2
    after = [batch_of(installation, at_ms) for at_ms in times]
    assert [batch.attempt for batch in after] == [2] * 3
    for was, batch in zip(before, after, strict=True):
        assert batch.state.value == "completed"
        assert (batch.records, batch.manifest_sha256) == (was.records, was.manifest_sha256)
        assert batch.records > 0


def test_the_command_line_backfills_backwards(installation, run_backfill, times):
    command = [
        *airflow_command(), "backfill", "create", "--dag-id", BATCHES,
        "--from-date", date_of(times[0]).isoformat(), "--to-date", date_of(times[-1]).isoformat(),
        "--reprocess-behavior", "completed", "--max-active-runs", "1", "--run-backwards",
    ]  # fmt: skip
    environment = installation.airflow.environment()
    done = subprocess.run(
        command, env=environment, cwd=installation.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = run_backfill(BATCHES, _newest_backfill(installation, BATCHES), times)
    assert [batch_time(run) for run in runs] == times[::-1]
    assert _most_at_once(runs) == 1
    assert attempts(installation, times) == [3] * 3


def test_the_user_interface_runs_what_failed_again(installation, run_backfill, times):
    failing = times[1]
    # The lake's part of one batch fails, so that its run does.
    installation.fail_if.write_text("lake")
    try:
        again = {"reprocess_behavior": "completed", "max_active_runs": 1}
        backfill = installation.api.backfill(BATCHES, date_of(failing), date_of(failing), **again)
        (run,) = run_backfill(BATCHES, backfill, [failing])
    finally:
        installation.fail_if.unlink()
    assert run["state"] == "failed"
    assert batch_of(installation, failing).state.value == "failed"
    with installation.ledger() as ledger:
        written = {row.output_id: row.state.value for row in ledger.attempts.outputs("taps", failing)}
        assert written == {"search": "completed", "lake": "failed"}
    # As the form sends it: with the session's cookie, all fields, and the params as it shows them.
    body = {
        "dag_id": BATCHES,
        "from_date": date_of(times[0]).isoformat().replace("+00:00", ".000Z"),
        "to_date": date_of(times[-1]).isoformat().replace("+00:00", ".000Z"),
        "max_active_runs": 1,
        "reprocess_behavior": "failed",
        "run_backwards": False,
        "run_on_latest_version": True,
        "dag_run_conf": {"reprocess": False, "outputs": None, "parameters": {"factor": 1}, "from_kafka": False},
    }
    answer = _as_the_browser(installation, "POST", "/api/v2/backfills", body)
    runs = run_backfill(BATCHES, answer["id"], times)
    assert [run["state"] for run in runs if batch_time(run) == failing] == ["success"]
    assert attempts(installation, times) == [3, 5, 3]
    with installation.ledger() as ledger:
        # What had been written was not written again.
        written = {row.output_id: row.attempt for row in ledger.attempts.outputs("taps", failing)}
        assert written == {"search": 4, "lake": 5}


def test_a_run_for_one_batch_time_does_what_its_conf_says(installation, times):
    at_ms = times[2]
    asked = (
        {},
        {"reprocess": True, "outputs": ["search"], "parameters": {"factor": 7}},
    )
    for seconds, conf in enumerate(asked, start=1):
        date = date_of(at_ms) + timedelta(seconds=seconds)
        installation.api.wait_for_run(BATCHES, installation.api.trigger(BATCHES, conf=conf, logical_date=date))
    with installation.ledger() as ledger:
        rows = {row.output_id: row for row in ledger.attempts.outputs("taps", at_ms)}
        assert ledger.batches.get("taps", at_ms).state.value == "completed"
    assert {output: row.attempt for output, row in rows.items()} == {"search": 4, "lake": 3}
    assert rows["search"].counts["parameters"] == {"factor": 7}
    assert rows["lake"].counts["parameters"] == {"factor": 1}


@pytest.mark.parametrize("conf", [{"outputs": ["nowhere"]}, {"reprocess": "perhaps"}, {"parameters": {"other": 1}}])
def test_a_conf_that_the_stream_does_not_know_is_refused_at_once(installation, times, conf):
    with pytest.raises(AirflowApiError) as refused:
        installation.api.trigger(BATCHES, conf=conf, logical_date=date_of(times[2]) + timedelta(seconds=1))
    assert refused.value.status == http.client.BAD_REQUEST


def test_a_date_whose_interval_never_ends_is_refused_at_once(installation):
    with pytest.raises(AirflowApiError, match="Give another logical date") as refused:
        installation.api.trigger(BATCHES, logical_date=datetime.fromisoformat("9999-12-31T23:59:59+00:00"))
    assert refused.value.status == http.client.BAD_REQUEST


@pytest.mark.parametrize("backwards", [False, True])
def test_history_is_replayed_beside_the_stream(installation, run_backfill, times, backwards):
    before = [batch_of(installation, at_ms) for at_ms in times]
    if not backwards:
        installation.api.unpause(REPLAY)
        # It begins nothing by itself.
        assert installation.api.wait_for_dag(REPLAY)["next_dagrun_logical_date"] is None
        assert installation.api.runs(REPLAY) == []
    backfill = installation.api.backfill(
        REPLAY, date_of(times[0]), date_of(times[-1]), run_backwards=backwards, reprocess_behavior="completed",
        max_active_runs=1,
    )  # fmt: skip
    runs = run_backfill(REPLAY, backfill, times)
    assert [batch_time(run) for run in runs] == (times[::-1] if backwards else times)
    assert {run["state"] for run in runs} == {"success"}
    with installation.ledger() as ledger:
        rows = ledger.replays.between("taps", "v2", 0, 2**60)
        assert [(row.batch_time_ms, row.state.value) for row in rows] == [(at_ms, "completed") for at_ms in times]
    assert [batch_of(installation, at_ms).completed_at_ms for at_ms in times] == [row.completed_at_ms for row in before]


def test_the_documented_calls_are_right(installation, run_backfill, times):
    (script,) = [block for block in _blocks("bash") if "curl" in block]
    for here, there in {
        "http://localhost:8080": installation.airflow.url,
        "…": installation.airflow.password(),
        "flights_batches": BATCHES,
        "flights_replay_v2": REPLAY,
        # Not one of the backfill's: it would take the batch over from this run.
        "2026-11-21T14:05:01Z": (date_of(times[2]) + timedelta(seconds=3)).isoformat(),
        "2026-11-21T14:00:00Z": date_of(times[0]).isoformat(),
        "2026-11-21T14:59:59Z": date_of(times[1]).isoformat(),
        '"elasticsearch"': '"search"',
        '"limit"': '"factor"',
    }.items():
        assert here in script
        script = script.replace(here, there)
    so_far = [_newest_backfill(installation, dag_id) for dag_id in (BATCHES, REPLAY)]
    script = script.replace("/backfills/1/", f"/backfills/{max(so_far) + 1}/")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    answers = _json_values(done.stdout)
    assert [answer.get("detail") for answer in answers] == [None] * 7, answers
    run, planned, made, listed, paused, cancelled, replayed = answers
    assert run["conf"]["parameters"] == {"factor": 3}
    assert planned["total_entries"] == 2
    assert (made["max_active_runs"], made["reprocess_behavior"]) == (2, "completed")
    assert made["id"] in [backfill["id"] for backfill in listed["backfills"]]
    assert paused["is_paused"] is True
    assert cancelled["completed_at"] is not None
    installation.api.wait_for_run(BATCHES, run["dag_run_id"])
    run_backfill(BATCHES, made["id"], times[:2])
    assert replayed["dag_id"] == REPLAY
    runs = run_backfill(REPLAY, replayed["id"], times[:2])
    assert {batch_time(run) for run in runs} == set(times[:2])
    assert {run["state"] for run in runs} == {"success"}


def test_documented_cleaning_of_airflows_database_keeps_batches(installation, until, run_backfill, story):
    (file,) = [block for block in _blocks("python") if '"airflow", "db", "clean"' in block]
    assert "KEEP = timedelta(days=3)" in file
    # Longer than Airflow's own components are silent: their heartbeats are in that database too.
    keep = timedelta(seconds=20)
    file = file.replace("KEEP = timedelta(days=3)", "KEEP = timedelta(seconds=20)").replace("flights_batches", BATCHES)
    (installation.folder / "dags" / "clean.py").write_text(file)
    installation.api.wait_for_dag("clean_airflow_db")
    # Not that of the run that started last: Airflow keeps the last automatic one, for the schedule to go on from.
    at_ms = story["down"][0]
    before = [run for run in installation.api.runs(BATCHES, limit=500) if run["start_date"]]
    receivers = installation.api.runs(RECEIVER)
    (run,) = [run for run in before if _date(run) == date_of(at_ms).isoformat()]
    until(lambda: datetime.fromisoformat(run["start_date"]) + keep < datetime.now(UTC), what="the run's age")
    with installation.ledger() as ledger:
        # The others are being run meanwhile.
        batches = [batch for batch in ledger.batches.page("taps", 1000) if batch.completed_at_ms is not None]
    installation.api.unpause("clean_airflow_db")
    cleaning = until(lambda: installation.api.runs("clean_airflow_db"), what="the cleaning's run")[-1]
    installation.api.wait_for_run("clean_airflow_db", cleaning["dag_run_id"])

    def is_left() -> bool:
        return any(other["dag_run_id"] == run["dag_run_id"] for other in installation.api.runs(BATCHES, limit=500))

    if is_left():
        # Airflow leaves rows that are in use; the next cleaning deletes them, as it would on the next day.
        print(installation.api.task_log("clean_airflow_db", cleaning["dag_run_id"], "clean"))
        installation.api.wait_for_run("clean_airflow_db", installation.api.trigger("clean_airflow_db"))
    installation.api.pause("clean_airflow_db")
    assert not is_left()
    assert [run["dag_run_id"] for run in installation.api.runs(RECEIVER)] == [run["dag_run_id"] for run in receivers]
    assert all(batch_of(installation, was.batch_time_ms).completed_at_ms == was.completed_at_ms for was in batches)
    # To Airflow the interval has no run any more, so it is run, and the ledger knows the batch.
    (attempt,) = attempts(installation, [at_ms])
    backfill = installation.api.backfill(BATCHES, date_of(at_ms), date_of(at_ms))
    (again,) = run_backfill(BATCHES, backfill, [at_ms])
    assert again["state"] == "success"
    assert attempts(installation, [at_ms]) == [attempt + 1]


def _newest_backfill(installation, dag_id: str) -> int:
    listed = installation.api.request("GET", "/backfills", params={"dag_id": dag_id, "order_by": "-id"})
    return listed["backfills"][0]["id"]


def _blocks(language: str) -> list[str]:
    text = "".join((REPOSITORY / "docs" / page).read_text() for page in ("airflow.md", "dags.md"))
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def _json_values(text: str) -> list[dict]:
    """JSON values that follow one another."""
    decoder, values = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def _completed_with_records(installation) -> bool:
    with installation.ledger() as ledger:
        return any(batch.records for batch in ledger.batches.page("taps", states=["completed"]))


def _is_complete(installation, at_ms: int) -> bool:
    batch = batch_of(installation, at_ms)
    return batch is not None and batch.state.value == "completed"


def _most_at_once(runs) -> int:
    """How many of the runs ran at the same time, at most; they are sorted by their start."""
    assert all(first["start_date"] <= second["start_date"] for first, second in pairwise(runs))
    return max(sum(other["start_date"] <= run["start_date"] < other["end_date"] for other in runs) for run in runs)


def _as_the_browser(installation, method: str, path: str, body: dict):
    """A request as Airflow's pages send it: the login is in a cookie."""
    login = {"username": "admin", "password": installation.airflow.password()}
    token = installation.api.request("POST", "//auth/token", login)["access_token"]
    connection = http.client.HTTPConnection("127.0.0.1", installation.airflow.port, timeout=60)
    headers = {"Content-Type": "application/json", "Cookie": f"_token={token}"}
    try:
        connection.request(method, path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == http.client.OK, text
        return json.loads(text)
    finally:
        connection.close()
