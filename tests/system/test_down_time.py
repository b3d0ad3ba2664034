"""Down for six batch times while a producer runs; then all of it, each batch time with its own records, and again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pyarrow.dataset
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.system.clicks import INTERVAL_MS, STREAM, TOPIC, ClickProducer, Clicks, sleep_through
from tests.system.conftest import EndStream
from tests.system.killing import kill_session
from tests.system.orders import wait_until

from headrace.devstack.stack import Stack
from headrace.ledger import Ledger
from headrace.ledger.states import BatchState, JobState

pytestmark = pytest.mark.timeout(1200)

DOWN = 6


@pytest.fixture(scope="module")
def clicks(stack: Stack, ledger: Ledger, end_stream: EndStream) -> Iterator[Clicks]:
    """The stream, while it is received."""
    clicks = Clicks(stack, ledger)
    clicks.begin()
    wait_until(lambda: _job_state(ledger) is JobState.RUNNING, seconds=300)
    yield clicks
    end_stream(STREAM)


def test_each_batch_time_of_a_down_time_has_its_records_once(clicks: Clicks) -> None:
    with ClickProducer(clicks.kafka, rate=40) as producer:
        wait_until(lambda: any(batch.records for batch in clicks.batches()), seconds=300)
        scheduler = clicks.airflow.components["scheduler"]
        scheduler.kill()
        down_from_ms = clicks.ledger.now_ms()
        job = clicks.ledger.jobs.current(STREAM)
        assert job is not None
        kill_session(job.attributes["pid"])
        sleep_through(DOWN)
        up_from_ms = clicks.ledger.now_ms()
        scheduler.start()
        assert producer.sent > 500
    clicks.settle()
    # The tests that follow ask for their runs.
    clicks.end_schedule()
    expected = clicks.batch_times()
    taken = clicks.taken()
    assert {(click.partition, click.offset): time for click, time in expected.items()} == taken
    times = set(taken.values())
    down = set(range(-(-down_from_ms // INTERVAL_MS) * INTERVAL_MS, up_from_ms, INTERVAL_MS))
    assert len(down) >= DOWN
    assert down <= times
    assert all(batch.late_records == 0 for batch in clicks.batches())
    documents = clicks.documents()
    assert {click.document_id: json.loads(click.value) for click in expected} == {
        name: json.loads(source) for name, (source, _, _) in documents.items()
    }


def test_batches_without_their_log_run_again_from_kafka_the_same(clicks: Clicks) -> None:
    before = clicks.documents()
    files = _files()
    batches = [batch for batch in clicks.batches() if batch.records]
    again = batches[2:6]
    assert all(batch.cleaned_at_ms for batch in again)
    backfill = clicks.api.backfill(
        f"{STREAM}_batches",
        _logical(again[0].batch_time_ms),
        _logical(again[-1].batch_time_ms),
        reprocess_behavior="completed",
        max_active_runs=2,
    )
    clicks.wait_for_backfill(backfill)
    for batch in again:
        after = clicks.ledger.batches.get(STREAM, batch.batch_time_ms)
        assert after.state is BatchState.COMPLETED
        assert after.attempt > batch.attempt, "it was run again"
        assert after.manifest_sha256 == batch.manifest_sha256
    assert clicks.documents() == before
    assert _files() == files


def test_ranges_that_retention_took_are_named_and_others_run(clicks: Clicks) -> None:
    before = clicks.documents()
    batches = [batch for batch in clicks.batches() if batch.records]
    gone, kept = batches[1], batches[-2]
    ends = {
        taken.partition.partition: taken.until_offset
        for taken in clicks.ledger.batches.inputs(STREAM, gone.batch_time_ms)
    }
    admin = AdminClient({"bootstrap.servers": clicks.kafka})
    deleted = admin.delete_records([TopicPartition(TOPIC, partition, end) for partition, end in ends.items()])
    for future in deleted.values():
        future.result(60)
    dag_id = f"{STREAM}_batches"
    # Any date inside the interval: its start has a run already.
    dates = [_logical(batch.batch_time_ms) + timedelta(milliseconds=7) for batch in (gone, kept)]
    _, of_kept = [clicks.api.trigger(dag_id, logical_date=date, conf={"reprocess": True}) for date in dates]
    clicks.api.wait_for_run(dag_id, of_kept, timeout=300)
    wait_until(lambda: _error(clicks, gone.batch_time_ms) is not None, seconds=300)
    error = _error(clicks, gone.batch_time_ms)
    assert error is not None
    for partition, end in ends.items():
        assert str(end) in error, partition
    assert TOPIC in error
    assert clicks.documents() == before


def _files() -> dict[str, int]:
    """How many rows the files of each batch have."""
    rows = pyarrow.dataset.dataset(os.environ["CLICKS_FILES"], partitioning="hive").to_table(columns=["batch_time"])
    return {str(entry["values"]): entry["counts"] for entry in rows.column("batch_time").value_counts().to_pylist()}


def _error(clicks: Clicks, batch_time_ms: int) -> str | None:
    return next(
        (row.error for row in clicks.ledger.attempts.outputs(STREAM, batch_time_ms) if row.error is not None), None
    )


def _logical(batch_time_ms: int) -> datetime:
    return datetime.fromtimestamp((batch_time_ms - INTERVAL_MS) / 1000, UTC)


def _job_state(ledger: Ledger) -> JobState | None:
    if STREAM not in {row.name for row in ledger.streams.all()}:
        return None
    job = ledger.jobs.current(STREAM)
    return None if job is None else job.state
