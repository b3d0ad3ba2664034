"""Batches run again into other places."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred

from headrace.errors import Failure
from headrace.ledger.errors import ReplayOrderError
from headrace.operators.replay_batch import ReplayBatchOperator
from headrace.operators.wal_spark_submit import BatchTaskError
from headrace.stream import KeyIds, RecordIds
from headrace.stream.stream import replayed
from headrace.timetables.micro_batch import from_ms


def run(stream, task, *, document_ids=None, **options) -> None:
    fields = {"index": "flights-v2", "document_ids": document_ids or RecordIds()}
    replay = replayed(stream, {"elasticsearch": fields}, transform="corrected:transform")
    ReplayBatchOperator(
        task_id="replay", stream=stream, replay=replay, target="v2", step="elasticsearch", **options
    ).execute(task.context)


def replays(ledger) -> list[tuple[int, str]]:
    return [(row.batch_time_ms, row.state.value) for row in ledger.replays.between("flights", "v2", 0, 1 << 60)]


def test_a_batch_goes_elsewhere_and_stays_as_it_is(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    before = ledger.batches.get("flights", at_ms)
    run(stream, task)
    assert replays(ledger) == [(at_ms, "completed")]
    assert ledger.batches.get("flights", at_ms).state is before.state
    (attempt,) = ledger.attempts.of_batch("flights", at_ms)
    assert attempt.target == "v2"
    assert "flights-v2" in attempt.definition


def test_a_retry_does_not_repeat_it_and_a_cleared_run_does(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    run(stream, task)
    run(stream, task.again(try_number=2))
    assert len(ledger.attempts.of_batch("flights", at_ms)) == 1
    run(stream, task.again(clear_number=1))
    assert len(ledger.attempts.of_batch("flights", at_ms)) == 2


def test_a_run_that_was_deleted_and_comes_again_by_the_same_id_replays_again(
    stream, allocated, toy_batch, connectable, ledger
):
    at_ms, task = allocated()
    run(stream, task)
    run(stream, task.again(started=datetime.now(UTC)))
    assert len(ledger.attempts.of_batch("flights", at_ms)) == 2


def test_a_replays_parameters_reach_its_process(stream, allocated, toy_batch, connectable, capsys):
    stream = stream.model_copy(update={"parameters": {"limit": 1}})
    _, task = allocated()
    run(stream, task.again(conf={"parameters": {"limit": 2}}))
    assert "parameters {'limit': 2}" in capsys.readouterr().out


def test_a_run_has_to_say_which_batch(stream, ledger, make_task):
    with pytest.raises(AirflowFailException, match="logical date"):
        run(stream, make_task(None))


def test_a_failure_is_the_replays_alone(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    toy_batch("fail")
    with pytest.raises(BatchTaskError):
        run(stream, task)
    assert replays(ledger) == [(at_ms, "failed")]
    assert ledger.batches.get("flights", at_ms).state.value == "allocated"


def test_batches_that_delete_by_key_are_replayed_in_their_order(stream, allocated, toy_batch, connectable, ledger):
    (first_ms, first), (second_ms, second) = allocated(), allocated()
    toy_batch("fail")
    with pytest.raises(BatchTaskError):
        run(stream, first, document_ids=KeyIds())
    with pytest.raises(TaskDeferred):
        run(stream, second, document_ids=KeyIds())
    toy_batch("ok")
    for task in (first, second):
        run(stream, task.again(clear_number=1), document_ids=KeyIds())
    assert replays(ledger) == [(first_ms, "completed"), (second_ms, "completed")]
    with pytest.raises(ReplayOrderError, match="with a new name of the replay") as refused:
        run(stream, first.again(clear_number=2), document_ids=KeyIds())
    assert refused.value.failure is Failure.FINAL


def test_a_renamed_output_is_replayed_in_order_with_the_batches_before_its_renaming(
    stream, allocated, toy_batch, connectable, ledger
):
    (first_ms, first), (second_ms, second) = allocated(), allocated()
    run(stream, second, document_ids=KeyIds())
    renamed = stream.outputs[0].model_copy(update={"id": "orders", "renamed_from": "elasticsearch"})
    stream = stream.model_copy(update={"outputs": (renamed,)})

    def replay(index, target="v2"):
        copied = replayed(
            stream, {"orders": {"index": index, "document_ids": KeyIds()}}, transform="corrected:transform"
        )
        return ReplayBatchOperator(task_id="r", stream=stream, replay=copied, target=target, step="orders")

    with pytest.raises(ReplayOrderError):
        replay("flights-v2").execute(first.context)
    replay("flights-v3").execute(first.context)
    assert replays(ledger) == [(first_ms, "completed"), (second_ms, "completed")]


def test_a_batch_without_records_is_replayed_without_spark(stream, allocated, connectable, ledger):
    plain = replayed(stream, {"elasticsearch": {"index": "flights-v2"}})
    at_ms, task = allocated(records=0)
    operator = ReplayBatchOperator(task_id="r", stream=stream, replay=plain, target="v2", step="elasticsearch")
    operator.execute(task.context)
    assert replays(ledger) == [(at_ms, "completed")]


def test_what_has_no_batch_of_its_own_is_skipped(stream, allocated, connectable, ledger, make_task):
    with pytest.raises(AirflowSkipException, match="not allocated"):
        run(stream, make_task(from_ms(1_700_000_000_000)))
    at_ms, task = allocated()
    ledger.batches.abandon("flights", at_ms, reason="lost")
    with pytest.raises(AirflowSkipException, match="abandoned"):
        run(stream, task)
    with pytest.raises(AirflowSkipException, match="does not ask"):
        replay = replayed(
            stream.model_copy(update={"outputs": (*stream.outputs, stream.outputs[0].model_copy(update={"id": "b"}))}),
            {"elasticsearch": {"index": "c"}, "b": {"index": "d"}},
        )
        ReplayBatchOperator(task_id="r", stream=stream, replay=replay, target="v2", step="elasticsearch").execute(
            task.again(conf={"outputs": ["b"]}).context
        )
