"""Runs by more than their ids, as Airflow's contexts tell of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from uuid import UUID, uuid4

from headrace.runs.identity import RunIdentity, run_identity

START = datetime(2026, 11, 21, 14, tzinfo=UTC)
START_MS = int(START.timestamp() * 1000)


def identity(start=START, *, made_ms=None, clear_number=0) -> RunIdentity:
    ti = SimpleNamespace(id=uuid4() if made_ms is None else UUID(int=(made_ms << 80) | (7 << 76) | (2 << 62)))
    run = SimpleNamespace(run_id="backfill__1", clear_number=clear_number, start_date=start)
    return run_identity({"dag_run": run, "ti": ti})


def test_a_run_knows_its_own_attempts():
    assert identity().made(identity(START.astimezone(timezone(timedelta(hours=2)))).attributes)
    assert not identity().made({**identity().attributes, "run_id": "backfill__2"})
    assert not identity().made({})


def test_another_run_of_the_same_id_began_at_another_time():
    assert not identity().made(identity(START + timedelta(days=30)).attributes)


def test_a_cleared_run_knows_in_which_clear_an_attempt_was_made():
    first, second = identity(), identity(START + timedelta(hours=1), clear_number=1)
    assert second.clear_of(first.attributes) == 0
    assert not second.made(first.attributes)
    assert first.clear_of(second.attributes) is None


def test_an_attempt_that_does_not_tell_when_its_run_began_is_known_by_the_id():
    assert identity().made({"run_id": "backfill__1", "clear_number": 0})
    assert identity(None).made(identity().attributes)


def test_a_run_was_there_when_its_task_was_made_though_it_began_later():
    waited = identity(made_ms=START_MS - 60_000)
    assert waited.existed(START_MS - 60_000)
    assert not waited.existed(START_MS - 60_001)
    # A task that is tried again has another id.
    assert identity(made_ms=START_MS + 60_000).existed(START_MS)
    assert not identity().existed(START_MS - 1)
