"""Waits for other batches of the stream that take up its slots."""

# ruff: noqa: PLR0917 - fixtures are asked for by argument
from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.sdk.exceptions import TaskDeferred
from tests.unit.operators.wal_spark_submit.conftest import make

from headrace.ledger.errors import SlotBusyError


def test_other_batches_in_the_slot_are_waited_for_deferred(stream, allocated, toy_batch, connectable, ledger):
    first, _ = allocated()
    at_ms, task = allocated()
    other = ledger.attempts.begin("flights", first, holder="other", way="connect", lease_ms=60_000)
    operator = make(stream)
    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(task.context)
    assert waiting.value.method_name == "slot_may_be_free"
    ledger.attempts.fail(other, "over")
    operator.slot_may_be_free(task.context, **waiting.value.kwargs)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"


def test_other_batches_in_the_slot_are_waited_for_in_place_where_tasks_are_not_deferred(
    stream, allocated, toy_batch, connectable, ledger, capsys, monkeypatch
):
    first, _ = allocated()
    at_ms, task = allocated()
    other = ledger.attempts.begin("flights", first, holder="another run", way="connect", lease_ms=60_000)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            ledger.attempts.fail(other, "over")

    monkeypatch.setattr("headrace.operators.spark_attempt.time.sleep", sleep)
    make(stream, deferrable=False, slot_poll=timedelta(milliseconds=100)).execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"
    assert slept == [0.1] * 3
    assert capsys.readouterr().out.count("another run") == 1, "why it waits is said once"


def test_a_wait_in_place_for_the_slot_ends_after_the_slot_timeout(stream, allocated, toy_batch, connectable, ledger):
    first, _ = allocated()
    _, task = allocated()
    ledger.attempts.begin("flights", first, holder="other", way="connect", lease_ms=60_000)
    operator = make(
        stream, deferrable=False, slot_poll=timedelta(milliseconds=10), slot_timeout=timedelta(milliseconds=30)
    )
    with pytest.raises(SlotBusyError, match="other"):
        operator.execute(task.context)


def test_a_deferred_wait_for_the_slot_ends_after_the_slot_timeout(stream, allocated, toy_batch, connectable, ledger):
    first, _ = allocated()
    _, task = allocated()
    ledger.attempts.begin("flights", first, holder="other", way="connect", lease_ms=60_000)
    with pytest.raises(TaskDeferred) as waiting:
        make(stream).execute(task.context)
    with pytest.raises(SlotBusyError, match="other"):
        make(stream).slot_may_be_free(task.context, **{**waiting.value.kwargs, "waited": 10_000.0})
