"""A stream of one's own on a real Airflow: to the end, and through crashes. Each test proves all that was ever sent."""

from __future__ import annotations

import json

import psutil
import pytest
from tests.system.killing import kill_session
from tests.system.orders import INDEX, STREAM, Orders, wait_until
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.stack import environment
from headrace.clock import time_text
from headrace.devstack.stack import Stack
from headrace.ledger.states import JobState

pytestmark = pytest.mark.timeout(1200)


def test_everything_arrives_once_and_unchanged(orders: Orders) -> None:
    orders.finish(orders.produce(20_000))
    orders.assert_proved()


def test_a_batch_run_again_by_the_command_changes_nothing(orders: Orders, stack: Stack) -> None:
    batch = orders.settle().with_records[-1]
    (run_id,) = orders.ledger.runs.of_batch(STREAM, batch.batch_time_ms)
    orders.api.wait_for_run(f"{STREAM}_batches", run_id)
    command = ["batches", "run", STREAM, time_text(batch.batch_time_ms)]
    preview = CliRunner().invoke(app, [*command, "--preview"], env=environment(stack.state))
    assert f"Run {run_id} of {STREAM}_batches is cleared" in preview.output
    done = CliRunner().invoke(app, [*command, "--reason", "a test", "--json"], env=environment(stack.state))
    assert done.exit_code == 0, done.output
    assert f"Run {run_id} of {STREAM}_batches is cleared" in json.loads(done.stdout)["done"]
    orders.api.wait_for_run(f"{STREAM}_batches", run_id)
    assert orders.ledger.batches.get(STREAM, batch.batch_time_ms).attempt > batch.attempt
    orders.assert_proved()


def test_a_range_replayed_by_one_call_has_its_batches_documents(orders: Orders) -> None:
    batches = orders.settle().with_records
    replay, first = f"{STREAM}_replay_v2", batches[0].batch_time_ms - batches[0].interval_ms
    orders.api.wait_for_dag(replay)
    orders.api.unpause(replay)
    asked = {"from": time_text(first), "until": time_text(batches[-1].batch_time_ms)}
    orders.api.wait_for_run(replay, orders.api.trigger(replay, conf=asked))
    documents = dict(orders.elasticsearch.documents(INDEX))
    assert documents
    assert dict(orders.elasticsearch.documents(f"{INDEX}-v2")) == documents
    rows = orders.ledger.replays.between(STREAM, "v2", first, batches[-1].batch_time_ms + 1)
    assert {batch.batch_time_ms for batch in batches} <= {row.batch_time_ms for row in rows}
    assert {row.state.value for row in rows} == {"completed"}


def test_kill_9_of_the_receiver_job(orders: Orders) -> None:
    before = orders.job()
    producing = orders.produce_under_way()
    kill_session(before.attributes["pid"])
    orders.finish(producing)
    orders.assert_proved()
    after = orders.job()
    assert after.epoch > before.epoch
    assert after.state is JobState.RUNNING
    orders.assert_nobody_was_needed()


def test_kill_9_of_a_batchs_process(orders: Orders) -> None:
    taken = orders.indexings()
    orders.finish(orders.produce(60_000))
    killed: list[psutil.Process] = []

    def caught() -> bool:
        process = orders.batch_process()
        if process is None or orders.indexings() == taken:
            return False
        process.kill()
        killed.append(process)
        return True

    # When it has begun to index, and most likely has not ended: should it have, the next one is due.
    wait_until(caught, seconds=600, poll=0.01)
    orders.assert_proved()
    attempts = [
        attempt
        for batch in orders.look().with_records
        for attempt in orders.ledger.attempts.of_batch(STREAM, batch.batch_time_ms)
    ]
    assert killed
    assert any(attempt.number > 1 for attempt in attempts), "no batch was attempted again"
    orders.assert_nobody_was_needed()


def test_kill_9_of_the_scheduler(orders: Orders, stack: Stack) -> None:
    before = orders.job()
    producing = orders.produce_under_way()
    scheduler = orders.airflow.components["scheduler"]
    scheduler.kill()
    # The receiver job does not need Airflow.
    orders.finish(producing)
    orders.until(lambda snapshot: snapshot.received == snapshot.produced)
    assert orders.job().epoch == before.epoch
    scheduler.start()
    orders.assert_proved()
    assert orders.job().epoch == before.epoch, "the receiver job outlives Airflow's crash"
    assert orders.job().alive(orders.ledger.now_ms())
    orders.assert_nobody_was_needed()


def test_kill_9_of_job_triggerer_and_api_server_at_once(orders: Orders) -> None:
    before = orders.job()
    producing = orders.produce_under_way()
    # In the order in which they are started again: the triggerer is ready when the api-server says so.
    killed = [orders.airflow.components[name] for name in ("api-server", "triggerer")]
    for component in killed:
        component.kill()
    kill_session(before.attributes["pid"])
    for component in killed:
        component.start()
    orders.finish(producing)
    orders.assert_proved()
    assert orders.job().epoch > before.epoch
    orders.assert_nobody_was_needed()
