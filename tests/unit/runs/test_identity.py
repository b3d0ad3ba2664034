"""Runs by more than their ids, as Airflow's contexts tell of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace

from headrace.runs.identity import RunIdentity, run_identity

START = datetime(2026, 11, 21, 14, tzinfo=UTC)


def identity(start=START, *, clear_number=0) -> RunIdentity:
    run = SimpleNamespace(run_id="backfill__1", clear_number=clear_number, start_date=start)
    return run_identity({"dag_run": run})


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


def test_an_attempt_without_the_start_of_its_run_is_recognised_by_the_runs_id():
    assert identity().made({"run_id": "backfill__1", "clear_number": 0})
    assert identity(None).made(identity().attributes)
