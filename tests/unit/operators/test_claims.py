from __future__ import annotations

from types import SimpleNamespace

import pytest
from airflow.sdk.execution_time import task_runner

from headrace.operators.claims import MOST_AT_ONCE, claim, ended_without_a_batch
from headrace.timetables.micro_batch import from_ms, to_ms

T = 1_700_000_000_000


@pytest.fixture
def sent(monkeypatch):
    messages = []
    comms = SimpleNamespace(send=messages.append)
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", comms, raising=False)
    return messages


def context(having: tuple[int, ...] = (), active: tuple[int, ...] = ()):
    def get_dr_count(*, dag_id, logical_dates, states=None):
        assert dag_id == "flights_batches"
        return sum(to_ms(date) in (having if states is None else active) for date in logical_dates)

    return {"ti": SimpleNamespace(dag_id="flights_batches", run_id="run", get_dr_count=get_dr_count)}


def test_each_time_gets_the_run_that_the_schedule_would_have_given_it(sent):
    assert claim(context(), [T, T + 10_000], 10_000) == [T, T + 10_000]
    first = sent[0]
    assert first.dag_id == "flights_batches"
    assert first.run_id == "claimed__2023-11-14T22:13:20+00:00"
    # The data interval is inferred from run_after, the batch time from the logical date.
    assert first.logical_date == first.run_after == from_ms(T - 10_000)


def test_a_time_that_has_a_run_is_left_to_it(sent):
    assert claim(context(having=(T - 10_000,)), [T, T + 10_000], 10_000) == [T + 10_000]
    assert len(sent) == 1


def test_one_task_does_not_create_runs_without_end(sent):
    times = [T + n * 10_000 for n in range(MOST_AT_ONCE * 2)]
    assert claim(context(), times, 10_000) == times[:MOST_AT_ONCE]


def test_a_time_whose_run_is_over_gets_no_other_and_is_named():
    """It failed before it could allocate: Airflow refuses another run of its date."""
    having = (T - 10_000, T)
    asked = context(having=having, active=(T,))
    assert ended_without_a_batch(asked, [T, T + 10_000, T + 20_000], 10_000) == [T]
