"""Sensors as Airflow calls them, on the stream, the ledger and the receiver job of the tests of readiness."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from uuid import uuid4

import pytest
from tests.unit.runs.readiness.conftest import clock, ledger, stream

from headrace.ledger import Ledger
from headrace.triggers import ledger as triggers

__all__ = ["clock", "ledger", "stream"]


@pytest.fixture(autouse=True)
def _defer_by_default(monkeypatch):
    """As the embedded stack and compose have it."""
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "True")


@pytest.fixture(autouse=True)
def _look_at_once_by_the_same_clock(monkeypatch, clock):
    """Sensors open the ledger themselves."""
    monkeypatch.setattr(Ledger, "open", partial(Ledger.open, clock=clock))
    monkeypatch.setattr(triggers, "FIRST_POLL_SECONDS", 0.0)


def context(logical_date: datetime | None = None, **run):
    run = SimpleNamespace(**{
        "logical_date": logical_date, "run_after": datetime.now(UTC), "data_interval_end": None, "run_id": "run",
        "conf": {}, "clear_number": 0, "run_type": "scheduled", "start_date": None, **run,
    })  # fmt: skip
    xcoms: dict[str, object] = {}
    return {"dag_run": run, "ti": SimpleNamespace(id=uuid4(), xcoms=xcoms, xcom_push=xcoms.__setitem__)}
