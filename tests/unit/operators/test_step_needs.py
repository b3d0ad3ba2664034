from __future__ import annotations

import pytest

from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.runs.batch_run import needs_of
from headrace.stream import ConsoleOutput, Window


@pytest.fixture
def windowed(stream):
    window = Window(length="1 s", slide="1 s")
    return stream.model_copy(update={"outputs": (stream.outputs[0].model_copy(update={"window": window}),)})


def test_records_need_spark_and_none_need_nothing(stream, allocated, ledger):
    at_ms, _ = allocated(records=0)
    needs = needs_of(ledger, stream, at_ms, stream.steps)
    assert (needs.spark, needs.process, needs.counts) == (False, False, {"elasticsearch": {"records": 0}})
    at_ms, _ = allocated()
    assert needs_of(ledger, stream, at_ms, stream.steps).spark


def test_a_batch_without_records_completes_for_a_renamed_output(stream, allocated, ledger, connectable):
    renamed = stream.outputs[0].model_copy(update={"id": "orders", "renamed_from": "elasticsearch"})
    renamed_stream = stream.model_copy(update={"outputs": (renamed,)})
    at_ms, task = allocated(records=0)
    WalSparkSubmitOperator(task_id="generate", stream=renamed_stream, step="orders").execute(task.context)
    assert ledger.batches.get("flights", at_ms).state == "completed"


def test_state_always_does(stream, allocated, ledger):
    at_ms, _ = allocated(records=0)
    assert needs_of(ledger, stream, at_ms, ["state"]).spark


def test_a_console_has_its_heading_from_a_plain_process(stream, allocated, ledger):
    printed = stream.model_copy(update={"outputs": (ConsoleOutput(),)})
    at_ms, _ = allocated(records=0)
    needs = needs_of(ledger, printed, at_ms, printed.steps)
    assert (needs.spark, needs.process) == (False, True)


def test_between_two_slides_a_window_is_left_out_without_spark(windowed, stream, allocated, connectable, ledger):
    at_ms, task = allocated()
    while at_ms % 1000 == 0:
        # A window ends with this one; unfinished it would come first.
        ledger.batches.abandon("flights", at_ms, "not this one")
        at_ms, task = allocated()
    WalSparkSubmitOperator(task_id="generate", stream=windowed, step="elasticsearch").execute(task.context)
    (row,) = ledger.attempts.outputs("flights", at_ms)
    assert "no window ends" in row.counts["skipped"]
