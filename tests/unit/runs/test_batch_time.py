from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from headrace.clock import ManualClock
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.runs.batch_run import (
    NoBatchTimeError,
    NothingToRun,
    batch_time_of_run,
    begin_run,
    end_of_interval_ms,
)
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

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


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON_MS)


@dataclass
class Run:
    logical_date: datetime | None = None
    data_interval_end: datetime | None = None
    run_after: datetime | None = None
    run_id: str = "manual__x"
    run_type: str = "manual"
    clear_number: int = 0


def test_a_scheduled_runs_batch_is_the_end_of_its_interval():
    run = Run(NOON, NOON + TEN, NOON + TEN)
    assert end_of_interval_ms({"dag_run": run}, TEN) == NOON_MS + 10_000


def test_a_date_inside_an_interval_belongs_to_it():
    run = Run(NOON + timedelta(seconds=7), NOON + TEN, NOON)
    assert end_of_interval_ms({"dag_run": run}, TEN) == NOON_MS + 10_000


def test_the_asked_date_counts_if_airflow_inferred_the_interval(caplog):
    later = NOON + timedelta(hours=3)
    with caplog.at_level(logging.WARNING):
        assert end_of_interval_ms({"dag_run": Run(NOON, later, later)}, TEN) == NOON_MS + 10_000
    assert "The logical date counts" in caplog.text


def test_a_run_without_logical_date_has_the_ledgers_batch(stream, ledger):
    context = {"dag_run": Run(run_after=NOON, run_id="asset_triggered__1")}
    first = batch_time_of_run(context, StreamContext(stream, ledger))
    assert first % stream.batch_interval_ms == 0
    assert batch_time_of_run(context, StreamContext(stream, ledger)) == first


def test_scheduled_runs_get_the_ledgers_time_others_their_date(stream, clock):
    """The run's own interval ended half a minute ago: a batch that is late takes over what has come since."""
    clock.advance(40_500)
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        register(ledger, stream)

        def begin(run_type: str, stream: Stream = stream, **fields) -> int:
            run = Run(NOON, NOON + TEN, NOON + TEN, run_id=f"{run_type}__{stream.coalesce}", run_type=run_type)
            taken = begin_run({"dag_run": run}, StreamContext(stream, ledger))
            # Every later task of the run finds the same.
            assert batch_time_of_run({"dag_run": run}, StreamContext(stream, ledger)) == taken
            return taken

        exact = stream.model_copy(update={"coalesce": False})
        by_timestamp = stream.model_copy(update={"batch_by": "timestamp"})
        own = NOON_MS + 10_000
        assert begin("scheduled") == NOON_MS + 40_000
        assert [begin(kind) for kind in ("manual", "backfill")] == [own, own]
        assert [begin("scheduled", other) for other in (exact, by_timestamp)] == [own, own]


def test_a_run_takes_no_time_ahead_of_its_own_host(stream, clock, caplog):
    """The clocks differ meanwhile."""
    host = ManualClock(clock.now_ms() + 20_500)
    clock.advance(600_000)
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        register(ledger, stream)
        run = Run(NOON, NOON + TEN, NOON + TEN, run_id="scheduled__1", run_type="scheduled")
        with caplog.at_level(logging.WARNING):
            assert begin_run({"dag_run": run}, StreamContext(stream, ledger, clock=host)) == NOON_MS + 20_000
    assert "differ. The earlier one counts" in caplog.text


@pytest.mark.parametrize(
    ("ledger_is_at", "waited"),
    [
        pytest.param(9.3, [0.7], id="for the end of its interval"),
        pytest.param(10.2, [], id="not, because its interval has ended"),
        pytest.param(4.0, [1.0], id="for a second, because the ledger's clock is 5 s behind"),
    ],
)
def test_a_run_that_began_a_second_ahead_waits(stream, clock, monkeypatch, ledger_is_at, waited):
    clock.advance(round(ledger_is_at * 1000))
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(round(seconds * 1000))

    # Of this module only: threads that another test has left would sleep by it too.
    monkeypatch.setattr("headrace.runs.batch_run.time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        register(ledger, stream)
        ahead = Run(NOON, NOON + TEN, NOON + timedelta(seconds=9), run_type="scheduled")
        # The ledger gives it the batch time of its own interval.
        assert begin_run({"dag_run": ahead}, StreamContext(stream, ledger)) == NOON_MS + 10_000
        # A person's run of the same interval does not wait.
        begin_run({"dag_run": replace(ahead, run_id="manual__2", run_type="manual")}, StreamContext(stream, ledger))
    assert slept == waited


def test_a_run_that_has_no_batch_says_so(stream, clock):
    clock.advance(12_000)
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        register(ledger, stream)
        ledger.allocations.seal("flights", NOON_MS + 10_000)
        run = Run(NOON, NOON + TEN, NOON + TEN, run_type="scheduled")
        with pytest.raises(NothingToRun, match="taken this batch time over"):
            begin_run({"dag_run": run}, StreamContext(stream, ledger))


def test_a_run_without_any_date_is_refused():
    with pytest.raises(NoBatchTimeError, match="logical date"):
        end_of_interval_ms({"dag_run": Run()}, TEN)
