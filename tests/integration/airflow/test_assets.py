"""Assets under a real Airflow: DAGs that run after batches, and batches that are started by what was received.

The tests are steps of one story, in order.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from operator import itemgetter

import pytest
from playwright.sync_api import expect
from tests.integration.airflow.in_chromium import frame, signed_in

from headrace.clock import time_text
from headrace.devstack.airflow import USER
from headrace.ledger import AttemptState
from headrace.ledger.states import EventKind

# The first test also waits for Airflow's start.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DAGS = ("clicks_receiver", "clicks_batches", "reports", "orders_receiver", "orders_batches")
INTERVAL_MS = 10_000


def reported(installation) -> list[dict]:
    """The events that the runs of `reports` found, each with its run's id."""
    file = installation.folder / "reports.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{**batch, "run_id": line["run_id"]} for line in lines for batch in line["batches"]]


def reported_times(installation) -> Counter[int]:
    return Counter(event["batch_time_ms"] for event in reported(installation))


def completed(installation, stream: str) -> dict:
    with installation.ledger() as ledger:
        return {batch.batch_time_ms: batch for batch in ledger.batches.page(stream, 1000, ["completed"])}


def test_a_dag_runs_after_each_completed_batch_with_its_numbers(installation, until):
    for dag_id in ("reports", "clicks_batches", "clicks_receiver"):
        installation.api.unpause(dag_id)
    until(lambda: len([event for event in reported(installation) if event["records"]]) >= 3, what="reports")
    batches = completed(installation, "clicks")
    events = reported(installation)
    assert set(Counter(event["batch_time_ms"] for event in events).values()) == {1}
    for event in events:
        batch = batches[event["batch_time_ms"]]
        assert (event["records"], event["blocks"], event["attempts"]) == (batch.records, batch.blocks, 1)
        assert event["interval_end_ms"] - event["interval_start_ms"] == INTERVAL_MS
        if batch.records:
            assert event["outputs"]["search"] == event["outputs"]["lake"] == {"indexed": 1, "parameters": {"factor": 1}}


def test_a_failed_batch_emits_its_event_only_after_its_repair(installation, until):
    installation.fail_if.write_text("lake")
    try:
        run = until(lambda: failed_in_spark(installation), what="a run whose batch failed")
        at_ms = batch_time(run)
        assert at_ms not in reported_times(installation)
    finally:
        installation.fail_if.unlink()
    until(lambda: reported_times(installation)[at_ms] == 1, what="the report")
    (event,) = [event for event in reported(installation) if event["batch_time_ms"] == at_ms]
    assert event["attempts"] >= 2
    states = {run["dag_run_id"]: run["state"] for run in installation.api.runs("clicks_batches")}
    assert states[run["dag_run_id"]] == "failed"


def failed_in_spark(installation) -> dict | None:
    """A failed run with a failed batch. Airflow also fails a task that resumes before the scheduler has read the end of
    its first half ("the task instance's state attribute is running", under load): such a run has no batch."""
    failed = [run for run in installation.api.runs("clicks_batches") if run["state"] == "failed"]
    with installation.ledger() as ledger:
        for run in failed:
            attempts = ledger.attempts.of_batch("clicks", batch_time(run))
            if attempts and attempts[-1].state is AttemptState.FAILED:
                return run
    return None


def test_a_batch_emits_another_event_only_when_it_was_run_again(installation, until):
    installation.stop_receiving("clicks")
    installation.end_schedule("clicks", datetime.now(UTC))
    # Of two events at once Airflow takes one up with the next event only (apache/airflow#54659): no other run may end.
    until(lambda: not unfinished(installation, "clicks_batches"), what="the end of the scheduled runs")
    first = max((event for event in reported(installation) if event["records"]), key=itemgetter("batch_time_ms"))
    at_ms = first["batch_time_ms"]
    for seconds, conf in ((1, {}), (2, {"reprocess": True})):
        date = datetime.fromtimestamp((at_ms - INTERVAL_MS) / 1000).astimezone() + timedelta(seconds=seconds)
        run_id = installation.api.trigger("clicks_batches", conf=conf, logical_date=date)
        installation.api.wait_for_run("clicks_batches", run_id)
    until(lambda: reported_times(installation)[at_ms] == 2, what="the second report")
    again = [event["attempts"] for event in reported(installation) if event["batch_time_ms"] == at_ms]
    assert again == [first["attempts"], first["attempts"] + 1]


def test_an_operator_reruns_and_replays_a_batch_on_the_page(installation, until):
    at_ms = max(at_ms for at_ms, batch in completed(installation, "clicks").items() if batch.records)
    installation.api.unpause("clicks_replay_v2")
    with installation.ledger() as ledger, signed_in(installation.airflow) as page:
        before = ledger.batches.get("clicks", at_ms).attempt
        page.goto(f"{installation.airflow.url}/headrace/#/streams/clicks/batches/{time_text(at_ms)}")
        confirm(page, "Run again", will="run again with the same", done="runs batch")
        until(lambda: ledger.batches.get("clicks", at_ms).attempt > before, what="the next attempt")
        until(lambda: at_ms in completed(installation, "clicks"), what="its completion")
        installation.api.pause("clicks_batches")
        confirm(page, "Replay into another index", will="clicks_replay_v2 writes batch", done="it replays batch")
        until(lambda: replayed(ledger, at_ms) == ["completed"], what="the replay")
        actions = ledger.events.latest("clicks", [EventKind.OPERATOR_ACTION], 10)
    assert {(event.payload["action"], event.payload["by"]) for event in actions} == {("run", USER), ("replay", USER)}


def confirm(page, action: str, *, will: str, done: str) -> None:
    """Press the action's button, read what will happen, and confirm it."""
    page.get_by_role("button", name=action, exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".will")).to_contain_text(will)
    dialog.get_by_role("button", name=action, exact=True).click()
    expect(page.get_by_text(re.compile(done))).to_be_attached()


def replayed(ledger, at_ms: int) -> list[str]:
    return [row.state.value for row in ledger.replays.between("clicks", "v2", at_ms, at_ms + 1)]


def test_received_blocks_start_batches_with_records_of_their_own(installation, until):
    installation.api.unpause("orders_receiver")
    installation.api.unpause("orders_batches")
    # Airflow begins to watch when it parses the DAG file again, within half a minute.
    until(lambda: len(completed(installation, "orders")) >= 3, what="batches")
    # A new triggerer begins the watch from its beginning, and must not start anything twice.
    installation.airflow.components["triggerer"].kill()
    installation.airflow.components["triggerer"].start()
    so_far = len(completed(installation, "orders"))
    until(lambda: len(completed(installation, "orders")) >= so_far + 2, what="batches after the new triggerer's start")
    installation.stop_receiving("orders")
    # What is left is less than a batch needs: its oldest record has to wait for its time.
    with installation.ledger() as ledger:
        until(lambda: not ledger.blocks.unclaimed("orders"), what="the last batch")
    until(lambda: not unfinished(installation, "orders_batches"), what="the runs' ends")

    runs = installation.api.runs("orders_batches")
    assert {(run["run_type"], run["logical_date"], run["state"]) for run in runs} == {
        ("asset_triggered", None, "success")
    }
    with installation.ledger() as ledger:
        claimed = [ledger.runs.find("orders", run["dag_run_id"]) for run in runs]
        taken = [ledger.batches.get("orders", at_ms) for at_ms in sorted(claimed)]
        # None doubled, none empty; more than one batch time each but for a slow machine's last.
        assert len(set(claimed)) == len(claimed)
        assert all(batch.records for batch in taken)
        assert any(batch.absorbed for batch in taken)
        reached = 0
        for batch in taken:
            (ranges,) = ledger.batches.inputs("orders", batch.batch_time_ms)
            assert ranges.from_offset == reached
            reached = ranges.until_offset
        (position,) = ledger.positions.all("orders")
        assert reached == position.next_offset


def test_a_person_finds_a_stream_its_batch_and_run_on_the_page(installation):
    failed = []
    with signed_in(installation.airflow) as page:
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.get_by_test_id("nav-sidebar").get_by_text("Streams").click()
        streams = frame(page, "Streams")
        streams.get_by_role("link", name="clicks", exact=True).click()
        # Airflow's address follows, so that a reload leads back.
        expect(page).to_have_url(re.compile("#/streams/clicks$"))
        page.reload()
        streams.get_by_role("link", name="Batches", exact=True).click()
        streams.locator("tbody tr a").first.click()
        expect(streams.get_by_role("heading", level=1)).to_contain_text("Batch")
        # From the batch to its run, and on the run back to the batch.
        streams.get_by_role("link", name="Run in Airflow").click()
        page.get_by_role("link", name="Batch", exact=True).click()
        expect(frame(page, "Batch").get_by_role("heading", level=1)).to_contain_text("Batch")
        page.goto(f"{installation.airflow.url}/dags/reports/plugin/headrace_stream")
        expect(frame(page, "Stream").locator("main")).to_contain_text("belongs to no stream")
    assert failed == []


def unfinished(installation, dag_id: str) -> list:
    return [run for run in installation.api.runs(dag_id) if run["state"] in ("queued", "running")]


def batch_time(run) -> int:
    return int(datetime.fromisoformat(run["data_interval_end"]).timestamp() * 1000)
