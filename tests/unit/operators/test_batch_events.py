"""When a batch's asset event comes, by what a real ledger has of the batch."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from airflow.sdk.execution_time.context import OutletEventAccessors

from headrace.batch.run_request import RunIdentity
from headrace.ledger import Ledger
from headrace.operators.batch_events import batch_alias, batch_asset, emit_batch_event
from headrace.runs.batch_run import BatchRun
from headrace.stream_context import StreamContext

STREAM, AT_MS = "flights", 20_000
STARTED = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as opened:
        opened.streams.register(
            STREAM, "{}", batch_interval_ms=10_000, block_interval_ms=200, outputs=["elasticsearch", "lake"]
        )
        opened.allocations.allocate(STREAM, AT_MS, manifest_uri="m", manifest_sha256="0")
        yield opened


def attempt(ledger, *outputs, run_id="run", clear_number=0, ends=True, force=False, **attributes):
    begun = ledger.attempts.begin(
        STREAM,
        AT_MS,
        holder="test",
        way="submit",
        lease_ms=60_000,
        outputs=outputs or None,
        force=force,
        attributes={**RunIdentity(run_id, clear_number, STARTED.isoformat()).attributes, **attributes},
    )
    for output in begun.outputs:
        ledger.attempts.record_output(begun, output, {"indexed": 3})
    if ends:
        ledger.attempts.complete(begun, code_version="c0de")
    return begun


def emitted(ledger, run_id="run", clear_number=0) -> list:
    """The events of a checkpoint in this run."""
    context = {
        "dag_run": SimpleNamespace(run_id=run_id, clear_number=clear_number, start_date=STARTED),
        "outlet_events": OutletEventAccessors(),
    }
    stream_context = StreamContext(SimpleNamespace(name=STREAM, is_ordered=False), ledger)
    reported = emit_batch_event(BatchRun(context, stream_context, AT_MS))
    events = context["outlet_events"][batch_alias(STREAM)].asset_alias_events
    assert reported == [event.extra["batch_time_ms"] for event in events]
    return events


def test_the_event_of_a_completed_batch_has_its_numbers(ledger):
    attempt(ledger)
    (event,) = emitted(ledger)
    assert event.dest_asset_key.uri == batch_asset(STREAM).uri == "headrace://flights/batches"
    assert event.extra == {
        "stream": "flights",
        "batch_time": "1970-01-01T00:00:20+00:00",
        "batch_time_ms": 20_000,
        "interval_start_ms": 10_000,
        "interval_end_ms": 20_000,
        "absorbed_ms": [],
        "blocks": 0,
        "records": 0,
        "late_records": 0,
        "attempts": 1,
        "outputs": {"elasticsearch": {"indexed": 3}, "lake": {"indexed": 3}},
        "code_version": "c0de",
    }


def test_a_batch_that_is_not_complete_emits_no_event(ledger):
    assert emitted(ledger) == []
    begun = attempt(ledger, "elasticsearch")
    assert emitted(ledger) == []
    ledger.attempts.begin(STREAM, AT_MS, holder="test", way="submit", lease_ms=60_000)
    assert begun.number == 1
    assert emitted(ledger) == []


def test_a_batch_completes_where_a_cleared_run_writes_its_output(ledger):
    attempt(ledger, "elasticsearch")
    attempt(ledger, "lake", clear_number=1)
    assert len(emitted(ledger, clear_number=1)) == 1


def test_another_run_that_finds_the_batch_done_emits_no_event(ledger):
    attempt(ledger)
    assert emitted(ledger, run_id="another") == []


def test_a_cleared_run_emits_another_event_only_if_it_did_work(ledger):
    """It emits one only if it ran a step of the batch."""
    attempt(ledger)
    assert emitted(ledger, clear_number=1) == []
    attempt(ledger, clear_number=1, force=True)
    (event,) = emitted(ledger, clear_number=1)
    assert event.extra["attempts"] == 2
    assert emitted(ledger) == []


def test_a_batch_is_complete_if_its_attempt_died_after_recording(ledger):
    attempt(ledger, ends=False)
    with pytest.raises(Exception, match="completed"):
        attempt(ledger)
    assert len(emitted(ledger)) == 1


def test_a_run_emits_no_event_for_what_a_later_run_did_instead(ledger):
    attempt(ledger, run_id="the later one", repair=True)
    assert emitted(ledger) == []


def test_of_two_writing_runs_the_completing_one_emits_the_event(ledger):
    attempt(ledger, "elasticsearch")
    attempt(ledger, "lake", run_id="another")
    assert emitted(ledger) == []
    assert len(emitted(ledger, run_id="another")) == 1


def test_a_replay_is_no_batch_of_the_stream(ledger):
    attempt(ledger)
    definition = '{"outputs": [{"id": "elasticsearch"}]}'
    replay = ledger.replays.begin(
        STREAM, AT_MS, target="v2", definition=definition, outputs=["elasticsearch"], holder="test", way="submit",
        lease_ms=60_000, attributes={"run_id": "replay", "clear_number": 0},
    )  # fmt: skip
    ledger.attempts.record_output(replay, "elasticsearch", {"indexed": 9})
    ledger.attempts.complete(replay)
    assert emitted(ledger, run_id="replay") == []
    (event,) = emitted(ledger)
    assert event.extra["outputs"]["elasticsearch"] == {"indexed": 3}
