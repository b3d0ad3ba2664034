"""What a run asks for, and runs that are known by more than their ids, as Airflow's contexts tell of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from airflow.sdk.definitions.param import process_params
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError

from headrace.batch.run_request import RunIdentity, RunRequest
from headrace.dags import batch_dag, receiver_dag, replay_dag
from headrace.runs.batch_run import run_identity, run_request
from headrace.stream import ConsoleOutput, KafkaInput, State, Stream

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


def test_an_attempt_without_its_runs_start_is_known_by_the_id():
    """The id is that of the run."""
    assert identity().made({"run_id": "backfill__1", "clear_number": 0})
    assert identity(None).made(identity().attributes)


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=(ConsoleOutput(id="one"), ConsoleOutput(id="two")),
        state=State(update="m:f", fields="k STRING", keys="k"),
        parameters={"limit": 3},
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


def run(conf=None, *, run_type="manual", clear_number=2) -> SimpleNamespace:
    started = datetime(2026, 1, 1, tzinfo=UTC)
    return SimpleNamespace(run_id="run", clear_number=clear_number, run_type=run_type, conf=conf, start_date=started)


def ask(stream, conf=None, *, params=None, **fields) -> RunRequest:
    return run_request({"dag_run": run(conf, **fields), "params": params or {}}, stream)


def as_airflow_merges(dag, conf, *, task_id=None):
    """The context of the DAG's first task, or of this one, with the params that Airflow makes of the run's conf."""
    task = dag.get_task(task_id) if task_id else dag.roots[0]
    params = process_params(dag, task, conf, suppress_exception=False)
    return {"dag_run": run(conf), "dag": dag, "task": task, "params": params}


def test_a_run_that_asks_for_nothing(stream):
    readiness = ask(stream, run_type="scheduled", clear_number=None)
    assert readiness == RunRequest(RunIdentity("run", 0, "2026-01-01T00:00:00+00:00"))
    assert readiness.wants("one")
    assert readiness.attributes == {"run_id": "run", "clear_number": 0, "run_started": "2026-01-01T00:00:00+00:00"}


def test_a_backfills_run_is_known_by_its_type(stream):
    assert ask(stream, run_type="backfill").is_backfill


def test_conf_and_params_say_the_same(stream):
    asked = {"reprocess": True, "outputs": ["one"], "parameters": {"limit": 5}, "from_kafka": True}
    assert ask(stream, asked) == ask(stream, params=asked)
    readiness = ask(stream, asked)
    assert (readiness.reprocess, readiness.outputs, readiness.parameters, readiness.from_kafka) == (
        True,
        ("one",),
        {"limit": 5},
        True,
    )
    assert readiness.attributes["parameters"] == {"limit": 5}


def test_a_renamed_output_is_asked_for_by_its_present_id(stream):
    renamed = ConsoleOutput(id="screen", renamed_from="one")
    stream = stream.model_copy(update={"outputs": (renamed, stream.outputs[1])})
    assert ask(stream, {"outputs": ["screen"]}).outputs == ("one",)
    with pytest.raises(AirflowFailException, match=r"no output 'one'\. Its outputs are state, screen, two"):
        ask(stream, {"outputs": ["one"]})


def test_the_forms_empty_fields_ask_for_all(stream):
    readiness = ask(stream, {"outputs": [], "parameters": {}})
    assert (readiness.outputs, readiness.parameters) == (None, None)


def test_state_is_updated_for_any_asked_outputs_but_not_again(stream):
    readiness = ask(stream, {"outputs": ["two"]})
    assert [step for step in stream.steps if readiness.wants(step)] == ["state", "two"]
    assert [step for step in stream.steps if readiness.may_repeat(step)] == ["two"]


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"outputs": ["three"]}, "no output 'three'. Its outputs are state, one, two"),
        ({"outputs": "one"}, "no output 'one'. Its outputs"),
        ({"outputs": [["one"]]}, "no output"),
        ({"parameters": {"other": 1}}, "no parameter other. Its parameters are limit"),
        ({"parameters": [1]}, "must be an object"),
        ({"reprocess": "false"}, "reprocess must be true or false"),
        ({"from_kafka": 1}, "from_kafka must be true or false"),
    ],
)
def test_what_the_stream_has_not_is_refused_for_good(stream, conf, why):
    with pytest.raises(AirflowFailException, match=why):
        ask(stream, conf)


@pytest.mark.parametrize("single_task", [False, True])
def test_a_misspelt_option_is_refused_despite_airflows_merge(stream, single_task):
    """Airflow merges it into the params."""
    dag = batch_dag(stream, single_task=single_task, params={"colour": "blue"})
    context = as_airflow_merges(dag, {"reproces": True})
    assert context["params"]["reproces"] is True
    known = "colour, from_kafka, outputs, parameters, reprocess"
    with pytest.raises(AirflowFailException) as refused:
        dag.roots[0].execute(context)
    assert f"'reproces', which is not an option here. Did you mean 'reprocess'? It may have {known}" in str(
        refused.value
    )
    # What the DAG declares, and what Airflow adds by itself, passes.
    passing = {"colour": "red", "reprocess": True, "openlineage": {"parentRunId": "1"}}
    assert run_request(as_airflow_merges(dag, passing), stream).reprocess
    with pytest.raises(ParamValidationError):
        as_airflow_merges(dag, {"reprocess": "yes"})


def test_a_name_like_none_is_refused_with_the_list(stream):
    with pytest.raises(
        AirflowFailException, match=r"'colour', which is not an option here\. It may have from_kafka, out"
    ):
        ask(stream, {"colour": "red"}, params={"colour": "red"})


def test_a_replays_runs_have_its_options_alone(stream):
    replay = replay_dag(stream.model_copy(update={"state": None}), "v2", outputs={"one": {"rows": 5}})
    (task,) = replay.roots
    with pytest.raises(
        AirflowFailException, match=r"'reprocess', which is not an option here\. .* from, outputs, parameters, until\."
    ):
        task.execute(as_airflow_merges(replay, {"reprocess": True}))


def test_a_receivers_runs_have_no_options(stream):
    dag = receiver_dag(stream)
    with pytest.raises(AirflowFailException, match=r"'reprocess', .* It may have no names"):
        dag.roots[0].execute(as_airflow_merges(dag, {"reprocess": True}))
