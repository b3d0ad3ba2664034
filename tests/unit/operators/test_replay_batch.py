# ruff: noqa: PLR0917 - fixtures are asked for by argument
"""Batches run again: into other places, and a range of them into the stream's own."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred

from headrace.batch.time_range import TimeRange
from headrace.errors import Failure
from headrace.hooks.ledger import register
from headrace.ledger.errors import ReplayOrderError
from headrace.operators.replay_batch import RepeatBatchesOperator, ReplayBatchOperator
from headrace.operators.wal_spark_submit import BatchTaskError
from headrace.stream import KeyIds, RecordIds
from headrace.stream.stream import replayed
from headrace.timetables.micro_batch import from_ms
from headrace.wal.errors import StorageError


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


def test_a_run_that_was_deleted_and_comes_again_replays_again(stream, allocated, toy_batch, connectable, ledger):
    """The run comes again by the same id."""
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


def test_a_renamed_outputs_replay_includes_batches_from_before(stream, allocated, toy_batch, connectable, ledger):
    """Its batches from before the renaming are replayed in order with the others."""
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


@pytest.fixture
def day(stream, source, allocated, make_task, ledger):
    """Five batches, and the task of a run for their range."""

    def make(number=5, **options):
        times = [allocated()[0] for _ in range(number)]
        span = {"from": from_ms(times[0] - 200).isoformat(), "until": from_ms(times[-1]).isoformat()}
        return times, make_task(None, {**span, **options}, run_id="day", run_type="manual")

    return make


def test_one_run_replays_all_batches_of_a_range(stream, day, toy_batch, connectable, ledger):
    times, task = day()
    assert run_range(stream, task)["completed"] == 5
    assert task.xcoms["range"] == {
        "batches": 5, "completed": 5, "failed": 0, "left": 0, "left_out": 0, "records": 15,
    }  # fmt: skip
    assert replays(ledger) == [(at_ms, "completed") for at_ms in times]
    (attempt,) = ledger.attempts.of_batch("flights", times[3])
    assert (attempt.holder, attempt.run_id) == ("airflow:flights_batches/day/task/1", "day")
    # What a run has done is not done again by a retry, and is by a run that was cleared.
    run_range(stream, task.again(run_id="day", try_number=2))
    assert len(ledger.attempts.of_batch("flights", times[0])) == 1
    run_range(stream, task.again(run_id="day", clear_number=1))
    assert {len(ledger.attempts.of_batch("flights", at_ms)) for at_ms in times} == {2}


def test_a_failed_batch_of_a_range_is_named_and_retried_alone(stream, day, toy_batch, connectable, ledger):
    times, task = day()
    toy_batch(f"fail@{times[1]}")
    with pytest.raises(BatchTaskError, match=r"4 of 5 batches.*1 have failed.*the transform said no") as failed:
        run_range(stream, task)
    assert failed.value.failure is Failure.PASSING
    assert task.xcoms["range"]["failed"] == 1
    toy_batch("ok")
    assert run_range(stream, task.again(run_id="day", try_number=2))["completed"] == 5
    assert [len(ledger.attempts.of_batch("flights", at_ms)) for at_ms in times] == [1, 2, 1, 1, 1]


def test_a_range_whose_process_was_killed_goes_on_with_the_rest(stream, day, toy_batch, connectable, ledger):
    times, task = day()
    toy_batch(f"killed@{times[2]}")
    with pytest.raises(BatchTaskError, match="2 of 5 batches are done"):
        run_range(stream, task)
    assert not ledger.attempts.running("flights")
    toy_batch("ok")
    run_range(stream, task.again(run_id="day", try_number=2))
    assert replays(ledger) == [(at_ms, "completed") for at_ms in times]
    assert [len(ledger.attempts.of_batch("flights", at_ms)) for at_ms in times] == [1, 1, 2, 1, 1]


def test_a_cleared_run_goes_on_with_its_incomplete_range(stream, day, toy_batch, connectable, ledger):
    times, task = day(3)
    toy_batch(f"fail@{times[1]}")
    with pytest.raises(BatchTaskError):
        run_range(stream, task)
    toy_batch("ok")
    run_range(stream, task.again(run_id="day", clear_number=1))
    assert [len(ledger.attempts.of_batch("flights", at_ms)) for at_ms in times] == [1, 2, 1]
    run_range(stream, task.again(run_id="day", clear_number=2))
    assert [len(ledger.attempts.of_batch("flights", at_ms)) for at_ms in times] == [2, 3, 2]


def with_copy(stream):
    """The stream with a second output."""
    return stream.model_copy(
        update={"outputs": (*stream.outputs, stream.outputs[0].model_copy(update={"id": "copy", "index": "copy"}))}
    )


def test_each_output_of_a_cleared_replay_has_its_own_range(stream, day, toy_batch, connectable, ledger):
    """Each output goes on with that range."""
    both = with_copy(stream)
    replay = replayed(both, {"elasticsearch": {"index": "c"}, "copy": {"index": "d"}})
    register(ledger, both)

    def run_output(step, task):
        ReplayBatchOperator(task_id=step, stream=both, replay=replay, target="v2", step=step).execute(task.context)

    def attempts(step):
        found = [ledger.attempts.of_batch("flights", at_ms) for at_ms in times]
        return [sum(row.outputs == (step,) for row in rows) for rows in found]

    times, task = day(3)
    run_output("elasticsearch", task)
    toy_batch(f"fail@{times[1]}")
    with pytest.raises(BatchTaskError):
        run_output("copy", task)
    toy_batch("ok")
    cleared = task.again(run_id="day", clear_number=1)
    run_output("elasticsearch", cleared)
    run_output("copy", cleared)
    assert attempts("elasticsearch") == [2, 2, 2], "it had completed the range"
    assert attempts("copy") == [1, 2, 1]


def test_a_retry_also_writes_an_output_that_the_stream_got_since(stream, day, toy_batch, connectable, ledger):
    times, task = day(3)
    complete(ledger, *times)
    toy_batch(f"fail@{times[2]}")
    with pytest.raises(BatchTaskError):
        run_again(stream, task)
    toy_batch("ok")
    both = with_copy(stream)
    register(ledger, both)
    assert run_again(both, task.again(run_id="day", try_number=2))["completed"] == 3
    for at_ms in times:
        assert {row.output_id for row in ledger.attempts.outputs("flights", at_ms)} == {"elasticsearch", "copy"}


@pytest.mark.usefixtures("connectable")
@pytest.mark.parametrize("into", ["another index", "the stream's own"])
def test_batches_that_come_while_a_range_runs_are_not_in_it(stream, day, allocated, toy_batch, ledger, into):
    run_it = run_range if into == "another index" else run_again
    times, task = day(3, until="2100-01-01")
    complete(ledger, *times[:2])
    toy_batch(f"fail@{times[0]}")
    with pytest.raises(BatchTaskError):
        run_it(stream, task)
    toy_batch("ok")
    # Its own run completes the third batch only now, and a fourth comes.
    later = allocated()[0]
    complete(ledger, times[2], later)
    numbers = run_it(stream, task.again(run_id="day", try_number=2))
    in_it = 3 if into == "another index" else 2
    assert (numbers["completed"], numbers["left"], numbers["left_out"]) == (in_it, 0, 4 - in_it)
    # Another run has them all.
    assert run_it(stream, task.again(run_id="another"))["completed"] == 4


def test_a_batch_written_completely_during_a_range_is_left_out(stream, day, toy_batch, connectable, ledger):
    both = with_copy(stream)
    times, task = day(3)
    register(ledger, both)
    complete(ledger, *times[:2], outputs=("elasticsearch", "copy"))
    complete(ledger, times[2])
    toy_batch(f"fail@{times[0]}")
    with pytest.raises(BatchTaskError):
        run_again(both, task)
    toy_batch("ok")
    complete(ledger, times[2], outputs=("copy",))
    numbers = run_again(both, task.again(run_id="day", try_number=2))
    assert (numbers["completed"], numbers["left"], numbers["left_out"]) == (2, 0, 1)


def test_a_batch_that_another_run_repeats_stays_in_the_range(stream, day, toy_batch, connectable, ledger):
    """Also if a failed attempt had written one of its outputs first."""
    both = with_copy(stream)
    times, task = day(2)
    register(ledger, both)
    complete(ledger, times[0], outputs=("elasticsearch", "copy"))
    attempt = ledger.attempts.begin("flights", times[1], holder="own run", way="connect", lease_ms=30_000)
    ledger.attempts.record_output(attempt, "elasticsearch", {"indexed": 3})
    ledger.attempts.fail(attempt, "copy said no")
    complete(ledger, times[1], outputs=("copy",))
    toy_batch(f"fail@{times[0]}")
    with pytest.raises(BatchTaskError):
        run_again(both, task)
    toy_batch("ok")
    complete(ledger, times[1], outputs=("elasticsearch", "copy"), force=True)
    assert run_again(both, task.again(run_id="day", try_number=2))["completed"] == 2


def test_the_execution_timeout_ends_the_process_of_a_range(stream, day, toy_process, connectable, ledger, expire):
    times, task = day(2)
    complete(ledger, *times)
    toy_process("hang")
    operator = RepeatBatchesOperator(task_id="run_again", stream=stream)
    expire(operator, task)
    assert not ledger.attempts.running("flights")


def test_a_range_does_not_begin_with_another_runs_batch(stream, day, toy_batch, connectable, ledger):
    """The other run is running that batch."""
    times, task = day(2)
    fields = {"target": "v2", "definition": stream.to_json(), "outputs": ["elasticsearch"], "way": "connect"}
    ledger.replays.begin("flights", times[0], holder="another run", lease_ms=1_500, **fields)
    run_range(stream, task)
    first, second = (ledger.attempts.of_batch("flights", at_ms)[-1] for at_ms in times)
    assert second.started_at_ms < first.started_at_ms


def test_a_changed_definition_begins_a_range_again(stream, day, toy_batch, connectable, ledger):
    times, task = day(2)
    run_range(stream, task)
    run_range(stream, task.again(run_id="day", try_number=2), index="flights-v3")
    assert [len(ledger.attempts.of_batch("flights", at_ms)) for at_ms in times] == [2, 2]


def test_a_range_over_a_deployment_is_written_by_one_definition(stream, day, toy_batch, connectable, ledger):
    times, task = day(3)
    register(ledger, stream)
    complete(ledger, *times)
    other = stream.model_copy(update={"outputs": (stream.outputs[0].model_copy(update={"transform": "shop:new"}),)})
    toy_batch(f"fail@{times[1]}")
    with pytest.raises(BatchTaskError, match="2 of 3 batches are done"):
        run_again(stream, task)
    with pytest.raises(BatchTaskError, match="2 of 3 batches are done"):
        run_again(other, task.again(run_id="day", try_number=2))
    toy_batch("ok")
    # Back to the first definition, after the second one has written some of the batches.
    assert run_again(stream, task.again(run_id="day", try_number=3))["completed"] == 3
    written = [ledger.attempts.of_batch("flights", at_ms)[-1] for at_ms in times]
    assert {(row.revision, row.attributes["try_number"]) for row in written} == {(1, 3)}


@pytest.mark.usefixtures("toy_batch", "connectable")
def test_a_range_writes_the_results_of_its_batches(stream, day, ledger, monkeypatch):
    times, task = day(3)
    complete(ledger, *times)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr("headrace.batch.results.write_results", refuse)
        run_range(stream, task)
    assert ledger.results.written("flights") == {}
    # The next try has nothing else to do.
    run_range(stream, task.again(run_id="day", try_number=2))
    assert list(ledger.results.written("flights")) == times
    assert ledger.results.behind("flights") == []


def test_a_replay_of_one_batch_writes_its_result(stream, allocated, toy_batch, connectable, ledger):
    at_ms, task = allocated()
    complete(ledger, at_ms)
    run(stream, task)
    assert list(ledger.results.written("flights")) == [at_ms]
    assert ledger.results.behind("flights") == []


def refuse(*_, **__):
    raise StorageError("the disk is full")


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"from": "2026-11-20T00:00:00Z"}, "are not a range of batches.*is a day"),
        ({"from": "2026-11-21T00:00:00Z", "until": "2026-11-20T00:00:00Z"}, "are not a range of batches"),
        ({"from": "yesterday", "until": "today"}, "from must be a time in ISO 8601, not 'yesterday'"),
        ({"form": "2026-11-20T00:00:00Z"}, "Did you mean 'from'"),
        ({"from": "2020-11-20", "until": "2020-11-21"}, "no batch to run in 2020-11-20T00:00:00Z until"),
    ],
)
def test_a_range_that_cannot_be_run_says_what_to_do(stream, connectable, make_task, conf, why):
    with pytest.raises(AirflowFailException, match=why):
        run_range(stream, make_task(None, conf))


def run_range(stream, task, index="flights-v2"):
    replay = replayed(stream, {"elasticsearch": {"index": index}})
    operator = ReplayBatchOperator(task_id="r", stream=stream, replay=replay, target="v2", step="elasticsearch")
    return operator.execute(task.context)


def run_again(stream, task):
    return RepeatBatchesOperator(task_id="run_again", stream=stream).execute(task.context)


def complete(ledger, *times, outputs=("elasticsearch",), force=False):
    for at_ms in times:
        attempt = ledger.attempts.begin(
            "flights", at_ms, holder="own run", way="connect", lease_ms=30_000, outputs=outputs, force=force
        )
        for output in outputs:
            ledger.attempts.record_output(attempt, output, {"indexed": 3})
        ledger.attempts.complete(attempt)


def test_one_run_runs_the_completed_batches_of_a_range_again(stream, day, toy_batch, connectable, ledger):
    times, task = day()
    complete(ledger, *times[:4])
    assert run_again(stream, task) == {
        "batches": 4, "completed": 4, "failed": 0, "left": 0, "left_out": 1, "records": 12,
    }  # fmt: skip
    assert [len(ledger.attempts.of_batch("flights", at_ms)) for at_ms in times] == [2, 2, 2, 2, 0]
    assert {ledger.batches.get("flights", at_ms).state.value for at_ms in times[:4]} == {"completed"}
    assert run_again(stream, task.again(run_id="day", try_number=2))["completed"] == 4
    assert len(ledger.attempts.of_batch("flights", times[0])) == 2


@pytest.mark.usefixtures("toy_batch", "connectable")
@pytest.mark.parametrize("number", [2, 3])
def test_a_range_of_an_ordered_stream_runs_again_in_order(stream, day, ledger, monkeypatch, capsys, number):
    # The third batch is due, and is not run here.
    monkeypatch.setattr("headrace.batch.next_attempt.GIVE_WAY_SECONDS", 0.1)
    stream = stream.model_copy(update={"outputs": (stream.outputs[0].model_copy(update={"document_ids": KeyIds()}),)})
    assert stream.is_ordered
    times, task = day(number)
    register(ledger, stream)
    complete(ledger, *times[:2])
    task.dag_run.conf["until"] = from_ms(times[1]).isoformat()
    assert run_again(stream, task)["completed"] == 2
    assert ("may come back with an older value" in capsys.readouterr().out) == (number == 3)
    began = [ledger.attempts.of_batch("flights", at_ms)[-1].started_at_ms for at_ms in times[:2]]
    assert began == sorted(began)


def test_a_run_without_a_range_says_how_to_give_one(stream, connectable, make_task):
    with pytest.raises(AirflowFailException, match="has no range"):
        run_again(stream, make_task(None))


def test_a_replay_in_order_behind_a_range_waits_deferred(stream, allocated, toy_batch, connectable, ledger):
    """The range may take hours, and the task has no worker meanwhile."""
    (first_ms, first), (second_ms, second) = allocated(), allocated()
    toy_batch("fail")
    with pytest.raises(BatchTaskError):
        run(stream, first, document_ids=KeyIds())
    (row,) = ledger.attempts.of_batch("flights", first_ms)
    of_range = {"outputs": ("elasticsearch",), "ordered": ("elasticsearch",), "way": "connect", "lease_ms": 60_000}
    ledger.replays.begin(
        "flights", first_ms, target="v2", definition=row.definition, holder="range",
        attributes=TimeRange(0, second_ms, "another run").attributes, **of_range,
    )  # fmt: skip
    with pytest.raises(TaskDeferred):
        run(stream, second, document_ids=KeyIds())
