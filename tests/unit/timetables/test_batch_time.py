from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.timetables.batch_time import NoBatchTimeError, batch_time_ms, batch_time_of_run

TEN = timedelta(seconds=10)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp()) * 1000


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=ConsoleOutput(),
        batch_interval=TEN,
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


@pytest.fixture
def ledger(stream):
    with Ledger.open(stream.ledger) as opened:
        register(opened, stream)
        yield opened


@dataclass
class Run:
    logical_date: datetime | None = None
    data_interval_end: datetime | None = None
    run_after: datetime | None = None
    run_id: str = "manual__x"


def test_a_scheduled_runs_batch_is_the_end_of_its_interval():
    run = Run(NOON, NOON + TEN, NOON + TEN)
    assert batch_time_ms({"dag_run": run}, TEN) == NOON_MS + 10_000


def test_a_date_inside_an_interval_belongs_to_it():
    run = Run(NOON + timedelta(seconds=7), NOON + TEN, NOON)
    assert batch_time_ms({"dag_run": run}, TEN) == NOON_MS + 10_000


def test_the_date_asked_for_counts_where_airflow_inferred_the_interval_from_the_moment(caplog):
    later = NOON + timedelta(hours=3)
    with caplog.at_level(logging.WARNING):
        assert batch_time_ms({"dag_run": Run(NOON, later, later)}, TEN) == NOON_MS + 10_000
    assert "the latter counts" in caplog.text


def test_a_run_without_logical_date_has_its_batch_from_the_ledger(stream, ledger):
    context = {"dag_run": Run(run_after=NOON, run_id="asset_triggered__1")}
    first = batch_time_of_run(context, stream, ledger)
    assert first % stream.batch_interval_ms == 0
    assert batch_time_of_run(context, stream, ledger) == first


def test_a_date_needs_no_ledger(stream):
    assert batch_time_of_run({"dag_run": Run(NOON, NOON + TEN, NOON)}, stream, None) == NOON_MS + 10_000


def test_a_run_without_any_date_is_refused():
    with pytest.raises(NoBatchTimeError, match="logical date"):
        batch_time_ms({"dag_run": Run()}, TEN)
